# SPDX-License-Identifier: Apache-2.0
"""Bilinear layers: linear in the products of two inputs' features.

Legend: N rows of all samples, I and J the features of the inputs, O those of the output.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import bilinear as torch_bilinear

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass
from gnsfast.functional._beside import stand_in
from gnsfast.functional.plan import PLAIN, Plan


class _Bilinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, w: Tensor, b: Tensor | None, probe: Tensor, plan: Plan
    ) -> Tensor:
        plan.check("bilinear", probe, sum(ctx.needs_input_grad[2:4]), w)
        ctx.save_for_backward(x, y, w, *plan.tensors())
        ctx.samples, ctx.plan = plan.samples(probe), plan.without_tensors()
        if plan.norms_alone:
            z = stand_in(x, *x.shape[:-1], len(w))
        else:
            z = torch_bilinear(x, y, w, b)
        if not torch.compiler.is_compiling() and z._is_view():  # see ``_linear.py``
            z = z.data
        return z

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, y, w, *saved = tensors
        plan, B = ctx.plan.restored(saved), ctx.samples
        need_x, need_y, *need = ctx.needs_input_grad[:4]
        dx = dy = None
        wide_x, wide_y = x.to(dz.dtype), y.to(dz.dtype)
        if need_x or need_y:
            dz_NO = dz.reshape(-1, w.shape[0])
            dproducts_NIJ = (dz_NO @ w.flatten(1).to(dz.dtype)).view(-1, *w.shape[1:])
        if need_x:
            dx_NI1 = dproducts_NIJ @ wide_y.reshape(-1, w.shape[2], 1)
            dx = dx_NI1.reshape(x.shape).to(x.dtype)
        if need_y:
            dy_N1J = wide_x.reshape(-1, 1, w.shape[1]) @ dproducts_NIJ
            dy = dy_N1J.reshape(y.shape).to(y.dtype)
        products = dz  # a bias needs none
        if need[0]:
            products = (wide_x[..., :, None] * wide_y[..., None, :]).flatten(-2)
        rows = (plan.rows(t, B) for t in (products, dz))
        a = plan.linear_wgrad(*rows, need, w.dtype)
        dw, db, probe_rows, _ = plan.run(ops.linear_wgrad, a, need)
        dw, db = plan.gradients(need, dw, db)
        return dx, dy, dw if dw is None else dw.view_as(w), db, probe_rows, None


def bilinear(
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
) -> Tensor:
    """``torch.nn.functional.bilinear(input1, input2, weight, bias)`` whose backward fills
    ``probe``. ``plan`` is that of ``linear``.

    For a trainable weight, backward stores the products of the inputs' features, [B, T, I · J].

    >>> x, y, w = torch.randn(3, 5), torch.randn(3, 4), torch.randn(2, 5, 4, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.bilinear(x, y, w, None, probe).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], 2 * x.square().sum(1) * y.square().sum(1))
    True
    """
    z: Tensor = _Bilinear.apply(input1, input2, weight, bias, probe, plan)
    return z
