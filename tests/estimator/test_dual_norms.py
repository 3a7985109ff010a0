# SPDX-License-Identifier: Apache-2.0
"""Noise scales in the dual norms of sign and spectral descent, against single samples."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adam_cases import Tied
from dual_norm_cases import KINDS, assert_numbers, expected, noise_scale, sample_grads
from made import Made
from noise_cases import draw, make, one_update, through_a_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import gnsfast

UPDATES = 12


class Ids(nn.Module):
    """An embedding, norms of both kinds, and matrices that are high, wide and square."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(9, 5), nn.Linear(5, 7)
        self.norm, self.square = nn.LayerNorm(7), nn.Linear(7, 7, bias=False)
        self.rms, self.down = nn.RMSNorm(7), nn.Linear(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.up(self.embed(ids))))
        y: Tensor = self.down(self.rms(h + self.square(h)))
        return y


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """A sum over samples of their mean over tokens."""
    x, y = batch
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum") / y[0].numel()


def tokens(V: int, classes: int, n: int, T: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randint(V, (n, T)), (torch.rand(n, T) < 0.2).long() * (classes - 1))
        for _ in range(UPDATES)
    ]


def run(
    model: nn.Module,
    gns: gnsfast.GradientNoiseScale,
    data: list[tuple[Tensor, Tensor]],
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> gnsfast.NoiseScale:
    for x, y in data:
        for own in zip(x.chunk(parts), y.chunk(parts)):
            n = len(own[0])
            with gns.microbatch(n, scale=n / len(x)):
                loss = loss_of(model, own) / len(x)
                (loss if scaler is None else scaler.scale(loss)).backward()
        gns.update()
        model.zero_grad()
    return gns.compute()


def check(
    found: Any, updates: list[dict[str, Tensor]], metric: str, parts: int = 1, rel: float = 1e-6
) -> None:
    """The result is that of every sample's gradient; ``updates`` hold the measured parameters."""
    numbers = expected(metric, updates, 64, parts)
    assert_numbers(found, numbers, rel)
    assert found.updates == UPDATES - 1
    assert found.lower < found.noise_scale < found.upper
    modules: dict[str, Any] = {}
    for name, own in numbers.items():
        path = name.rpartition(".")[0]
        modules[path] = modules.get(path, 0.0) + own
    assert set(found.per_module) == set(modules)
    for path, own in modules.items():
        scale = noise_scale(own)
        assert found.per_module[path].noise_scale == pytest.approx(scale, rel=5 * rel), path


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_against_single_samples(parts: int) -> None:
    """Both norms at once, in one, two and four micro-batches, of one, many and no tokens."""
    torch.manual_seed(0)
    model = Ids().double()
    data = tokens(9, 4, 8)
    gns = gnsfast.GradientNoiseScale(model, metric=["spectral", "sign"])
    found = run(model, gns, data, parts)
    grads = [sample_grads(model, loss_of, batch, 8) for batch in data]
    assert found.sign is not None and found.spectral is not None
    check(found.sign, grads, "sign", parts)
    assert found.sign.left_out == ()
    matrices = {"up.weight", "square.weight", "down.weight"}
    of_matrices = [{n: g for n, g in u.items() if n in matrices} for u in grads]
    check(found.spectral, of_matrices, "spectral", parts)
    assert set(found.spectral.left_out) == set(grads[0]) - matrices
    assert found.adam is None and "in the sign norm" in str(found)


def test_tied_weights() -> None:
    """The square of the sum over the uses of a weight, also the cross terms."""
    torch.manual_seed(0)
    model = Tied().double()
    data = tokens(7, 7, 6)
    found = run(model, gnsfast.GradientNoiseScale(model, metric="sign"), data).sign
    check(found, [sample_grads(model, loss_of, batch, 6) for batch in data], "sign")
    with pytest.raises(ValueError, match="Matrices have it, except for embeddings"):
        run(model, gnsfast.GradientNoiseScale(model, metric="spectral"), data)


def test_frozen_and_transposed_weights() -> None:
    """A frozen weight with a trained bias, and a weight that is stored [in, out]."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    net = nn.Sequential(conv1d(6, 4), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), conv1d(5, 5))
    net[2].weight.requires_grad_(False)
    model = net.double()
    data = [
        (torch.randn(6, 2, 4).double(), (torch.rand(6, 2) < 0.2).long()) for _ in range(UPDATES)
    ]
    found = run(model, gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"]), data)
    grads = [sample_grads(model, loss_of, batch, 6) for batch in data]
    check(found.sign, grads, "sign")
    matrices = {"0.weight", "4.weight"}
    check(
        found.spectral, [{n: g for n, g in u.items() if n in matrices} for u in grads], "spectral"
    )


def test_several_calls() -> None:
    """A layer that is called twice in a pass: a sample's gradient is the sum of both calls."""
    torch.manual_seed(0)
    twice = lambda m, x: m.out(torch.tanh(m.one(torch.tanh(m.one(x)))))
    model = Made(twice, one=nn.Linear(5, 5), out=nn.Linear(5, 3)).double()
    data = [
        (torch.randn(6, 3, 5).double(), (torch.rand(6, 3) < 0.2).long()) for _ in range(UPDATES)
    ]
    found = run(model, gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"]), data)
    grads = [sample_grads(model, loss_of, batch, 6) for batch in data]
    check(found.sign, grads, "sign")
    matrices = [{n: g for n, g in u.items() if g.ndim == 3} for u in grads]
    check(found.spectral, matrices, "spectral")


def test_optimizer_names_the_matrices() -> None:
    model = make()
    muon = torch.optim.Muon([model[0].weight], lr=1e-3)
    gns = gnsfast.GradientNoiseScale(model, metric="spectral", optimizer=muon)
    found = run(model, gns, draw(UPDATES)).spectral
    assert found is not None and list(found.per_module) == ["0"]
    assert "3.weight" in found.left_out


def test_scaler_and_overflow() -> None:
    """A scaler's factor drops out; an update that overflows teaches nothing."""
    results = []
    for scaled in (False, True):
        torch.manual_seed(3)
        model, data = make(), draw(UPDATES)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        gns = gnsfast.GradientNoiseScale(
            model, metric=["sign", "spectral"], grad_scaler=scaler, window=20
        )
        run(model, gns, data[:6], scaler=scaler)
        if scaled:
            x, y = data[0]
            run(model, gns, [(torch.full_like(x, torch.inf), y)], scaler=scaler)
        results.append(run(model, gns, data[6:], scaler=scaler))
    plain, scaled_ = results
    assert scaled_.skipped == 1
    for name in ("sign", "spectral"):
        a, b = getattr(plain, name), getattr(scaled_, name)
        assert a.updates == b.updates == UPDATES - 1
        assert b.noise == pytest.approx(a.noise, rel=1e-5)
        assert b.noise_scale == pytest.approx(a.noise_scale, rel=1e-4)


def test_scale_and_reduction_drop_out() -> None:
    """A loss that is a sum, and token weights, give the noise scale of the mean."""
    torch.manual_seed(4)
    data = draw(UPDATES)
    results = []
    for reduction in ("mean", "sum"):
        model = make()
        gns = gnsfast.GradientNoiseScale(
            model, metric=["sign", "spectral"], loss_reduction=reduction
        )
        for x, y in data:
            with one_update(gns, len(x), tokens=torch.full((len(x),), 1)):
                F.cross_entropy(model(x), y, reduction=reduction).backward()
        results.append(gns.compute())
    for name in ("sign", "spectral"):
        a, b = (getattr(r, name) for r in results)
        assert b.noise_scale == pytest.approx(a.noise_scale, rel=1e-4)


def test_resume() -> None:
    """Saved in the middle and loaded into a new estimator: the same bits."""
    torch.manual_seed(5)
    model, data = make(), draw(UPDATES)
    metrics = {"metric": ["sign", "spectral"], "window": 8}
    whole = run(model, gnsfast.GradientNoiseScale(model, **metrics), data)
    first = gnsfast.GradientNoiseScale(model, **metrics)
    run(model, first, data[:7])
    second = gnsfast.GradientNoiseScale(model, **metrics)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert run(model, second, data[7:]) == whole
    with pytest.raises(ValueError, match="dual"):
        gnsfast.GradientNoiseScale(model, metric="sign", window=8).load_state_dict(
            first.state_dict()
        )


def test_every() -> None:
    """Updates in between are plain: nothing is added, no mean moves."""
    model, data = make(), draw(UPDATES)
    gns = gnsfast.GradientNoiseScale(model, metric="sign", every=3)
    found = run(model, gns, data)
    assert found.updates == 4 and found.sign is not None and found.sign.updates == 3


def test_together_with_adam() -> None:
    torch.manual_seed(6)
    model, data = make(), draw(UPDATES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    gns = gnsfast.GradientNoiseScale(model, metric=["adam", "sign"], optimizer=optimizer)
    for x, y in data:
        with gns.microbatch(len(x)):
            F.cross_entropy(model(x), y).backward()
        gns.update()
        optimizer.step()
        optimizer.zero_grad()
    found = gns.compute()
    assert found.adam is not None and found.adam.updates == UPDATES - 1
    check(found.sign, [sample_grads(model, loss_of_one, b, 8) for b in data], "sign", rel=1e-4)


def loss_of_one(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def test_a_pass_for_other_gradients() -> None:
    """It adds nothing to the sums."""
    found = []
    for others in (False, True):
        torch.manual_seed(3)
        model, data = make(), draw(UPDATES)
        gns = gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"])
        for x, y in data:
            with one_update(gns, 8):
                loss = F.cross_entropy(model(x.requires_grad_()), y)
                if others:
                    torch.autograd.grad(3 * loss, x, retain_graph=True)
                loss.backward()
        found.append(gns.compute())
    assert found[0].sign == found[1].sign and found[0].spectral == found[1].spectral


@pytest.mark.second
def test_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers through the kernels, which are given every second sample."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    results = []
    for backend in ("reference", "triton"):
        monkeypatch.setenv("GNSFAST_BACKEND", backend)
        torch.manual_seed(9)
        model = Ids()
        gns = gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"])
        results.append(run(model, gns, tokens(9, 4, 5)[:3]))
    for metric in ("sign", "spectral"):
        plain, kernels = (getattr(each, metric) for each in results)
        assert kernels.noise == pytest.approx(plain.noise, rel=1e-4)
        assert kernels.grad_norm_lower == pytest.approx(plain.grad_norm_lower, rel=1e-3)


def test_refusals() -> None:
    model = make()
    with pytest.raises(ValueError, match="metric must be .*sign.*, not 'lion'"):
        gnsfast.GradientNoiseScale(model, metric="lion")
    with pytest.raises(ValueError, match="metric='sign' needs the gradient of the whole update"):
        gnsfast.GradientNoiseScale(model, metric="sign", source="local")
    with pytest.raises(ValueError, match="optimizer=... is used only with metric='adam' and"):
        gnsfast.GradientNoiseScale(
            model, metric="sign", optimizer=torch.optim.AdamW(model.parameters())
        )
    with pytest.raises(NotImplementedError, match="sign noise scale .* together with groups"):
        gnsfast.GradientNoiseScale(model, metric="sign", groups=["a", "b"])
    gns = gnsfast.GradientNoiseScale(model, metric="sign")
    [(x, y)] = draw(1)
    with pytest.raises(ValueError, match="tokens of each sample, not their total"):
        with gns.microbatch(8, tokens=8):
            pass
    with gns.microbatch(8):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="metric='sign' needs the gradients"):
        gns.update(grad_norm=1.0)
    conv = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(ValueError, match="No parameter has the spectral noise scale"):
        with gnsfast.GradientNoiseScale(conv, metric="spectral").microbatch(2):
            pass


def test_compiled_model() -> None:
    """Measured updates run in eager mode, and no graph is compiled for them."""
    torch.manual_seed(7)
    data = draw(UPDATES)
    results = []
    counter = CompileCounterWithBackend("eager")
    for compiled in (False, True):
        model = make()
        run_model = torch.compile(model, backend=counter) if compiled else model
        gns = gnsfast.GradientNoiseScale(run_model, metric="sign", every=2)
        results.append(run(run_model, gns, data).sign)
    assert results[0] == results[1] and results[0] is not None
    assert counter.frame_count == 1


@pytest.mark.parametrize("metric", ["sign", "spectral"])
def test_unequal_lengths(metric: str) -> None:
    """Five samples of one to four tokens: their weights are in C, in G² and in both halves."""
    torch.manual_seed(8)
    model = make().double()
    gns = gnsfast.GradientNoiseScale(model, metric=metric)
    square, numbers = KINDS[metric]
    lengths, half = torch.tensor([1, 4, 2, 3, 3]), torch.tensor([True, False] * 2 + [True])
    u = lengths / lengths.sum()
    v_less_u2 = 1 - u.square().sum()
    moments: dict[str, Tensor] = {}
    whole: Any = 0.0
    for update, (x, y) in enumerate(draw(3, 5)):
        x = x.double()
        with one_update(gns, 5, tokens=lengths):
            (F.cross_entropy(model(x), y, reduction="none") * u).sum().backward()
        for name, g_B in sample_grads(model, loss_of_one, (x, y), 5).items():
            if metric == "spectral" and g_B.ndim < 3:
                continue
            weighed = g_B * u.view(-1, *[1] * (g_B.ndim - 1))
            mean, p = weighed.sum(0), square(weighed).sum(0)
            unbiased = (square(mean) - p) / v_less_u2
            new = (p - u.square().sum() * unbiased) * lengths.sum() ** 2 / 5
            halves = [weighed[own].sum(0) / u[own].sum() for own in (half, ~half)]
            before = moments.get(name, torch.zeros(()))
            moments[name] = before + 5 / (5 * sum((63 / 64) ** k for k in range(update + 1))) * (
                new - before
            )
            if update == 2:
                parts = numbers(before, moments[name], new, unbiased, mean, *halves)
                whole = whole + torch.stack(parts)
    gns.compute()
    [row] = gns._start().ledger.ring[2:3]
    [side] = gns._start().sides.values()
    found = row[-side.width :].view(-1, 7).sum(0)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0.0)


def test_two_estimators_with_open_blocks() -> None:
    """The last to close gives ``torch.compile`` back."""
    data = draw(2)
    models = make(), make()
    counter = CompileCounterWithBackend("eager")
    one, two = (gnsfast.GradientNoiseScale(m, metric="sign") for m in models)
    for x, y in data:
        with one.microbatch(len(x)), two.microbatch(len(x)):
            for model in models:
                F.cross_entropy(model(x), y).backward()
        for gns in (one, two):
            gns.update()
            gns.model.zero_grad()
    torch.compile(make(), backend=counter)(data[0][0])
    assert counter.frame_count == 1
