# SPDX-License-Identifier: Apache-2.0
"""The samples with the largest gradients, of two processes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import spawn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
B, D = 4, 8


def kept(rank: int) -> None:
    """Each process has samples of its own; all of them see the largest of all."""
    data = torch.randn(2, 2 * B, D)
    data[1, 5] *= 9
    for wrap in (DistributedDataParallel, fully_shard):
        torch.manual_seed(1)
        plain = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, 3))
        expected = []
        for update, x in enumerate(data):
            own = []
            for b in range(2 * B):
                loss = F.cross_entropy(plain(x[b : b + 1]), x[b : b + 1, :3].argmax(1))
                grads = torch.autograd.grad(loss, [*plain.parameters()])
                own.append(sum(g.square().sum().item() for g in grads) / B**2)
            expected += [(s / sum(own), f"{update} {b}", s) for b, s in enumerate(own)]
        wrapped: Any = wrap(plain)
        gns = gnsfast.GradientNoiseScale(wrapped, keep_largest=2 * B)
        for update, x in enumerate(data):
            own_x = x[rank * B : (rank + 1) * B]
            with gns.microbatch(B, ids=[f"{update} {rank * B + b}" for b in range(B)]):
                F.cross_entropy(wrapped(own_x), own_x[:, :3].argmax(1)).backward()
            gns.update()
            wrapped.zero_grad()
        found = gns.largest()
        for one, (share, name, sqnorm) in zip(found, sorted(expected, reverse=True), strict=True):
            assert one.id == name
            assert one.sqnorm == pytest.approx(sqnorm, rel=1e-4)
            assert one.share == pytest.approx(share, rel=1e-4)
        newest = max(share for share, name, _ in expected if name[0] == "1")
        assert gns.compute().largest == pytest.approx(newest, rel=1e-4)


def test_two_processes() -> None:
    spawn(kept)
