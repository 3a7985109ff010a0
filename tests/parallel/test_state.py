# SPDX-License-Identifier: Apache-2.0
"""The estimator's state in a distributed checkpoint, resumed by another number of processes."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import spawn
from test_estimator_distributed import UPDATES, N, batches_of, check, make, one_process
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import gnsfast

pytestmark = pytest.mark.dist
PARTS, HALF = 2, UPDATES // 2


def run(rank: int, ranks: int, folder: Path, resume: bool) -> None:
    """Half of the updates, each of ``PARTS`` micro-batches over all processes."""
    updates = batches_of(PARTS, 1, N)
    model = make()
    fully_shard(model)
    gns = gnsfast.GradientNoiseScale(model)
    assert isinstance(gns, Stateful)
    if resume:
        dcp.load({"gns": gns}, checkpoint_id=folder)
    own = PARTS // ranks
    for update in updates[HALF:] if resume else updates[:HALF]:
        for [(x, y)] in update[rank * own : (rank + 1) * own]:
            with gns.microbatch(N, scale=1 / own):
                (F.cross_entropy(model(x), y) / own).backward()
        gns.update()
        model.zero_grad()
    if resume:
        check(gns.compute(), one_process(updates, "global"))
    else:
        dcp.save({"gns": gns}, checkpoint_id=folder)


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_other_world_size(first: int, then: int, tmp_path: Path) -> None:
    spawn(run, first, (first, tmp_path, False))
    spawn(run, then, (then, tmp_path, True))
    assert not dist.is_initialized()
