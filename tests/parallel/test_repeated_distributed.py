# SPDX-License-Identifier: Apache-2.0
"""Two processes, data parallel and sharded, and a block that the model calls four times."""

import copy

import pytest
import torch
import torch.distributed as dist
from layers import assert_as_loop
from processes import each, spawn
from repeated_models import B, T, Universal, V
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.dist
RANKS = 2


def square(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum()


def data_parallel(rank: int) -> None:
    model = Universal()
    check(rank, model, DistributedDataParallel(model))


def sharded(rank: int, apart: bool, reshard: bool) -> None:
    """``apart``: the repeated block is a unit of its own, gathered anew for each call."""
    model = Universal()
    plain = copy.deepcopy(model)
    if apart:
        fully_shard(model.block.qkv, reshard_after_forward=reshard)
        fully_shard(model.block, reshard_after_forward=reshard)
    check(rank, model, fully_shard(model, reshard_after_forward=reshard), plain)


def check(rank: int, model: nn.Module, wrapped: nn.Module, plain: nn.Module | None = None) -> None:
    """Norms of each rank's own samples, and the ranks' mean of the gradients; over two steps."""
    plain = copy.deepcopy(model) if plain is None else plain
    for _ in range(2):
        ids = [torch.randint(0, V, (B, T)) for _ in range(RANKS)][rank]
        assert_as_loop(model, ids, B, square, twin=plain, run=wrapped)
        square(plain, ids).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert q.grad is not None
        dist.all_reduce(q.grad)
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad / RANKS, rtol=1e-4, atol=1e-4)


def all_of_them(rank: int) -> None:
    each(rank, [data_parallel])
    each(rank, [sharded], (True, True), (True, False), (False, True))


def test_two_processes() -> None:
    spawn(all_of_them)
