# SPDX-License-Identifier: Apache-2.0
"""The formulas in plain PyTorch: the CPU back-end, and the yardstick for every faster kernel.

Legend: B samples, T tokens of a sample, I in_features, O out_features, D model width, V vocabulary,
C channels, N gains of a normalization, P parameters of a module.

Every ``*_wgrad`` returns the gradients and ``sqnorm_PB`` of shape [P, B + 2], a row for each
parameter: B squared norms of the single samples' gradients, the squared norm of their sum, and 1.0,
a counter of calls.
"""

import torch
from torch import Tensor

from gnsfast.reference.rows import probe_row, sqnorm_rows, sum_tokens, sum_wgrad, with_sum
from gnsfast.tensors import accumulate_dtype

# Elements of a per-sample tile of the fused route, and its columns at most: large enough that the
# GEMM runs at full speed, small enough that the tile is still in a cache when its norm is taken and
# it is added. With tiles of 14336 columns dW took 1.6 to 2.1 times as long as plain's.
TILE, COLUMNS = 1 << 20, 1 << 10
# Tiles of which more than ``SMALL`` have this many elements go through one batched GEMM: a small
# layer is then a few calls, 1.3 instead of 1.9 times plain dW at 96 x 288.
SMALL, GROUP = 4, 1 << 19
# Rows of a tile that are worth a thread's own GEMM. Product, norm and sum then split the tile in
# the same places, and each thread finds its rows in its own cache.
PART = 128


def linear_route(T: int, I: int, O: int) -> str:
    """The cheapest CPU route to the norms of a linear layer: ``closed``, ``gram`` or ``fused``.

    Counted in multiply-adds: the Gram route adds T² (I + O) a sample, the fused route squares and
    adds a tile and multiplies less at a time, worth so many an element of [O, I] as crossovers
    measured on a CPU say.
    """
    if T == 1:
        return "closed"
    return "gram" if T * T * (I + O) < FUSED[I * O > LARGE] * I * O else "fused"


# Of a weight of at most so many elements, and of a larger one.
FUSED, LARGE = (16, 36), 1 << 22


def linear_wgrad(
    x_BTI: Tensor, dy_BTO: Tensor, weight: bool, bias: bool, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, db and ``sqnorm_PB`` of ``y = x Wᵀ + b``; an unwanted gradient comes back empty.

    Sample b's gradient is dy_bᵀ x_b. With ``transposed`` the weight is stored as [I, O].
    """
    B, T, _ = x_BTI.shape
    dw = db = x_BTI.new_empty(0, dtype=dtype)
    rows = []
    if weight:
        left, right = (x_BTI, dy_BTO) if transposed else (dy_BTO, x_BTI)
        dw, row = _outer_wgrad(right, left, dtype)
        rows.append(row)
    if bias:
        db, row = sum_wgrad(sum_tokens(dy_BTO) if T != 1 else dy_BTO[:, 0], dtype)
        rows.append(row)
    return dw, db, torch.stack(rows) if rows else x_BTI.new_empty((0, B + 2), dtype=torch.float32)


def in_projection_wgrad(
    x_BTI: list[Tensor], dy_BTO: list[Tensor], weight: bool, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW [ΣO, I], db [ΣO] and ``sqnorm_PB`` of linear layers whose weights lie one below the other
    in one parameter (query, key, value): each layer's own weight row, then each one's bias row.
    """
    parts = [linear_wgrad(x, dy, weight, bias, False, dtype) for x, dy in zip(x_BTI, dy_BTO)]
    dws, dbs, rows = zip(*parts)
    both = [r[kind] for kind in range(weight + bias) for r in rows]
    sqnorm_PB = torch.stack(both) if both else rows[0]
    return torch.cat(dws), torch.cat(dbs), sqnorm_PB


def _outer_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dW [O, I] and its probe row by the cheapest route."""
    B, T, I = x_BTI.shape
    O = dy_BTO.shape[2]
    acc = accumulate_dtype(x_BTI.dtype)
    if I * O == 0:
        return x_BTI.new_zeros((O, I), dtype=dtype), probe_row(x_BTI.new_zeros(B + 1))
    route = linear_route(T, I, O)
    if B * T == 0 or route == "fused":
        dw_OI, sqnorm_B1 = _fused(x_BTI, dy_BTO, acc)
    else:
        x_BTI, dy_BTO = x_BTI.to(acc), dy_BTO.to(acc)
        dw_OI = dy_BTO.reshape(-1, O).T @ x_BTI.reshape(-1, I)
        if route == "closed":
            sqnorm_B = sqnorm_rows(x_BTI[:, 0]) * sqnorm_rows(dy_BTO[:, 0])
        else:
            sqnorm_B = gram_sqnorms(x_BTI, dy_BTO)
        sqnorm_B1 = with_sum(sqnorm_B, dw_OI)
    return dw_OI.to(dtype), probe_row(sqnorm_B1)


def gram_sqnorms(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    """Σ_{t,s} (dy_t·dy_s)(x_t·x_s) for each sample.

    Where the terms cancel (tokens alike, dy that sums to zero: key projections) their rounding is
    larger than the sum: such samples go through the product itself, which cancels before it is
    squared.
    """
    x_gram, dy_gram = torch.bmm(x_BTI, x_BTI.mT), torch.bmm(dy_BTO, dy_BTO.mT)
    terms_BTT = x_gram.mul_(dy_gram)
    sqnorm_B = terms_BTT.sum((1, 2), dtype=torch.float64)
    cancelled_B = sqnorm_B < CANCELLED * terms_BTT.abs_().sum((1, 2), dtype=torch.float64)
    if cancelled_B.any():
        _, again_B1 = _fused(x_BTI[cancelled_B], dy_BTO[cancelled_B], x_BTI.dtype)
        sqnorm_B[cancelled_B] = again_B1[:-1].to(torch.float64)
    return sqnorm_B


CANCELLED = 0.02
"""A Gram sum below this share of its terms' absolute sum has lost too many digits."""


def _fused(x_BTI: Tensor, dy_BTO: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """dW and its [B + 1] squared norms: a GEMM a sample, its tile squared and added in cache."""
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    width, height = alike(I, COLUMNS), alike(O, TILE // min(I, COLUMNS))
    dw_OI = (x_BTI.new_empty if B else x_BTI.new_zeros)((O, I), dtype=acc)
    norms_BCO = x_BTI.new_empty((B + 1, -(-I // width), O), dtype=acc)  # the sum's come last
    add_tiles = _add_small_tiles if height * width * SMALL < GROUP else _add_tiles
    for c, x_BTW in enumerate(x_BTI.split(width, 2)):
        for start in range(0, O, height):
            rows, columns = slice(start, start + height), slice(c * width, (c + 1) * width)
            tile = dw_OI[rows, columns]
            add_tiles(x_BTW, dy_BTO[..., rows].mT, tile, norms_BCO[:, c, rows])
    return dw_OI, sqnorm_rows(norms_BCO.flatten(1))


def alike(size: int, most: int) -> int:
    """Of blocks of at most so many that are alike, but for the last."""
    return -(-size // -(-size // max(1, most)))


def _add_tiles(x_BTI: Tensor, dy_BOT: Tensor, total_OI: Tensor, norms_BO: Tensor) -> None:
    """One sample after the other, the first one's tile in place.

    Views are made before the loop: in it, with caches that the GEMM has filled, they would cost as
    much as norm and sum do.
    """
    acc, O = total_OI.dtype, len(total_OI)
    threads = torch.get_num_threads() if total_OI.device.type == "cpu" else 1
    N = threads if O % threads == 0 and O >= PART * threads else 1
    x_BNTI = x_BTI.unsqueeze(1).expand(-1, N, -1, -1)
    dy_BNOT = dy_BOT.unflatten(1, (N, O // N))
    tiles = [
        (tile_OI, tile_OI.unflatten(0, (N, O // N)))
        for tile_OI in (total_OI, total_OI.new_empty(total_OI.shape))
    ]
    *norms, norm_O = norms_BO.unbind()
    for b, (dy_NOT, x_NTI, out) in enumerate(zip(dy_BNOT.unbind(), x_BNTI.unbind(), norms)):
        if x_NTI.dtype != acc:
            dy_NOT, x_NTI = dy_NOT.to(acc), x_NTI[:1].to(acc).expand(N, -1, -1)
        tile_OI, tile_NOI = tiles[b > 0]
        torch.bmm(dy_NOT, x_NTI, out=tile_NOI)
        torch.linalg.vector_norm(tile_OI, dim=1, out=out)
        if b:
            total_OI += tile_OI
    torch.linalg.vector_norm(total_OI, dim=1, out=norm_O)


def _add_small_tiles(x_BTI: Tensor, dy_BOT: Tensor, total_OI: Tensor, norms_BO: Tensor) -> None:
    """Many samples a GEMM: of small tiles the calls cost more than the memory."""
    acc, B, together = total_OI.dtype, len(x_BTI), GROUP // max(1, total_OI.numel())
    scratch_GOI = total_OI.new_empty((min(together, B), *total_OI.shape))
    total_OI.zero_()
    groups = (t.split(together) for t in (dy_BOT, x_BTI, norms_BO[:B]))
    for dy_GOT, x_GTI, norms_GO in zip(*groups):
        tiles_GOI = scratch_GOI[: len(x_GTI)]
        torch.bmm(dy_GOT.to(acc), x_GTI.to(acc), out=tiles_GOI)
        torch.linalg.vector_norm(tiles_GOI, dim=2, out=norms_GO)
        total_OI += tiles_GOI.sum(0)
    torch.linalg.vector_norm(total_OI, dim=1, out=norms_BO[B])


def linear_wgrad_tied(
    x_BTI: Tensor, dy_BTO: Tensor, ids_BS: Tensor, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``linear_wgrad``, and rows ``ids_BS`` of every sample's weight gradient dy_bᵀ x_b, [B, S, I]:
    what a tied embedding needs of its head.
    """
    dw, db, sqnorm_PB = linear_wgrad(x_BTI, dy_BTO, True, bias, False, dtype)
    return dw, db, sqnorm_PB, tied_rows(x_BTI, dy_BTO, ids_BS)


def tied_rows(x_BTI: Tensor, dy_BTO: Tensor, ids_BS: Tensor) -> Tensor:
    """Rows ``ids_BS`` of every sample's dy_bᵀ x_b, [B, S, I]."""
    acc = accumulate_dtype(x_BTI.dtype)
    rows = x_BTI.new_empty((*ids_BS.shape, x_BTI.shape[2]), dtype=acc)
    for b, ids_S in enumerate(ids_BS.unbind()):
        torch.mm(dy_BTO[b].index_select(1, ids_S).to(acc).T, x_BTI[b].to(acc), out=rows[b])
    return rows
