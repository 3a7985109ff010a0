# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: one block measures all passes of a schedule's step.

The squared norms of the stages add up, as those of layers do. A schedule runs the passes of its A
micro-batches in its own order, so one block holds all A passes. Passes over different samples may
share a probe, because only the sum of their per-sample norms is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

from gnsfast.errors import ObservationError

NextPass = Callable[[nn.Module, Any, Any], AbstractContextManager[None]]


class PipelinePasses:
    """One step of a ``torch.distributed.pipelining`` schedule over ``num_samples`` samples."""

    def __init__(self, schedule: Any, num_samples: int, alone: bool) -> None:
        self.passes: int = schedule._n_microbatches
        if num_samples % self.passes:
            raise ValueError(
                f"num_samples is {num_samples}, which does not divide into the schedule's "
                f"{self.passes} micro-batches. All micro-batches must have the same size."
            )
        self._schedule = schedule
        self._stages = getattr(schedule, "_stages", None) or [schedule._stage]
        if alone and any(stage.group_size > 1 for stage in self._stages):
            raise ValueError(
                "The schedule's stages are on several processes. Call GradientNoiseScale(model, "
                "stages=group) with the process group of the pipeline."
            )
        self.num_samples = num_samples // self.passes
        # After the last pass the schedule may divide gradients by the number of passes.
        self.factor = 1 / self.passes if schedule.scale_grads else 1.0

    @contextmanager
    def open(
        self,
        probes: Callable[[], list[Tensor]],
        next_pass: NextPass,
        after_step: Callable[[], None],
    ) -> Iterator[None]:
        """Let the backward passes of one step fill the probes. ``next_pass`` is around each
        forward of a stage, but not where a stage finds the shapes of its tensors by a pass over
        uninitialised ones.

        Zero-bubble schedules split a backward pass. They ask autograd for the gradients of the
        stage's parameters alone, some time after those of its inputs, so the probes are added to
        these parameters. ``after_step`` runs when the schedule has divided the gradients.
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
                stack.enter_context(_announced(stage, next_pass))
            stack.enter_context(_replaced(self._schedule, "step", watched))
            yield
        if steps != 1:
            raise ObservationError(
                f"schedule.step ran {steps} times in one gns.microbatch block. A block takes one "
                "step."
            )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of this one object, and restore it afterwards."""
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
def _announced(stage: Any, next_pass: NextPass) -> Iterator[None]:
    forward = stage.forward_maybe_with_nosync

    def announced(*args: Any, **kwargs: Any) -> Any:
        with next_pass(stage.submod, args, kwargs):
            return forward(*args, **kwargs)

    with _replaced(stage, "forward_maybe_with_nosync", announced):
        yield


@contextmanager
def _with_probes(stage: Any, probes: Callable[[], list[Tensor]]) -> Iterator[None]:
    submodule: nn.Module = stage.submod
    backward, parameters = stage.backward_maybe_with_nosync, submodule.parameters

    def more(*args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return chain(parameters(*args, **kwargs), probes())

    def with_probes(kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == "full":
            return backward(kind, *args, **kwargs)
        with _replaced(submodule, "parameters", more):
            return backward(kind, *args, **kwargs)

    with _replaced(stage, "backward_maybe_with_nosync", with_probes):
        yield
