# SPDX-License-Identifier: Apache-2.0
"""What makes the noise scale of a model on several processes wrong is an error on all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from made import Made
from processes import each, spawn
from test_model_parallel import alone, layers, measured, vector_loss, vectors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
N = 8


class Pipeline:
    """Two stages, and a step of eight samples in two passes."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        freeze: bool = False,
        data: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        self.rank, model = dist.get_rank(group), layers()
        self.stage: Any = model[2 * self.rank : 2 * self.rank + 2]
        self.stage.requires_grad_(self.rank == 1 or not freeze)
        if data is not None:
            self.stage = DistributedDataParallel(self.stage, process_group=data)
        stage = PipelineStage(self.stage, self.rank, 2, torch.device("cpu"), group=group)
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
        self.gns = gnsfast.GradientNoiseScale(self.stage, **settings)

    def step(self, batch: tuple[Tensor, Tensor], **options: Any) -> None:
        x, y = batch
        with self.gns.microbatch(len(x), schedule=self.schedule, **options):
            self.schedule.step(*([x] if self.rank == 0 else []), target=y)

    def update(self, grad_norm: Any = None) -> None:
        self.gns.update(grad_norm)
        self.stage.zero_grad()


def pipelines(rank: int) -> None:
    world, updates = dist.group.WORLD, vectors(1)
    [batch] = updates[0]

    pipe = Pipeline(world, stages=world)
    pipe.step(batch)
    pipe.update(torch.nn.utils.clip_grad_norm_(pipe.stage.parameters(), 1e-3))
    with pytest.raises(gnsfast.ObservationError, match="different values of grad_norm"):
        pipe.gns.compute()

    pipe = Pipeline(world, stages=world)
    pipe.step(batch, tokens=torch.full((N,), 3) if rank else None)
    pipe.update()
    with pytest.raises(gnsfast.ObservationError, match="different tokens or scale"):
        pipe.gns.compute()

    pipe = Pipeline(world, stages=world)
    with pipe.gns.microbatch(N, schedule=pipe.schedule):
        pipe.schedule.step(*([batch[0]] if rank == 0 else []), target=batch[1])
        torch.nn.utils.clip_grad_norm_(pipe.stage.parameters(), 1e-3)
    with pytest.raises(gnsfast.ObservationError, match="clipping"):
        pipe.gns.update()

    with pytest.raises(ValueError, match=r"Call GradientNoiseScale\(model, stages=group\)"):
        Pipeline(world).step(batch)
    with pytest.raises(ValueError, match="does not work with a schedule"):
        Pipeline(world, source="local").step(batch)
    with pytest.raises(gnsfast.ObservationError, match=r"step ran 0 times"):
        pipe = Pipeline(world, stages=world)
        with pipe.gns.microbatch(N, schedule=pipe.schedule):
            pass

    if rank == 0:  # the last stage alone scales the loss
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with pytest.raises(gnsfast.ObservationError, match="scaled nothing on this pipeline"):
            pipe = Pipeline(world, stages=world, grad_scaler=scaler)
            pipe.step(batch)
    else:
        Pipeline(world, stages=world).step(batch)

    pipe = Pipeline(world, freeze=True, stages=world)
    for [batch] in updates:
        pipe.step(batch)
        pipe.update()
    plain = layers()
    plain[:2].requires_grad_(False)
    truth = measured(alone(plain), plain, vector_loss, updates)
    assert pipe.gns.compute().noise_scale == pytest.approx(truth.noise_scale, rel=1e-5)


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
    data, stages = mesh["dp"].get_group(), mesh["pp"].get_group()
    [batch] = vectors(1)[0]
    for wrong in (data, stages):  # some of the model's processes are not in it
        with pytest.raises(ValueError, match="process_group of all processes"):
            Pipeline(stages, data=data, stages=stages, process_group=wrong).step(batch)
    pipe = Pipeline(stages, stages=stages)  # nobody averages
    pipe.step((batch[0] + mesh["dp"].get_local_rank(), batch[1]))
    pipe.update()
    with pytest.raises(gnsfast.ObservationError, match="nobody has averaged them"):
        pipe.gns.compute()

    # Tensor parallel twice, and no average over the two copies.
    model: Any = nn.Sequential(nn.Linear(8, 4, bias=False))
    sharded = distribute_tensor(model[0].weight.detach(), mesh["pp"], [Shard(0)])
    model[0].weight = nn.Parameter(sharded)
    gns = gnsfast.GradientNoiseScale(model)
    x = torch.randn(N, 8) + mesh["dp"].get_local_rank()
    with gns.microbatch(N):
        whole = distribute_tensor(x, mesh["pp"], [Replicate()])
        model(whole).full_tensor().square().sum().backward()
    gns.update()
    with pytest.raises(gnsfast.ObservationError, match="nobody has averaged them"):
        gns.compute()

    # Experts on a mesh of their own: another number of data-parallel processes.
    model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    expert = distribute_tensor(model[0].weight.detach(), mesh["pp"], [Shard(0)])
    model[0].weight, model[0].bias = nn.Parameter(expert), None
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model[1], mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(NotImplementedError, match="different degrees of model parallelism"):
        with gnsfast.GradientNoiseScale(model).microbatch(N):
            pass


def test_four_processes() -> None:
    spawn(four, 4)
