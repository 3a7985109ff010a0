# SPDX-License-Identifier: Apache-2.0
"""Σ_b dy_bᵀ x_b and the squared norm of each term, computed in the cheapest way on a CPU.

Legend: B samples, T tokens of a sample, I in_features, O out_features, W columns of a block.
"""

import torch
from torch import Tensor

from gnsfast.reference.rows import Norms, norm, norm_rows
from gnsfast.tensors import accumulate_dtype

# The most elements and columns of a per-sample tile of the fused route: large enough for a GEMM at
# full speed, small enough that the tile is still in a cache when its norm is taken and it is added.
# With tiles of 14336 columns dW took 1.6 to 2.1 times as long as torch's plain dW.
TILE, COLUMNS = 1 << 20, 1 << 10
# If more than ``SMALL`` tiles fit into ``GROUP`` elements, one batched GEMM computes as many as
# fit. A small layer then needs few calls: 1.3 instead of 1.9 times plain dW at 96 x 288.
SMALL, GROUP = 4, 1 << 19
# Up to so many numbers, all samples' gradients are made at once, even if the Gram route computes
# less. That route takes ten more calls, 30 µs, in which a core makes, adds and squares so many.
FEW = 1 << 15
# The fewest rows of a tile that are worth a GEMM for each thread. Product, norm and sum then split
# the tile in the same places, and each thread finds its rows in its own cache.
PART = 128


def linear_route(T: int, I: int, O: int) -> str:
    """The cheapest CPU route to the norms of a linear layer: ``closed``, ``gram`` or ``fused``.

    The cost beside dW is counted in multiply-adds of a sample. The Gram route adds T² (I + O). The
    fused route squares and adds a tile, and its GEMMs are smaller: ``FUSED`` for each element of
    [O, I], from crossovers measured on a CPU.
    """
    if T == 1:
        return "closed"
    return "gram" if T * T * (I + O) < FUSED[I * O > LARGE] * I * O else "fused"


# The fused route's cost for each element of a weight of at most ``LARGE`` elements, and of a larger
# one.
FUSED, LARGE = (16, 36), 1 << 22


def outer_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dtype: torch.dtype) -> tuple[Tensor, Norms]:
    """dW [O, I] and its norms."""
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    acc = accumulate_dtype(x_BTI.dtype)
    route = linear_route(T, I, O)
    if B * T * I * O == 0:
        zeros = x_BTI.new_zeros(B + 1, dtype=acc)
        return x_BTI.new_zeros((O, I), dtype=dtype), (zeros,)
    if T > 1 and B * I * O <= (GROUP if route == "fused" else FEW):
        return at_once_wgrad(x_BTI.to(acc), dy_BTO.to(acc), dtype)
    if route == "fused":
        dw_OI, norms_B = fused_wgrad(x_BTI, dy_BTO, acc)
        return dw_OI.to(dtype), (norms_B,)
    if x_BTI.dtype != acc:
        x_BTI, dy_BTO = x_BTI.to(acc), dy_BTO.to(acc)
    x_NI, dy_NO = x_BTI.flatten(0, 1), dy_BTO.flatten(0, 1)
    dw_OI = dy_NO.T @ x_NI
    if route == "gram":
        norms_B = gram_sqnorms(x_BTI, dy_BTO).sqrt_()
    else:
        norms_B = norm_rows(x_NI) * norm_rows(dy_NO)
    return dw_OI.to(dtype), (norms_B, norm(dw_OI))


def outer_norms(x_BTI: Tensor, dy_BTO: Tensor) -> Norms:
    """The norms of ``outer_wgrad``, for which one tile of dW after the other is made."""
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    acc = accumulate_dtype(x_BTI.dtype)
    route = linear_route(T, I, O)
    if B * T * I * O == 0 or (T > 1 and B * I * O <= (GROUP if route == "fused" else FEW)):
        return outer_wgrad(x_BTI, dy_BTO, acc)[1]
    if route == "fused":
        return (fused_wgrad(x_BTI, dy_BTO, acc, is_kept=False)[1],)
    x_BTI, dy_BTO = x_BTI.to(acc), dy_BTO.to(acc)
    x_NI, dy_NO = x_BTI.flatten(0, 1), dy_BTO.flatten(0, 1)
    tiles = dy_NO.split(even_block(O, TILE // I), 1)
    total = norm_rows(torch.cat([norm(dy_NW.T @ x_NI) for dy_NW in tiles])[None])
    if route == "gram":
        return gram_sqnorms(x_BTI, dy_BTO).sqrt_(), total
    return norm_rows(x_NI) * norm_rows(dy_NO), total


def at_once_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dtype: torch.dtype) -> tuple[Tensor, Norms]:
    """``outer_wgrad`` of a small layer, by one product of all samples, since calls cost most."""
    g_BOI = torch.bmm(dy_BTO.mT, x_BTI)
    dw_OI = g_BOI.sum(0)
    norms_B = norm_rows(torch.linalg.vector_norm(g_BOI, dim=2))
    return dw_OI.to(dtype), (norms_B, norm(dw_OI))


def gram_sqnorms(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    """[B]: Σ_{t,s} (dy_t·dy_s)(x_t·x_s) for each sample.

    If the terms cancel, their rounding errors exceed the sum, as in key projections, with similar
    tokens and a dy that sums to zero. Such samples take the fused route, whose product cancels
    before it is squared.
    """
    x_gram, dy_gram = torch.bmm(x_BTI, x_BTI.mT), torch.bmm(dy_BTO, dy_BTO.mT)
    terms_BTT = x_gram.mul_(dy_gram)
    sqnorm_B = terms_BTT.sum((1, 2), dtype=torch.float64)
    cancelled_B = sqnorm_B < CANCELLED * terms_BTT.abs_().sum((1, 2), dtype=torch.float64)
    if cancelled_B.any():
        _, again_B = fused_wgrad(x_BTI[cancelled_B], dy_BTO[cancelled_B], x_BTI.dtype)
        sqnorm_B[cancelled_B] = again_B[:-1].double().square_()
    return sqnorm_B


CANCELLED = 0.02
"""A Gram sum below this share of the sum of its absolute terms has lost too many digits."""


def fused_wgrad(
    x_BTI: Tensor, dy_BTO: Tensor, acc: torch.dtype, is_kept: bool = True
) -> tuple[Tensor, Tensor]:
    """dW and its norms [B + 1], tile by tile. Each sample has a GEMM of its own, and its tile is
    squared and added while it is in a cache. All tiles take one memory unless dW ``is_kept``.
    """
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    width, height = even_block(I, COLUMNS), even_block(O, TILE // min(I, COLUMNS))
    shape = (O, I) if is_kept else (height, width)
    dw_OI = (x_BTI.new_empty if B else x_BTI.new_zeros)(shape, dtype=acc)
    norms_BCO = x_BTI.new_empty((B + 1, -(-I // width), O), dtype=acc)  # the sum last
    add_tiles = _add_small_tiles if height * width * SMALL < GROUP else _add_tiles
    for c, x_BTW in enumerate(x_BTI.split(width, 2)):
        for start in range(0, O, height):
            rows, columns = slice(start, start + height), slice(c * width, (c + 1) * width)
            dy_BTR = dy_BTO[..., rows]
            size = slice(dy_BTR.shape[2]), slice(x_BTW.shape[2])
            total_RW = dw_OI[rows, columns] if is_kept else dw_OI[size]
            add_tiles(x_BTW, dy_BTR.mT, total_RW, norms_BCO[:, c, rows])
    return dw_OI, norm_rows(norms_BCO.flatten(1))


def even_block(size: int, most: int) -> int:
    """Block size <= ``most`` that splits ``size`` evenly. Only the last block may be smaller."""
    return -(-size // -(-size // max(1, most)))


def _add_tiles(x_BTI: Tensor, dy_BOT: Tensor, total_OI: Tensor, norms_BO: Tensor) -> None:
    """Add one sample's tile after the other to ``total_OI``. The first is computed in place.

    Views are made before the loop. In the loop, where caches are full of the GEMM's data, they
    would cost as much as the norm and the sum.
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
    *norms, last = norms_BO.unbind()
    for b, (dy_NOT, x_NTI, out) in enumerate(zip(dy_BNOT.unbind(), x_BNTI.unbind(), norms)):
        if x_NTI.dtype != acc:
            dy_NOT, x_NTI = dy_NOT.to(acc), x_NTI[:1].to(acc).expand(N, -1, -1)
        tile_OI, tile_NOI = tiles[b > 0]
        torch.bmm(dy_NOT, x_NTI, out=tile_NOI)
        torch.linalg.vector_norm(tile_OI, dim=-1, out=out)
        if b:
            total_OI += tile_OI
    torch.linalg.vector_norm(total_OI, dim=-1, out=last)


def _add_small_tiles(x_BTI: Tensor, dy_BOT: Tensor, total_OI: Tensor, norms_BO: Tensor) -> None:
    """Add the tiles of many samples at a time. For small tiles calls cost more than memory."""
    acc, B, together = total_OI.dtype, len(x_BTI), GROUP // max(1, total_OI.numel())
    scratch_GOI = total_OI.new_empty((min(together, B), *total_OI.shape))
    total_OI.zero_()
    groups = (t.split(together) for t in (dy_BOT, x_BTI, norms_BO[:B]))
    for dy_GOT, x_GTI, out in zip(*groups):
        tiles_GOI = scratch_GOI[: len(x_GTI)]
        torch.bmm(dy_GOT.to(acc), x_GTI.to(acc), out=tiles_GOI)
        total_OI += tiles_GOI.sum(0)
        torch.linalg.vector_norm(tiles_GOI, dim=-1, out=out)
    torch.linalg.vector_norm(total_OI, dim=-1, out=norms_BO[B])
