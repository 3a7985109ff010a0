# SPDX-License-Identifier: Apache-2.0
"""Noise from micro-batches on two processes: the backward passes of both are compared, whatever
DistributedDataParallel does with their gradients afterwards.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import assert_same
from processes import spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
UPDATES, N = 6, 3
SETTINGS: Any = {"metric": ["sign", "spectral"]}


class Rows(nn.Module):
    """A layer that is called twice, and one without per-sample norms."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.lstm = nn.Linear(6, 6), nn.LSTM(6, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        y: Tensor = self.out(self.lstm(x[:, None])[0][:, -1])
        return y


def make() -> nn.Module:
    torch.manual_seed(1)
    return gnsfast.configure(Rows().double(), exclude=["lstm"])


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 6).double(), (torch.rand(N) < 0.2).long()


def measure(gns: Any, model: nn.Module, called: Any, updates: list[list[Any]]) -> Any:
    for mine in updates:
        with gns.update():
            for k, (x, y) in enumerate(mine, 1):
                waits = called is not model and k < len(mine)
                with called.no_sync() if waits else nullcontext():
                    with gns.microbatch(N, scale=1 / len(mine)):
                        (F.cross_entropy(called(x), y) / len(mine)).backward()
        model.zero_grad()
    return gns.compute()


def same(ours: Any, theirs: Any) -> None:
    for metric in ("sign", "spectral"):
        assert_same(getattr(ours, metric), getattr(theirs, metric), 1e-7)
        assert getattr(ours, metric).updates == UPDATES - 1


def micro_batches_of_two(rank: int, parts: int) -> None:
    torch.manual_seed(2)
    data = [[[draw() for _ in range(parts)] for _ in range(2)] for _ in range(UPDATES)]
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    model = make()
    # The halves are the same if the second process' passes come reversed.
    one = [[*of[0], *(reversed(of[1]) if parts % 2 == 0 else of[1])] for of in data]
    want = measure(
        gnsfast.GradientNoiseScale(model, process_group=alone, **SETTINGS), model, model, one
    )
    for view in (False, True):
        model = make()
        both = DistributedDataParallel(model, gradient_as_bucket_view=view)
        gns = gnsfast.GradientNoiseScale(model, **SETTINGS)
        same(measure(gns, model, both, [of[rank] for of in data]), want)


def layouts_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded, split = make(), nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded)
    parallelize_module(split, mesh, {"0": ColwiseParallel()})
    for model, words in ((sharded, r"sharded parameters \(FSDP2\)"), (split, "tensor parallelism")):
        gns = gnsfast.GradientNoiseScale(model, **SETTINGS)
        with pytest.raises(NotImplementedError, match=rf"spectral'\) together with {words}"):
            with gns.update(4):
                pass


def test_two_processes() -> None:
    spawn(everything)


def everything(rank: int) -> None:
    for parts in (1, 2):
        micro_batches_of_two(rank, parts)
    layouts_are_refused(rank)
