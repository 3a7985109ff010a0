# SPDX-License-Identifier: Apache-2.0
"""After an evaluation, and in a forward pass, FSDP2's modules hold whole parameters: the estimator
that begins then reads the gradients of the shards all the same.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import each, spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gnsfast
from gnsfast.parallel import parameters_at_rest

pytestmark = pytest.mark.dist
UPDATES, V, CLASSES = 6, 9, 4
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Matrices that are high, wide and square; 9, 7, 5 and 1 rows are not even over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(V, 5), nn.Linear(5, 7)
        self.norm, self.square = nn.LayerNorm(7), nn.Linear(7, 7, bias=False)
        self.gate, self.unused = nn.Linear(7, 1), nn.Linear(3, 3)
        self.down = nn.Linear(7, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.up(self.embed(ids))))
        y: Tensor = self.down(h + self.gate(h).sigmoid() * self.square(h))
        return y


def make() -> nn.Module:
    torch.manual_seed(1)
    return Model().double()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches_of(ranks: int) -> list[list[Batch]]:
    """[update][rank], the same on every process."""
    torch.manual_seed(2)

    def draw() -> Batch:
        return torch.randint(V, (4, 3)), (torch.rand(4, 3) < 0.2).long() * (CLASSES - 1)

    return [[draw() for _ in range(ranks)] for _ in range(UPDATES)]


def shard(model: Any) -> Any:
    """A block of its own, and by default a root that stays whole between forward and backward."""
    fully_shard([model.up, model.norm])
    return fully_shard(model)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def trained(
    rank: int | None, model: nn.Module, gns: gnsfast.GradientNoiseScale, evaluated: str = "never"
) -> gnsfast.NoiseScale:
    """An update of one micro-batch on each process; those of all processes if ``rank`` is None."""
    optimizer = adam(model)
    for k, ranks in enumerate(batches_of(2)):
        if evaluated == "each" or (evaluated == "first" and k == 0):
            with torch.no_grad():
                loss_of(model, ranks[0])
        passes = ranks if rank is None else ranks[rank : rank + 1]
        with gns.update():
            for batch in passes:
                with gns.microbatch(4, scale=1 / len(passes)):
                    (loss_of(model, batch) / len(passes)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gns.compute()


def same(rank: int, evaluated: str) -> None:
    one, model = make(), shard(make())
    group, _ = dist.new_subgroups(group_size=1)
    truth = trained(None, one, gnsfast.GradientNoiseScale(one, process_group=group))
    gns = gnsfast.GradientNoiseScale(model)
    found = trained(rank, model, gns, evaluated)
    assert found.updates == truth.updates == 6
    assert found.noise_scale == pytest.approx(truth.noise_scale, rel=1e-6)


def test_two_processes() -> None:
    spawn(each, args=([same], ("first",), ("each",), ("never",)))


def partly(rank: int) -> None:
    """Blocks that stay spread over two of four processes after a forward pass."""
    model: Any = make()
    fully_shard([model.up, model.norm], reshard_after_forward=2)
    fully_shard(model, reshard_after_forward=2)
    before = dict(model.named_parameters())
    with torch.no_grad():
        loss_of(model, batches_of(1)[0][0])
    assert not {*before.values()} & {*model.parameters()}
    found = parameters_at_rest(model)
    assert all(found[name] is p for name, p in before.items())


def test_four_processes() -> None:
    spawn(partly, 4)
