# SPDX-License-Identifier: Apache-2.0
"""Squared norms of rows and of their sums, and the rows of a probe that they fill."""

import torch
from torch import Tensor

from gnsfast.tensors import accumulate_dtype

# A float32 sum of squares loses digits with its length: a dot product is 5e-4 low at 16.8M numbers,
# a norm 8e-5 at 2.4M, but below 1e-7 at this many. Longer ones are summed in pieces, in float64.
PIECE = 1 << 13


def sqnorm(t: Tensor) -> Tensor:
    """The squared Frobenius norm of ``t``, a float64 scalar."""
    return sqnorm_rows(t.flatten(0, -2) if t.ndim > 1 else t.reshape(1, -1)).sum()


def sqnorm_rows(t_RN: Tensor) -> Tensor:
    """The squared norm of each row of ``t_RN``, float64."""
    t_RN = t_RN.to(accumulate_dtype(t_RN.dtype))
    if t_RN.shape[1] <= PIECE:
        norms_R: Tensor = torch.linalg.vector_norm(t_RN, dim=1)
        return norms_R.to(torch.float64).square_()
    norms_PR = [torch.linalg.vector_norm(piece, dim=1) for piece in t_RN.split(PIECE, dim=1)]
    return torch.stack(norms_PR).to(torch.float64).square_().sum(0)


def probe_row(sqnorm_B1: Tensor) -> Tensor:
    """One row of ``sqnorm_PB``: the squared norms of B samples and of their sum, the counter."""
    row = torch.ones(len(sqnorm_B1) + 1, dtype=torch.float32, device=sqnorm_B1.device)
    row[:-1] = sqnorm_B1
    return row


def with_sum(sqnorm_B: Tensor, total: Tensor) -> Tensor:
    """[B + 1]: the samples' squared norms and that of their sum ``total``."""
    return torch.cat([sqnorm_B, sqnorm(total)[None]])


def sum_tokens(t_BTN: Tensor) -> Tensor:
    """[B, N]: the sum over each sample's tokens. A product with ones takes half the time of a sum
    at 12M elements, and twice the time at 1M.
    """
    B, T, _ = t_BTN.shape
    acc = accumulate_dtype(t_BTN.dtype)
    if t_BTN.dtype != acc or t_BTN.numel() < GEMM_SUM:
        return t_BTN.sum(1, dtype=acc)
    return torch.bmm(t_BTN.new_ones(1, 1, T).expand(B, 1, T), t_BTN)[:, 0]


GEMM_SUM = 1 << 21


def sum_wgrad(g_BN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient and the probe row of a parameter whose samples' gradients are rows ``g_BN``."""
    g_BN = g_BN.to(accumulate_dtype(g_BN.dtype))
    total_N = g_BN.sum(0)
    return total_N.to(dtype), probe_row(sqnorm_rows(torch.cat([g_BN, total_N[None]])))
