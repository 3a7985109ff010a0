# SPDX-License-Identifier: Apache-2.0
"""Dual norms under FSDP2 are those of one process with the same global batch."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from noise_cases import assert_same
from processes import each, spawn
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gnsfast

pytestmark = pytest.mark.dist
UPDATES, V, CLASSES = 6, 9, 4
METRICS = ["sign", "spectral"]
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Matrices that are high, wide and square; 9, 7, 5 and 1 rows are not even over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(V, 5), nn.Linear(5, 7)
        self.norm, self.square = nn.LayerNorm(7), nn.Linear(7, 7, bias=False)
        self.gate, self.unused = nn.Linear(7, 1), nn.Linear(3, 3)
        self.down = nn.Linear(7, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.up(self.embed(ids))))
        y: Tensor = self.down(h + self.gate(h).sigmoid() * self.square(h))
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(V, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.mix(self.embed(ids))))
        return y


def make(kind: type[nn.Module] = Model, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return kind().to(dtype)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches_of(ranks: int, parts: int, n: int) -> list[list[list[Batch]]]:
    """[update][rank][micro-batch], the same on every process."""
    torch.manual_seed(2)

    def draw() -> Batch:
        return torch.randint(V, (n, 3)), (torch.rand(n, 3) < 0.2).long() * (CLASSES - 1)

    return [[[draw() for _ in range(parts)] for _ in range(ranks)] for _ in range(UPDATES)]


def in_one(ranks: list[list[Batch]]) -> list[Batch]:
    """All passes, so that those of even and of odd places stay such: a place says which samples
    make the first half.
    """
    turns: list[list[Batch]] = [[], []]
    for rank, passes in enumerate(ranks):
        for k, batch in enumerate(passes):
            turns[(rank + k) % 2].append(batch)
    pairs = itertools.zip_longest(*turns)
    return [batch for pair in pairs for batch in pair if batch is not None]


def measure(
    gns: gnsfast.GradientNoiseScale, model: Any, updates: list[list[Batch]], each_pass: str = ""
) -> gnsfast.GradientNoiseScale:
    """``each_pass`` names a method of FSDP2 that is told whether a pass is its update's last. Steps
    the optimizer of Adam's metric.
    """
    for passes in updates:
        for k, batch in enumerate(passes):
            if each_pass:
                getattr(model, each_pass)(k == len(passes) - 1)
            with gns.microbatch(len(batch[0]), scale=1 / len(passes)):
                (loss_of(model, batch) / len(passes)).backward()
        gns.update()
        if (optimizer := gns._settings.optimizer) is not None:
            optimizer.step()
        model.zero_grad()
    return gns


def alone(model: nn.Module, metric: Any = METRICS, **options: Any) -> gnsfast.GradientNoiseScale:
    group, _ = dist.new_subgroups(group_size=1)
    return gnsfast.GradientNoiseScale(model, process_group=group, metric=metric, **options)


def numbers(gns: gnsfast.GradientNoiseScale) -> Tensor:
    """[U, P, 7] of the updates after the first, which has no past."""
    rows = gns._start().ledger.ring[1 : gns.compute().updates]
    width = sum(side.width for side in gns._start().sides.values())
    return rows[:, -width:].unflatten(1, (-1, 7))


def check(
    ours: gnsfast.GradientNoiseScale, theirs: gnsfast.GradientNoiseScale, rel: float = 1e-8
) -> None:
    assert ours.compute().updates == theirs.compute().updates == UPDATES
    found, expected = numbers(ours), numbers(theirs)
    assert expected[:, 0, 0].all() and expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=rel, atol=rel)


def shard(model: Any, **options: Any) -> Any:
    fully_shard([model.up, model.norm], **options)
    return fully_shard(model, **options)


def compared(
    rank: int, updates: Any, one: Any, model: Any, metric: Any = METRICS, each_pass: str = "",
    rel: float = 1e-8,
) -> None:  # fmt: skip
    """``model`` over all processes, and ``one`` in this process with all of the samples."""
    truth = measure(alone(one, metric), one, [in_one(u) for u in updates])
    gns = gnsfast.GradientNoiseScale(model, metric=metric)
    check(measure(gns, model, [u[rank] for u in updates], each_pass), truth, rel)


def sharded(rank: int, ranks: int, parts: int, n: int, each_pass: str) -> None:
    model = shard(make(), reshard_after_forward=not each_pass)
    compared(rank, batches_of(ranks, parts, n), make(), model, each_pass=each_pass)


CASES = [  # ranks, micro-batches, samples, what is told of each pass
    (2, 1, 4, ""),
    (2, 2, 1, ""),
    (2, 2, 4, "set_requires_gradient_sync"),
    (2, 4, 3, "set_reshard_after_backward"),
    (3, 1, 4, ""),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes(ranks: int) -> None:
    spawn(each, ranks, ([sharded], *(case for case in CASES if case[0] == ranks)))


def replicated(rank: int, compared: Callable[..., None]) -> None:
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compared(rank, batches_of(4, 1, 4), make(), shard(make(), mesh=mesh))


def test_four_processes() -> None:
    spawn(replicated, 4, (compared,))


def mixed_precision(rank: int, compared: Callable[..., None]) -> None:
    """bfloat16 layers; one process shards over itself, for the same rounding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one = shard(make(dtype=torch.float32), mesh=DeviceMesh("cpu", [rank]), mp_policy=policy)
    model = shard(make(dtype=torch.float32), mp_policy=policy)
    compared(rank, batches_of(2, 2, 4), one, model, rel=1e-4)


def tied(rank: int) -> None:
    """The sign alone: a shared weight has no spectral noise scale."""
    compared(rank, batches_of(2, 2, 4), make(Tied), fully_shard(make(Tied)), "sign")


def overflow(rank: int, metric: str, layer: str) -> None:
    """What is not finite in the part that one process keeps teaches none of them."""
    updates = batches_of(2, 1, 4)
    updates[0][1][0][0][0] = 0  # the word of which the other process has the row
    found = []
    for broken in (False, True):
        model = shard(make())
        gns = gnsfast.GradientNoiseScale(model, metric=metric)
        mine = [u[rank] for u in updates]
        measure(gns, model, mine[:3])
        if broken:
            handle = model.get_submodule(layer).register_forward_hook(spoil if rank else keep)
            measure(gns, model, mine[:1])
            handle.remove()
        found.append(measure(gns, model, mine[3:]).compute())
    assert [each.skipped for each in found] == [0, 1]
    assert getattr(found[0], metric) == getattr(found[1], metric)


def keep(module: nn.Module, args: Any, out: Tensor) -> None:
    pass


def spoil(module: nn.Module, args: Any, out: Tensor) -> None:
    """An infinite gradient of one sample."""
    out.register_hook(lambda grad: grad.index_fill(0, torch.tensor(0), torch.inf))


def test_two_processes() -> None:
    spawn(several)


def memory(rank: int) -> None:
    """Whole sums are there from backward on until the pass ends; each matrix has one owner."""
    updates = batches_of(2, 1, 4)
    model = shard(make())
    gns = gnsfast.GradientNoiseScale(model, metric=METRICS)
    with gns.microbatch(4):
        loss = loss_of(model, updates[0][rank][0])
        sign, spectral = (gns._start().sides[metric] for metric in METRICS)
        every = [*sign._holdings.values(), *spectral._holdings.values()]
        assert all(each._sums == [None, None] for each in every)
        loss.backward()
        assert any(each._sums != [None, None] for each in every)
    assert all(each._sums == [None, None] for each in every)
    for name, p in sign.parameters.items():
        kept = sign._holdings[name]._kept.values()
        assert [t.shape for t in kept] == [p.to_local().shape] * 2
        assert sign._moments[name].shape == p.to_local().shape
    owned = torch.tensor([name in spectral._moments for name in spectral.parameters]).int()
    assert 0 < owned.sum() < len(owned)
    dist.all_reduce(owned)
    assert owned.tolist() == [1] * len(spectral.parameters)


def averaged(p: Any) -> None:
    """As the message says."""
    p.register_post_accumulate_grad_hook(
        lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size()))
    )


def ignored(rank: int, names: str, parts: int, average: bool) -> None:
    """FSDP2 leaves its ``ignored_params`` whole and averages none of them."""
    updates = batches_of(2, parts, 4)
    model = make()
    apart = {p for name, p in model.named_parameters() if name.startswith(names)}
    for p in apart if average else ():
        averaged(p)
    fully_shard(model, ignored_params=apart)
    gns = gnsfast.GradientNoiseScale(model, metric=METRICS)
    measure(gns, model, [u[rank] for u in updates])
    if average:
        check(gns, measure(alone(model := make()), model, [in_one(u) for u in updates]))
    else:
        with pytest.raises(gnsfast.ObservationError, match="does not average its ignored_params"):
            gns.compute()


def ignored_and_averaged_late(rank: int) -> None:
    """A given norm is that of the averages, and no gradient at the end of a pass is one."""
    model = make()
    apart: Any = {p for name, p in model.named_parameters() if name.startswith("down")}
    fully_shard(model, ignored_params=apart)
    gns = gnsfast.GradientNoiseScale(model)
    for batch in batches_of(2, 2, 4)[0][rank]:
        with gns.microbatch(4):
            loss_of(model, batch).backward()
    for p in apart:
        dist.all_reduce(p.grad.div_(2))
    others: Any = [p.grad for p in model.parameters() if p not in apart and p.grad is not None]
    total = torch.stack([grad.to_local().square().sum() for grad in others]).sum()
    dist.all_reduce(total)
    gns.update(grad_norm=(total + sum(p.grad.square().sum() for p in apart)).sqrt())
    assert gns.compute().updates == 1


def several(rank: int) -> None:
    each(rank, [tied, memory, ignored_and_averaged_late])
    each(rank, [mixed_precision], (compared,))
    cases = (("norm", 1, False), ("square", 2, False), ("norm", 2, True), ("up", 1, True))
    each(rank, [ignored], *cases, (("embed", "square"), 2, True))
    each(rank, [overflow], ("sign", "embed"), ("spectral", "up"))


def resumed(rank: int, ranks: int, folder: Path, half: str) -> None:
    """Half of the updates, each of two micro-batches over all processes."""
    updates = [in_one(u) for u in batches_of(2, 1, 4)]
    model = shard(make())
    gns = gnsfast.GradientNoiseScale(model, metric=METRICS)
    assert isinstance(gns, Stateful)
    middle, own = UPDATES // 2, 2 // ranks
    if half == "second":
        dcp.load({"gns": gns}, checkpoint_id=folder)
    part = updates[:middle] if half == "first" else updates[middle:]
    found = measure(gns, model, [u[rank * own : (rank + 1) * own] for u in part])
    if half == "first":
        dcp.save({"gns": gns}, checkpoint_id=folder)
    else:
        truth = measure(alone(model := make()), model, updates)
        check(found, truth)
        assert_same(found.compute(), truth.compute(), 1e-6)


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_resume(first: int, then: int, tmp_path: Path) -> None:
    """The state is whole: another number of processes goes on with it."""
    spawn(resumed, first, (first, tmp_path, "first"))
    spawn(resumed, then, (then, tmp_path, "second"))
