# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: how the operators of ``ops.py`` act on DTensors.

A weight sharded by rows or columns has, on each rank, the norm of its shard: those add. A
replicated bias has the whole norm on every rank: that counts once. So weight and bias go through
the operator apart, and every probe row is made whole before it reaches its probe, the same on all
ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnsfast import ops
from gnsfast.tensors import accumulate_dtype, is_dtensor


def linear_wgrad(
    x_BTI: Any, dy_BTO: Any, weight: bool, bias: bool, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.linear_wgrad`` on DTensors: dW and db as DTensors, ``sqnorm_PB`` as a plain tensor,
    whole on every rank.
    """
    _register_linear_wgrad()
    dw = db = dy_BTO
    rows = []
    if weight:
        dw, _, row = ops.linear_wgrad(x_BTI, dy_BTO, True, False, False, dtype)
        dw = dw.t() if transposed else dw
        rows.append(_whole(row))
    if bias:
        s_BO = dy_BTO.sum(1, dtype=accumulate_dtype(dy_BTO.dtype))
        total_O = s_BO.sum(0)
        rows.append(
            _whole(torch.cat([s_BO.square().sum(1), total_O.square().sum().expand(2)])[None])
        )
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_partial() else p for p in total_O.placements]
        db = total_O.redistribute(placements=whole).to(dtype)  # the tokens may be split
    return dw, db, torch.cat(rows)


def embedding_wgrad(
    dy_BTD: Any, ids_BT: Any, weight: Any, padding_idx: int, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """``ops.embedding_wgrad`` for a weight that is a DTensor, sharded by ids or by columns."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = weight.device_mesh, weight.placements
    dy, ids = (t.full_tensor() if is_dtensor(t) else t for t in (dy_BTD, ids_BT))
    (rows, columns), (first, column) = compute_local_shape_and_global_offset(
        weight.shape, mesh, placements
    )
    # Ids of other shards go to one more row, as padding: it takes no gradient.
    here = (ids >= first) & (ids < first + rows) & (ids != padding_idx)
    local = torch.where(here, ids - first, rows)
    dw, row = ops.embedding_wgrad(
        dy[..., column : column + columns].contiguous(), local, rows + 1, rows, dtype
    )
    dw = dw[:rows]
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            torch.distributed.all_reduce(row, group=mesh.get_group(dim))
    row[:, -1] = 1.0
    shape, stride = weight.shape, weight.stride()
    sharded_dw = DTensor.from_local(
        dw, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return sharded_dw, row


def _whole(row: Any) -> Tensor:
    """A probe row summed over its shards; their counters add up too and become one again."""
    full: Tensor = row.full_tensor()
    full[:, -1] = 1.0
    return full


@functools.cache
def _register_linear_wgrad() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.gnsfast.linear_wgrad.default)  # type: ignore[untyped-decorator]
    def rule(x: Any, dy: Any, *flags: Any) -> list[Any]:
        # DTensor caches the answer without the flags: it is asked with those of a weight alone.
        none = (None,) * len(flags)
        whole, columns = Replicate(), Shard(2)
        return [
            ([whole, whole, whole], [whole, whole, *none]),
            ([Shard(0), whole, Partial()], [whole, columns, *none]),
            ([Shard(1), whole, Partial()], [columns, whole, *none]),
        ]


def replicated(fn: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``fn`` for DTensors too: arguments are gathered, gradients come back replicated, the last
    result plain.
    """

    def call(*args: Any) -> tuple[Tensor, ...]:
        mesh = next((a.device_mesh for a in args if is_dtensor(a)), None)
        if mesh is None:
            return fn(*args)
        from torch.distributed.tensor import DTensor

        *grads, sqnorm_PB = fn(*(a.full_tensor() if is_dtensor(a) else a for a in args))
        return *(DTensor.from_local(g, mesh, run_check=False) for g in grads), sqnorm_PB

    return call
