# SPDX-License-Identifier: Apache-2.0
"""Counts that may not grow: the instructions that gnsfast adds on a CPU, and how a budget is
compared. The kernels' own are compared where they are compiled: ``test_triton_compile.py``,
``test_cuda_binary.py``.
"""

import re
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
    {"torch": "2.0"},
    {
        "gemm": {"registers": 128, "spilled": 0, "shared": 1000, "blocks": 2, "instructions": 500},
        "step": {"plain": 1000, "gnsfast": 1500, "added": 500},
    },
    "built here",
)


@pytest.mark.slow
def test_instructions() -> None:
    """No more than in the budget; renewing it is a line in the change that needs more."""
    then = budget.read("instructions")
    if why := instructions.missing() or budget.unlike(then, instructions.here({})):
        pytest.skip(f"the budget instructions is not compared: {why}")
    if why := budget.hold("instructions", instructions.count()):
        pytest.skip(why)


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
        ("step", "added", 510, ""),
        ("step", "added", 511, "step: added 500 -> 511 (+2.2%)"),
        ("step", "plain", 1010, ""),
        ("step", "plain", 989, ""),
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
    """Nor is what plain torch itself counts otherwise on; on the same ground growth is an error."""
    monkeypatch.setattr(budget, "FOLDER", tmp_path)
    THEN.write("step")
    assert budget.read("step") == THEN and budget.hold("step", THEN) == ""
    newer = Budget({"torch": "2.1"}, THEN.rows)
    assert "counted with torch 2.0, but here it is 2.1" in budget.hold("step", newer)
    rows = THEN.rows | {"step": {"plain": 980, "gnsfast": 1900, "added": 910}}
    assert "takes 980 instructions instead of 1000, here on there" in budget.hold(
        "step", Budget(THEN.versions, rows, "there")
    )
    rows = THEN.rows | {"step": {"plain": 995, "gnsfast": 1900, "added": 905}}
    with pytest.raises(AssertionError, match="--write --only step"):
        budget.hold("step", Budget(THEN.versions, rows, THEN.build))
