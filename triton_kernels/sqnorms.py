# SPDX-License-Identifier: Apache-2.0
"""Squared norms of rows, and the rows of a probe, by torch's own reductions."""

import torch
from torch import Tensor

from gnsfast import reference, tensors


def probe_rows(sqnorms: list[Tensor], like: Tensor) -> Tensor:
    """``sqnorm_PB`` [P, B + 2] from the [B + 1] squared norms of each parameter."""
    if not sqnorms:
        return like.new_empty((0, len(like) + 2), dtype=torch.float32)
    return torch.stack([reference.probe_row(sqnorm_B1) for sqnorm_B1 in sqnorms])


def row_sqnorms(t_RN: Tensor) -> Tensor:
    """The squared norm of each row, float64; narrow types are widened as they are read."""
    wide = tensors.accumulate_dtype(t_RN.dtype)
    norms_R: Tensor = torch.linalg.vector_norm(t_RN, dim=1, dtype=wide)
    return norms_R.double().square()


def with_sum(sqnorm_B: Tensor, total_ON: Tensor) -> Tensor:
    """[B + 1]: the samples' squared norms and that of their sum."""
    return torch.cat([sqnorm_B.double(), row_sqnorms(total_ON).sum()[None]])
