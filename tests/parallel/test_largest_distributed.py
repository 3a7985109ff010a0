# SPDX-License-Identifier: Apache-2.0
"""The samples with the largest gradients, of two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import spawn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast
from gnsfast.estimator import largest
from gnsfast.parallel import gathered

pytestmark = pytest.mark.dist
B, D = 4, 8


def kept(rank: int) -> None:
    """Each process has samples of its own; all of them see the largest of all."""
    data = torch.randn(2, 2 * B, D)
    data[1, 5] *= 9
    for wrap in (DistributedDataParallel, fully_shard):
        plain, expected = small(), []
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
            measure(gns, rank, update, x)
        found = gns.largest()
        for one, (share, name, sqnorm) in zip(found, sorted(expected, reverse=True), strict=True):
            assert one.id == name
            assert one.sqnorm == pytest.approx(sqnorm, rel=1e-4)
            assert one.share == pytest.approx(share, rel=1e-4)
        newest = max(share for share, name, _ in expected if name[0] == "1")
        assert gns.compute().largest == pytest.approx(newest, rel=1e-4)


def test_two_processes() -> None:
    spawn(kept)


def measure(gns: Any, rank: int, update: int, x: torch.Tensor) -> None:
    own = x[rank * B : (rank + 1) * B]
    with gns.update(B, ids=[f"{update} {rank * B + b}" for b in range(B)]):
        F.cross_entropy(gns.model(own), own[:, :3].argmax(1)).backward()
    gns.model.zero_grad()


def told(rank: int) -> None:
    """Each log asks for the largest of the window, and processes exchange those of new updates."""
    model, sizes = DistributedDataParallel(small()), []
    gns, again = (gnsfast.GradientNoiseScale(model, keep_largest=2, window=3) for _ in range(2))
    gather = largest.gathered

    def counted(value: Any, group: Any) -> Any:
        sizes.append(len(value))
        return gather(value, group)

    data = torch.randn(5, 2 * B, D)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "gathered", counted)
        for update, x in enumerate(data):
            measure(gns, rank, update, x)
            if update != 2:
                found = gns.largest()
    assert sizes == [1, 1, 2, 1]
    for update, x in enumerate(data):
        measure(again, rank, update, x)
    assert found == gns.largest() == again.largest() and len(found) == 3 * 2 * 2


def test_only_what_is_new_is_exchanged() -> None:
    spawn(told)


def small() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, 3))


def saved(rank: int, folder: Path) -> None:
    """The state is that of all processes, the same on each, and a resumed run continues it."""
    data, model = torch.randn(2, 2 * B, D), DistributedDataParallel(small())
    data[0, 5] *= 9
    whole, first, then = (gnsfast.GradientNoiseScale(model, keep_largest=2) for _ in range(3))
    for update, x in enumerate(data):
        measure(whole, rank, update, x)
        measure(then if update else first, rank, update, x)
        if not update:
            state = first.state_dict()
            samples = state["means"]["largest"]
            assert gathered(samples, None) == [samples, samples]
            assert len(samples["updates"][0][2]) == 4  # two of each process
            then.load_state_dict(state)
            dcp.save({"gns": first}, checkpoint_id=folder)
    assert then.largest() == whole.largest() and len(whole.largest()) == 8
    assert then.compute().largest == whole.compute().largest


def loaded(rank: int, folder: Path) -> None:
    """By one process."""
    gns = gnsfast.GradientNoiseScale(small(), keep_largest=2)
    dcp.load({"gns": gns}, checkpoint_id=folder)
    found = gns.largest()
    assert found[0].id == "0 5" and len(found) == 4
    assert gns.compute().largest == found[0].share


def test_states(tmp_path: Path) -> None:
    spawn(saved, 2, (tmp_path,))
    spawn(loaded, 1, (tmp_path,))
