# SPDX-License-Identifier: Apache-2.0
"""Squared norms of rows and of their sums, and the probe rows that they fill."""

import torch
from torch import Tensor

from gnsfast.reference.metric import root_metric
from gnsfast.signatures import Metric
from gnsfast.tensors import accumulate_dtype

# A float32 sum of squares loses digits with its length: a dot product of 16.8M numbers is 5e-4 low,
# a norm of 2.4M numbers 8e-5, one of ``PIECE`` less than 1e-7. Longer rows are cut into pieces,
# whose squared norms are added in float64.
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


def probe_rows(norms: list[Tensor], samples: int, like: Tensor) -> Tensor:
    """Probe rows [M P, B + 2] from each parameter's squared norms [M, B + 1], those of the samples
    and that of their sum.
    """
    if not norms:
        return like.new_empty((0, samples + 2), dtype=torch.float32)
    found = norms[0] if len(norms) == 1 else torch.stack(norms, 1).flatten(0, 1)
    rows = torch.ones(len(found), samples + 2, dtype=torch.float32, device=like.device)
    rows[:, :-1] = found
    return rows


def with_sum(sqnorm_B: Tensor, total: Tensor) -> Tensor:
    """[1, B + 1]: the samples' squared norms, and that of ``total``, their sum."""
    return torch.cat([sqnorm_B, sqnorm(total)[None]])[None]


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


def sum_wgrad(
    g_BN: Tensor, dtype: torch.dtype, metric: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """A parameter's gradient and its squared norms [M, B + 1], from the samples' gradients."""
    g_BN = g_BN.to(accumulate_dtype(g_BN.dtype))
    total_N = g_BN.sum(0)
    all_N = torch.cat([g_BN, total_N[None]])
    norms = sqnorm_rows(all_N)
    if metric is None:
        return total_N.to(dtype), norms[None]
    weighed = sqnorm_rows(all_N * root_metric(*metric, g_BN.dtype).flatten())
    return total_N.to(dtype), torch.stack([norms, weighed])


def metric_sqnorm(g: Tensor, v: Tensor, constants_2: Tensor) -> Tensor:
    """Σ P g², a float64 scalar; a part of ``g`` is copied at a time."""
    acc = accumulate_dtype(g.dtype)
    g_RN, v_RN = (t.flatten(0, -2) if t.ndim > 1 else t.reshape(1, -1) for t in (g, v))
    rows = max(1, (WEIGHED_CUDA if g.is_cuda else WEIGHED) // max(1, g_RN.shape[1]))
    scratch = torch.empty_like(g_RN[:rows], dtype=acc)
    found = [
        sqnorm(root_metric(v, constants_2, acc, out=scratch[: len(v)]).mul_(g))
        for g, v in zip(g_RN.split(rows), v_RN.split(rows))
    ]
    return torch.stack(found).sum()


WEIGHED = 1 << 17
"""Elements of a gradient that are multiplied by √P at a time on the CPU, in one scratch tensor:
fresh memory would cost more than the square roots.
"""

WEIGHED_CUDA = 1 << 25
"""The same on a GPU, where each piece costs a few launches: 128 MiB beside the gradient."""
