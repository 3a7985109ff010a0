# SPDX-License-Identifier: Apache-2.0
"""``unit="micro_batch"``: unbiased for units of any sizes, and the same as from the float64
gradient of every backward pass.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from noise_cases import every_draw, in_updates
from processes import each, spawn
from test_micro_batch_noise import Everything, draw, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gnsfast
from gnsfast import GradientNoiseScale, ObservationError
from gnsfast.integrations.trackers import metrics

B, K, UPDATES = 2, 4, 8
by_micro_batches = partial(GradientNoiseScale, unit="micro_batch")


@pytest.mark.parametrize(
    ("units", "lengths"),
    [([1, 1], None), ([2, 1], None), ([1, 2, 1], None), ([2, 1], [3, 1, 2]), ([1, 2], [1, 1, 4])],
)
def test_unbiased_over_all_draws(units: list[int], lengths: list[int] | None) -> None:
    """tr Σ and |G|² over every draw of samples from a population are those of the population."""
    n = sum(units)
    x_M, r_M = torch.randn(2, 3, 3, dtype=torch.float64)
    g_M = torch.einsum("mo,mi->moi", r_M, x_M).flatten(1)
    model = nn.Linear(3, 3, bias=False).double()
    gns = by_micro_batches(model, window=3**n)
    counts = every_draw(gns, model, x_M, r_M, units, lengths)
    found, spread = gns.compute(), counts.square().mean() / counts.mean().square()
    trace = (g_M - g_M.mean(0)).square().sum(1).mean() * spread
    assert found.trace == pytest.approx(trace.item(), rel=1e-9)
    assert found.grad_sqnorm == pytest.approx(g_M.mean(0).square().sum().item(), rel=1e-9)
    assert (found.updates, found.passes) == (3**n, 3**n * len(units))


def run(model: nn.Module, gns: Any, data: list[Any], scaler: Any = None) -> gnsfast.NoiseScale:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batches in in_updates(data, K):
        with gns.update():
            for batch in batches:
                with gns.microbatch(B, scale=1 / K):
                    loss = loss_of(model, batch) / (B * K)
                    (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return gns.compute()


def expected(model: nn.Module, data: list[Any], K: int = K) -> dict[str, tuple[Tensor, Tensor]]:
    """tr Σ and |G|² of each update by parameter, from the mean gradient of every micro-batch."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in named}
    for k in range(0, len(data), K):
        units = [
            torch.autograd.grad(
                loss_of(model, batch) / B, [*named.values()], materialize_grads=True
            )
            for batch in data[k : k + K]
        ]
        for name, *grads in zip(named, *units):
            g_K = torch.stack(grads).flatten(1)
            trace = B * g_K.var(0).sum()
            found[name].append(torch.stack([trace, g_K.mean(0).square().sum() - trace / (B * K)]))
    return {name: tuple(torch.stack(each).mean(0)) for name, each in found.items()}


@pytest.mark.parametrize("how", ["plain", "scaler"])
def test_against_units(how: str) -> None:
    """LSTM, convolution, tied weight, checkpoint, an expert that some units do not reach."""
    model, data = Everything().double(), draw()
    want = expected(model, data)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaler" else None
    gns = by_micro_batches(model, grad_scaler=scaler)
    found = run(model, gns, data, scaler)
    trace, grad_sqnorm = (sum(each).item() for each in zip(*want.values()))
    assert found.trace == pytest.approx(trace, rel=1e-9)
    assert found.grad_sqnorm == pytest.approx(grad_sqnorm, rel=1e-9)
    assert found.lower < found.noise_scale < found.upper
    assert (found.covered, found.left_out, found.samples) == (1.0, (), UPDATES * K * B)
    assert (found.updates, found.passes, found.skipped) == (UPDATES, UPDATES * K, 0)
    if how == "norm":
        assert not found.per_module
        return
    of = {name: found.per_module[name.rpartition(".")[0]] for name in want}
    weight = "conv.weight", "conv.bias"
    assert of["conv.weight"].trace == pytest.approx(sum(want[n][0].item() for n in weight))
    assert of["rare.weight"].grad_sqnorm == pytest.approx(
        sum(want[n][1].item() for n in ("rare.weight", "rare.bias"))
    )


def test_as_single_samples_where_each_is_a_micro_batch() -> None:
    """One sample per micro-batch: the numbers of ``GradientNoiseScale``, and the same error."""
    model = nn.Linear(6, 3).double()
    one, two = gnsfast.GradientNoiseScale(model), by_micro_batches(model)
    for _ in range(6):
        with one.update(), two.update():
            for x in torch.randn(4, 1, 6).double():
                with one.microbatch(1, scale=1 / 4), two.microbatch(1, scale=1 / 4):
                    (model(x).square().sum() / 4).backward()
        model.zero_grad()
    a, b = one.compute(), two.compute()
    assert (b.noise_scale, b.lower) == pytest.approx((a.noise_scale, a.lower), rel=1e-5)
    assert b.excess == (1.0, 1.0) == a.excess


def test_with_a_dual_norm() -> None:
    """Both are of the same units, with the numbers that each has by itself."""
    model, data = Everything().double(), draw()
    both = gnsfast.GradientNoiseScale(model, unit="micro_batch", metric="sign")
    sign = gnsfast.GradientNoiseScale(model, metric="sign")
    found = run(model, both, data)
    assert found.noise_scale == run(model, by_micro_batches(model), data).noise_scale
    assert found.sign is not None
    alone = run(model, sign, data).sign
    assert alone is not None and found.sign.noise_scale == pytest.approx(alone.noise_scale)


def test_what_is_said() -> None:
    model, data = Everything().double(), draw()
    found = run(model, by_micro_batches(model), data)
    assert found.noise_from == "micro_batches"
    assert "\nfrom 32 gradients of micro-batches, not from single samples: tr Σ has up to " in (
        str(found)
    )
    assert metrics(found)["gns/b_simple_from_micro_batches"] == 1.0
    ordinary = gnsfast.GradientNoiseScale(nn.Linear(2, 2)).compute()
    assert "gns/b_simple_from_micro_batches" not in metrics(ordinary)
    assert "micro-batches" not in str(ordinary)


@pytest.mark.second
def test_excess_is_that_of_noise() -> None:
    """Of Gaussian samples without a mean, by both estimators on the same data."""
    n, width, draws = 16, 30, 400
    model = nn.Linear(width, 1, bias=False).double()
    one = gnsfast.GradientNoiseScale(model, window=1)
    two = by_micro_batches(model, window=1)
    values = []
    for _ in range(draws):
        with one.update(), two.update():
            for x in torch.randn(K, n // K, width, dtype=torch.float64):
                with one.microbatch(n // K, scale=1 / K), two.microbatch(n // K, scale=1 / K):
                    (model(x).mean() / K).backward()
        model.zero_grad()
        found = one.compute(), two.compute()
        values.append([[each.trace, each.grad_sqnorm] for each in found])
    alone, units = torch.tensor(values).std(0)
    ratios = (units / alone).tolist()
    assert ratios == pytest.approx(found[1].excess, rel=0.12)
    assert found[1].excess == pytest.approx((math.sqrt(5), math.sqrt(15 / 12)))


def test_compiled_and_sparse() -> None:
    table = nn.Embedding(7, 4, sparse=True)
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(16, 3)).double()
    data = draw()
    want = expected(nn.Sequential(nn.Embedding(7, 4, _weight=table.weight.data), *net[1:]), data)
    found = run(net, by_micro_batches(net), data)
    assert found.trace == pytest.approx(sum(each[0].item() for each in want.values()))
    dense = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    data = [(torch.randn(B, 6), (torch.rand(B) < 0.2).long()) for _ in range(UPDATES * K)]
    called = torch.compile(dense, backend="aot_eager")
    one, two = (
        run(dense, by_micro_batches(dense), data),
        run(called, by_micro_batches(called), data),
    )
    assert one.noise_scale == pytest.approx(two.noise_scale)
    assert {*one.per_module} == {*two.per_module} == {"0", "2"}


def in_ddp(rank: int) -> None:
    """Two processes, without and with accumulation, find what one process finds of all units."""
    torch.manual_seed(0)
    data = draw(UPDATES * K)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(16, 3)).double()
    own = data[rank::2]
    for passes in (1, 2):
        want = expected(net, data, 2 * passes)
        trace, grad_sqnorm = (sum(each).item() for each in zip(*want.values()))
        model = DDP(net)
        gns = by_micro_batches(model)
        for k in range(0, len(own), passes):
            with gns.update():
                for j, batch in enumerate(own[k : k + passes], 1):
                    model.require_backward_grad_sync = j == passes
                    with gns.microbatch(B, scale=1 / passes):
                        (loss_of(model, batch) / (B * passes)).backward()
            model.zero_grad()
        found = gns.compute()
        assert found.passes == len(data) and found.updates == len(own) // passes
        assert found.trace == pytest.approx(trace)
        assert found.grad_sqnorm == pytest.approx(grad_sqnorm)
    alone = by_micro_batches(net)  # nobody averages
    with alone.update():
        for k in range(2):
            with alone.microbatch(B, scale=0.5):
                (loss_of(net, data[2 * k + rank]) / (2 * B)).backward()
    with pytest.raises(ObservationError, match="processes have different gradients"):
        alone.compute()


def sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(NotImplementedError, match="noise from micro-batches .*FSDP2"):
        by_micro_batches(fully_shard(nn.Linear(4, 4)))


@pytest.mark.dist
def test_processes() -> None:
    spawn(each, args=([in_ddp, sharded],))
