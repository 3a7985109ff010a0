# SPDX-License-Identifier: Apache-2.0
"""The GPU that is not there refuses what a GPU would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is there on Linux alone")

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[2]

KERNELS = """
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def plain(x_ptr, N, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr + N.to(tl.int64) + tl.arange(0, BLOCK), x)


@triton.jit
def greedy(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    a, b, c = tl.load(at), tl.load(at + BLOCK), tl.load(at + 2 * BLOCK)
    tl.store(at + BLOCK, a)  # 384 registers a thread: no load may come after this store
    tl.store(at + 2 * BLOCK, b)
    tl.store(at, c)


@triton.jit
def wide(x_ptr, K: tl.constexpr):
    rows, columns = tl.arange(0, 128), tl.arange(0, K)
    a = tl.load(x_ptr + rows[:, None] * K + columns[None, :])
    product = tl.dot(a, a.T)
    tl.store(x_ptr + rows[:, None] * 128 + rows[None, :], product.to(tl.bfloat16))


def test_right():
    plain[(1,)](torch.ones(9), 9, BLOCK=8)
    assert False, "nothing is computed, so nothing is asserted"


def test_size_of_one():
    plain[(1,)](torch.ones(9), 1, BLOCK=8)


def test_grid():
    plain[(1, 65536)](torch.ones(9), 9, BLOCK=8)


def test_shared_memory():
    wide[(1,)](torch.ones(128, 1024, dtype=torch.bfloat16), K=1024, num_warps=8)


def test_spills():
    greedy[(1,)](torch.ones(9), BLOCK=4096, num_warps=1)
"""


def test_two_gpus_stand_for_all() -> None:
    """The kernels' host code asks for sm_90, and for what is older than sm_80, so ``make jit-test``
    needs sm_80 and sm_90. For sm_100 it takes other tiles and numbers of stages alone.
    """
    sources = "".join(p.read_text() for p in sorted(ROOT.glob("triton_kernels/*.py")))
    asked = re.findall(r"capability\(.*?\)(?:\[0\])? (\S+ (?:\(.*?\)|\d+))", sources)
    assert asked == ["< (9, 0)", ">= (8, 0)", "== 10"]


@pytest.mark.slow
def test_what_fails(tmp_path: Path) -> None:
    """Errors of the front end, spills, grids; a run without a launch."""
    (tmp_path / "test_kernels.py").write_text(KERNELS)
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONOPTIMIZE": "1"}
    run = [sys.executable, "-m", "pytest", "-q", "--assert=plain", "-p", "fake_gpu", "--gpu", "90"]

    def pytest_of(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*run, "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    said = pytest_of("--compile", "-rf", "test_kernels.py").stdout
    assert "1 passed" in said and "4 failed" in said, said
    assert "'int' object has no attribute 'to'" in said
    assert "no GPU takes a grid of 1 x 65536 x 1 blocks" in said
    assert "out of resource: shared memory, Required: " in said
    assert "greedy spills" in said and "2 launches through" in said
    assert pytest_of("test_nothing.py").returncode == pytest.ExitCode.NO_TESTS_COLLECTED
