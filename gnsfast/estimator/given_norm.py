# SPDX-License-Identifier: Apache-2.0
"""The audit of a ``grad_norm`` that the caller gives to ``update()``.

A norm of another kind, or of some of the parameters, is a plausible number: noise alone may explain
a whole gradient that is smaller than those of its passes. So some updates read the gradients too.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gnsfast.estimator.gradients import Sqnorms, grad_sqnorms
from gnsfast.parallel import Processes


class GivenNorm:
    """Reads the gradients as the last backward pass leaves them, before anybody clips them, in the
    first update and in one after each ``again``. Where nobody gives a norm, only the first is read.

    Args:
        parameters: all that the norm holds.
        averaged: whether gradients at the end of a backward pass are those of all processes. Where
            the caller averages them later by hand, there is nothing to compare.
    """

    def __init__(self, parameters: list[Any], processes: Processes, averaged: bool) -> None:
        self._parameters, self._processes, self._averaged = parameters, processes, averaged
        self._open, self._ever, self._seen = True, False, False

    def again(self) -> None:
        """Compare one more norm."""
        self._open = True

    def read(self) -> Sqnorms | None:
        """This process's share of the norms at the end of a pass, or None if none is needed."""
        wanted = self._averaged and self._open and (self._ever or not self._seen)
        if not wanted or all(p.grad is None for p in self._parameters):
            return None
        return grad_sqnorms(self._parameters, self._processes)

    def finish(self, given: bool, read: Sqnorms | None) -> Sqnorms | None:
        """End an update: what its norm is compared with, if it has one."""
        self._seen = True
        if not given:
            return None
        self._ever = True
        if read is not None:
            self._open = False
        return read


def averages(model: nn.Module, processes: Processes, replicas: Sequence[bool]) -> bool:
    """Whether backward passes leave the average over processes in ``.grad``. ``replicas`` says
    which parameters FSDP2 does not hold, and so does not average.
    """
    wrapped = any(isinstance(m, DistributedDataParallel) for m in model.modules())
    return processes.data == 1 or wrapped or not any(replicas)
