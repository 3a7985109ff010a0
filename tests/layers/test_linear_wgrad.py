# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.Linear`` and its routes: against torch, and per sample against the float64 loop."""

import pytest
import torch
from layers import (
    assert_as_loop,
    assert_folded,
    assert_half,
    assert_layer,
    error_against_loop,
    loop_errors_at_dtype,
    plain,
    weighted_loss,
)
from layouts import LAYOUTS
from oracle import loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.reference import outer, rows

SHAPES = {
    "two dimensions": (6, 5),
    "three dimensions": (4, 9, 5),
    "four dimensions": (3, 2, 7, 5),
    "one token": (6, 1, 5),
    "one sample": (1, 9, 5),
    "no sample": (0, 9, 5),
    "no token": (3, 0, 5),
    "odd everything": (7, 13, 11),
    "one feature": (4, 6, 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_shapes(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = gnsfast.Linear(shape[-1], 3, bias=bias), torch.randn(shape)
    # A batch without tokens proves nothing.
    table = None if x.numel() or not len(x) else gnsfast.learn(layer, torch.randn(3, 2, shape[-1]))
    assert_layer(layer, x, shape[0], table=table)


@pytest.mark.parametrize("T", [1, 2, 8, 16, 64, 200])
def test_every_token_count(T: int) -> None:
    """Walks through all three routes."""
    assert_layer(gnsfast.Linear(33, 21), torch.randn(5, T, 33), 5)


def test_routes_agree() -> None:
    x_BTI, dy_BTO = torch.randn(4, 6, 33), torch.randn(4, 6, 21)
    g_BOI = torch.einsum("bto,bti->boi", dy_BTO.double(), x_BTI.double())
    want = g_BOI.square().sum((1, 2))
    torch.testing.assert_close(outer.gram_sqnorms(x_BTI, dy_BTO), want, rtol=1e-5, atol=0)
    dw, fused = outer.fused_wgrad(x_BTI, dy_BTO, torch.float32)
    torch.testing.assert_close(fused[:-1].double().square(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(fused[-1].double(), g_BOI.sum(0).norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(dw.double(), g_BOI.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("together", [0, 10_000], ids=["alone", "together"])
def test_tiles(
    monkeypatch: pytest.MonkeyPatch, together: int, threads: int, dtype: torch.dtype
) -> None:
    """Blocks of rows and of columns, the last one smaller, that threads share or that do not divide
    by them; sums of samples one by one, or of some at a time; rows of norms in pieces.
    """
    sizes = {"TILE": 12 * 20, "COLUMNS": 20, "GROUP": together, "PART": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(outer, name, value)
    monkeypatch.setattr(rows, "PIECE", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x_BTI, dy_BTO = torch.randn(5, 7, 50).to(dtype), torch.randn(5, 7, 34).to(dtype)
    g_BOI = torch.einsum("bto,bti->boi", dy_BTO.double(), x_BTI.double())
    dw, norm_B1 = outer.fused_wgrad(x_BTI, dy_BTO, torch.float32)
    want_B1 = torch.cat([g_BOI, g_BOI.sum(0, keepdim=True)]).flatten(1).norm(dim=1)
    torch.testing.assert_close(norm_B1.double(), want_B1, rtol=1e-5, atol=0)
    torch.testing.assert_close(dw.double(), g_BOI.sum(0), rtol=1e-5, atol=1e-5)
    none, zero = outer.fused_wgrad(x_BTI[:0], dy_BTO[:0], torch.float32)
    assert none.shape == (34, 50) and not none.any() and zero.tolist() == [0.0]


def test_route_is_chosen_by_cost() -> None:
    assert outer.linear_route(1, 768, 768) == "closed"
    assert outer.linear_route(4, 768, 768) == "gram"
    assert outer.linear_route(2048, 768, 768) == "fused"
    assert outer.linear_route(256, 1024, 1024) == "fused"
    assert outer.linear_route(256, 4096, 4096) == "gram"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_summed_norm_and_counter(dtype: torch.dtype) -> None:
    """The norm is that of the sum before it is rounded to the parameter's dtype."""
    layer = gnsfast.Linear(5, 3).to(dtype)
    x_BTI, dy_BTO = torch.randn(4, 7, 5).to(dtype), torch.randn(4, 7, 3).to(dtype)
    probe = torch.zeros(2, 4 + 2, requires_grad=True)
    gnsfast.functional.linear(x_BTI, layer.weight, layer.bias, probe).backward(dy_BTO)
    assert probe.grad is not None
    dw_OI = torch.einsum("bto,bti->oi", dy_BTO.double(), x_BTI.double())
    for row, grad in zip(probe.grad, (dw_OI, dy_BTO.double().sum((0, 1)))):
        torch.testing.assert_close(row[4].double(), grad.square().sum(), rtol=1e-5, atol=0)
        assert row[5] == 1.0


def test_large_layer() -> None:
    """2.4M elements: single-precision sums of that length would be off by more than 1e-5."""
    assert_layer(gnsfast.Linear(1536, 1536), torch.randn(2, 150, 1536), 2)


def test_rows_longer_than_one_piece() -> None:
    """20 000 inputs: twenty blocks of columns."""
    assert_layer(gnsfast.Linear(20_000, 3), torch.randn(3, 90, 20_000), 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    assert_layer(gnsfast.Linear(5, 3), LAYOUTS[layout](4, 9, 5), 4)


def test_expanded_gradient() -> None:
    """The gradient of ``sum`` has stride zero."""
    layer, x = gnsfast.Linear(5, 3), torch.randn(4, 9, 5)
    assert_as_loop(layer, x, 4, lambda m, x: m(x).sum(), twin=plain(layer))


def test_sequence_first() -> None:
    layer = nn.Linear(5, 3)
    assert_layer(layer, torch.randn(9, 4, 5), 4, batch_dim=1)


def test_folded_rows() -> None:
    """Twelve rows are four samples of three consecutive rows."""
    assert_folded(nn.Linear(5, 3), torch.randn(12, 5))


def test_all_frozen_costs_nothing() -> None:
    layer = nn.Sequential(gnsfast.Linear(5, 3).requires_grad_(False), gnsfast.Linear(3, 3))
    with gnsfast.per_sample_sqnorms(layer, 4) as norms:
        assert type(layer[0].weight) is nn.Parameter
        layer(torch.randn(4, 5)).sum().backward()
    assert set(norms) == {"1.weight", "1.bias"}


def test_no_gradient_for_the_input() -> None:
    layer, x = gnsfast.Linear(5, 3), torch.randn(4, 9, 5)
    with gnsfast.per_sample_sqnorms(layer, 4) as norms:
        weighted_loss(layer, (x, torch.ones(4, 9, 3))).backward()
    assert norms["weight"].isfinite().all()


def test_float64() -> None:
    assert_layer(
        gnsfast.Linear(5, 3).double(), torch.randn(4, 9, 5, dtype=torch.float64), 4, rtol=1e-6
    )


HALF = [(dtype, T) for dtype in (torch.bfloat16, torch.float16) for T in (1, 4, 70)]


@pytest.mark.parametrize(("dtype", "T"), HALF, ids=[f"{d} T={T}" for d, T in HALF])
def test_half_precision(dtype: torch.dtype, T: int) -> None:
    assert_half(gnsfast.Linear(48, 24).to(dtype), torch.randn(4, T, 48).to(dtype))


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast(inside: bool) -> None:
    """Same output bits as torch's autocast, float32 gradients, norms no worse than twice torch's
    own.
    """
    layer, x, r = gnsfast.Linear(48, 24), torch.randn(4, 9, 48), torch.randn(4, 9, 24)
    twin, leaf = plain(layer), x.clone().requires_grad_()
    loop = loop_sqnorms(twin, weighted_loss, (x, r), 4)
    with torch.autocast("cpu", torch.bfloat16):
        torch_error = loop_errors_at_dtype(twin, (x, r), 4, loop)
        want = twin(x)
    with gnsfast.per_sample_sqnorms(layer, 4) as norms:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
            loss = (y * r).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    assert torch.equal(y, want)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32
    assert error_against_loop(norms, loop) <= 2 * torch_error


def test_autocast_keeps_the_low_precision_input() -> None:
    """What waits for backward is what torch's autocast keeps: half the memory of the input."""
    layer, kept = gnsfast.Linear(48, 24), []
    table = gnsfast.learn(layer, torch.randn(4, 9, 48))
    with gnsfast.per_sample_sqnorms(layer, 4, table=table), torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = layer(torch.randn(4, 9, 48)).sum()
        loss.backward()
    assert {t.dtype for t in kept} == {torch.bfloat16}


def test_no_grad_is_plain() -> None:
    layer, x = gnsfast.Linear(5, 3), torch.randn(4, 5)
    with gnsfast.per_sample_sqnorms(layer, 4), torch.no_grad():
        y: Tensor = layer(x)
        assert torch.equal(y, plain(layer)(x)) and not y.requires_grad
        with torch.enable_grad():
            layer(x).sum().backward()


def test_probe_of_another_shape() -> None:
    x, w, b = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True), torch.zeros(2)
    probe = torch.zeros(2, 5, requires_grad=True)
    with pytest.raises(ValueError, match=r"float32 \[1, B \+ 2\]"):
        gnsfast.functional.linear(x, w, b, probe)
