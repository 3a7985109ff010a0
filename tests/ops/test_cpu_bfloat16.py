# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels for bfloat16 alone. Those for AMX run on a processor with AMX, or on the model of
its instructions in ``csrc/cpu/amx_model.h``.
"""

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_cases import (
    EDGES,
    SETS,
    assert_agrees,
    assert_metric_rows,
    assert_segments,
    linear,
    single_samples,
    with_metric,
)
from layouts import LAYOUTS
from torch import Tensor

from gnsfast.ops import cpu
from gnsfast.signatures import InProjectionWgrad, LinearWgrad

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"
FLAGS = "-std=c++17 -O1 -ffp-contract=fast -fno-math-errno -Wno-psabi -fPIC -fvisibility=hidden"

pytestmark = [
    pytest.mark.source,
    pytest.mark.skipif("avx512" not in SETS, reason="no AVX-512"),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``gnsfast._cpu`` with the model of AMX."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    pybind11 = pytest.importorskip("pybind11")
    folder = tmp_path_factory.mktemp("model")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    sources = [path for path in CSRC.glob("*.cpp") if path.name != "check.cpp"]
    compile_all = [
        subprocess.Popen(
            ["g++", *FLAGS.split(), "-DGNSFAST_BFLOAT16", "-DGNSFAST_AMX_MODEL", *includes]
            + ["-c", str(path), "-o", str(folder / f"{path.stem}.o")]
        )
        for path in sources
    ]
    assert not any([each.wait() for each in compile_all])
    library = folder / "_cpu.so"
    objects = [str(folder / f"{path.stem}.o") for path in sources]
    subprocess.run(["g++", "-shared", "-o", str(library), *objects], check=True)
    spec = importlib.util.spec_from_file_location("model._cpu", library)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.bfloat16_kernels()[0] == "amx"
    return found


@pytest.fixture(autouse=True, params=[pytest.param("amx", marks=pytest.mark.slow), "avx512_bf16"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name not in cpu._module().bfloat16_kernels():
        if name != "amx":
            pytest.skip(f"no {name}")
        model = request.getfixturevalue("model")
        monkeypatch.setattr(cpu, "_module", lambda: model)
    monkeypatch.setattr(cpu, "instructions", lambda: "avx512")
    monkeypatch.setattr(cpu, "for_bfloat16", lambda: name)
    return name


def halves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def assert_right(a: LinearWgrad) -> None:
    assert cpu.takes(a.x_BTI, a.dy_BTO, a.samples)
    dw, db, rows = assert_agrees(a)
    half_dw, half_db, half_rows, _ = cpu.linear_wgrad(a._replace(dtype=torch.bfloat16))
    assert torch.equal(half_dw, dw.bfloat16()) and torch.equal(half_db, db.bfloat16())
    assert torch.equal(half_rows, rows)


@pytest.mark.parametrize("T", [1, 2, 5, 40, 1025])
@pytest.mark.parametrize(("O", "I"), EDGES)
def test_agrees_with_single_samples(T: int, O: int, I: int) -> None:
    B = 2 if T > 1000 else 5
    assert_right(linear(*halves((B, T, I), (B, T, O))))
    assert_right(linear(*halves((1, T, I), (1, T, O)), bias=False))


@pytest.mark.parametrize("gram", [True, False], ids=["rows' products", "tiles"])
@pytest.mark.parametrize("T", [2, 5, 16, 33, 70])
def test_short_samples(T: int, gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "takes_gram", lambda *_: gram)
    assert_right(linear(*halves((7, T, 33), (7, T, 20))))
    assert_right(linear(*halves((9, T, 64), (9, T, 96))))


def test_terms_that_cancel(kernel: str) -> None:
    """Tokens alike and a dy that sums to zero: the products of rows lose all digits."""
    x = (torch.randn(3, 1, 64) + 1e-2 * torch.randn(3, 8, 64)).bfloat16()
    dy = torch.randn(3, 8, 96)
    dy = (dy - dy.mean(1, keepdim=True)).bfloat16()
    sqnorm_B = single_samples(linear(x, dy))[0].flatten(1).square().sum(1)
    found_B = cpu._gram_sqnorms(kernel, dy, x)
    torch.testing.assert_close(found_B, sqnorm_B, rtol=1e-6, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, T: int, transposed: bool) -> None:
    x, dy = halves((3, T, 40), (3, T, 20))
    assert_right(linear(LAYOUTS[layout](3, T, 40).bfloat16(), dy, transposed=transposed))
    assert_right(linear(x, LAYOUTS[layout](3, T, 20).bfloat16(), transposed=transposed))


@pytest.mark.parametrize(("O", "I"), [(1, 100), (100, 1), (300, 7), (7, 300)])
@pytest.mark.parametrize("T", [5, 600])
def test_thin_weights(O: int, I: int, T: int) -> None:
    for transposed in (False, True):
        assert_agrees(linear(*halves((4, T, I), (4, T, O)), transposed=transposed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [3, 1100])
def test_metric(T: int, transposed: bool) -> None:
    assert_metric_rows(with_metric(linear(*halves((3, T, 70), (3, T, 45)), transposed=transposed)))


@pytest.mark.parametrize("experts", [0, 3])
def test_segments(experts: int) -> None:
    a, dw = assert_segments(experts, torch.bfloat16)
    half_dw = cpu.linear_wgrad(a._replace(dtype=torch.bfloat16))[0]
    assert torch.equal(half_dw, dw.bfloat16())


def test_in_projection() -> None:
    xs = halves(*[(3, 50, 40)] * 3)
    dys = halves((3, 50, 20), (3, 50, 8), (3, 50, 8))
    for dtype in (torch.float32, torch.bfloat16):
        a = InProjectionWgrad(xs, dys, True, True, dtype)
        dw, db, rows = cpu.in_projection_wgrad(a)
        assert dw.dtype == db.dtype == dtype
        for k, (x, dy) in enumerate(zip(xs, dys)):
            own = slice(sum(dy.shape[2] for dy in dys[:k]), sum(dy.shape[2] for dy in dys[: k + 1]))
            want = single_samples(linear(x, dy))[0]
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(
                dw[own].double(), want.sum(0), rtol=tolerance, atol=1e-5 * want.std().item()
            )
            torch.testing.assert_close(
                rows[k, :3].double(), want.flatten(1).square().sum(1), rtol=1e-6, atol=0
            )


def test_in_projection_of_two_dtypes() -> None:
    x, dy = halves((3, 50, 40), (3, 50, 20))
    xs, dys = [x, x.float()], [dy, dy.float()]
    dw, _, rows = cpu.in_projection_wgrad(InProjectionWgrad(xs, dys, True, False, torch.bfloat16))
    assert dw.dtype == torch.bfloat16
    torch.testing.assert_close(dw[:20], dw[20:])  # one rounding apart
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=0)


def test_infinities_stay_in_their_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 columns leave 31 of a tile's empty, and infinity times zero is no number."""
    for gram in (False, True):
        monkeypatch.setattr(cpu, "takes_gram", lambda *_, gram=gram: gram)
        x, dy = halves((3, 5, 33), (3, 5, 20))
        dy[1, 2, 3] = float("inf")
        rows = cpu.linear_wgrad(linear(x, dy))[2]
        stays = torch.tensor([False, True, False, True, False])
        assert torch.equal(~rows[0].isfinite(), stays)
        if not gram:
            assert torch.equal(rows[0].isinf(), stays) and torch.equal(rows[1].isinf(), stays)


def test_same_bits(threads: Callable[[int], None]) -> None:
    a = linear(*halves((3, 300, 300), (3, 300, 500)))
    found = []
    for n in (1, 1, 2, 3):
        threads(n)
        found.append(cpu.linear_wgrad(a)[:3])
    for dw, db, rows in found[1:]:
        assert torch.equal(dw, found[0][0]) and torch.equal(db, found[0][1])
        torch.testing.assert_close(rows, found[0][2], rtol=1.2e-7, atol=0)


@pytest.mark.parametrize(("B", "T"), [(64, 1), (16, 16), (2, 600)])
def test_errors_are_torchs(B: int, T: int) -> None:
    """At most twice those of torch's own product, whose result is rounded to bfloat16 too."""
    x, dy = halves((B, T, 96), (B, T, 160))
    want = single_samples(linear(x, dy))[0].sum(0)
    error = lambda dw: (dw.double() - want).norm() / want.norm()
    ours = cpu.linear_wgrad(linear(x, dy)._replace(dtype=torch.bfloat16))[0]
    assert error(ours) <= 2 * error(dy.flatten(0, 1).T @ x.flatten(0, 1))


def test_wrong_calls(kernel: str) -> None:
    x, dy = torch.randn(3, 5, 40), torch.randn(3, 5, 20)
    wgrad = cpu._Wgrad(dy, x, torch.empty(20, 40), None, torch.empty(1, 5))
    with pytest.raises(ValueError, match=f"no kernel {kernel}"):
        cpu._tiles(kernel, wgrad)
    with pytest.raises(ValueError, match="kernel avx512_bf16|amx needs"):
        cpu._gram_sqnorms(kernel, dy, x)
    sides = (dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride())
    with pytest.raises(ValueError, match="null pointer"):
        cpu._module().gram_sqnorms(kernel, *sides, True, (3, 5, 20, 40), 0, 0, 1)
