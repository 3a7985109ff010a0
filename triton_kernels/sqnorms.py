# SPDX-License-Identifier: Apache-2.0
"""Squared norms of rows and of their sums, by torch's own reductions.

The squared norms of a parameter are float64 [M, B + 1]: of the samples' gradients and their sum,
then the same under a metric.
"""

import torch
from torch import Tensor

from gnsfast import tensors
from gnsfast.reference import root_metric
from gnsfast.signatures import Metric


def row_sqnorms(t_RN: Tensor) -> Tensor:
    """The squared norm of each row, float64; half precision is widened as it is read."""
    wide = tensors.accumulate_dtype(t_RN.dtype)
    norms_R: Tensor = torch.linalg.vector_norm(t_RN, dim=1, dtype=wide)
    return norms_R.double().square()


def with_sum(sqnorm_B: Tensor, total_ON: Tensor) -> Tensor:
    """[1, B + 1]: the samples' squared norms, and that of ``total_ON``, their sum."""
    return torch.cat([sqnorm_B.double(), row_sqnorms(total_ON).sum()[None]])[None]


def sums_wgrad(
    g_BN: Tensor, dtype: torch.dtype, metric: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """A parameter's gradient and its squared norms [M, B + 1], from the samples' gradients."""
    total_N = g_BN.sum(0)
    norms = with_sum(row_sqnorms(g_BN), total_N[None])
    if metric is not None:
        root_N = root_metric(*metric, torch.float32).flatten()
        weighed = with_sum(row_sqnorms(g_BN * root_N), (total_N * root_N)[None])
        norms = torch.cat([norms, weighed])
    return total_N.to(dtype), norms


def probe_rows(norms: list[Tensor], samples: int, like: Tensor) -> Tensor:
    """Probe rows [M P, B + 2] from each parameter's squared norms [M, B + 1]."""
    if not norms:
        return like.new_empty((0, samples + 2), dtype=torch.float32)
    found = norms[0] if len(norms) == 1 else torch.stack(norms, 1).flatten(0, 1)
    rows = torch.ones(len(found), samples + 2, dtype=torch.float32, device=like.device)
    rows[:, :-1] = found
    return rows
