# SPDX-License-Identifier: Apache-2.0
"""``gradients="torch"``: the losses of two processes, to the last bit as without us."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from gpt_models import NanoGPT, tokens
from processes import each, spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gnsfast


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        plan = {"c_fc": ColwiseParallel(), "c_out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def train(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    first, found = NanoGPT(), []
    for measured in (False, True):
        model = wrap(copy.deepcopy(first).eval())
        gns = gnsfast.GradientNoiseScale(model, gradients="torch") if measured else None
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(5 + (rank if wrap is not tensor_parallel else 0))
        for _ in range(5):
            with nullcontext() if gns is None else gns.update():
                for _ in range(2):
                    batch = tokens()
                    with nullcontext() if gns is None else gns.microbatch(len(batch[0])):
                        loss = model(*batch)[1]
                        (loss / 2).backward()
                    losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        assert gns is None or gns.compute().updates == 5
    assert found[0] == found[1]


@pytest.mark.second
def test_training() -> None:
    spawn(each, args=([train], (ddp,), (fsdp2,), (tensor_parallel,)))
