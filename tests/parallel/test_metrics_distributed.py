# SPDX-License-Identifier: Apache-2.0
"""Adam's metric and dual norms on two processes are those of one with the same global batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import assert_same, draw, make
from processes import each, spawn
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist


def measured(rank: int, group: Any, adam: bool, **settings: Any) -> gnsfast.NoiseScale:
    """By both processes, or by one with the passes of both. In float64 no rounding turns a sign."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    data = [[draw(2, 4) for _ in range(2)] for _ in range(6)]  # [update][rank][micro-batch]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    settings |= {"optimizer": optimizer} if adam else {}
    gns = gnsfast.GradientNoiseScale(model, process_group=group, **settings)
    both = DistributedDataParallel(model) if group is None else model
    for ranks in data:
        # The halves of the samples are the same if the second process' passes come reversed.
        mine = ranks[rank] if group is None else [*ranks[0], *reversed(ranks[1])]
        with gns.update():
            for x, y in mine:
                with gns.microbatch(len(x), scale=1 / len(mine)):
                    (F.cross_entropy(both(x), y) / len(mine)).backward()
        if adam:
            optimizer.step()
        optimizer.zero_grad()
    return gns.compute()


def compared(rank: int, settings: dict[str, Any], rel: float) -> None:
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    metric = settings["metric"]
    both = [measured(rank, group, metric == ["adam"], **settings) for group in (None, alone)]
    for each_metric in metric:
        ours, theirs = (getattr(found, each_metric) for found in both)
        assert_same(ours, theirs, rel)
        assert ours.updates == 5


def test_two_processes() -> None:
    cases = ({"metric": ["adam"]}, 1e-9), ({"metric": ["sign", "spectral"]}, 1e-9)
    spawn(each, args=([compared], *cases))
