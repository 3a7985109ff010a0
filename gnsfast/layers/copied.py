# SPDX-License-Identifier: Apache-2.0
"""The route for parameters that a module uses element by element in its own code. Each sample gets
a copy of them (``functional.copies_of``).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.combinations import COMPILED, refuse
from gnsfast.errors import ObservationError
from gnsfast.functional import Unfollowed
from gnsfast.layers.drop_in import Converted, DropIn, Opened


class Copied(DropIn):
    """Drop-in for a module that mixes, scales or shifts its input by parameters of its own."""

    gnsfast = Converted("copies")
    _copies: dict[str, Tensor] | None = None

    def open_probe(self, opened: Opened) -> None:
        super().open_probe(opened)
        self.__dict__["_copies"] = None

    def close_probe(self) -> None:
        super().close_probe()
        self.__dict__["_copies"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (opened := self._measuring()) is None:
            return super().forward(*args, **kwargs)
        if _is_compiled():
            refuse("copies", (COMPILED,), opened.name)
        if self._copies is None:  # all calls of a pass share them, so their gradients add up
            own, known = self.probed_parameters(), dict(self.gnsfast.steps)
            made = functional.copies_of(own, opened.probe, opened.plan, known)
            self.__dict__["_copies"] = made
        try:
            with in_place(self, self._covered()):
                return super().forward(*args, **kwargs)
        except Unfollowed as error:
            raise ObservationError(
                f"{opened.name} ({type(self).__name__}): {error}, so its samples cannot be told "
                "apart. convert(model, example=batch) looks for a route that fits such a batch, "
                f"and convert(model, exclude=[{opened.name!r}]) leaves the module out."
            ) from error

    def _covered(self) -> dict[str, Tensor]:
        """The copies of the parameters that have norms."""
        made = self._copies or {}
        return {name: t for name, t in made.items() if name not in self.gnsfast.uncovered}


def _is_compiled() -> bool:
    """Whether Dynamo runs this frame, or runs it eagerly and would compile the frames that it
    calls. Dynamo cannot follow copies.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    return torch.compiler.is_compiling() or callable(
        torch._C._dynamo.eval_frame.get_eval_frame_callback()
    )


@contextmanager
def in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put ``tensors`` in the place of the parameters of ``module`` that have these names."""
    places = []
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        owner: Any = module.get_submodule(path)._parameters
        places.append((owner, key, owner[key]))
        owner[key] = tensor
    try:
        yield
    finally:
        for owner, key, parameter in places:
            owner[key] = parameter
