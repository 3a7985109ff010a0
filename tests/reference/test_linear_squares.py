# SPDX-License-Identifier: Apache-2.0
"""Σ_b (dy_bᵀ x_b)² in plain torch: every coordinate against a float64 loop over single samples."""

import importlib
from collections.abc import Callable

import pytest
import torch
from layouts import LAYOUTS
from second_moments import assert_squares, coarse_products, draw, sample_grads
from signed import Signed
from torch import Tensor

from gnsfast import ops, reference

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
squares = importlib.import_module("gnsfast.reference.linear_squares")  # not its function
SQUARES: Callable[..., Tensor] = Signed(reference).linear_squares

# B, T, I, O
SHAPES = {
    "odd everything": (3, 17, 37, 21),
    "one sample": (1, 9, 40, 24),
    "one token": (5, 1, 40, 24),
    "one feature": (4, 6, 1, 1),
    "no sample": (0, 9, 16, 8),
    "no token": (3, 0, 16, 8),
    "no feature": (3, 9, 0, 8),
    "one token, no sample": (0, 1, 16, 8),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_squares(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, dy = draw(*shape, dtype, "cpu")
    for transposed in (False, True):
        found = SQUARES(x, dy, transposed)
        assert found.dtype == (F64 if dtype == F64 else F32)
        assert_squares(found.T if transposed else found, x, dy)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("together", [0, 900, 1 << 19], ids=["alone", "some", "all"])
def test_blocks(together: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows and columns, the last ones smaller, of single samples, of three, of all."""
    for name, value in {"TILE": 12 * 20, "COLUMNS": 20, "GROUP": together}.items():
        monkeypatch.setattr(squares, name, value)
    x, dy = draw(7, 5, 50, 34, dtype, "cpu")
    for transposed in (False, True):
        found = SQUARES(x, dy, transposed)
        assert_squares(found.T if transposed else found, x, dy)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than ``GROUP`` or one block of ``TILE`` numbers are made at a time."""
    made = []
    square = torch.Tensor.square_
    monkeypatch.setattr(torch.Tensor, "square_", lambda t: made.append(t.numel()) or square(t))
    monkeypatch.setattr(squares, "GROUP", 4000)
    x, dy = draw(30, 3, 40, 24, F32, "cpu")
    assert_squares(SQUARES(x, dy, False), x, dy)
    assert max(made) <= 4000 and sum(made) == 30 * 40 * 24


def test_large_layer() -> None:
    """2.4M coordinates in blocks of their real size."""
    x, dy = draw(2, 3, 1536, 1536, F32, "cpu")
    assert_squares(SQUARES(x, dy, False), x, dy)


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, T: int) -> None:
    """Inputs are not changed either, also where no copy widens them."""
    x, dy = LAYOUTS[layout](3, T, 40), LAYOUTS[layout](3, T, 24)
    before = x.clone(), dy.clone()
    assert_squares(SQUARES(x, dy, False), x, dy)
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])


def test_coarse_products_are_allowed() -> None:
    """By torch's switch: the product of squares of one-token samples is exact to float32."""
    x, dy = draw(9, 1, 40, 24, F32, "cpu")
    with coarse_products():
        found = SQUARES(x, dy, False)
    want = sample_grads(x, dy).square().sum(0).float()
    torch.testing.assert_close(found, want, rtol=2e-7, atol=0)


def test_many_samples() -> None:
    """A sum of 20 000 float32 squares."""
    for T in (1, 2):
        x, dy = torch.randn(20_000, T, 6), torch.randn(20_000, T, 5)
        assert_squares(SQUARES(x, dy, False), x, dy)


def test_variance_of_a_coordinate() -> None:
    """What the sums are for: with the mean they give each coordinate's variance over samples."""
    x, dy = draw(8, 5, 7, 6, F64, "cpu")
    g_BOI = sample_grads(x, dy)
    found = Signed(ops).linear_squares(x, dy, False)
    variance = (found - 8 * g_BOI.mean(0).square()) / 7
    torch.testing.assert_close(variance, g_BOI.var(0), rtol=1e-12, atol=0)
