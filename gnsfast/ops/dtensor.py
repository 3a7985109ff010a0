# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: runs the operators on DTensors.

Each rank finds the norms of its shard of a weight, and the norms of all shards add up. A replicated
bias has its whole norm on every rank, which must count once. Weight and bias therefore go through
the operator one at a time. Every probe row is summed over the shards before it reaches its probe,
so it is the same on all ranks.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gnsfast.ops import operators
from gnsfast.signatures import EmbeddingWgrad, LinearWgrad, NormBackward
from gnsfast.tensors import accumulate_dtype, is_dtensor
from gnsfast.torch_internals import local_shape_and_offset


def linear_wgrad(a: LinearWgrad) -> tuple[Any, ...]:
    """The operator. For DTensors dW and db are DTensors, and every rank has the whole rows."""
    if not is_dtensor(a.dy_BTO):
        results: tuple[Tensor, ...] = operators.linear_wgrad(a)
        return results
    x_BTI: Any = a.x_BTI
    dy_BTO: Any = a.dy_BTO
    _register_linear_wgrad()
    dw = db = dy_BTO
    rows = []
    if a.weight:
        alone = LinearWgrad(x_BTI, dy_BTO, True, False, False, a.dtype)
        dw, _, row, _ = operators.linear_wgrad(alone)
        dw = dw.t() if a.transposed else dw
        rows.append(_whole(row))
    if a.bias:
        s_BO = dy_BTO.sum(1, dtype=accumulate_dtype(dy_BTO.dtype))
        total_O = s_BO.sum(0)
        rows.append(
            _whole(torch.cat([s_BO.square().sum(1), total_O.square().sum().expand(2)])[None])
        )
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_partial() else p for p in total_O.placements]
        db = total_O.redistribute(placements=whole).to(a.dtype)  # tokens may be split over ranks
    return dw, db, torch.cat(rows), dy_BTO


def embedding_wgrad(weight: Any, a: EmbeddingWgrad) -> tuple[Any, Tensor]:
    """The operator for a ``weight`` that is a DTensor, sharded by ids or by columns."""
    from torch.distributed.tensor import DTensor

    mesh, placements = weight.device_mesh, weight.placements
    parts: tuple[Any, ...] = a.dy_BTD, a.ids_BT
    dy, ids = (t.full_tensor() if is_dtensor(t) else t for t in parts)
    (rows, columns), (first, column) = local_shape_and_offset(weight.shape, mesh, placements)
    # Ids of other shards go to an extra row, the padding row, which takes no gradient.
    here = (ids >= first) & (ids < first + rows) & (ids != a.padding_idx)
    local = torch.where(here, ids - first, rows)
    dy = dy[..., column : column + columns].contiguous()
    local_a = EmbeddingWgrad(dy, local, rows + 1, rows, a.dtype)
    dw, row = operators.embedding_wgrad(local_a)
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


def norm_backward(a: NormBackward) -> tuple[Any, ...]:
    """The operator. It gathers DTensors, and returns replicated gradients for them."""
    if not any(map(is_dtensor, a[:6])):
        return operators.norm_backward(a)
    mesh = next(t.device_mesh for t in a[:6] if is_dtensor(t))  # type: ignore[union-attr]
    from torch.distributed.tensor import DTensor

    whole: Any = (t.full_tensor() if is_dtensor(t) else t for t in a[:6])  # type: ignore[union-attr]
    gathered: Any = *whole, *a[6:]
    *grads, rows = operators.norm_backward(NormBackward(*gathered))
    return *(DTensor.from_local(g, mesh, run_check=False) for g in grads), rows


def _whole(row: Any) -> Tensor:
    """A probe row, summed over its shards. The call counter is set to 1, since it is summed too."""
    full: Tensor = row.full_tensor()
    full[:, -1] = 1.0
    return full


@functools.cache
def _register_linear_wgrad() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.gnsfast.linear_wgrad.default)  # type: ignore[untyped-decorator]
    def rule(x: Any, dy: Any, *more: Any) -> list[Any]:
        # DTensor's cache of rules ignores the flags, so only calls with a weight alone come here.
        none = (None,) * len(more)
        whole, columns = Replicate(), Shard(2)
        return [
            ([whole, whole, whole, whole], [whole, whole, *none]),
            ([Shard(0), whole, Partial(), whole], [whole, columns, *none]),
            ([Shard(1), whole, Partial(), whole], [columns, whole, *none]),
        ]
