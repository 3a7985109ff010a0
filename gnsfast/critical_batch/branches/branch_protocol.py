# SPDX-License-Identifier: Apache-2.0
"""What a training run has to offer so that branches of it can be trained."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gnsfast.noise_scale import NoiseScale


class BranchStep(NamedTuple):
    """An optimizer step that is done.

    Args:
        tokens: of this step's batch.
        loss: mean training loss of this step's batch, at the weights before the step.
    """

    tokens: int
    loss: float


class BranchRun(Protocol):
    """A training run at some point of it, which can be saved, restored and trained on.

    ``restore`` takes back all that ``save`` wrote, bit for bit: model, optimizer, random number
    generators, data position and the count of tokens. After it, ``train(tokens,
    batch_size=run.batch_size, lr_factor=1.0)`` gives the steps of the run that was never branched.
    ``gnsfast.critical_batch.torch_run.TorchRun`` is one for a plain torch loop.

    A run may offer more: ``MeasuresNoise``, ``Evaluates``, and ``batch_multiple``, an int that
    divides every batch size that it can train with.
    """

    batch_size: int
    """Samples of an optimizer step of the unbranched run."""

    tokens_per_sample: int
    """What converts samples into tokens."""

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that training on depends on into ``folder``, which exists and is empty."""
        ...

    def restore(self, folder: Path) -> None:
        """Take back what ``save`` wrote, in this process or in another one."""
        ...

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        """Train at least ``tokens`` tokens from here, in steps of ``batch_size`` samples.

        A step is done when it is yielded: between two steps ``save`` is allowed, and so is closing
        the iterator, after which ``restore`` and another ``train`` are. After ``restore`` of such a
        save a ``train`` of what is left goes on with the same steps.

        Args:
            tokens: as many steps as reach it are trained; the last one may go beyond.
            batch_size: samples of an optimizer step, however they are accumulated.
            lr_factor: every learning rate, as the run's own schedule in tokens gives it, times
                this; 1.0 is the unbranched run. It is no part of what ``save`` writes.
        """
        ...


class HasSettings(Protocol):
    """What a ``BranchRun`` may offer as well."""

    def branch_settings(self) -> Mapping[str, Any]:
        """Plain values that change what a branch would be: a folder of others is refused."""
        ...


class MeasuresNoise(Protocol):
    """What a ``BranchRun`` may offer as well."""

    def noise_scale(self) -> NoiseScale | None:
        """The noise scale at the present weights; the run's state is the same afterwards.

        None is none, for a reason that ``noise_scale_reason`` may tell in one line.
        """
        ...


class Evaluates(Protocol):
    """What a ``BranchRun`` may offer as well: a loss with less noise than a training batch's."""

    def evaluate(self) -> float:
        """Mean loss on held-out samples, the same ones at each call; no state is changed."""
        ...
