# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel against loops over single samples in float64, and what it leaves to PyTorch."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from cpu_cases import (
    EDGES,
    SETS,
    assert_agrees,
    assert_segments,
    drawn,
    linear,
    single_samples,
)
from layouts import LAYOUTS
from torch import Tensor

import gnsfast
from gnsfast import reference
from gnsfast.ops import backends, cpu
from gnsfast.signatures import LinearWgrad

BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason=cpu.missing() or "the kernel is there")


def assert_right(a: LinearWgrad) -> None:
    assert cpu.takes(a.x_BTI, a.dy_BTO, a.samples)
    dw, db, rows = assert_agrees(a)
    if a.x_BTI.dtype == BF16:
        half_dw, half_db, half_rows, _ = cpu.linear_wgrad(a._replace(dtype=BF16))
        assert torch.equal(half_dw, dw.bfloat16()) and torch.equal(half_db, db.bfloat16())
        assert torch.equal(half_rows, rows)


@pytest.mark.parametrize("T", [1, 2, 5, 40, 1025, 2100])
@pytest.mark.parametrize(("O", "I"), EDGES)
def test_agrees_with_single_samples(T: int, O: int, I: int, dtype: torch.dtype) -> None:
    if T > 2000 and dtype == BF16:
        return  # the model of AMX would take minutes
    B = 2 if T > 1000 else 5
    assert_right(linear(*drawn(dtype, (B, T, I), (B, T, O))))
    assert_right(linear(*drawn(dtype, (1, T, I), (1, T, O)), bias=False))


@pytest.mark.parametrize("T", [1, 40, 2100])
def test_one_number(T: int, instructions: str) -> None:
    """Its terms cancel, so it is as good as the sum of their absolute values."""
    x, dy = torch.randn(3, T, 1), torch.randn(3, T, 1)
    rows = cpu.linear_wgrad(linear(x, dy))[2]
    for row, (g_B11, terms) in zip(rows, zip(single_samples(linear(x, dy)), (x * dy, dy))):
        within_B = 1e-6 * terms.abs().sum((1, 2)).square()
        assert ((row[:3] - g_B11.view(3).square()).abs() <= within_B).all()


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("T", [1000, 1 << 16])
def test_long_samples_of_one_sign(T: int, segments: bool, instructions: str) -> None:
    """Nothing cancels, and all roundings of a constant feature have one sign: one float32 sum over
    2^16 tokens would be 2e-4 off.
    """
    x, dy = torch.rand(1, T, 40), torch.full((1, T, 20), 0.3)
    x[..., 0] = 1.1
    want = dy[0].double().T @ x[0].double()
    a = linear(x, dy)
    if segments:
        a = a._replace(x_BTI=x[0], dy_BTO=dy[0], starts=torch.tensor([0, T]))
    dw, _, rows, _ = cpu.linear_wgrad(a)
    torch.testing.assert_close(dw.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(dw[:, 1:].double(), want[:, 1:], rtol=2e-6, atol=0)
    torch.testing.assert_close(rows[0, 0].double(), dw.double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("T", [1, 5, 600])
@pytest.mark.parametrize(("O", "I"), [(1, 100), (100, 1), (300, 7), (7, 300), (200, 16)])
def test_thin_weights(O: int, I: int, T: int, dtype: torch.dtype) -> None:
    """The thin side goes to the left of the kernel; one panel of it reads the other unpacked."""
    for transposed in (False, True):
        x, dy = torch.rand(4, T, I) + 0.1, torch.rand(4, T, O)
        assert_agrees(linear(x.to(dtype), dy.to(dtype), transposed=transposed))


def test_no_rows_in_any_segment(instructions: str) -> None:
    a = linear(torch.randn(50, 40), torch.randn(50, 20))
    a = a._replace(starts=torch.tensor([5, 5, 5]))
    dw, db, rows, _ = cpu.linear_wgrad(a)
    assert not dw.any() and not db.any() and not rows[:, :-1].any()


@pytest.mark.parametrize("gram", [True, False], ids=["Gram", "tiles"])
@pytest.mark.parametrize("T", [2, 5, 16, 33, 70])
def test_short_samples(
    T: int, gram: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "takes_gram", lambda *_: gram)
    assert_right(linear(*drawn(dtype, (70, T, 33), (70, T, 20))))
    assert_right(linear(*drawn(dtype, (9, T, 64), (9, T, 96))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [33, 5000])
def test_products_of_rows(K: int, dtype: torch.dtype, instructions: str) -> None:
    x, dy = torch.randn(3, 6, K).to(dtype), torch.randn(3, 6, 20).to(dtype)
    want_B = single_samples(linear(x, dy))[0].flatten(1).square().sum(1)
    for left, right in ((x, dy), (dy, x)):
        found_B = cpu._gram_sqnorms(instructions, left, right)
        torch.testing.assert_close(found_B, want_B, rtol=1e-6, atol=0)


def test_terms_that_cancel(dtype: torch.dtype) -> None:
    """Tokens alike and a dy that sums to zero: the products of rows lose digits."""
    apart, rtol = (1e-3, 2e-6) if dtype == torch.float32 else (1e-2, 1e-6)
    x = (torch.randn(3, 1, 64) + apart * torch.randn(3, 8, 64)).to(dtype)
    dy = torch.randn(3, 8, 96)
    dy = (dy - dy.mean(1, keepdim=True)).to(dtype)
    want_B = single_samples(linear(x, dy))[0].flatten(1).square().sum(1)
    assert (want_B < 1e-2 * (x.square().sum((1, 2)) * dy.square().sum((1, 2)))).all()
    found_B = cpu._gram_sqnorms(cpu.for_bfloat16() or cpu.instructions(), dy, x)
    torch.testing.assert_close(found_B, want_B, rtol=rtol, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, T: int, transposed: bool, dtype: torch.dtype) -> None:
    x, dy = drawn(dtype, (3, T, 40), (3, T, 20))
    assert_right(linear(LAYOUTS[layout](3, T, 40, dtype=dtype), dy, transposed=transposed))
    assert_right(linear(x, LAYOUTS[layout](3, T, 20, dtype=dtype), transposed=transposed))


def test_bfloat16(instructions: str) -> None:
    """By the kernels for float32."""
    assert_right(linear(*drawn(BF16, (3, 50, 40), (3, 50, 20))))


@pytest.mark.parametrize("experts", [0, 2])
def test_float16(experts: int, instructions: str) -> None:
    """It is read as float32, as the reference does."""
    x, dy = torch.randn(3, 50, 40).half(), torch.randn(3, 50, 20).half()
    a = linear(x, dy)._replace(dtype=torch.float16)
    if experts:
        starts = torch.tensor([0, 40, 80, 120, 150])
        a = a._replace(x_BTI=x[0].repeat(3, 1), dy_BTO=dy[0].repeat(3, 1))
        a = a._replace(starts=starts, experts=experts)
    else:
        assert_right(a._replace(dtype=torch.float32))
    for ours, floats in zip(
        cpu.linear_wgrad(a),
        cpu.linear_wgrad(a._replace(x_BTI=a.x_BTI.float(), dy_BTO=a.dy_BTO.float())),
    ):
        assert torch.equal(ours, floats)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [0, 3])
def test_segments(experts: int, index: torch.dtype, dtype: torch.dtype) -> None:
    a, dw = assert_segments(experts, dtype, index)
    half_dw = cpu.linear_wgrad(a._replace(dtype=BF16))[0]
    assert torch.equal(half_dw, dw.bfloat16())


def test_experts_of_few_rows_stay_in_torch() -> None:
    """What counts are the rows of a segment, of which there are experts times samples."""
    x, dy = torch.randn(64, 40), torch.randn(64, 20)
    assert cpu.takes(x, dy, samples=2, segments=2)
    assert not cpu.takes(x, dy, samples=2, segments=2 * 16)


def test_infinities_stay_in_their_sample(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """33 columns leave 31 of a tile's empty, and infinity times zero is no number."""
    for gram in (False, True):
        monkeypatch.setattr(cpu, "takes_gram", lambda *_, gram=gram: gram)
        x, dy = drawn(dtype, (3, 5, 33), (3, 5, 20))
        dy[1, 2, 3] = float("inf")
        rows = cpu.linear_wgrad(linear(x, dy))[2]
        stays = torch.tensor([False, True, False, True, False])
        assert torch.equal(~rows[0].isfinite(), stays)
        if not gram:
            assert torch.equal(rows[0].isinf(), stays) and torch.equal(rows[1].isinf(), stays)


def test_same_bits(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Two runs, and another number of threads: dW and db have the same bits, and norms differ in
    the last one at most.
    """
    T = 300 if dtype == BF16 else 700
    a = linear(*drawn(dtype, (3, T, 300), (3, T, 500)))
    found = []
    for n in (1, 1, 2, 3):
        threads(n)
        found.append(cpu.linear_wgrad(a)[:3])
    for dw, db, rows in found[1:]:
        assert torch.equal(dw, found[0][0]) and torch.equal(db, found[0][1])
        torch.testing.assert_close(rows, found[0][2], rtol=1.2e-7, atol=0)
    assert torch.equal(found[1][2], found[0][2])


@pytest.mark.parametrize(
    "change",
    [
        {"x_BTI": torch.randn(3, 5, 4).double(), "dy_BTO": torch.randn(3, 5, 2).double()},
        {"dy_BTO": torch.randn(3, 5, 2).bfloat16()},
        {"x_BTI": torch.randn(3, 5, 4, dtype=torch.complex64).conj().imag},
        {"dy_BTO": torch._efficientzerotensor((3, 5, 2))},
        {"x_BTI": torch.randn(3, 1, 40), "dy_BTO": torch.randn(3, 1, 2)},
        {"x_BTI": torch.randn(3, 0, 4), "dy_BTO": torch.randn(3, 0, 2)},
        {"x_BTI": torch.randn(0, 5, 4), "dy_BTO": torch.randn(0, 5, 2)},
    ],
    ids=[
        "float64",
        "two dtypes",
        "lazy minus",
        "lazy zeros",
        "thin",
        "no tokens",
        "no samples",
    ],
)
def test_what_the_reference_computes(change: dict[str, Tensor]) -> None:
    a = linear(torch.randn(3, 5, 4), torch.randn(3, 5, 2))._replace(**change)
    assert not cpu.takes(a.x_BTI, a.dy_BTO, a.samples)
    if a.x_BTI.dtype == a.dy_BTO.dtype:
        for ours, torchs in zip(cpu.linear_wgrad(a), reference.linear_wgrad(a)):
            assert torch.equal(ours, torchs)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, "avx1024", "no kernel avx1024"),
        (1, 0, "null pointer"),
        (6, (3, 0, 20, 40), "every size must be"),
        (5, (False, True), "amx alone writes bfloat16"),
    ],
)
def test_wrong_calls(place: int, value: object, words: str) -> None:
    x, dy = torch.randn(3, 5, 40), torch.randn(3, 5, 20)
    dw, rows = torch.empty(20, 40), torch.empty(1, 5)
    call = [SETS[0], dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride(), (False, False)]
    call += [(3, 5, 20, 40), 0, 0, dw.data_ptr(), 0, False, rows.data_ptr(), 5, 1]
    cpu._module().linear_wgrad(*call)
    call[place] = value
    with pytest.raises(ValueError, match=words):
        cpu._module().linear_wgrad(*call)


def test_starts_that_decrease_or_leave_the_rows() -> None:
    for starts in ([0, 40, 20, 50], [0, 20, 40, 60], [-1, 20, 40, 50]):
        a = linear(torch.randn(50, 4), torch.randn(50, 2))._replace(starts=torch.tensor(starts))
        with pytest.raises(ValueError, match="starts must be numbers of rows that do not decrease"):
            cpu.linear_wgrad(a)


def test_it_runs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    seen = []
    layer = gnsfast.Linear(40, 20)
    with gnsfast.per_sample_sqnorms(layer, 3):  # it learns the table
        layer(torch.randn(3, 5, 40)).sum().backward()
    kernel = cpu.linear_wgrad
    monkeypatch.setattr(cpu, "linear_wgrad", lambda a: seen.append(a) or kernel(a))
    for backend, calls in (("", 1), ("reference", 1), ("cpu", 2)):
        monkeypatch.setenv(backends.VARIABLE, backend)
        with gnsfast.per_sample_sqnorms(layer, 3):
            layer(torch.randn(3, 5, 40)).sum().backward()
        assert len(seen) == calls


@pytest.mark.second
def test_where_it_is_missing() -> None:
    """The reference runs; who asks for the kernel by name is told what to do."""
    code = """
import importlib.util, sys, torch
found = importlib.util.find_spec
hidden = lambda name, *rest: None if name == "gnsfast._cpu" else found(name, *rest)
importlib.util.find_spec = hidden
import gnsfast
print(gnsfast.ops.backends.backend("cpu"))
layer = gnsfast.Linear(5, 3)
with gnsfast.per_sample_sqnorms(layer, 2):
    layer(torch.randn(2, 5)).sum().backward()
"""
    environment = {k: v for k, v in os.environ.items() if k != backends.VARIABLE}
    run = lambda **more: subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | more
    )
    done = run(GNSFAST_BACKEND="cpu")
    last = done.stderr.strip().splitlines()[-1]
    assert "RuntimeError: gnsfast::linear_wgrad has no kernel for this cpu tensor" in last
    assert "GNSFAST_CPU=1 pip install" in last and "GNSFAST_BACKEND=reference" in last
    done = run()
    assert done.returncode == 0 and done.stdout == "reference\n", done.stderr


@pytest.mark.second
def test_threads_are_those_of_torch() -> None:
    """None is added to those that torch has, and a layer that is too small for all of them ends
    none: torch would start them anew.
    """
    code = """
import os, torch, gnsfast
threads = lambda: set(os.listdir("/proc/self/task"))
torch.set_num_threads(8)
many = torch.randn(1 << 22)
x = torch.randn(4, 64, 128)
layer = gnsfast.Linear(128, 128)
layer(x).sum().backward()
before = [threads() for _ in range(2) if many.add_(1) is not None][-1]
for _ in range(3):
    with gnsfast.per_sample_sqnorms(layer, 4):
        layer(x).sum().backward()
    many.add_(1)
print(len(threads() ^ before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0\n", done.stdout + done.stderr
