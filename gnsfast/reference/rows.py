# SPDX-License-Identifier: Apache-2.0
"""Norms of rows and of their sums, and the probe rows made from them."""

import torch
from torch import Tensor

from gnsfast.tensors import accumulate_dtype

# A float32 sum of squares loses digits with its length: a dot product of 16.8M numbers is 5e-4 low,
# a norm of 2.4M numbers 8e-5, one of ``PIECE`` less than 1e-7. The norm of a longer row is that of
# the norms of its pieces.
PIECE = 1 << 13


Norms = tuple[Tensor, ...]
"""A parameter's norms, not squared: tensors that together hold B + 1 numbers, the norms of the
samples and that of their sum."""


def norm_rows(t_RN: Tensor) -> Tensor:
    """The norm of each row of ``t_RN``, in the accumulation dtype."""
    acc = accumulate_dtype(t_RN.dtype)
    if t_RN.dtype != acc:
        t_RN = t_RN.to(acc)
    if t_RN.shape[1] > PIECE:
        t_RN = torch.stack([torch.linalg.vector_norm(t, dim=1) for t in t_RN.split(PIECE, 1)], 1)
    norms_R: Tensor = torch.linalg.vector_norm(t_RN, dim=1)
    return norms_R


def norm(t: Tensor) -> Tensor:
    """[1]: the Frobenius norm of ``t``, in the accumulation dtype."""
    if t.numel() <= PIECE or t.ndim < 2:
        return norm_rows(t.reshape(1, -1))
    return norm_rows(norm_rows(t.flatten(0, -2))[None])


def sqnorm(t: Tensor) -> Tensor:
    """The squared Frobenius norm of ``t``, a float64 scalar."""
    return norm(t).double().square_()[0]


def probe_rows(found: list[Norms], samples: int, like: Tensor) -> Tensor:
    """Probe rows [P, B + 2] from the norms of each parameter."""
    if not found:
        return like.new_empty((0, samples + 2), dtype=torch.float32)
    one = found[0][0].new_ones(1)
    parts = [t for norms in found for t in (*norms, one)]
    return torch.cat(parts).view(-1, samples + 2).double().square_().to(torch.float32)


def sum_tokens(t_BTN: Tensor) -> Tensor:
    """[B, N]: the sum over each sample's tokens.

    A product with ones takes half the time of a sum at 12M elements, and twice the time at 1M.
    """
    B, T, _ = t_BTN.shape
    acc = accumulate_dtype(t_BTN.dtype)
    if t_BTN.dtype != acc or t_BTN.numel() < GEMM_SUM:
        return t_BTN.sum(1, dtype=acc)
    return torch.bmm(t_BTN.new_ones(1, 1, T).expand(B, 1, T), t_BTN)[:, 0]


GEMM_SUM = 1 << 21
"""The fewest elements that ``sum_tokens`` sums by a product with ones."""


def sum_wgrad(g_BN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Norms]:
    """A parameter's gradient and its norms, from the samples' gradients."""
    g_BN = g_BN.to(accumulate_dtype(g_BN.dtype))
    total_N = g_BN.sum(0)
    return total_N.to(dtype), (norm_rows(g_BN), norm(total_N))
