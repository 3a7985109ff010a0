# SPDX-License-Identifier: Apache-2.0
"""What makes the noise scale of a model on several processes wrong is an error on all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from made import Made
from processes import each, spawn
from test_model_parallel import alone, layers, measured, vectors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import gnsfast

pytestmark = pytest.mark.dist
N = 8


def pipelines(rank: int) -> None:
    """A stage on each process, with other parameters or with several passes in a block."""
    [(x, y)] = vectors(1)[0]
    itself, _ = dist.new_subgroups(group_size=1)
    part = slice(0, 3) if rank == 0 else slice(3, 4)
    for same in (False, True):  # the names of the parameters
        for settings in ({}, {"unit": "micro_batch"}):
            model = nn.Sequential(nn.Linear(8, 8)) if same else layers()[part]
            gns = gnsfast.GradientNoiseScale(model, **settings)
            words = "must be averaged" if same else "as the stages of a pipeline do"
            with pytest.raises(gnsfast.ObservationError, match=words):
                with gns.update(N):
                    (model(x).square().sum(1).mean() * (1 + rank)).backward()
                gns.compute()

    model = layers()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=itself)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
    gns = gnsfast.GradientNoiseScale(model, unit="micro_batch", process_group=itself)
    with pytest.raises(RuntimeError) as caught:  # that of the schedule
        with gns.update(N):
            schedule.step(x, target=y)
    assert "several parts in one pass" in str(caught.value.__cause__)


def split_tokens(rank: int) -> None:
    """A replicated linear layer of which each process has some of the tokens."""
    torch.manual_seed(1)
    plain, model = (Made(lambda m, x: m.up(x), up=nn.Linear(8, 8)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"up": SequenceParallel(use_local_output=False)})
    batches = [[(torch.randn(4, 6, 8), torch.randn(4, 6, 8))] for _ in range(5)]

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        y = m(batch[0] if m is plain else distribute_tensor(batch[0], mesh, [Shard(1)]))
        y = y if m is plain else y.full_tensor()
        return (y * batch[1]).sum((1, 2)).mean()

    truth = measured(alone(plain), plain, loss, batches)
    found = measured(gnsfast.GradientNoiseScale(model), model, loss, batches)
    assert found.noise_scale == pytest.approx(truth.noise_scale, rel=1e-5)


def test_two_processes() -> None:
    spawn(each, args=((pipelines, split_tokens),))


def four(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    # Tensor parallel twice, and no average over the two copies.
    model: Any = nn.Sequential(nn.Linear(8, 4, bias=False))
    sharded = distribute_tensor(model[0].weight.detach(), mesh["pp"], [Shard(0)])
    model[0].weight = nn.Parameter(sharded)
    gns = gnsfast.GradientNoiseScale(model)
    x = torch.randn(N, 8) + mesh["dp"].get_local_rank()
    with gns.update(N):
        whole = distribute_tensor(x, mesh["pp"], [Replicate()])
        model(whole).full_tensor().square().sum().backward()
    with pytest.raises(gnsfast.ObservationError, match="must be averaged"):
        gns.compute()

    # Experts on a mesh of their own: another number of data-parallel processes.
    model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    expert = distribute_tensor(model[0].weight.detach(), mesh["pp"], [Shard(0)])
    model[0].weight, model[0].bias = nn.Parameter(expert), None
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model[1], mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(NotImplementedError, match="different degrees of model parallelism"):
        with gnsfast.GradientNoiseScale(model).update(N):
            pass


def test_four_processes() -> None:
    spawn(four, 4)
