# SPDX-License-Identifier: Apache-2.0
"""How a linear layer's gradient is shared out among programs and finished: each pair of a tile and
a sample once, by whichever program comes last, in two launches.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import assert_wgrad, loop
from signed import Signed

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from kernel_launches import count_launches  # noqa: E402

from gnsfast import reference  # noqa: E402
from gnsfast.triton_kernels import configs, linear_plan, linear_wgrad, operators, outer  # noqa: E402
from gnsfast.triton_kernels.configs import Config, balance  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = Signed(operators)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="counts and orders programs")
SMALL = Config(16, 16, 16, 4, 2)


# GPT-2, a model of a billion parameters, Llama-3-8B: I, O, tokens of a sample.
LAYERS = {
    "gpt2 qkv": (768, 2304, 1024),
    "gpt2 out": (768, 768, 1024),
    "gpt2 up": (768, 3072, 1024),
    "gpt2 down": (3072, 768, 1024),
    "1B out": (2048, 2048, 2048),
    "1B up": (2048, 8192, 2048),
    "8B q": (4096, 4096, 2048),
    "8B k": (4096, 1024, 2048),
    "8B up": (4096, 14336, 2048),
    "8B k, long": (4096, 1024, 8192),
    "8B up, long": (4096, 14336, 8192),
}

FEW_TILES = {
    ("gpt2 out", 8, 132): 0.73,
    ("gpt2 out", 16, 132): 0.87,
    ("gpt2 out", 8, 108): 0.89,
    ("gpt2 out", 16, 108): 0.89,
}
"""Layers whose 36 tiles have 2.2 to 5.3 samples for each multiprocessor, of which the busiest takes
3 to 6: whole samples allow no more."""

NOT_WORTH_CUTTING = {("gpt2 qkv", 8, 132): 0.82}
"""A cut would save one sample of 16 steps; a helper would store 7 parts, and a tile have 2."""


def test_no_wave_is_nearly_empty() -> None:
    """The mean program's work by the busiest one's, on A100, H100 and B200."""
    below, table = {}, []
    for (name, (I, O, T)), B, processors in itertools.product(
        LAYERS.items(), (8, 16, 32), (132, 108, 148)
    ):
        tiles = -(-I // 128) * -(-O // 128)
        plan = balance(tiles, B, processors, T // 64)
        filled = tiles * B / processors / plan.most
        table.append(f"{name:12} B {B:3} on {processors}: {filled:.2f}, {plan.unfinished} parts")
        if filled < 0.9:
            below[name, B, processors] = round(filled, 2)
        assert plan.unfinished * 128 * 128 * 4 <= 20 << 20
    print("\n".join(table))
    assert below == FEW_TILES | NOT_WORTH_CUTTING
    assert balance(108, 16, 108).unfinished == 0, "108 tiles fill a wave of 108 programs"
    assert balance(144, 1, 132).unfinished == 0 and balance(144, 1, 132).most == 2


def test_tiles_stay_whole_where_parts_cost_more() -> None:
    assert balance(108, 8, 132, blocks=32).unfinished
    assert not balance(108, 8, 132, blocks=16).unfinished


def test_every_sharing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles, few and many samples, on devices of few and many programs."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    for B, programs in itertools.product((1, 2, 5), (1, 4, 5, 7, 13, 40)):
        x, dy = torch.randn(B, 5, 32, device=device), torch.randn(B, 5, 48, device=device)
        dw, rows = torch.empty(48, 32, device=device), torch.empty(1, B + 2, device=device)
        linear_wgrad.fused(x, dy, dw, rows, SMALL, programs=programs)
        assert_wgrad(dw, rows[0, :-1], loop(x, dy))
        assert balance(6, B, programs, 1).programs <= programs


@pytest.mark.parametrize("programs, height", [(3, 16), (9, 4), (40, 1)])
def test_a_tile_of_many_parts(
    programs: int, height: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of two tiles are added by more programs, several at a time."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    x, dy = torch.randn(37, 2, 15, device=device), torch.randn(37, 2, 20, device=device)
    dw, rows = torch.ones(20, 15, device=device), torch.empty(1, 39, device=device)
    linear_wgrad.fused(x, dy, dw, rows, SMALL, programs=programs, add=True)
    want, sqnorm_B1 = loop(x, dy)
    assert_wgrad(dw, rows[0, :-1], (want + 1, sqnorm_B1))
    squares = linear_plan.Squares(20, 15, SMALL, balance(2, 37, programs, 1))
    how = linear_plan.plan((37, 2), squares, None, processors=programs)
    constants = how.launch.values[len(linear_plan.FIXED) :]
    assert dict(zip(linear_plan.CONSTANTS, constants))["HEIGHT"] == height


BIASES = {
    "one long sample": (1, 500, 300),
    "chunks of tokens": (3, 300, 130),
    "a chunk that is shorter": (2, 513, 24),
    "many samples": (27, 3, 20),
    "many samples, several columns": (15, 9, 260),
    "more samples than a program adds": (260, 2, 150),
    "one token": (5, 1, 40),
    "one sample of one token": (1, 1, 200),
    "many of one token": (150, 1, 150),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES.keys())
def test_bias(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Beside a weight, alone, and of rows that begin anywhere."""
    B, T, N = shape
    scale = torch.logspace(-2, 0, B, device=device)[:, None, None]
    wide = (torch.randn(B, T, N + 3, device=device) * scale).to(dtype)
    x = torch.randn(B, T, 16, device=device).to(dtype)
    # The other two pairs run in the other dtype.
    pairs = (wide[..., :N].contiguous(), dtype == F32), (wide[..., 3:], dtype == BF16)
    for dy, weight in pairs:
        _, db, rows, _ = KERNELS.linear_wgrad(x, dy, weight, True, False, F32)
        assert_wgrad(db[:, None], rows[-1, :-1], loop(torch.ones_like(x[..., :1]), dy))
        assert (rows[:, -1] == 1.0).all()


@pytest.mark.parametrize("sizes", [(3, 4, 0, 5), (3, 4, 5, 0), (3, 0, 4, 5), (0, 3, 4, 5)], ids=str)
def test_layers_without_numbers(sizes: tuple[int, ...], device: str) -> None:
    """The bias has its own rows, also where the weight has no column."""
    B, T, I, O = sizes
    x, dy = torch.randn(B, T, I, device=device), torch.randn(B, T, O, device=device)
    arguments = x, dy, True, True, False, torch.float32
    found, want = (Signed(m).linear_wgrad(*arguments) for m in (operators, reference))
    for ours, theirs in zip(found, want):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 3])
def test_a_bias_of_strided_rows(T: int, device: str) -> None:
    """A dy whose inner stride is not one is copied, and is dy still."""
    x, dy = torch.randn(4, T, 6, device=device), torch.randn(4, T, 10, device=device)[..., ::2]
    dw, db = torch.empty(5, 6, device=device), torch.empty(5, device=device)
    rows = torch.empty(2, 6, device=device)
    outer.outer_wgrad(x, dy, dw, rows, linear_plan.Bias(dy, db))
    want = Signed(reference).linear_wgrad(x, dy, True, True, False, torch.float32)
    for ours, theirs in zip((dw, db, rows), want):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("T", [1, 4])
def test_squares_before_rounding(T: int, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Half of these gradients vanish in float16."""
    x = (torch.randn(3, T, 70, device=device) * 1e-4).to(dtypes[0])
    dy = (torch.randn(3, T, 90, device=device) * 3e-4).to(dtypes[0])
    dw = torch.empty(90, 70, dtype=dtypes[1], device=device)
    rows = torch.empty(1, 5, device=device)
    outer.outer_wgrad(x, dy, dw, rows, route="gram" if T > 1 else "closed")
    want, norms = loop(x, dy)
    torch.testing.assert_close(dw, want.to(dtypes[1]), rtol=1e-3, atol=6e-8)
    torch.testing.assert_close(rows[0, :-1].double(), norms, rtol=1e-5, atol=0)


def test_pieces_of_a_bias() -> None:
    """Few samples are cut into chunks of tokens, so that B = 1 fills the device. No program adds
    more samples than the last one of their columns adds at a time.
    """
    assert linear_plan.share(1, 4096, 6, 132) == (32, 1)
    assert linear_plan.share(16, 1024, 6, 132) == (4, 1)
    assert linear_plan.share(16, 1024, 24, 132) == (1, 1)
    assert linear_plan.share(4096, 16, 32, 132) == (1, 128)
    assert linear_plan.share(4096, 2, 393, 132) == (1, 128)
    sizes = (1, 3, 7, 100, 9999), (1, 50, 129, 5000), (1, 24, 400)
    for B, T, columns in itertools.product(*sizes):
        chunks, each = linear_plan.share(B, T, columns, 132)
        assert chunks & (chunks - 1) == 0 and (chunks == 1 or each == 1)
        assert chunks * B <= 128 or chunks == 1
        assert each <= linear_plan.BLOCK_N


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Programs in the interpreter run by the order that it is set to."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original, state = builder.set_grid_idx, {"of": lambda n: range(n)}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        original(list(state["of"](builder.grid_dim[0]))[x], y, z)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    yield state


@interpreted
@pytest.mark.parametrize(
    "shape", [(5, 300, 40, 300), (3, 9, 300, 512), (40, 1, 40, 300), (30, 2, 40, 300)], ids=str
)
def test_whoever_comes_last(
    shape: tuple[int, int, int, int], order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits in any order of programs."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    B, T, I, O = shape
    x, dy = torch.randn(B, T, I), torch.randn(B, T, O)
    found = []
    for of in (range, lambda n: reversed(range(n)), lambda n: [*range(1, n), 0]):
        order["of"] = of
        found.append(KERNELS.linear_wgrad(x, dy, True, True, False, F32))
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one))


@interpreted
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_launches(bias: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(4, 70, 40), torch.randn(4, 70, 24)
    shapes = {"fused": 2, "gram": 3, "closed": 3}
    for route, launches in shapes.items():
        monkeypatch.setattr(outer, "linear_route", lambda *args, route=route: route)
        T = {"fused": 70, "gram": 9, "closed": 1}[route]
        short = x[:, :T].contiguous(), dy[:, :T].contiguous()
        call = lambda short=short: KERNELS.linear_wgrad(*short, True, bias, transposed, F32)
        assert count_launches(call) == launches, route
    if bias:
        assert count_launches(lambda: KERNELS.linear_wgrad(x, dy, False, True, False, F32)) == 2
    monkeypatch.setattr(outer, "linear_route", lambda *args: "fused")
    strided = torch.randn(4, 24, 70).mT  # one copy more
    assert (
        count_launches(lambda: KERNELS.linear_wgrad(x, strided, True, bias, transposed, F32)) == 3
    )
