# SPDX-License-Identifier: Apache-2.0
"""Sums of g_b g_bᵀ and of g_bᵀ g_b over a linear layer's per-sample gradients, by both routes."""

import importlib
from collections.abc import Callable

import pytest
import torch
from second_moments import assert_grams, coarse_products, draw, sample_grads
from signed import Signed
from torch import Tensor

from gnsfast import ops, reference

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
grams = importlib.import_module("gnsfast.reference.linear_grams")  # not its function
GRAMS: Callable[..., Tensor] = Signed(reference).linear_grams

# B, T, I, O
SHAPES = {
    "wide": (3, 17, 37, 21),
    "tall": (3, 17, 21, 37),
    "one sample": (1, 9, 40, 24),
    "one token": (5, 1, 40, 24),
    "more tokens than features": (4, 50, 6, 5),
    "one feature": (4, 6, 1, 1),
    "no sample": (0, 9, 16, 8),
    "no token": (3, 0, 16, 8),
    "no feature": (3, 9, 0, 8),
}


@pytest.fixture(params=["tokens", "tiles"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(grams, "grams_route", lambda T, N, M: request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_grams(shape: tuple[int, int, int, int], dtype: torch.dtype, route: str) -> None:
    x, dy = draw(*shape, dtype, "cpu")
    before = x.clone(), dy.clone()
    for side in (0, 1):
        gram = GRAMS(x, dy, side)
        assert gram.dtype == (F64 if dtype == F64 else F32)
        assert_grams(gram, x, dy, side)
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])


@pytest.mark.parametrize("elements", [1, 200, 5000], ids=["one by one", "blocks", "some samples"])
def test_blocks(elements: int, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some samples at a time, and some columns of one sample's gradient; the last ones fewer."""
    monkeypatch.setattr(grams, "ELEMENTS", {"cpu": elements, "cuda": elements})
    x, dy = draw(7, 9, 50, 34, F32, "cpu")
    for side in (0, 1):
        assert_grams(GRAMS(x, dy, side), x, dy, side)


def test_strides(route: str) -> None:
    x = torch.randn(9, 3, 80).transpose(0, 1)[..., ::2]
    dy = torch.randn(1, 1, 24).expand(3, 9, -1)
    for side in (0, 1):
        assert_grams(GRAMS(x, dy, side), x, dy, side)


@pytest.mark.parametrize("side", [0, 1])
def test_tokens_that_cancel(side: int, route: str) -> None:
    """Tokens within 3 % of each other and dy that sums to almost zero, as in key projections. With
    inner products in float32 the route over tokens would be off by 4e-4.
    """
    x, dy = draw(4, 70, 60, 40, F32, "cpu")
    x = x[:, :1] + 0.03 * x
    dy -= dy.mean(1, keepdim=True)
    if side:
        x, dy = dy, x
    assert_grams(GRAMS(x, dy, side), x, dy, side)


def test_coarse_products_are_allowed(route: str) -> None:
    """By torch's switch, as on a GPU with tf32: the sums are exact to float32 all the same."""
    x, dy = draw(3, 12, 40, 24, F32, "cpu")
    with coarse_products():
        found = [GRAMS(x, dy, side) for side in (0, 1)]
    for side, gram in enumerate(found):
        want = GRAMS(x.double(), dy.double(), side).float()
        assert gram.dtype == F32
        torch.testing.assert_close(gram, want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("T", [1, 12, 300])
def test_agrees_with_squares_and_norms(T: int) -> None:
    """Both sides' traces, and the sum over all coordinates' squares, are Σ_b ‖g_b‖²."""
    x, dy = draw(3, T, 40, 24, F64, "cpu")
    of = Signed(ops)
    want = sample_grads(x, dy).square().sum()
    sums = [of.linear_grams(x, dy, side).trace() for side in (0, 1)]
    for each in (*sums, of.linear_squares(x, dy, False).sum()):
        torch.testing.assert_close(each, want, rtol=1e-12, atol=0)
    rows = of.linear_squares(x, dy, False).sum(1)
    torch.testing.assert_close(of.linear_grams(x, dy, 0).diagonal(), rows, rtol=1e-12, atol=0)


def test_route_is_chosen_by_cost() -> None:
    assert grams.grams_route(1, 768, 768) == "tokens"
    assert grams.grams_route(256, 768, 768) == "tokens"
    assert grams.grams_route(1024, 768, 768) == "tiles"
    assert grams.grams_route(256, 96, 288) == "tiles"
    assert grams.grams_route(512, 768, 50257) == "tokens"


def test_the_chosen_route_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("tokens", "tiles"):
        add = getattr(grams, f"_add_by_{name}")
        run = lambda *args, add=add, name=name: ran.append(name) or add(*args)
        monkeypatch.setattr(grams, f"_add_by_{name}", run)
    for T in (2, 50):
        x, dy = draw(2, T, 6, 5, F32, "cpu")
        assert_grams(GRAMS(x, dy, 0), x, dy, 0)
    assert ran == ["tokens", "tiles"]
