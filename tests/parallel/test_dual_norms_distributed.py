# SPDX-License-Identifier: Apache-2.0
"""Dual norms on two processes are those of one with the same global batch."""

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
    results = []
    for group in (None, alone):
        model = make()
        gns = gnsfast.GradientNoiseScale(model, process_group=group, metric=["sign", "spectral"])
        both = DistributedDataParallel(model) if group is None else model
        for ranks in data:
            # The halves of the samples are the same if the second process' passes come reversed.
            mine = ranks[rank] if group is None else [*ranks[0], *reversed(ranks[1])]
            for x, y in mine:
                with gns.microbatch(len(x), scale=1 / len(mine)):
                    (F.cross_entropy(both(x), y) / len(mine)).backward()
            gns.update()
            model.zero_grad()
        results.append(gns.compute())
    for metric in ("sign", "spectral"):
        ours, theirs = (getattr(each, metric) for each in results)
        assert ours.updates == theirs.updates == 5
        for name in ("noise", "grad_norm_lower", "grad_norm_upper", "noise_scale", "lower"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a == pytest.approx(b, rel=1e-5), (metric, name)


def test_two_processes() -> None:
    spawn(measure)
