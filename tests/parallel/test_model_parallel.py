# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel, sharded and pipelined models have the numbers of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import each, spawn
from test_distributed import Attention
from test_estimator_distributed import check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
UPDATES, N, T, V = 5, 4, 6, 23
Batch = tuple[Tensor, Tensor]


def texts(count: int) -> list[list[Batch]]:
    """[update][batch], the same on every process; labels that have something to learn."""
    torch.manual_seed(2)
    return [
        [(torch.randint(0, V, (N, T)), torch.randint(0, 3, (N, T))) for _ in range(count)]
        for _ in range(UPDATES)
    ]


def measured(
    gns: gnsfast.GradientNoiseScale,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    updates: list[list[Any]],
) -> gnsfast.NoiseScale:
    """The micro-batches of each update, one after the other."""
    for batches in updates:
        with gns.update():
            for batch in batches:
                with gns.microbatch(len(batch[0]), scale=1 / len(batches)):
                    (loss(model, batch) / len(batches)).backward()
        model.zero_grad()
    return gns.compute()


def alone(model: nn.Module, **settings: Any) -> gnsfast.GradientNoiseScale:
    group, _ = dist.new_subgroups(group_size=1)
    return gnsfast.GradientNoiseScale(model, process_group=group, source="update", **settings)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(8), Attention()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.norm = nn.Embedding(V, 8), Block(), nn.RMSNorm(8)
        self.head = nn.Linear(8, V)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.tokens(ids))))
        return out


def transformer() -> nn.Module:
    torch.manual_seed(1)
    return Transformer()


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def split_heads(model: nn.Module, mesh: DeviceMesh, logits: Shard | None = None) -> nn.Module:
    """The usual plan: vocabulary, heads and features split; norms see their share of the tokens.
    The ``logits`` are gathered, or stay split.
    """
    split, whole = Shard(1), Replicate()
    plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=split),
        **split_block(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=logits or whole, use_local_output=logits is None
        ),
    }
    return parallelize_module(model, mesh, plan)


def split_block() -> dict[str, Any]:
    """The plan of a block that gets and returns a share of the tokens."""
    split = Shard(1)
    inputs = PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate())
    return {
        "block.before": SequenceParallel(),
        "block.attention": inputs,
        **{f"block.attention.{p}": ColwiseParallel() for p in "qkv"},
        "block.attention.o": RowwiseParallel(output_layouts=split),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=split),
        "block.down": RowwiseParallel(output_layouts=split),
    }


def llama() -> Any:
    import transformers as hf  # takes seconds, and one test needs it
    from tiny_models import SMALL

    torch.manual_seed(1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))


def llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())


def llama_2d(mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over tensor parallel layers."""
    model = llama()
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        columns += ("mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan = {
            **{name: ColwiseParallel() for name in columns},
            **{name: RowwiseParallel() for name in rows},
        }
        fully_shard(parallelize_module(layer, mesh["other"], plan), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def layers() -> nn.Sequential:
    """Four layers for pipeline stages."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


def vectors(count: int) -> list[list[Batch]]:
    torch.manual_seed(2)
    return [
        [(torch.randn(2 * N, 8), (torch.rand(2 * N) < 0.1).long()) for _ in range(count)]
        for _ in range(UPDATES)
    ]


def vector_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pipelined(
    updates: list[list[Batch]], group: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> gnsfast.NoiseScale:
    """Of this process's stage, a half of the layers: every batch is a step of one micro-batch."""
    rank = dist.get_rank(group)
    model = DistributedDataParallel(layers()[2 * rank : 2 * rank + 2], process_group=replicas)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, labels: F.cross_entropy(y, labels) / 2)
    gns = gnsfast.GradientNoiseScale(model, unit="micro_batch", process_group=replicas)
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(len(x), scale=1 / 2):
                    schedule.step(*([x] if rank == 0 else []), target=y)
        model.zero_grad()
    return gns.compute()


def check_stages(
    updates: list[list[Batch]],
    mine: list[list[Batch]],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup,
) -> None:
    """The numbers of two stages add up to those of the model."""
    model, found = layers(), pipelined(mine, group, replicas)
    truth = measured(alone(model, unit="micro_batch"), model, vector_loss, updates)
    stages: list[Any] = [None, None]
    dist.all_gather_object(stages, (found.trace, found.grad_sqnorm), group)
    trace, grad_sqnorm = map(sum, zip(*stages))
    assert (trace, grad_sqnorm) == pytest.approx((truth.trace, truth.grad_sqnorm), rel=1e-5)
    assert all(truth.trace > own > 0 for own, _ in stages)


def stages_of_two(rank: int) -> None:
    itself, _ = dist.new_subgroups(group_size=1)
    updates = vectors(2)
    check_stages(updates, updates, dist.group.WORLD, itself)


def heads_split(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    updates, plain = texts(2), transformer()
    truth = measured(alone(plain), plain, text_loss, updates)
    model = split_heads(transformer(), mesh)
    check(measured(gnsfast.GradientNoiseScale(model), model, text_loss, updates), truth)
    group, _ = dist.new_subgroups(group_size=1)
    with pytest.raises(ValueError, match="all processes that train the model"):
        with gnsfast.GradientNoiseScale(model, process_group=group).update(N):
            pass


def mixed_precision(rank: int) -> None:
    """bfloat16 parameters, float32 sums; one process shards over itself, for the same rounding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(mesh: DeviceMesh, reshard: bool) -> nn.Module:
        options: dict[str, Any] = dict(mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        model = transformer()
        fully_shard(model.block, **options)  # type: ignore[arg-type]
        return fully_shard(model, **options)

    updates, mesh = texts(4), init_device_mesh("cpu", (2,))
    mine = [update[2 * rank : 2 * rank + 2] for update in updates]
    plain = shard(DeviceMesh("cpu", [rank]), True)
    truth = measured(alone(plain), plain, text_loss, updates)
    for reshard in (True, False):
        model = shard(mesh, reshard)
        check(measured(gnsfast.GradientNoiseScale(model), model, text_loss, mine), truth)


def test_two_processes() -> None:
    spawn(each, args=((heads_split, mixed_precision, stages_of_two),))


def four(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    replica = mesh["dp"].get_local_rank()
    plain, updates = llama(), texts(4)
    truth = measured(alone(plain), plain, llama_loss, updates)
    mine = [update[2 * replica : 2 * replica + 2] for update in updates]
    model = llama_2d(mesh)
    check(measured(gnsfast.GradientNoiseScale(model), model, llama_loss, mine), truth)
    updates = vectors(4)
    mine = [update[2 * replica : 2 * replica + 2] for update in updates]
    check_stages(updates, mine, mesh["other"].get_group(), mesh["dp"].get_group())


def test_two_dimensions() -> None:
    """FSDP2 over tensor parallel layers; DistributedDataParallel over pipeline stages."""
    spawn(four, 4)
