# SPDX-License-Identifier: Apache-2.0
"""Adam's metric under FSDP2 is that of one process with the same global batch."""

from typing import Any

import pytest
import torch
from noise_cases import assert_same
from processes import each, spawn
from test_dual_norms_sharded import (
    Tied,
    alone,
    batches_of,
    in_one,
    loss_of,
    make,
    measure,
    mixed_precision,
    replicated,
    shard,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import gnsfast

pytestmark = pytest.mark.dist


def with_adam(model: nn.Module, amsgrad: bool = False) -> dict[str, Any]:
    options: Any = dict(lr=1e-2, eps=1e-3, amsgrad=amsgrad)
    return {"metric": "adam", "optimizer": torch.optim.AdamW(model.parameters(), **options)}


def compared(
    rank: int, updates: Any, one: Any, model: Any, each_pass: str = "", source: Any = "auto",
    ams: bool = False, rel: float = 1e-6,
) -> None:  # fmt: skip
    """``model`` over all processes, and ``one`` in this process with all of the samples."""
    theirs = alone(one, source=source, **with_adam(one, ams))
    ours = gnsfast.GradientNoiseScale(model, source=source, **with_adam(model, ams))
    truth = measure(theirs, one, [in_one(u) for u in updates])
    measure(ours, model, [u[rank] for u in updates], each_pass)
    assert_same(ours.compute().adam, truth.compute().adam, rel)


def sharded(rank: int, ranks: int, parts: int, each_pass: str, source: str, ams: bool) -> None:
    model = shard(make(), reshard_after_forward=not each_pass)
    compared(rank, batches_of(ranks, parts, 4), make(), model, each_pass, source, ams)


CASES = [  # ranks, micro-batches, what is told of each pass, source, amsgrad
    (2, 1, "", "auto", False),
    (2, 2, "set_requires_gradient_sync", "global", True),
    (2, 4, "set_reshard_after_backward", "global", False),
    (2, 2, "", "local", False),
    (3, 1, "", "auto", False),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes(ranks: int) -> None:
    spawn(each, ranks, ([sharded], *(case for case in CASES if case[0] == ranks)))


def test_four_processes() -> None:
    spawn(replicated, 4, (compared,))


def tied(rank: int) -> None:
    """One v for all uses of a weight."""
    compared(rank, batches_of(2, 2, 4), make(Tied), fully_shard(make(Tied)))


def step_in_between(rank: int) -> None:
    """One v must serve the whole update."""
    model: Any = shard(make())
    given = with_adam(model)
    gns = gnsfast.GradientNoiseScale(model, **given)
    [[batch, other]] = batches_of(1, 2, 4)[0]
    measure(gns, model, [[batch]])
    with gns.microbatch(4):
        loss_of(model, batch).backward()
    given["optimizer"].step()
    with pytest.raises(gnsfast.ObservationError, match="The optimizer has stepped"):
        with gns.microbatch(4):
            loss_of(model, other).backward()


def step_in_between_local(rank: int) -> None:
    """Micro-batches that are measured by themselves have the v of their own time."""
    model: Any = shard(make())
    given = with_adam(model)
    gns = gnsfast.GradientNoiseScale(model, source="local", **given)
    [[batch, other]] = batches_of(1, 2, 4)[0]
    measure(gns, model, [[batch]])
    for each_batch in (batch, other):
        with gns.microbatch(4):
            gathered = dict(gns._start().sides["adam"]._gathered)
            assert len(gathered) == 10
            for p, v in gathered.items():
                torch.testing.assert_close(
                    v, given["optimizer"].state[p]["exp_avg_sq"].full_tensor()
                )
            loss_of(model, each_batch).backward()
        given["optimizer"].step()
    gns.update()
    assert not gns._start().sides["adam"]._gathered


def another_sharding(rank: int) -> None:
    """Second moments that are not the parameter's, and an optimizer made before the sharding."""
    model: Any = make()
    early = with_adam(model)
    shard(model)
    batch = batches_of(1, 1, 4)[0][0][0]
    with pytest.raises(ValueError, match="not among the optimizer's parameters"):
        with gnsfast.GradientNoiseScale(model, **early).microbatch(4):
            pass
    given = with_adam(model)
    loss_of(model, batch).backward()
    given["optimizer"].step()
    state = given["optimizer"].state[model.down.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].full_tensor()
    model.zero_grad()
    with pytest.raises(ValueError, match="down.weight is a Tensor .* device and sharding"):
        with gnsfast.GradientNoiseScale(model, **given).microbatch(4):
            pass


def test_two_processes() -> None:
    spawn(several)


def several(rank: int) -> None:
    each(rank, [tied, step_in_between, step_in_between_local, another_sharding])
    each(rank, [mixed_precision], (compared,))
