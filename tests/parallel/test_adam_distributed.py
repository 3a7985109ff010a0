# SPDX-License-Identifier: Apache-2.0
"""Adam's metric on two processes is that of one with the same global batch."""

import pytest
import torch
import torch.nn.functional as F
from noise_cases import draw, make
from processes import spawn
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist


def measure(rank: int) -> None:
    torch.manual_seed(2)
    data = [[draw(2, 4) for _ in range(2)] for _ in range(6)]  # [update][rank][micro-batch]
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    for source in ("global", "local"):
        results = []
        for group in (None, alone):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
            gns = gnsfast.GradientNoiseScale(
                model, source=source, process_group=group, metric="adam", optimizer=optimizer
            )
            both = DistributedDataParallel(model) if group is None else model
            for ranks in data:
                mine = ranks[rank] if group is None else [b for each in ranks for b in each]
                for x, y in mine:
                    with gns.microbatch(len(x), scale=1 / len(mine)):
                        (F.cross_entropy(both(x), y) / len(mine)).backward()
                gns.update()
                optimizer.step()
                optimizer.zero_grad()
            results.append(gns.compute().adam)
        ours, theirs = results
        assert ours.updates == theirs.updates == 5
        for name in ("trace", "grad_sqnorm", "noise_scale", "lower", "upper"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a == pytest.approx(b, rel=1e-4), (source, name)


def test_two_processes() -> None:
    spawn(measure)
