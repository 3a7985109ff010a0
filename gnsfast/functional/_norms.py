# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import NormBackward
from gnsfast.tensors import accumulate_dtype


class _Norm(torch.autograd.Function):
    """Layer norm, which is ``centred``, or RMS norm, over the last dimensions of ``shape``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        shape: list[int],
        eps: float,
        centred: bool,
    ) -> Tensor:
        layer = "layer_norm" if centred else "rms_norm"
        plan.check(layer, probe, sum(ctx.needs_input_grad[1:3]), w)
        mean, rstd = None, None
        if centred:
            y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        else:
            y = torch_rms_norm(x, shape, w, eps)
        ctx.save_for_backward(x, w, b, mean, rstd, *plan.tensors())
        ctx.plan, ctx.kept = plan.without_tensors(), (plan.samples(probe), len(shape), eps)
        return y

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, mean, rstd, *saved = tensors
        plan, (B, dims, eps) = ctx.plan, ctx.kept
        plan, need = plan.restored(saved), ctx.needs_input_grad[1:3]
        lists = [None if t is None else t.flatten(-dims) for t in (dy, x, mean, rstd, w, b)]
        rows: Any = [None if t is None else plan.rows(t, B) for t in lists[:4]]
        # torch's kernel assumes that the statistics are contiguous.
        statistics = (None if t is None else t.contiguous() for t in rows[2:])
        last: Any = *need, eps, 0.0, plan.starts
        a = NormBackward(*rows[:2], *statistics, *lists[4:], *last)
        dx, dw, db, probe_rows = plan.run(ops.norm_backward, a, need)
        dx = _shaped(plan.rows_back(dx, lists[1]), x)
        dw, db = map(_shaped, plan.gradients(need, dw, db), (w, b))
        return dx, dw, db, probe_rows, *(None,) * 4


def _shaped(t: Any, like: Any) -> Any:
    """``t.reshape_as(like)``, which takes 1 µs where it has that shape already."""
    return t if t is None or t.shape == like.shape else t.reshape_as(like)


def layer_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)`` whose backward
    fills ``probe``. ``plan`` is that of ``linear``.

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.layer_norm(x, (5,), w, None, probe).sum().backward()
    >>> normed = torch.nn.functional.layer_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1), atol=1e-5)
    True
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as torch's autocast does on CUDA
    shape = list(normalized_shape)
    y: Tensor = _Norm.apply(x, weight, bias, probe, plan, shape, eps, True)
    return y


def rms_norm(
    x: Tensor,
    weight: Tensor,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    eps: float | None = None,
) -> Tensor:
    """``torch.nn.functional.rms_norm(x, weight.shape, weight, eps)`` whose backward fills
    ``probe``. ``plan`` is that of ``linear``.

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.rms_norm(x, w, probe).sum().backward()
    >>> normed = torch.nn.functional.rms_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1))
    True
    """
    if eps is None:
        eps = torch.finfo(accumulate_dtype(x.dtype)).eps  # as F.rms_norm does
    y: Tensor = _Norm.apply(x, weight, None, probe, plan, list(weight.shape), eps, False)
    return y
