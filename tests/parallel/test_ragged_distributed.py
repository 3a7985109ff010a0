# SPDX-License-Identifier: Apache-2.0
"""Ragged batches on two processes, whose batches differ: DDP, and parameters that FSDP2 shards."""

import copy
from typing import Any

import pytest
import ragged
import torch
import torch.distributed as dist
from oracle import assert_norms
from processes import each, spawn
from ragged import GraphNet, loop, loss_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist

NODES, EDGES = ([4, 2, 6, 3], [3, 5, 2, 4]), ([5, 3, 9, 2], [7, 4, 6, 8])


def draw(number: int) -> ragged.Graphs:
    torch.manual_seed(number)
    return ragged.draw(NODES[number % 2], EDGES[number % 2], shuffled=True)


def replicated(rank: int) -> None:
    """The noise scale is that of the graphs of both processes in a loop."""
    plain = GraphNet()
    model = DistributedDataParallel(copy.deepcopy(plain))
    gns = gnsfast.GradientNoiseScale(model)
    by_itself, _ = dist.new_subgroups(group_size=1)
    alone = gnsfast.GradientNoiseScale(plain, process_group=by_itself)
    for step in range(3):
        batches = [draw(2 * step + other) for other in range(2)]
        with alone.update():
            for batch in batches:
                with alone.microbatch(4, rows=batch.rows, scale=0.5):
                    (loss_of(plain, batch) / 8).backward()
        plain.zero_grad()
        with gns.update(4, rows=batches[rank].rows):
            (loss_of(model, batches[rank]) / 4).backward()
        if step == 0:
            with gnsfast.per_sample_sqnorms(model.module, 4, rows=batches[rank].rows) as norms:
                loss_of(model.module, batches[rank]).backward()
            assert_norms(norms, loop(plain, batches[rank]))
        model.zero_grad()
    ours, theirs = gns.compute(), alone.compute()
    assert ours.samples == theirs.samples == 24 and ours.covered == 1.0
    for name in ("noise_scale", "trace", "grad_sqnorm"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5)


def sharded(rank: int) -> None:
    plain = GraphNet()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.first)
    fully_shard(model)
    for _ in range(2):
        batch = draw(rank)
        with gnsfast.per_sample_sqnorms(model, 4, rows=batch.rows) as norms:
            loss_of(model, batch).backward()
        assert_norms(norms, loop(plain, batch))


def test_two_processes() -> None:
    spawn(each, args=([replicated, sharded],))
