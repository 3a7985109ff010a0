# SPDX-License-Identifier: Apache-2.0
"""Functions that torch does not show: autograd functions of their own, as fused kernels have."""

from typing import Any

import torch
from torch import Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.detach().T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.flatten(0, -2).T @ x.flatten(0, -2)


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(w)
        ctx.share = share
        return share * w.detach().square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return 2 * ctx.share * dy * w, None


def linear(x: Tensor, w: Tensor) -> Tensor:
    """``F.linear(x, w)``"""
    y: Tensor = _Linear.apply(x, w)
    return y


def penalty(w: Tensor, share: float = 1.0) -> Tensor:
    """``share * w.square().sum()``"""
    y: Tensor = _Penalty.apply(w, share)
    return y
