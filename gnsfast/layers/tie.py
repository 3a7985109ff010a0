# SPDX-License-Identifier: Apache-2.0
"""A weight that several modules share."""

from typing import Any

import torch
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.functional import Link


class Tie:
    """A weight that embeddings and at most one linear head share. It passes the links from earlier
    uses to later ones.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the uses of the last forward pass."""
        self.uses: tuple[Link, ...] = ()
        self.crossed = self.taken = False

    def links(self, name: str) -> tuple[Link, ...]:
        """The links of the embeddings so far, for one more embedding. Raises after the head, which
        would not be linked with that embedding.
        """
        if self.taken and not torch.compiler.is_compiling() and not _in_backward():
            raise ObservationError(
                f"{name}: it is looked up after the head that shares its weight, so the link "
                "between the two is lost. If the model ran twice in this block, run it once. "
                f"Otherwise leave both out: convert(model, exclude=[{name!r}, ...])."
            )
        return self.uses

    def ended(self, probe: Tensor) -> bool:
        """Whether a backward pass has gone through the head, whose ``probe`` it filled."""
        if not self.taken or torch.compiler.is_compiling() or _in_backward():
            return False
        return probe.grad is not None

    def take(self, name: str, repeated: bool) -> tuple[Link, ...]:
        """Take the links of the embeddings so far, for the head, which is the last use. All calls
        of a ``repeated`` head have the links of the first call.
        """
        links, self.uses, self.taken = self.uses, (), True
        if links:
            self.crossed = True
        elif self.crossed and not (repeated or torch.compiler.is_compiling()) and _in_backward():
            raise ObservationError(
                f"{name}: activation checkpointing recomputes this head without the embedding that "
                "shares its weight, so the link between the two is lost. Checkpoint both or "
                f"neither, or leave both out: convert(model, exclude=[{name!r}, ...])."
            )
        return links

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reset()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
