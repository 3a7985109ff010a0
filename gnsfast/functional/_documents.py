# SPDX-License-Identifier: Apache-2.0
"""Documents of packed rows: what differs where samples are segments of one list of rows.

Legend: N rows (tokens), B documents, F features; document b is rows ``starts[b]`` to
``starts[b + 1]``. ``starts`` is [B + 1] and covers all rows.
"""

import torch
from torch import Tensor

from gnsfast import ops, reference
from gnsfast.tensors import accumulate_dtype, is_dtensor


def rows_of(x: Tensor) -> Tensor:
    """``x`` as [N, F]."""
    return x.flatten(0, -2) if x.ndim > 2 else x


def refuse_sharded(dy: Tensor) -> None:
    """Segments of DTensors have no rule for how they are shared."""
    if is_dtensor(dy):
        raise NotImplementedError(
            "documents of packed rows (cu_seqlens) have no norms in tensor parallel layers"
        )


def tied_rows(x_NI: Tensor, dy_NO: Tensor, ids_N: Tensor, starts: Tensor) -> Tensor:
    """[N, I]: for each row the one of its document's head gradient dy_bᵀ x_b at ``ids_N``."""
    acc = accumulate_dtype(x_NI.dtype)
    rows = x_NI.new_zeros(x_NI.shape, dtype=acc)
    bounds = starts.tolist()
    for start, end in zip(bounds, bounds[1:]):
        dy_TT = dy_NO[start:end].index_select(1, ids_N[start:end]).to(acc)
        torch.mm(dy_TT.T, x_NI[start:end].to(acc), out=rows[start:end])
    return rows


def rms_norm_backward(
    dy_NF: Tensor, x_NF: Tensor, w_F: Tensor, eps: float, offset: float, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.rms_norm_backward`` of documents."""
    dx, products_NF = reference.rms_norm_products(dy_NF, x_NF, w_F, eps, offset)
    dw, row = reference.sum_wgrad(ops.segment_sums(products_NF, starts), w_F.dtype)
    return dx, dw, row[None]
