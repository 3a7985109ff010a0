# SPDX-License-Identifier: Apache-2.0
"""Two published methods without a package to install, written from their papers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.contestants.sessions import Session, row_sqnorms

Norms = dict[str, Tensor]
Keep = Callable[[str, Tensor], None]
"""Takes the name of one of a module's parameters and its squared norms [B]."""


class MixedGhostNorms(Session):
    """Hooks beside an ordinary backward take each layer's norms where 2 T² <= O I by Gram
    matrices, else from the samples' gradients (Bu et al. 2022, 2023).

    The norm pass alone, without the clipping that the papers are about.
    """

    def take_over(self) -> None:
        for path, module in self.model.named_modules():
            if type(module) in GHOST_RULES:
                module.register_forward_hook(partial(self._watch, path and f"{path}."))

    def _watch(self, path: str, module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(partial(self._add, path, module, inputs[0].detach()))

    def _add(self, path: str, module: nn.Module, x: Tensor, dy: Tensor) -> None:
        for name, sqnorm_B in GHOST_RULES[type(module)](module, x, dy.detach()).items():
            if path + name in self.parameters:
                self._sqnorms[path + name] = sqnorm_B


def ghost_linear(module: Any, x: Tensor, dy: Tensor) -> Norms:
    x_BTI, dy_BTO = by_token(x.to(dy.dtype)), by_token(dy)
    T = x_BTI.shape[1]
    if T == 1:
        weight_B = row_sqnorms(x_BTI) * row_sqnorms(dy_BTO)
    elif 2 * T**2 <= x_BTI.shape[2] * dy_BTO.shape[2]:
        gram_BTT = (x_BTI @ x_BTI.mT).mul_(dy_BTO @ dy_BTO.mT)
        weight_B = gram_BTT.sum((1, 2), dtype=torch.float32)
    else:
        weight_B = row_sqnorms(dy_BTO.mT @ x_BTI)
    if module.bias is None:
        return {"weight": weight_B}
    return {"weight": weight_B, "bias": row_sqnorms(dy_BTO.sum(1))}


def ghost_embedding(module: Any, ids: Tensor, dy: Tensor) -> Norms:
    ids_BT, dy_BTD = ids.flatten(1), dy.flatten(1, -2)
    if 2 * ids_BT.shape[1] ** 2 <= module.weight.numel():
        same_BTT = ids_BT[:, :, None] == ids_BT[:, None, :]
        gram_BTT = (dy_BTD @ dy_BTD.mT).mul_(same_BTT)
        return {"weight": gram_BTT.sum((1, 2), dtype=torch.float32)}
    g_BVD = dy.new_zeros(len(ids), *module.weight.shape)
    g_BVD.scatter_add_(1, ids_BT[:, :, None].expand_as(dy_BTD), dy_BTD)
    return {"weight": row_sqnorms(g_BVD)}


def ghost_layer_norm(module: Any, x: Tensor, dy: Tensor) -> Norms:
    normed = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    dy_BTN = by_token(dy)
    gains_BN = (by_token(normed) * dy_BTN).sum(1)
    return {"weight": row_sqnorms(gains_BN), "bias": row_sqnorms(dy_BTN.sum(1))}


GHOST_RULES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Norms]] = {
    nn.Linear: ghost_linear,
    nn.Embedding: ghost_embedding,
    nn.LayerNorm: ghost_layer_norm,
}


class OneGemm(Session):
    """Every sample's weight gradient by one batched GEMM; their sum is dW (Gray et al. 2024).

    The paper's buffers keep the sum over the samples of a batch; keeping each costs no more.
    """

    def take_over(self) -> None:
        for path, module in self.model.named_modules():
            if type(module) in ONE_GEMM:
                keep = partial(self._keep, path and f"{path}.")
                module.forward = partial(ONE_GEMM[type(module)], module, keep)

    def _keep(self, path: str, name: str, sqnorm_B: Tensor) -> None:
        if path + name in self.parameters:
            self._sqnorms[path + name] = sqnorm_B


class LinearBySample(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OI: Tensor, bias: Tensor | None, keep: Keep) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, w_OI)
        ctx.bias, ctx.keep = bias is not None, keep
        return F.linear(x, w_OI, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_OI = ctx.saved_tensors
        dx = dy @ w_OI.to(dy.dtype) if ctx.needs_input_grad[0] else None
        dy_BTO = by_token(dy)
        g_BOI = dy_BTO.mT @ by_token(x)
        ctx.keep("weight", row_sqnorms(g_BOI))
        dbias = None
        if ctx.bias:
            g_BO = dy_BTO.sum(1)
            ctx.keep("bias", row_sqnorms(g_BO))
            dbias = g_BO.sum(0).to(w_OI.dtype)
        return dx, g_BOI.sum(0).to(w_OI.dtype), dbias, None


class EmbeddingBySample(Function):
    @staticmethod
    def forward(ctx: Any, w_VD: Tensor, ids: Tensor, keep: Keep) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.keep = w_VD.shape, keep
        return F.embedding(ids, w_VD)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """One sample's table at a time, as in the paper's code."""
        (ids,) = ctx.saved_tensors
        dw_VD, sqnorms = dy.new_zeros(ctx.shape), []
        for ids_T, dy_TD in zip(ids.flatten(1), dy.flatten(1, -2)):
            g_VD = dy.new_zeros(ctx.shape).index_add_(0, ids_T, dy_TD)
            sqnorms.append(row_sqnorms(g_VD[None]))
            dw_VD += g_VD
        ctx.keep("weight", torch.cat(sqnorms))
        return dw_VD, None, None


class LayerNormBySample(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_N: Tensor, b_N: Tensor, eps: float, keep: Keep) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, w_N.shape, w_N, b_N, eps)
        ctx.save_for_backward(x, w_N, b_N, mean, rstd)
        ctx.keep = keep
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_N, b_N, mean, rstd = ctx.saved_tensors
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, w_N.shape, mean, rstd, w_N, b_N, [True, False, False]
        )
        gains_BN = by_token(dy * (x - mean) * rstd).sum(1)
        biases_BN = by_token(dy).sum(1)
        ctx.keep("weight", row_sqnorms(gains_BN))
        ctx.keep("bias", row_sqnorms(biases_BN))
        return dx, gains_BN.sum(0), biases_BN.sum(0), None, None


ONE_GEMM: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: lambda m, keep, x: LinearBySample.apply(x, m.weight, m.bias, keep),
    nn.Embedding: lambda m, keep, ids: EmbeddingBySample.apply(m.weight, ids, keep),
    nn.LayerNorm: lambda m, keep, x: LayerNormBySample.apply(x, m.weight, m.bias, m.eps, keep),
}


def by_token(x: Tensor) -> Tensor:
    """[B, T, I] of a sample's tokens in any arrangement, or of none, [B, I]."""
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)
