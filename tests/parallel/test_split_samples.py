# SPDX-License-Identifier: Apache-2.0
"""Samples that are split over processes are refused wherever that can be seen."""

import re

import pytest
import torch
import torch.distributed as dist
from processes import each, spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gnsfast
from gnsfast.parallel import refuse_parts

N, T, D = 4, 8, 6


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))


def run(gns: gnsfast.GradientNoiseScale, x_NTD: Tensor | None = None) -> None:
    x_NTD = torch.randn(N, T, D) if x_NTD is None else x_NTD
    with gns.update(N):
        gns.model(x_NTD).square().mean().backward()


def groups(rank: int) -> None:
    """What torch calls the groups of a mesh of several dimensions, and Megatron its own."""
    for name in ("mesh_cp", "mesh_context", "CONTEXT_PARALLEL_GROUP"):
        group = dist.new_group([0, 1], group_desc=name)
        model = layers()
        with pytest.raises(NotImplementedError, match=f"'{name}'.*splits each sample"):
            run(gnsfast.GradientNoiseScale(DistributedDataParallel(model)))
        alone = [dist.new_group([k]) for k in range(2)][rank]
        run(gnsfast.GradientNoiseScale(model, process_group=alone))
        dist.destroy_process_group(group)
    single = [dist.new_group([k], group_desc="mesh_cp") for k in range(2)]
    run(gnsfast.GradientNoiseScale(DistributedDataParallel(layers())))
    dist.destroy_process_group(single[rank])


def meshes(rank: int) -> None:
    """Accelerate calls a flattened mesh ``dp_shard_cp``, whatever its dimensions are."""
    for name, flat in (("dp_shard", "dp_shard_cp"), ("cp", "dp_cp"), ("context_parallel", "all")):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        for used in (mesh, mesh._flatten(flat)):
            gns = gnsfast.GradientNoiseScale(fully_shard(layers(), mesh=used))
            if name == "dp_shard":
                run(gns)
                continue
            with pytest.raises(NotImplementedError, match=f"'{name}'.*splits each sample"):
                run(gns)
    single = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    run(gnsfast.GradientNoiseScale(fully_shard(layers(), mesh=single._flatten("dp_and_cp"))))


def attention(rank: int) -> None:
    """torchtitan's way: no context manager, but hooks on the attention of each block."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    model = layers()
    plan = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
    parallelize_module(model[1], mesh, plan)  # type: ignore[index]
    with pytest.raises(NotImplementedError, match="attention '1'.*splits each sample"):
        run(gnsfast.GradientNoiseScale(model))


def context(rank: int) -> None:
    """torch's ``context_parallel``, wherever it begins; batches outside of it are measured."""
    mesh, x_NTD = init_device_mesh("cpu", (2,)), torch.randn(N, T, D)
    gns = gnsfast.GradientNoiseScale(layers())
    with context_parallel(mesh, buffers=[x_NTD], buffer_seq_dims=[1]):
        with pytest.raises(gnsfast.ObservationError, match="splits each sample"):
            run(gns, x_NTD)
    with pytest.raises(gnsfast.ObservationError, match="splits each sample"):
        with gns.update(N):
            with context_parallel(mesh, buffers=[x_NTD], buffer_seq_dims=[1]):
                gns.model(x_NTD).square().mean().backward()
    gns.model.zero_grad()
    run(gns)


def flattened(rank: int) -> None:
    """FSDP 1 has no sums that can be read: not in ``.grad``, whatever is asked of it."""
    for options in ({"source": "local"}, {}):
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        with pytest.raises(NotImplementedError, match=r"the model is wrapped.*fully_shard"):
            run(gnsfast.GradientNoiseScale(model, **options))
        inner = layers()
        inner[0] = FullyShardedDataParallel(  # type: ignore[operator]
            inner[0],  # type: ignore[index]
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        with pytest.raises(NotImplementedError, match=r"0 is wrapped.*fully_shard"):
            run(gnsfast.GradientNoiseScale(inner, **options))


def positions(*begins: int) -> dict[str, Tensor]:
    return {"position_ids": torch.tensor(begins)[:, None] + torch.arange(T)}


def two_pieces(rank: int) -> Tensor:
    """The second of four pieces goes with the third, and the first with the last."""
    return torch.cat([torch.arange(T // 2) + k * T // 2 for k in (rank, 3 - rank)])


PIECES = {  # where the rows of each of two processes begin
    "in one piece": ([0, 0], [T, T]),
    "one row": ([0], [T]),
}

WHOLE = {
    "of their own": ([0, 0], [0, 0]),
    "padding in front": ([1, 1], [0, 1]),
    "padding in front of all": ([0, 0], [1, 1]),
    "drawn at random": ([0, T], [T, 0]),
    "one row of a long text": ([T], [T]),
    "a fixed offset": ([T // 2] * 2, [T // 2] * 2),
    "no first part": ([T, T], [2 * T, 2 * T]),
    "a hole": ([0, 0], [3 * T, 3 * T]),
    "rows that overlap": ([0, 0], [T // 2, T // 2]),
}


def exchanged(rank: int) -> None:
    """All processes raise, or none: the others of one that raises alone would wait for it."""
    for begins in PIECES.values():
        own, seen = begins[rank][0], sorted({b for each in begins for b in each})
        said = f"position {own}, .* at {re.escape(str(seen))}.*let its position_ids begin at 0"
        with pytest.raises(gnsfast.ObservationError, match=said):
            refuse_parts(positions(*begins[rank]))
    for rows in (1, 2):
        said = rf"position {rank * T // 2}, .* at \[0, {T // 2}\].*does not read positions"
        with pytest.raises(gnsfast.ObservationError, match=said):
            refuse_parts({"position_ids": two_pieces(rank).expand(rows, T)})
    for name, begins in WHOLE.items():
        try:
            refuse_parts(positions(*begins[rank]))
        except gnsfast.ObservationError as error:
            raise AssertionError(name) from error
    ids = positions(rank * T, rank * T)["position_ids"]
    for batch in (ids, [ids], {"input_ids": ids}, {"position_ids": ids[0]}):
        refuse_parts(batch)
    refuse_parts({"position_ids": ids} if rank else {})  # they exchange all the same
    refuse_parts({"position_ids": ids[:, : T - rank]})
    refuse_parts({"position_ids": torch.full((2, 1), rank)})
    refuse_parts({"position_ids": torch.full((2, 2), rank)})


def named(rank: int) -> None:
    """Names that mean something else, and how each message says to go on."""
    for name in ("sp", "context"):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", name))
        model, plan = layers(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh[name], plan)
        said = f"mesh has a dimension '{name}' .*By this name .*another name in init_device_mesh"
        with pytest.raises(NotImplementedError, match=said):
            run(gnsfast.GradientNoiseScale(model))
    of_mesh = dist.new_group([0, 1], group_desc="mesh_sp")
    with pytest.raises(NotImplementedError, match="group 'mesh_sp' .*name in init_device_mesh"):
        run(gnsfast.GradientNoiseScale(DistributedDataParallel(layers())))
    dist.destroy_process_group(of_mesh)
    group = dist.new_group([0, 1], group_desc="sequence")  # a library's
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run(gnsfast.GradientNoiseScale(model))
    run(gnsfast.GradientNoiseScale(fully_shard(layers(), mesh=mesh)))
    with pytest.raises(NotImplementedError, match=r"group 'sequence' .*group._set_group_desc\('o"):
        run(gnsfast.GradientNoiseScale(DistributedDataParallel(layers())))
    group._set_group_desc("other")
    run(gnsfast.GradientNoiseScale(DistributedDataParallel(layers())))


@pytest.mark.dist
def test_two_processes() -> None:
    spawn(each, args=((exchanged, named, groups, meshes, attention, flattened, context),))


def test_one_process() -> None:
    refuse_parts(positions(T, T))
