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

# A float32 sum of squares loses digits with its length: a dot product is 5e-4 low at 16.8M numbers,
# a norm 8e-5 at 2.4M, but below 1e-7 at this many. Longer ones are summed in pieces, in float64.
PIECE = 1 << 13

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


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients are summed in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def set_columns(t_RC: Tensor, column_RK: Tensor, value_RK: Tensor) -> None:
    """``t_RC.scatter_(1, column_RK, value_RK)`` of a contiguous tensor and columns within it: one
    beyond its row would go to the next.

    Where deterministic algorithms are asked for, torch sends the strides of a tensor of several
    dimensions to the GPU and waits for it, which a graph capture forbids. With one dimension it
    does not.
    """
    first_R1 = torch.arange(len(t_RC), device=t_RC.device)[:, None] * t_RC.shape[1]
    t_RC.view(-1).scatter_(0, (first_R1 + column_RK).flatten(), value_RK.flatten())


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
            sqnorm_B = _gram(x_BTI, dy_BTO)
        sqnorm_B1 = with_sum(sqnorm_B, dw_OI)
    return dw_OI.to(dtype), probe_row(sqnorm_B1)


def _gram(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
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


def embedding_wgrad(
    dy_BTD: Tensor, ids_BT: Tensor, num_embeddings: int, padding_idx: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and ``sqnorm_PB`` of an embedding: rows of one id are added within a sample before
    they are squared.

    ``padding_idx`` (-1: none) takes no gradient.
    """
    B, T, _ = dy_BTD.shape
    sample_N = torch.arange(B, device=ids_BT.device).repeat_interleave(T)
    dw_VD, sqnorm_B1 = embedding_rows(
        dy_BTD.flatten(0, 1), ids_BT.flatten(), sample_N, B, num_embeddings, padding_idx
    )
    return dw_VD.to(dtype), probe_row(sqnorm_B1)[None]


def embedding_rows(
    dy_ND: Tensor, ids_N: Tensor, sample_N: Tensor, B: int, num_embeddings: int, padding_idx: int
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and [B + 1] squared norms, from rows of which ``sample_N`` says whose they are."""
    V = max(num_embeddings, 1)
    key_S, sum_SD = segments(dy_ND, ids_N, sample_N, num_embeddings, padding_idx)
    sqnorm_B = sum_SD.new_zeros(B, dtype=torch.float64)
    sqnorm_B.index_add_(0, key_S // V, sqnorm_rows(sum_SD))
    dw_VD = sum_SD.new_zeros((num_embeddings, dy_ND.shape[1])).index_add_(0, key_S % V, sum_SD)
    return dw_VD, with_sum(sqnorm_B, dw_VD)


def segments(
    dy_ND: Tensor, ids_N: Tensor, sample_N: Tensor, num_embeddings: int, padding_idx: int
) -> tuple[Tensor, Tensor]:
    """Each sample's rows of one id added: sample · ``num_embeddings`` + id [S], and the sums."""
    key_N = sample_N * num_embeddings + ids_N
    keep = slice(None) if padding_idx < 0 else ids_N != padding_idx
    dy_ND = dy_ND[keep].to(accumulate_dtype(dy_ND.dtype))
    key_S, segment_N = torch.unique(key_N[keep], return_inverse=True)
    return key_S, dy_ND.new_zeros((len(key_S), dy_ND.shape[1])).index_add_(0, segment_N, dy_ND)


def layer_norm_backward(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    w_N: Tensor | None,
    b_N: Tensor | None,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dW, db and ``sqnorm_PB`` of ``y = w (x - mean) rstd + b``; an unwanted gradient comes
    back empty.

    torch's own kernel runs once a sample: its gain and bias gradients are then that sample's, and
    the rows are read once.
    """
    B, _, N = x_BTN.shape
    acc = accumulate_dtype(x_BTN.dtype)
    dx = x_BTN.new_empty(x_BTN.shape)
    dw_BN, db_BN = x_BTN.new_zeros((B, N), dtype=acc), x_BTN.new_zeros((B, N), dtype=acc)
    if (
        x_BTN.numel() <= B * ROWWISE
    ):  # short samples: a call of torch's kernel costs more than these passes
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy_BTN, x_BTN, [N], mean_BT1, rstd_BT1, w_N, b_N, [True, False, False]
        )
        dx = dx.contiguous()
        if weight:
            products_BTN = torch.sub(x_BTN.to(acc), mean_BT1).mul_(dy_BTN)
            dw_BN = torch.bmm(rstd_BT1.to(acc).mT, products_BTN)[:, 0]
        if bias:
            db_BN = sum_tokens(dy_BTN)
    else:
        for b in range(B):
            dx[b], dw_N, db_N = torch.ops.aten.native_layer_norm_backward(
                dy_BTN[b], x_BTN[b], [N], mean_BT1[b], rstd_BT1[b], w_N, b_N, [True, weight, bias]
            )
            if weight:
                dw_BN[b] = dw_N
            if bias:
                db_BN[b] = db_N
    dw, db, sqnorm_PB = affine_wgrad(dw_BN if weight else None, db_BN if bias else None, w_N, b_N)
    return dx, dw, db, sqnorm_PB


# Elements of one sample below which torch's layer-norm backward is not called sample by sample.
ROWWISE = 1 << 15


def affine_wgrad(
    dw_BN: Tensor | None, db_BN: Tensor | None, w_N: Tensor | None, b_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, db and ``sqnorm_PB`` from the per-sample gains' and biases' gradients; None for an
    unwanted one.
    """
    like = dw_BN if dw_BN is not None else db_BN
    assert like is not None
    grads, rows = [like.new_empty(0), like.new_empty(0)], []
    for i, (g_BN, parameter) in enumerate(((dw_BN, w_N), (db_BN, b_N))):
        if g_BN is not None and parameter is not None:
            grads[i], row = sum_wgrad(g_BN, parameter.dtype)
            rows.append(row)
    return grads[0], grads[1], torch.stack(rows)


def rms_norm_backward(
    dy_BTN: Tensor, x_BTN: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW and ``sqnorm_PB`` of ``y = (offset + w) x rsqrt(mean(x²) + eps)``."""
    dx, products_BTN = rms_norm_products(dy_BTN, x_BTN, w_N, eps, offset)
    dw, row = sum_wgrad(products_BTN.sum(1), w_N.dtype)
    return dx, dw, row[None]


def rms_norm_products(
    dy: Tensor, x: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """dx, and what each row [..., N] adds to dW."""
    acc = accumulate_dtype(x.dtype)
    wide = x.to(acc)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    dnormed = dy * (w_N.to(acc) + offset)
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype).contiguous(), normed * dy
