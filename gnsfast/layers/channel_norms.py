# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for norm layers with a gain and a bias for each channel: group norm, instance norm,
and batch norm with running statistics.

Each runs torch's own layer on the n rows [n, C, ...] as the channels of one row [1, n · C, ...],
with a copy of the parameters for every row. The gradients of the copies are those of the rows. For
channels-last inputs this would take four copies of the activations, so there backward computes the
sums itself.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.errors import ObservationError
from gnsfast.layers.drop_in import Converted, DropIn
from gnsfast.layers.own_forward import OwnForward
from gnsfast.tensors import accumulate_dtype

BATCH_NORM = nn.modules.batchnorm._BatchNorm
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Parameters = tuple[Tensor | None, Tensor | None]


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a batch norm would normalise with the statistics of its batch."""
    if not isinstance(module, BATCH_NORM):
        return False
    running = (module._buffers.get(name) for name in ("running_mean", "running_var"))
    return module.training or all(t is None for t in running)


def batch_statistics_error(path: str, module: nn.Module) -> ObservationError:
    """The error for a batch norm that ties samples together, with the remedies."""
    name = f"model.{path}" if path else "model"
    freeze = f", or freeze it: {name}.eval() after each model.train()"
    if module._buffers.get("running_mean") is None:
        freeze = ""  # it has no running statistics to use instead
    return ObservationError(
        f"{path or 'the model'} ({type(module).__name__}): batch norm by the statistics of the "
        "batch ties its samples together, so no sample has a gradient of its own, neither here "
        f"nor in the layers before it. Use GroupNorm or LayerNorm instead{freeze}."
    )


def channels_last(x: Tensor) -> bool:
    """Whether the channels of ``x`` are adjacent in memory. A size of 1 leaves this open, also for
    torch 2.13: see ``_by_rows``.
    """
    last = CHANNELS_LAST.get(x.ndim)
    return last is not None and min(x.shape) > 1 and x.is_contiguous(memory_format=last)


class _ChannelNorm(DropIn):
    gnsfast = Converted("channel_norm")
    weight: Any
    bias: Any
    eps: float

    def _spread(self, x: Tensor) -> Parameters:
        """The parameters of each row of ``x``."""
        plan = self._plan_for(x, features=x.ndim - 1)
        return functional.spread(self.weight, self.bias, len(x), self._measured.probe, plan)

    def _detached(self) -> Parameters:
        weight, bias = (None if p is None else p.detach() for p in (self.weight, self.bias))
        return weight, bias

    def _by_rows(
        self, x: Tensor, norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    ) -> Tensor:
        """``norm(x, weight, bias)``, with the rows as channels, and the parameters of each row.

        All positions become one dimension. With several, torch 2.13 on a CPU computes wrong
        gradients of the batch norm of one row if only the input or only the output's gradient is
        channels last.
        """
        n, C, *size = x.shape
        w, b = self._spread(x)
        return norm(x.reshape(1, n * C, math.prod(size)), w, b).view(x.shape)


class GroupNorm(_ChannelNorm, nn.GroupNorm):
    """``torch.nn.GroupNorm`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.GroupNorm(2, 4)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 8)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if self._measuring() is None:
            return super().forward(input)
        if channels_last(input):
            return self._channels_last(input)
        groups = len(input) * self.num_groups
        if groups == 0:  # torch's group norm does not accept zero groups
            return self._by_rows(input, _of_no_row)
        cudnn = torch.backends.cudnn.enabled
        return self._by_rows(
            input, lambda x, w, b: torch.group_norm(x, groups, w, b, self.eps, cudnn)
        )

    def _channels_last(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.float()  # as torch's autocast does on CUDA
        n, C, *size = x.shape
        sizes = n, C, math.prod(size), self.num_groups
        y, *of_groups = torch.native_group_norm(x, *self._detached(), *sizes, self.eps)
        mean_NC, rstd_NC = (t.repeat_interleave(C // self.num_groups, 1) for t in of_groups)
        return functional.attach_parameters(y, x, mean_NC, rstd_NC, *self._spread(x))


class OwnGroupNorm(OwnForward, GroupNorm):
    """Drop-in for group norms with a forward of their own that does the same."""


def _of_no_row(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    for t in (w, b):
        x = x if t is None else x * t.view(1, -1, *(1,) * (x.ndim - 2))
    return x


class _InstanceNorm(_ChannelNorm):
    """All instance norms. Their forward in ``torch.nn`` calls ``_apply_instance_norm``."""

    running_mean: Any
    running_var: Any
    momentum: float | None
    track_running_stats: bool

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if self._measuring() is None:
            y: Tensor = super()._apply_instance_norm(input)  # type: ignore[misc]
            return y
        by_input = self.training or not self.track_running_stats
        momentum, n = 0.0 if self.momentum is None else self.momentum, len(input)
        running = self.running_mean, self.running_var
        mean, var = copies = [None if t is None else t.repeat(n) for t in running]
        y = self._by_rows(
            input,
            lambda x, w, b: F.instance_norm(x, mean, var, w, b, by_input, momentum, self.eps),
        )
        for t, moved in zip(running, copies):
            if by_input and moved is not None:  # as torch does with copies of its own
                t.copy_(moved.view(n, -1).mean(0))
        return y


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.InstanceNorm1d(4, affine=True)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 8)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` with per-sample norms, like ``gnsfast.InstanceNorm1d``."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` with per-sample norms, like ``gnsfast.InstanceNorm1d``."""


class _FrozenBatchNorm(_ChannelNorm):
    """All batch norms. While a probe is open they normalise only with their running statistics."""

    running_mean: Any
    running_var: Any
    _check_input_dim: Any

    def forward(self, input: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            y: Tensor = super().forward(input)
            return y
        if uses_batch_statistics(self):  # since the probe was opened
            raise batch_statistics_error(opened.name, self)
        self._check_input_dim(input)
        mean, var = self.running_mean, self.running_var
        if input.ndim == 2 or channels_last(input):
            y = F.batch_norm(input, mean, var, *self._detached(), False, 0.0, self.eps)
            rstd = (var.to(accumulate_dtype(var.dtype)) + self.eps).rsqrt()
            return functional.attach_parameters(
                y, input, mean[None], rstd[None], *self._spread(input)
            )
        mean, var = (t.repeat(len(input)) for t in (mean, var))
        return self._by_rows(
            input, lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.0, self.eps)
        )


class BatchNorm1d(_FrozenBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` whose backward can also yield per-sample squared gradient norms if
    it normalises with its running statistics. In training mode a measurement raises an error.

    >>> layer = gnsfast.BatchNorm1d(4).eval()
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 8)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """


class BatchNorm2d(_FrozenBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with per-sample norms, like ``gnsfast.BatchNorm1d``."""


class BatchNorm3d(_FrozenBatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` with per-sample norms, like ``gnsfast.BatchNorm1d``."""


class SyncBatchNorm(_FrozenBatchNorm, nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` with per-sample norms, like ``gnsfast.BatchNorm1d``."""
