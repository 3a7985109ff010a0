# SPDX-License-Identifier: Apache-2.0
"""Counts that may not grow: the instructions that gnsfast adds on a CPU, and how a budget is
compared. The kernels' own are compared where they are compiled: ``test_triton_compile.py``,
``test_cuda_binary.py``.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import budget, kernel_tables  # noqa: E402
from benchmarks.budget import Budget  # noqa: E402
from benchmarks.budgets import instructions, launches  # noqa: E402
from gnsfast import ops  # noqa: E402
from gnsfast.signatures import LinearWgrad  # noqa: E402

pytestmark = pytest.mark.source

NAMES = [
    "instructions",
    "launches",
    "cuda",
    *(f"triton-sm_{each}" for each in kernel_tables.CAPABILITIES),
]
THEN = Budget(
    {"torch": "2.0", "python": "3.11", "compiler": "GCC 12"},
    {
        "gemm": {"registers": 128, "spilled": 0, "shared": 1000, "blocks": 2, "instructions": 500},
        "step": {"plain": 1000, "host": 500, "torch": 300, "kernels": 200},
    },
    "built here",
)


@pytest.mark.slow
def test_instructions() -> None:
    """No more than in the budget; renewing it is a line in the change that needs more. What cannot
    be compared here is a warning: the end of a run shows those.
    """
    if why := instructions.missing() or budget.unlike(
        budget.read("instructions"), instructions.here({})
    ):
        warnings.warn(f"the budget instructions is not compared: {why}", stacklevel=1)
        pytest.skip(why)
    if why := budget.hold("instructions", instructions.count()):
        warnings.warn(why, stacklevel=1)


@pytest.mark.parametrize(
    ("library", "function", "part"),
    [
        ("/a/libtorch_cpu.so", "at::native::add_kernel(at::TensorIteratorBase&)", "torch"),
        ("/a/libtorch_cpu.so", "mkl_blas_avx2_sgemm_kernel_0", "products"),
        ("/a/libtorch_cpu.so", "0x000000000cdbb2c0", "products"),
        ("/a/libtorch_cpu.so", "dnnl::impl::primitive_hashing::get_md_hash()", "products"),
        ("???", "0x0000000005b1c000", "products"),
        ("/a/gnsfast/_cpu.cpython-311-x86_64-linux-gnu.so", "0x0000000000085f30", "kernels"),
        ("/a/libpython3.11.so.1.0", "_PyEval_EvalFrameDefault'2", "host"),
        ("/a/libtorch_python.so", "THPVariable_Wrap", "host"),
        ("/a/libc.so.6", "malloc", "host"),
    ],
)
def test_who_executes_a_function(library: str, function: str, part: str) -> None:
    """A library's product is nobody's: which one it takes depends on the processor."""
    assert instructions.part_of(library, function) == part


CALLGRIND = """events: Ir
summary: 65

ob=/a/libpython3.11.so.1.0
fl=???
fn=_PyEval_EvalFrameDefault'2
0 40
cob=/a/libtorch_cpu.so
cfi=???
cfn=mkl_blas_sgemm
calls=3 0
0 20

ob=/a/libtorch_cpu.so
fl=???
fn=mkl_blas_sgemm
0 20
fn=at::add
0 5
totals: 65
"""


def test_what_is_called_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(CALLGRIND)
    assert instructions.by_part(tmp_path / "out") == {"host": 40, "products": 20, "torch": 5}
    (tmp_path / "out").write_text(CALLGRIND.replace("summary: 65", "summary: 66"))
    with pytest.raises(AssertionError, match="not read in full"):
        instructions.by_part(tmp_path / "out")


def test_launches() -> None:
    """No more than in the budget, for a step of GPT-2's layers and of a perceptron."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    if why := budget.hold("launches", launches.count()):
        pytest.skip(why)


def test_what_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator counts once, a view not at all, what an operator of gnsfast does one by one."""
    monkeypatch.setenv("GNSFAST_BACKEND", "reference")
    counter, x, dy = launches.Launches(), torch.randn(3, 4, 5), torch.randn(3, 4, 2)
    assert counter.of(lambda: (x[0].T + 1).sum()) == 2
    assert counter.of(lambda: torch.empty_like(x).view(-1).expand(2, 60)) == 0
    assert counter.of(lambda: x.clone().add_(1)) == 2
    a = LinearWgrad(x, dy, True, False, False, torch.float32)
    plain = counter.of(lambda: dy.flatten(0, 1).T @ x.flatten(0, 1))
    assert counter.of(lambda: ops.linear_wgrad(a)) > plain == 1


@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_of_the_pinned_versions(name: str) -> None:
    pins = Path(__file__).parents[2] / "constraints.txt"
    pinned = dict(re.findall(r"^(torch|triton)==(\S+)", pins.read_text(), re.MULTILINE))
    for package, version in budget.read(name).versions.items():
        public = version.partition("+")[0]
        assert pinned.get(package, public) == public, (
            f"constraints.txt pins {package} {pinned[package]}, the budget {name} was counted "
            f"with {version}: {budget.renew(name)}"
        )


def test_every_case_has_a_budget() -> None:
    assert list(budget.read("instructions").rows) == list(instructions.CASES)


@pytest.mark.parametrize(
    ("name", "column", "value", "said"),
    [
        ("gemm", "registers", 136, ""),
        ("gemm", "registers", 137, "gemm: registers 128 -> 137 (+7.0%)"),
        ("gemm", "spilled", 4, "gemm: spilled 0 -> 4"),
        ("gemm", "shared", 1051, "gemm: shared 1,000 -> 1,051 (+5.1%)"),
        ("gemm", "blocks", 1, "gemm: blocks 2 -> 1 (-50.0%)"),
        ("gemm", "blocks", 3, ""),
        ("gemm", "instructions", 525, ""),
        ("gemm", "instructions", 526, "gemm: instructions 500 -> 526 (+5.2%)"),
        ("gemm", "instructions", 300, ""),
        ("step", "host", 510, ""),
        ("step", "host", 511, "step: host 500 -> 511 (+2.2%)"),
        ("step", "torch", 307, "step: torch 300 -> 307 (+2.3%)"),
        ("step", "kernels", 203, "step: kernels 200 -> 203 (+1.5%)"),
    ],
)
def test_growth_beyond_the_margin(name: str, column: str, value: int, said: str) -> None:
    rows = THEN.rows | {name: THEN.rows[name] | {column: value}}
    found = budget.complaints(THEN, Budget(THEN.versions, rows, THEN.build))
    assert found == ([said] if said else [])


def test_rows_without_a_counterpart() -> None:
    fewer = Budget(THEN.versions, {"gemm": THEN.rows["gemm"]})
    assert budget.complaints(THEN, fewer) == ["step: only in the budget"]
    assert budget.complaints(THEN, fewer, whole=False) == []
    assert budget.complaints(fewer, THEN) == ["step: not in the budget"]


def test_other_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of Python and of the compiler those columns alone that depend on them."""
    monkeypatch.setattr(budget, "FOLDER", tmp_path)
    THEN.write("step")
    assert budget.read("step") == THEN and budget.hold("step", THEN) == ""
    newer = Budget(THEN.versions | {"torch": "2.1"}, THEN.rows)
    assert "counted with torch 2.0, but here it is 2.1" in budget.hold("step", newer)
    for key, version, column in (("python", "3.12", "host"), ("compiler", "GCC 13", "kernels")):
        other = Budget(THEN.versions | {key: version}, with_step(**{column: 900}))
        assert f"{column}: counted with {key}" in budget.hold("step", other)
        with pytest.raises(AssertionError, match="step: torch 300 -> 900"):
            budget.hold("step", Budget(other.versions, with_step(torch=900)))
    with pytest.raises(AssertionError, match="--write --only step"):
        budget.hold("step", Budget(THEN.versions, with_step(host=900)))


def test_the_host_is_compared_in_proportion_to_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another build of Python takes more instructions for all that it does."""
    monkeypatch.setattr(budget, "FOLDER", tmp_path)
    THEN.write("step")
    assert budget.hold("step", Budget(THEN.versions, with_step(plain=1040, host=530))) == ""
    with pytest.raises(AssertionError, match="step: host 520 -> 531"):
        budget.hold("step", Budget(THEN.versions, with_step(plain=1040, host=531)))
    with pytest.raises(AssertionError, match="step: host 490 -> 500"):
        budget.hold("step", Budget(THEN.versions, with_step(plain=980)))
    other = Budget(THEN.versions, with_step(plain=1060, host=900), "there")
    said = "host: plain torch takes 1.06 times as many instructions, here on there"
    assert said in budget.hold("step", other)


def with_step(**columns: int) -> budget.Rows:
    return THEN.rows | {"step": THEN.rows["step"] | columns}
