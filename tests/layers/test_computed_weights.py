# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are computed: parametrizations, and torch's older hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import squares
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import gnsfast

B, T, D = 4, 5, 6


class Skew(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu(1) - w.triu(1).T


def low_rank() -> nn.Module:
    """An adapter as a parametrization: it has parameters of its own, in a layer of its own."""
    up = nn.Linear(2, D, bias=False)
    return Made(lambda m, w: w + m.up(m.down.T).T, down=torch.randn(2, D), up=up)


def gain() -> nn.Module:
    """A parameter that is no layer's, and a layer in it."""
    of = lambda m, x: m.gain * torch.tanh(m.inner(x))
    return Made(of, gain=torch.randn(T, D), inner=nn.LayerNorm(D))


def parametrized(layer: nn.Module, how: nn.Module, name: str = "weight") -> nn.Module:
    parametrize.register_parametrization(layer, name, how)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    "weight norm of columns": lambda: parametrizations.weight_norm(nn.Linear(D, D), dim=1),
    "weight norm of all": lambda: parametrizations.weight_norm(nn.Linear(D, D), dim=None),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(D, D)),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="cayley"),
    "skew": lambda: parametrized(nn.Linear(D, D), Skew()),
    "bias": lambda: parametrized(nn.Linear(D, D), nn.Softplus(), "bias"),
    "twice": lambda: parametrized(parametrizations.weight_norm(nn.Linear(D, D)), nn.Softplus()),
    "adapter": lambda: parametrized(nn.Linear(D, D), low_rank()),
    "gain": lambda: parametrized(gain(), nn.Softplus(), "gain"),
    "layer norm": lambda: parametrized(nn.LayerNorm(D), nn.Softplus()),
    "conv": lambda: parametrizations.weight_norm(nn.Conv1d(T, T, 3, padding=1), dim=2),
    "conv, spectral": lambda: parametrizations.spectral_norm(nn.Conv1d(T, T, 3, padding="same")),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(D, D)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(D, D)),
    "old, conv": lambda: nn.utils.weight_norm(nn.Conv1d(T, T, 3, padding=1, groups=5)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(D, D), "weight", 0.3),
    "pruned twice": lambda: prune.random_structured(
        prune.l1_unstructured(nn.Linear(D, D), "weight", 0.3), "weight", 0.3, dim=0
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), LAYERS[name](), nn.Tanh(), nn.Linear(D, 3))


def one_by_one(make: Callable[[], nn.Module], x: Tensor, loss: Any = squares) -> dict[str, Tensor]:
    """The loop over single samples in float64, each with the buffers that the pass begins with."""
    norms: dict[str, list[Tensor]] = {}
    for b in range(B):
        model = make().double()
        loss(model, x[b : b + 1].double()).backward()
        for n, p in model.named_parameters():
            g = torch.zeros_like(p) if p.grad is None else p.grad
            norms.setdefault(n, []).append(g.square().sum())
    return {n: torch.stack(each) for n, each in norms.items()}


@pytest.mark.second
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_per_sample(name: str, example: bool, training: bool) -> None:
    x = torch.randn(B, T, D)
    plain, model = made(name).train(training), made(name).train(training)
    table = gnsfast.learn(model, x) if example else None
    assert gnsfast.coverage(model).covered_fraction == 1
    want = squares(plain, x)
    want.backward()
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        got = squares(model, x)
        weight, buffers = vars(model[2]).get("weight"), list(model.buffers())
        got.backward()
    assert vars(model[2]).get("weight") is weight
    assert all(b is was for b, was in zip(model.buffers(), buffers))
    assert torch.equal(got, want)
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=n)
    for p, q in zip(model.buffers(), plain.buffers()):
        assert torch.equal(p, q)
    assert_norms(norms, one_by_one(lambda: made(name).train(training), x))


def run(
    model: nn.Module, x: Tensor, num_samples: int = B, table: gnsfast.Table | None = None
) -> gnsfast.SampleNorms:
    with gnsfast.per_sample_sqnorms(model, num_samples, table=table) as norms:
        squares(model, x).backward()
    return norms


class Twice(nn.Module):
    """A layer that is called twice, in a block and behind it."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.block = nn.Sequential(norm(nn.Linear(D, D)), nn.Tanh())
        self.head = norm(nn.Linear(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.block(x)))
        return y


NORMS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old weight norm": nn.utils.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
}


def far_from_converged(model: nn.Module) -> nn.Module:
    """Vectors of which each power iteration makes quite different ones."""
    generator = torch.Generator().manual_seed(1)
    for name, b in model.named_buffers():
        if name.endswith(("_u", "_v")):
            b.copy_(torch.randn(b.shape, generator=generator))
            b /= b.norm()
    return model


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_each_call_goes_on_from_the_vectors_of_the_last(norm: str, example: bool) -> None:
    """A spectral norm that trains changes its weight with each call."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return far_from_converged(Twice(NORMS[norm]))

    x = torch.randn(B, T, D)
    model = make()
    table = gnsfast.learn(model, x) if example else None
    assert_norms(run(model, x, table=table), one_by_one(make, x))


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("norm", ["weight norm", "spectral norm"])
def test_a_cached_weight_is_computed_again(norm: str, outside: bool) -> None:
    """``parametrize.cached`` computes each once, that of the head before the first call."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return far_from_converged(Twice(NORMS[norm]))

    def cached(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            assert model.head.weight.shape == (3, D)
            return squares(model, x)

    x = torch.randn(B, T, D)
    model = make()
    table = gnsfast.learn(model, x)  # before a weight is asked for
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        if outside:
            cached(model, x).backward()
        else:
            with parametrize.cached():
                cached(model, x).backward()
    assert_norms(norms, one_by_one(make, x, cached))


@pytest.mark.parametrize("norm", NORMS)
def test_the_third_block_learns_nothing(norm: str) -> None:
    """Of the two parts of a weight, the function that joins them is seen once."""
    x, model = torch.randn(B, T, D), Twice(NORMS[norm])
    run(model, x)
    run(model, x)
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    run(model, x)
    assert len(calls) == 1


def test_removed_and_parametrized_again() -> None:
    x, model = torch.randn(B, T, D), nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    run(model, x)
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[0], "bias", nn.Softplus())
    assert_norms(run(model, x), loop_sqnorms(model, squares, x, B))
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[0], name)
    model.zero_grad()
    assert_norms(run(model, x), loop_sqnorms(model, squares, x, B))


def test_weight_behind_its_bias() -> None:
    layer = parametrizations.weight_norm(nn.Linear(D, D))
    parametrize.remove_parametrizations(layer, "weight")
    assert list(layer._parameters) == ["bias", "weight"]
    x = torch.randn(B, T, D)
    assert_norms(run(layer, x), loop_sqnorms(layer, squares, x, B))


@pytest.mark.parametrize("frozen", ["original0", "original1"])
def test_frozen(frozen: str) -> None:
    x, model = torch.randn(B, T, D), nn.Sequential(parametrizations.weight_norm(nn.Linear(D, D)))
    model.get_parameter(f"0.parametrizations.weight.{frozen}").requires_grad_(False)
    assert_norms(run(model, x), loop_sqnorms(model, squares, x, B))


def test_used_as_a_tensor() -> None:
    table = parametrizations.weight_norm(nn.Embedding(9, D))
    tied = lambda m, ids: F.linear(m.inner(m.table(ids)), m.table.weight)
    ids, model = torch.randint(0, 9, (B, T)), Made(tied, table=table, inner=nn.Linear(D, D))
    assert_norms(run(model, ids), loop_sqnorms(model, squares, ids, B))


def test_one_parametrization_of_two_layers() -> None:
    model, shared = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), nn.PReLU()
    for layer in model:
        parametrize.register_parametrization(layer, "weight", shared)
    x = torch.randn(B, T, D)
    assert_norms(run(model, x), loop_sqnorms(model, squares, x, B))


class Rows(nn.Module):
    """Modules whose weights are no layer's."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = norm(nn.LSTM(D, D, batch_first=True), "weight_hh_l0")
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        parametrizations.weight_norm(self.attention.out_proj)
        norm(self.attention, "in_proj_weight")

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        out: Tensor = y + self.attention(y, y, y)[0]
        return out


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "spectral norm"])
def test_inside_recurrent_layers_and_attention(norm: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Rows(NORMS[norm])

    x, model = torch.randn(B, T, D), make()
    assert_norms(run(model, x), one_by_one(make, x))
