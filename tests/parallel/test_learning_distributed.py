# SPDX-License-Identifier: Apache-2.0
"""What the first batch shows on several processes: those that shard a model learn together,
whatever batch each has, and all agree in the first update on which parameters have norms.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made import Made
from noise_cases import one_update
from oracle import assert_norms, loop_sqnorms
from processes import each, spawn
from test_distributed import Block
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.parallel import gathered

pytestmark = pytest.mark.dist


class Model(nn.Module):
    """A block of which a checkpoint may run the forward again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 3)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(self.block, h, use_reentrant=False) if self.again else self.block(h)
        y: Tensor = self.last(h).mean(1)
        return y


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def draw(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, 8), torch.arange(n) % 3


def measured(model: nn.Module, plain: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    n = len(batch[0])
    with gnsfast.per_sample_sqnorms(model, n) as norms:
        loss_of(model, batch).backward()
    assert_norms(norms, loop_sqnorms(plain, loss_of, batch, n))


def sharded(again: bool, **options: Any) -> tuple[nn.Module, Any]:
    plain = Model(again)
    model: Any = copy.deepcopy(plain)
    fully_shard(model.block, **options)
    return plain, fully_shard(model, **options)


def uneven(rank: int, again: bool) -> None:
    """One sample on a process, several on the other; and the other way round."""
    plain, model = sharded(again)
    for n in ((1, 4), (5, 1), (2, 3)):
        measured(model, plain, draw(n[rank]))
    assert gnsfast.coverage(model).proof == ""


def proven(rank: int, again: bool) -> None:
    plain, model = sharded(again, reshard_after_forward=again)
    model.set_requires_gradient_sync(False)
    measured(model, plain, draw(3 + rank))
    assert all(p.grad is None for p in model.parameters())  # nothing was reduced
    assert gnsfast.coverage(model).proof == ""


def single(rank: int) -> None:
    """Of one sample on each process two copies show as much."""
    plain, model = sharded(False)
    measured(model, plain, draw(1))
    assert gnsfast.coverage(model).proof == ""
    measured(model, plain, draw(2))


def before(rank: int, again: bool) -> None:
    """``learn`` is called by both processes, whose batches have other numbers of samples."""
    plain, model = sharded(again)
    table = gnsfast.learn(model, draw(2 + 2 * rank)[0])
    assert gathered(table, None) == [table, table] and not table.left_out
    gnsfast.GradientNoiseScale(model, table)
    measured(model, plain, draw(5 - rank))


def adapters(rank: int) -> None:
    """What is behind a matrix of zeros gets a gradient while its shards are not zeros."""
    parts = {"down": nn.Linear(8, 2, bias=False), "up": nn.Linear(2, 8, bias=False)}
    nn.init.zeros_(parts["up"].weight)
    plain = Made(lambda m, x: x + m.up(m.down(x)), **parts)
    model: Any = fully_shard(copy.deepcopy(plain))
    table, alone = (gnsfast.learn(each, draw(4)[0]) for each in (model, plain))
    assert table.proofs == alone.proofs and len(table.proofs) == 2
    assert not model.up.weight.full_tensor().any()


class Mixed(nn.Module):
    """A layer whose results the first process takes the mean of over its samples."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.own, self.mixed, self.mixes = nn.Linear(8, 3), nn.Linear(8, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        more = self.mixed(x).mean(1)
        y: Tensor = self.own(x).mean(1) + (more.mean(0) if self.mixes else more)
        return y


def agreed(rank: int) -> None:
    """What one process leaves out, all leave out: the first update is forgotten on all."""
    model = Mixed(rank == 0)
    wrapped = DistributedDataParallel(model, static_graph=True)
    gns = gnsfast.GradientNoiseScale(wrapped)
    for _ in range(4):
        with one_update(gns, 5):
            loss_of(wrapped, draw(5)).backward()
    found = gns.compute()
    assert found.updates == 3 and found.left_out == ("mixed.weight", "mixed.bias")
    rows = gnsfast.coverage(model).rows
    assert all(r.static == r.parameter.startswith("own") for r in rows)


def refused(rank: int) -> None:
    """A batch without samples on one process is an error on both, which do not wait for it."""
    _, model = sharded(False)
    with pytest.raises(gnsfast.SampleShapeError, match=r"shape \[5, 3, 8\]"):
        gnsfast.learn(model, torch.randn(4 + rank, 3, 8), num_samples=4)


def test_two_processes() -> None:
    spawn(several)


def several(rank: int) -> None:
    each(rank, [uneven, proven, before], (True,), (False,))
    each(rank, [single, agreed, adapters, refused])
