# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for the convolutions of ``torch.nn``, plain and transposed."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Converted, DropIn


class _Conv(DropIn):
    """All plain convolutions. Their forward in ``torch.nn`` calls ``_conv_forward``."""

    gnsfast = Converted("conv")
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    _reversed_padding_repeated_twice: list[int]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (opened := self._measuring()) is None:
            y: Tensor = super()._conv_forward(input, weight, bias)  # type: ignore[misc]
            return y
        if unbatched := input.ndim == weight.ndim - 1:
            input = input[None]
        plan = self._plan_for(input, features=input.ndim - 1)
        input, padding = self._pad(input)
        y = functional.conv(
            input,
            weight,
            bias,
            opened.probe,
            plan,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return y[0] if unbatched else y

    def _pad(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input and the padding that is left for the convolution. This method does the padding
        that a convolution cannot do.
        """
        none = (0,) * len(self.kernel_size)
        mode: Any = self.padding_mode
        if mode != "zeros":
            return F.pad(input, self._reversed_padding_repeated_twice, mode), none
        if not isinstance(self.padding, str):
            return input, self.padding
        if self.padding == "valid":
            return input, none
        span = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
        if all(s % 2 == 0 for s in span):
            return input, tuple(s // 2 for s in span)
        return F.pad(input, [p for s in reversed(span) for p in (s // 2, s - s // 2)]), none


class Conv1d(_Conv, nn.Conv1d):
    """``torch.nn.Conv1d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Conv1d(2, 4, kernel_size=3, padding="same")
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """


class Conv2d(_Conv, nn.Conv2d):
    """``torch.nn.Conv2d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Conv2d(2, 4, kernel_size=2, stride=2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8, 8)).sum().backward()
    >>> norms["bias"]
    tensor([1024., 1024., 1024.])
    """


class Conv3d(_Conv, nn.Conv3d):
    """``torch.nn.Conv3d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Conv3d(2, 4, kernel_size=2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 3, 3, 3)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """


class _ConvTranspose(DropIn):
    """All transposed convolutions."""

    gnsfast = Converted("conv")
    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    _output_padding: Any

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if (opened := self._measuring()) is None:
            y: Tensor = super().forward(input, output_size)
            return y
        geometry = self.stride, self.padding, self.kernel_size
        dims = len(self.kernel_size)
        added = self._output_padding(input, output_size, *geometry, dims, self.dilation)
        if unbatched := input.ndim == dims + 1:
            input = input[None]
        plan = self._plan_for(input, features=input.ndim - 1)
        y = functional.conv(
            input,
            self.weight,
            self.bias,
            opened.probe,
            plan,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            output_padding=added,
        )
        return y[0] if unbatched else y


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.ConvTranspose1d(2, 4, kernel_size=3, stride=2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 7)).sum().backward()
    >>> norms["bias"]
    tensor([900., 900., 900.])
    """


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` with per-sample norms, like ``gnsfast.ConvTranspose1d``."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` with per-sample norms, like ``gnsfast.ConvTranspose1d``."""
