# SPDX-License-Identifier: Apache-2.0
"""The noise scale of several processes is that of one process with the same global batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from made import Made
from noise_cases import one_update
from processes import each, spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
UPDATES, N, I, CLASSES = 6, 6, 5, 3
Batches = list[tuple[Tensor, Tensor]]


class Attend(nn.Module):
    """Two tokens of width 4 to a sample; the heads have rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        t = x.unflatten(1, (2, 4))
        y: Tensor = self.attention(t, t, t, need_weights=False)[0]
        return x + y.flatten(1)


def make() -> nn.Module:
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(I, 8), Attend(), nn.Tanh(), nn.LayerNorm(8))
    model = nn.Sequential(block, nn.Linear(8, CLASSES))
    return model


def batches_of(ranks: int, microbatches: int, n: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """[update][rank][micro-batch], the same on every process; labels with a signal in them."""
    torch.manual_seed(2)
    return [
        [
            [(torch.randn(n, I), (torch.rand(n) < 0.1).long()) for _ in range(microbatches)]
            for _ in range(ranks)
        ]
        for _ in range(UPDATES)
    ]


def one_process(updates: list[list[Batches]], source: str) -> gnsfast.NoiseScale:
    """All ranks' micro-batches as micro-batches of one process."""
    model = make()
    alone, _ = dist.new_subgroups(group_size=1)
    gns = gnsfast.GradientNoiseScale(model, source=source, process_group=alone)
    for ranks in updates:
        flat = [batch for batches in ranks for batch in batches]
        with gns.update():
            for x, y in flat:
                with gns.microbatch(len(x), scale=1 / len(flat)):
                    (F.cross_entropy(model(x), y) / len(flat)).backward()
        model.zero_grad()
    return gns.compute()


def check(result: gnsfast.NoiseScale, truth: gnsfast.NoiseScale) -> None:
    assert (result.updates, result.samples) == (truth.updates, truth.samples)
    for name in ("noise_scale", "trace", "grad_sqnorm", "lower", "upper"):
        assert getattr(result, name) == pytest.approx(getattr(truth, name), rel=1e-5), name
    for path, ours in result.per_module.items():
        theirs = truth.per_module[path]
        assert ours.trace == pytest.approx(theirs.trace, rel=1e-5)
        assert ours.grad_sqnorm == pytest.approx(theirs.grad_sqnorm, rel=1e-5, abs=1e-6)


def measure(
    rank: int, ranks: int, wrap: str, microbatches: int, synced: bool, source: str, n: int
) -> None:
    updates = batches_of(ranks, microbatches, n)
    model = make()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0])
        fully_shard(model)
        for module in [model[0], model] if wrap in FACTORS else []:
            module.set_gradient_divide_factor(FACTORS[wrap])
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    gns = gnsfast.GradientNoiseScale(model, source=source)
    for update in updates:
        with gns.update():
            for k, (x, y) in enumerate(update[rank]):
                silent = not synced and k < microbatches - 1
                if wrap != "ddp":
                    model.set_requires_gradient_sync(not silent)
                with model.no_sync() if silent and wrap == "ddp" else contextlib.nullcontext():
                    with gns.microbatch(n, scale=1 / microbatches):
                        (F.cross_entropy(model(x), y) / microbatches).backward()
        model.zero_grad()
    result = gns.compute()
    check(result, one_process(updates, source))


def one_norm(ranks: list[Batches]) -> float:
    model = make()
    alone, _ = dist.new_subgroups(group_size=1)
    gns = gnsfast.GradientNoiseScale(model, process_group=alone)
    with gns.update():
        for x, y in [batch for batches in ranks for batch in batches]:
            with gns.microbatch(len(x)):
                F.cross_entropy(model(x), y).backward()
    return gns.compute().grad_sqnorm


CASES = [  # ranks, wrap, microbatches, synced, source, n
    (2, "ddp", 1, True, "update", N),
    (2, "ddp", 3, False, "update", N),
    (2, "ddp", 3, True, "local", N),
    (2, "ddp", 2, True, "update", 1),
    (2, "fsdp", 1, True, "update", N),
    (2, "fsdp", 3, False, "update", N),
    (2, "fsdp", 3, True, "update", 1),
    (4, "ddp", 2, False, "update", N),
    (4, "fsdp", 2, True, "update", N),
    (2, "fsdp, sum", 1, True, "update", N),
    (2, "fsdp, a fifth", 3, False, "update", N),
    (2, "fsdp, a fifth", 3, True, "local", N),
]
FACTORS = {"fsdp, sum": 1.0, "fsdp, a fifth": 5.0}
"""FSDP2's ``set_gradient_divide_factor``: torchtitan's 1 has gradients added up."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(ranks: int) -> None:
    spawn(each, ranks, ([measure], *(case for case in CASES if case[0] == ranks)))


def not_wrapped(rank: int) -> None:
    """Each process trains by itself: their gradients are not an average."""
    model = make()
    torch.manual_seed(rank)
    gns = gnsfast.GradientNoiseScale(model)
    with gns.update(N):
        F.cross_entropy(model(torch.randn(N, I)), torch.arange(N) % CLASSES).backward()
    with pytest.raises(gnsfast.ObservationError, match="must be averaged .* source='local'"):
        gns.compute()


def averaged_by_hand(rank: int, passes: int) -> None:
    """As the message of ``not_wrapped`` says, inside the block."""
    update, model = batches_of(2, passes, N)[0], make()
    gns = gnsfast.GradientNoiseScale(model)
    with gns.update():
        for x, y in update[rank]:
            with gns.microbatch(N):
                F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert gns.compute().grad_sqnorm == pytest.approx(one_norm(update), rel=1e-5)


def divide_factors(rank: int) -> None:
    """Two factors in one model are refused, with the remedy."""
    model = make()
    fully_shard(model[0])
    fully_shard(model)
    model[0].set_gradient_divide_factor(1.0)
    with pytest.raises(
        NotImplementedError, match=r"the mean \(the model\) and 1.0 \(0\)\. .*source='local'"
    ):
        with gnsfast.GradientNoiseScale(model).update(N):
            pass


def new_divide_factor(rank: int) -> None:
    """A factor that is set after the first update would give later ones another scale."""
    model = make()
    fully_shard(model)
    gns = gnsfast.GradientNoiseScale(model)
    with one_update(gns, N):
        F.cross_entropy(model(torch.randn(N, I)), torch.zeros(N).long()).backward()
    model.set_gradient_divide_factor(1.0)
    with pytest.raises(gnsfast.ObservationError, match="was called since the first update"):
        with gns.update(N):
            pass


def unused_on_one_rank(rank: int) -> None:
    """A layer that only one rank calls gets a gradient on both, and is no error. The ranks join
    their tables in the first update, which they forget.
    """
    torch.manual_seed(1)
    layers = nn.ModuleDict({"a": nn.Linear(I, 3), "b": nn.Linear(I, 3)})
    gate = Made(lambda m, x: m.layers["b" if rank else "a"](x), layers=layers)
    wrapped = DistributedDataParallel(gate, find_unused_parameters=True)
    gns = gnsfast.GradientNoiseScale(wrapped)
    for _ in range(3):
        with one_update(gns, N):
            wrapped(torch.randn(N, I)).square().sum().backward()
    assert gns.compute().updates == 2 and gns.compute().covered == 1.0


def test_two_processes() -> None:
    works = divide_factors, new_divide_factor, not_wrapped, unused_on_one_rank
    spawn(each, args=(works,))
    spawn(each, args=([averaged_by_hand], (1,), (3,)))
