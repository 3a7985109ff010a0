# SPDX-License-Identifier: Apache-2.0
"""A budget and errors on several processes: all measure the same updates, and nobody waits."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import N, draw, make
from processes import each, spawn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast
from gnsfast.estimator.observer import Observer
from gnsfast.functional import _linear
from gnsfast.parallel import gathered

pytestmark = pytest.mark.dist


def step(model: nn.Module, gns: Any, passes: int = 1) -> bool:
    """An update, and whether it is measured."""
    with gns.update():
        is_due = bool(gns._is_due)
        for x, y in draw(passes):
            with gns.microbatch(N, scale=1 / passes):
                (F.cross_entropy(model(x), y) / passes).backward()
    model.zero_grad()
    return is_due


def unequal(rank: int) -> None:
    """One process is slow, and the other one's measured updates are."""
    model = DistributedDataParallel(make())
    gns = gnsfast.GradientNoiseScale(model, budget=0.2)
    torch.manual_seed(rank)
    measured = []
    for _ in range(60):
        measured.append(step(model, gns))
        time.sleep(0.002 + 0.004 * (rank == 0) + 0.02 * (rank == 1 and measured[-1]))
    assert len({*map(tuple, gathered(measured, None))}) == 1
    assert 5 <= sum(measured) < 40
    assert gns.compute().every == gns._budget.gap >= 1


FAULTS = {
    "forward": (_linear._Linear, "apply"),
    "open": (Observer, "open"),
    "close": (Observer, "_closed"),
    "end": (Observer, "_read"),
}


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("planted")


def one_fails(rank: int, fault: str, wrap: str, number: int) -> None:
    """Update ``number`` fails on one process alone, and counts on none."""
    first = make()
    results = []
    for measured in (False, True):
        torch.manual_seed(7 + rank)
        model = make()
        model.load_state_dict(first.state_dict())
        model = fully_shard(model) if wrap == "fsdp" else DistributedDataParallel(model)
        options: Any = {"gradients": "torch", "on_error": "skip"}
        gns = gnsfast.GradientNoiseScale(model, **options if measured else {"every": 1000})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for k in range(5):
            fails = measured and rank == 1 and k == number
            owner, name = FAULTS[fault]
            before = vars(owner).get(name)
            if fails:
                setattr(owner, name, broken)
            try:
                with gns.update() if measured else torch.enable_grad():
                    for x, y in draw(2):
                        with gns.microbatch(N, scale=0.5) if measured else torch.enable_grad():
                            loss = F.cross_entropy(model(x), y) / 2
                            loss.backward()
                        losses.append(loss.item())
            finally:
                if fails:
                    delattr(owner, name) if before is None else setattr(owner, name, before)
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses)
    assert results[0] == results[1]
    result = gns.compute()
    assert (result.updates, result.errors) == (4, int(rank == 1)), (
        result.updates,
        result.skipped,
        result.errors,
    )


def test_two_processes() -> None:
    cases = [(f, "ddp", 3) for f in FAULTS] + [("forward", "fsdp", 2), ("close", "ddp", 1)]
    spawn(each, args=([unequal], ()))
    spawn(each, args=([one_fails], *cases))
