# SPDX-License-Identifier: Apache-2.0
"""``BranchRun``: the methods that a training run needs so that its branches can be trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class BranchStep(NamedTuple):
    """An optimizer step that was taken.

    Args:
        tokens: in the batch of this step.
        loss: the mean training loss of this batch, at the weights before the step.
    """

    tokens: int
    loss: float


class BranchRun(Protocol):
    """A training run that can be saved, restored and trained further.

    ``restore`` brings back everything that ``save`` wrote, bit for bit: model, optimizer, random
    number generators, data position and the count of tokens. After it, ``train(tokens,
    batch_size=run.batch_size, lr_factor=1.0)`` takes the same steps as the run that was never
    branched. ``TorchRun`` is a ``BranchRun`` for a plain torch loop.

    Where several processes train one run, each has its part of it, and all of them call the methods
    together. Batch sizes and tokens are over all processes, and every process returns the same
    ``loss``. ``save`` and ``restore`` get one folder: each process has its own file names.

    A run may also have:

    - ``batch_multiple: int``: every batch size that the run can train with is a multiple of it.
    - ``branch_settings() -> Mapping[str, Any]``: plain values on which a branch depends. A folder
      whose branches had other values is refused.
    - ``check_branch(k: float) -> None``: raises ValueError where the run could not train a branch
      of k times its batch. It is called for every k before anything is written.
    - ``noise_scale() -> NoiseScale | None``: the noise scale at the present weights; the state of
      the run stays the same. None means no estimate; ``noise_scale_reason`` may say why, in one
      line.
    - ``identity() -> RunIdentity``: model, optimizer and data, which a factor file then holds.
    - ``evaluate() -> float``: the mean loss on held-out samples, the same ones at each call; the
      state of the run stays the same. It has less noise than the loss of a training batch.
    - ``skip(tokens: int) -> None``: go on with the data that would come after these tokens; weights
      and ``tokens`` stay as they are. For repeated measurements (``repeats``).
    """

    batch_size: int
    """Samples of an optimizer step of the unbranched run."""

    tokens_per_sample: int
    """Converts samples into tokens."""

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        ...

    def save(self, folder: Path) -> None:
        """Write all state that further training depends on into ``folder``, an empty folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Load what ``save`` wrote, in this process or in another one."""
        ...

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        """Train at least ``tokens`` tokens from here, in steps of ``batch_size`` samples.

        A step is complete when it is yielded. Between two steps the caller may ``save``, or close
        the iterator and then ``restore`` and ``train`` again. After ``restore`` of such a save,
        ``train`` of the remaining tokens continues with the same steps.

        Args:
            tokens: the run takes as many steps as it needs to reach them; the last one may go
                beyond.
            batch_size: samples of an optimizer step, however they are accumulated.
            lr_factor: multiplies every learning rate that the run's own schedule in tokens gives;
                1.0 is the unbranched run. ``save`` does not write it.
        """
        ...


def own_settings(run: Any) -> dict[str, Any]:
    """The settings of a run that its branches depend on, as the folder names them."""
    return {f"run.{name}": each for name, each in getattr(run, "branch_settings", dict)().items()}
