# SPDX-License-Identifier: Apache-2.0
"""Dual norms compare micro-batches: unbiased for units of any sizes, and the same as from the
float64 gradient of every backward pass, whatever layers they go through.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_combinations
import torch
import torch.nn.functional as F
from adam_cases import Tied
from dual_norm_cases import assert_numbers, expected, sample_grads
from made import Made
from noise_cases import every_draw, in_updates, one_update
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.estimator.dual_norms import DualNorm, SpectralNorm
from gnsfast.noise_scale import dual_norms

UPDATES, K, B = 8, 4, 2
BOTH: dict[str, Any] = {"metric": ["sign", "spectral"]}
ROUTES: Any = {"repeated": ["twice"], "exclude": ["lstm"]}
Batch = tuple[Tensor, Tensor]


@pytest.mark.parametrize("metric", ["sign", "spectral"])
@pytest.mark.parametrize(
    ("units", "lengths"),
    [([1, 1], None), ([2, 1], None), ([1, 2, 1], None), ([2, 1], [3, 1, 2]), ([1, 2], [1, 1, 4])],
)
def test_unbiased_over_all_draws(
    metric: str, units: list[int], lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of C and G² over every draw of samples from a population of two or three, units of
    unequal numbers of samples, and of tokens, included, is that of the population.
    """
    torch.manual_seed(0)
    n = sum(units)
    x_M, r_M = torch.randn(2, 3 if n < 4 else 2, 3, dtype=torch.float64).unbind()
    g_M = torch.einsum("mo,mi->moi", r_M, x_M)
    square: Callable[[Tensor], Tensor] = torch.square if metric == "sign" else (lambda g: g @ g.mT)
    parts: list[dual_norms.Parts] = []
    for kind in (DualNorm, SpectralNorm):
        monkeypatch.setattr(kind, "_numbers", lambda _, of: parts.append(of) or torch.zeros(7))
    model = nn.Linear(3, 3, bias=False).double()
    gns = gnsfast.GradientNoiseScale(model, metric=metric)
    counts = every_draw(gns, model, x_M, r_M, units, lengths)
    gns.compute()
    mean = g_M.mean(0)
    variance = square(g_M - mean).mean(0) * (counts.square().sum() / n)
    rows = [(p.new, p.square, p.whole, p.first, p.second) for p in parts]
    found = [torch.stack(each).mean(0) for each in zip(*rows)]
    want = [variance, square(mean), mean, mean, mean]
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


class Everything(nn.Module):
    """Layers without per-sample squares, a tied weight, a layer that is called twice and one in a
    checkpoint, and an expert that some micro-batches do not reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.lstm, self.twice = nn.LSTM(7, 5, batch_first=True), nn.Linear(5, 5)
        self.conv, self.out = nn.Conv1d(5, 5, 3, padding=1), nn.Linear(5, 3)
        self.rare = nn.Linear(5, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.lstm(self.tied(ids))[0]
        h = self.twice(torch.tanh(self.twice(h)))
        rare = ids[:, :1, None] == 0
        if bool(rare.any()):
            h = h + rare * self.rare(h)
        h = checkpoint(self.conv, h.mT, use_reentrant=False).mT
        y: Tensor = self.out(torch.tanh(h))[:, -1]
        return y


def draw(count: int = UPDATES * K) -> list[Batch]:
    return [(torch.randint(7, (B, 4)), (torch.rand(B) < 0.2).long()) for _ in range(count)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def run(
    model: nn.Module, gns: Any, data: list[Batch], scaler: Any = None, loss: Any = loss_of
) -> gnsfast.NoiseScale:
    for batches in in_updates(data, K):
        with gns.update():
            for batch in batches:
                with gns.microbatch(B, scale=1 / K):
                    value = loss(model, batch) / (B * K)
                    (value if scaler is None else scaler.scale(value)).backward()
        model.zero_grad()
    return gns.compute()


def unit_grads(model: nn.Module, data: list[Batch]) -> Iterator[dict[str, Tensor]]:
    """For each update, parameter name -> [K, ...]: the mean gradient of each micro-batch."""
    for k in range(0, len(data), K):
        units = [sample_grads(model, loss_of, batch, B) for batch in data[k : k + K]]
        yield {name: torch.stack([u[name].mean(0) for u in units]) for name in units[0]}


def check(found: Any, units: list[dict[str, Tensor]], metric: str, rel: float) -> None:
    """As from the units' gradients, each of ``B`` samples."""
    numbers = expected(metric, units, 64)
    assert_numbers(found, numbers, rel, B)
    assert found.updates == len(units) - 1
    assert {*found.per_module} == {name.rpartition(".")[0] for name in numbers}


@pytest.mark.parametrize("scaled", [False, True])
def test_all_parameters_against_units(scaled: bool) -> None:
    torch.manual_seed(0)
    model = Everything().double()
    data = draw()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler, **BOTH)
    found = run(model, gns, data, scaler)
    units = list(unit_grads(model, data))
    check(found.sign, units, "sign", 1e-6)
    assert found.sign is not None and found.sign.left_out == ()
    assert "in the sign norm: noise scale" in str(found)
    embeddings = {"tied.first.weight"}
    matrices = [{n: g for n, g in u.items() if g.ndim == 3 and n not in embeddings} for u in units]
    assert {"lstm.weight_hh_l0", "rare.weight"} < matrices[0].keys()
    check(found.spectral, matrices, "spectral", 1e-6)


@pytest.mark.parametrize("route", test_combinations.MODELS)
def test_every_layer(route: str) -> None:
    """Of two passes of three samples each: three times half the square of their difference."""
    torch.manual_seed(0)
    cases = [test_combinations.draw(route, ()) for _ in range(2)]
    model = cases[0].model
    gns = gnsfast.GradientNoiseScale(model, metric="sign")
    grads: list[list[Tensor]] = []
    with gns.update():
        for case in cases:
            loss = (model(case.x) * case.r).sum() / 3
            grads.append(
                [*torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]
            )
            with gns.microbatch(3, scale=0.5):
                ((model(case.x) * case.r).sum() / 3 / 2).backward()
    moments = gns.state_dict()["means"]["sign"]["moments"]
    assert {*moments} == {n for n, p in model.named_parameters() if p.requires_grad}
    for moment, one, two in zip(moments.values(), *grads):
        want = 3 * (one - two).square() / 2
        torch.testing.assert_close(moment, want, rtol=1e-4, atol=1e-5 * float(want.max() + 1e-9))


def test_groups() -> None:
    """With a noise scale of each group, which its samples show, beside that of all."""
    model = nn.Linear(6, 3)
    gns = gnsfast.GradientNoiseScale(model, groups=["a", "b"], **BOTH)
    for _ in range(2):
        with gns.update():
            for x in torch.randn(K, 4, 6):
                with gns.microbatch(4, groups=["a", "b", "b", "a"], scale=1 / K):
                    (model(x).square().sum(1).mean() / K).backward()
        model.zero_grad()
    found = gns.compute()
    assert found.sign is not None and found.sign.updates == 1 and {*found.per_group} == {"a", "b"}


def test_matrices_of_an_optimizer() -> None:
    """Also an embedding, which is left out otherwise."""
    model = Everything().double()
    own = [model.tied.first.weight, model.lstm.weight_hh_l0, model.out.bias]
    optimizer = torch.optim.SGD(own)
    gns = gnsfast.GradientNoiseScale(model, metric="spectral", optimizer=optimizer)
    found = run(model, gns, draw(2 * K)).spectral
    assert found is not None and {*found.per_module} == {"tied.first", "lstm"}


def test_sparse_gradients_and_half_precision() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(16, 3))
    data = draw()
    plain = net.double()
    dense = nn.Sequential(nn.Embedding(7, 4).double(), *net[1:])
    dense[0].weight.data.copy_(net[0].weight.data)
    units = list(unit_grads(dense, data))
    gns = gnsfast.GradientNoiseScale(plain, **BOTH)
    check(run(plain, gns, data).sign, units, "sign", 1e-6)
    model = dense.bfloat16()
    gns = gnsfast.GradientNoiseScale(model, **BOTH)
    check(run(model, gns, data).sign, list(unit_grads(model, data)), "sign", 0.03)


def test_one_unit() -> None:
    """An update that does not count; two in a row are an error."""
    torch.manual_seed(2)
    data = draw()
    model = Everything()

    def single(gns: Any) -> None:
        with one_update(gns, B):
            (loss_of(model, data[0]) / B).backward()

    gns = gnsfast.GradientNoiseScale(model, **BOTH)
    single(gns)
    with pytest.raises(gnsfast.ObservationError, match="1 pass on 1 process, and it takes 2"):
        single(gns)
    model.zero_grad()
    gns.reset()
    before = run(model, gns, data)
    single(gns)
    after = gns.compute()
    assert after.sign == before.sign and after.updates == before.updates + 1
    again = gnsfast.GradientNoiseScale(model, **BOTH)
    again.load_state_dict(gns.state_dict())
    single(again)
    assert again.compute().sign == before.sign
    assert run(model, again, data).sign == run(model, gns, data).sign


def test_a_gradient_in_parts() -> None:
    """A weight in two reentrant checkpoints, whose gradient is added up in ``.grad`` alone."""

    def parts(m: Any, x: Tensor) -> Tensor:
        once = lambda t: torch.tanh(F.linear(t, m.one.weight))
        for _ in range(2):
            x = checkpoint(once, x, use_reentrant=True)
        return m.out(x)

    made = Made(parts, one=nn.Linear(4, 4), out=nn.Linear(4, 3))
    model = gnsfast.configure(made, exclude=["one"])
    gns = gnsfast.GradientNoiseScale(model, metric="sign")
    with pytest.raises(gnsfast.ObservationError, match="one.weight got its gradient in several"):
        with gns.update(B):
            model(torch.randn(B, 4, requires_grad=True)).sum().backward()
    assert not model.one.weight._backward_hooks


def test_compiled_model() -> None:
    """Measured updates run the one graph: nothing is compiled anew, and nothing runs eagerly."""
    torch.manual_seed(3)
    data = [(torch.randn(B, 6), (torch.rand(B) < 0.2).long()) for _ in range(UPDATES * K)]
    graphs, calls, results = 0, 0, []

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph(*args)

        return counted

    for compiled in (False, True):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        called = torch.compile(model, backend=backend) if compiled else model
        gns = gnsfast.GradientNoiseScale(called, every=2, **BOTH)
        results.append(run(called, gns, data))
    assert results[0].sign == results[1].sign and results[0].spectral == results[1].spectral
    assert calls == len(data) and graphs == 2  # with statistics and without


def test_documents_and_totals_of_tokens() -> None:
    """A pass is a unit, whatever its samples are."""
    torch.manual_seed(5)
    model = nn.Linear(6, 3).double()
    starts, tokens = torch.tensor([0, 3, 8, 12]), torch.tensor([3, 5, 4])
    data = torch.randn(UPDATES * K, 1, 12, 6).double()
    results = []
    for block in (dict(tokens=tokens, cu_seqlens=starts), dict(tokens=tokens), dict(tokens=12)):
        gns = gnsfast.GradientNoiseScale(model, **BOTH)
        for batches in in_updates(data, K):
            with gns.update():
                for x in batches:
                    rows = x if "cu_seqlens" in block else x.new_zeros(3, 5, 6)
                    parts = () if "cu_seqlens" in block else x[0].split([3, 5, 4])
                    for row, part in enumerate(parts):
                        rows[row, : len(part)] = part
                    with gns.microbatch(3, **block):
                        real = (rows.abs().sum(2) > 0).flatten()
                        logits = model(rows).flatten(0, 1)
                        losses = F.cross_entropy(logits, real.long(), reduction="none")
                        (losses * real).sum().div(12).backward()
            model.zero_grad()
        results.append(gns.compute())
    for each in results[1:]:
        for metric in ("sign", "spectral"):
            ours, theirs = getattr(each, metric), getattr(results[0], metric)
            assert ours.noise_scale == pytest.approx(theirs.noise_scale, rel=1e-5)
            assert ours.lower == pytest.approx(theirs.lower, rel=1e-5)


def test_refusals() -> None:
    lookup = nn.Sequential(nn.Embedding(3, 3))
    with pytest.raises(ValueError, match="No parameter has a spectral noise scale"):
        with gnsfast.GradientNoiseScale(lookup, **BOTH).update(2):
            pass
