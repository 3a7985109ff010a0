# SPDX-License-Identifier: Apache-2.0
"""After an evaluation, and in a forward pass, FSDP2's modules hold whole parameters: the estimator
that begins then reads the gradients of the shards all the same.
"""

from typing import Any

import pytest
import torch
from processes import each, spawn
from test_dual_norms_sharded import METRICS, alone, batches_of, in_one, loss_of, make
from torch import nn
from torch.distributed.fsdp import fully_shard

import gnsfast
from gnsfast.parallel import parameters_at_rest

pytestmark = pytest.mark.dist
ALL = ["adam", *METRICS]


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
    optimizer = gns._settings.optimizer
    for k, ranks in enumerate(batches_of(2, 1, 4)):
        if evaluated == "each" or (evaluated == "first" and k == 0):
            with torch.no_grad():
                loss_of(model, ranks[0][0])
        passes = in_one(ranks) if rank is None else ranks[rank]
        for batch in passes:
            with gns.microbatch(4, scale=1 / len(passes)):
                (loss_of(model, batch) / len(passes)).backward()
        gns.update()
        optimizer.step()
        optimizer.zero_grad()
    return gns.compute()


def same(rank: int, evaluated: str) -> None:
    one, model = make(), shard(make())
    truth = trained(None, one, alone(one, ALL, optimizer=adam(one)))
    gns = gnsfast.GradientNoiseScale(model, metric=ALL, optimizer=adam(model))
    found = trained(rank, model, gns, evaluated)
    assert found.updates == truth.updates == 6
    for name in ("", "adam", "sign"):
        a, b = (getattr(r, name) if name else r for r in (found, truth))
        assert a.noise_scale == pytest.approx(b.noise_scale, rel=1e-6), name
    assert found.spectral is not None and truth.spectral is not None
    assert found.spectral.noise == pytest.approx(truth.spectral.noise, rel=1e-6)


def test_two_processes() -> None:
    spawn(each, args=([same], ("first",), ("each",), ("never",)))


def partly(rank: int) -> None:
    """Blocks that stay spread over two of four processes after a forward pass."""
    model: Any = make()
    fully_shard([model.up, model.norm], reshard_after_forward=2)
    fully_shard(model, reshard_after_forward=2)
    before = dict(model.named_parameters())
    with torch.no_grad():
        loss_of(model, batches_of(1, 1, 4)[0][0][0])
    assert not {*before.values()} & {*model.parameters()}
    found = parameters_at_rest(model)
    assert all(found[name] is p for name, p in before.items())


def test_four_processes() -> None:
    spawn(partly, 4)
