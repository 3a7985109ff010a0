# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: stages measured side by side, and a schedule's many passes as one block.

Squared norms of the stages' parameters add up, as those of layers do. A schedule runs the passes of
its A micro-batches in an order of its own, so one block holds A passes: per-sample norms of passes
over different samples may share a probe, since only their sum is wanted.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.probes import Unit
from gnsfast.processes import gathered

Label = tuple[str, str]


class Stages:
    """The units and probe rows of all pipeline stages, one stage after the other.

    Names that two stages have (``0.weight``) get the stage's place in the group in front.
    """

    def __init__(
        self, units: list[Unit], labels: list[Label], group: "dist.ProcessGroup | None"
    ) -> None:
        self.units, self.labels, self.rank = units, labels, 0
        self._first = self._row = 0
        if group is None:
            return
        found = gathered((units, labels), group)
        names = [{unit.parameter for unit in each} for each, _ in found]
        if len(set().union(*names)) < sum(map(len, names)):
            found = [_renamed(k, *each) for k, each in enumerate(found)]
        self.rank = dist.get_rank(group)
        before = found[: self.rank]
        self._first, self._row = (sum(len(each[i]) for each in before) for i in (0, 1))
        self.units, self.labels = (list(chain(*(each[i] for each in found))) for i in (0, 1))

    def of_units(self, t: Tensor) -> Tensor:
        """This stage's [..., K] among those of all stages, which are zero here."""
        return F.pad(t, (self._first, len(self.units) - self._first - t.shape[-1]))

    def of_rows(self, t: Tensor) -> Tensor:
        """The same for [..., R], a number for each probe row."""
        return F.pad(t, (self._row, len(self.labels) - self._row - t.shape[-1]))

    def own_rows(self, t: Tensor, count: int) -> Tensor:
        """This stage's ``count`` numbers of [..., R] over all stages."""
        return t.narrow(-1, self._row, count)


def _renamed(stage: int, units: list[Unit], labels: list[Label]) -> tuple[list[Unit], list[Label]]:
    def name(part: str) -> str:
        return f"stage{stage}.{part}" if part else f"stage{stage}"

    return (
        [Unit(name(u.parameter), name(u.module), u.block) for u in units],
        [(name(path), name(p) if p else p) for path, p in labels],
    )


class PipelinePasses:
    """One step of a ``torch.distributed.pipelining`` schedule over ``num_samples`` samples."""

    def __init__(self, schedule: Any, num_samples: int, alone: bool) -> None:
        self.passes: int = schedule._n_microbatches
        if num_samples % self.passes:
            raise ValueError(
                f"{num_samples} samples do not divide into the schedule's {self.passes} "
                "micro-batches: passes of unequal size have no norms"
            )
        self._schedule = schedule
        self._stages = getattr(schedule, "_stages", None) or [schedule._stage]
        if alone and any(stage.group_size > 1 for stage in self._stages):
            raise ValueError(
                "the schedule's stages lie on several processes: say GradientNoiseScale(model, "
                "stages=group), the group of the pipeline"
            )
        self.num_samples = num_samples // self.passes
        # After the last pass the schedule divides gradients by the number of passes.
        self.factor = 1 / self.passes if schedule.scale_grads else 1.0

    @contextmanager
    def open(self, probes: list[Tensor], after_step: Callable[[], None]) -> Iterator[None]:
        """Let a split backward pass fill the probes: zero-bubble schedules ask autograd for the
        gradients of the stage's parameters alone, some time after those of its inputs.
        ``after_step`` runs when the schedule has divided the gradients.
        """
        step, steps = self._schedule.step, 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            result = step(*args, **kwargs)
            after_step()
            steps += 1
            return result

        with ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(_with_probes(stage, probes))
            stack.enter_context(_replaced(self._schedule, "step", watched))
            yield
        if steps != 1:
            raise ObservationError(f"schedule.step ran {steps} times in a block, which holds one")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one object, put back afterwards."""
    own = vars(owner)
    had, old = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = old
        else:
            del own[name]


@contextmanager
def _with_probes(stage: Any, probes: list[Tensor]) -> Iterator[None]:
    submodule: nn.Module = stage.submod
    backward, parameters = stage.backward_maybe_with_nosync, submodule.parameters

    def more(*args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return chain(parameters(*args, **kwargs), probes)

    def with_probes(kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == "full":
            return backward(kind, *args, **kwargs)
        with _replaced(submodule, "parameters", more):
            return backward(kind, *args, **kwargs)

    with _replaced(stage, "backward_maybe_with_nosync", with_probes):
        yield
