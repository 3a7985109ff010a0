# SPDX-License-Identifier: Apache-2.0
"""A launch that is repeated hands the compiled kernel what Triton's own binder did."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

pytestmark = pytest.mark.source

SCRIPT = """
import torch
import triton
import triton.language as tl
from benchmarks import no_gpu

launched, compiled = [], []
no_gpu.install("90", 132, lambda *arguments: launched.append(arguments))
compile = triton.compiler.compile
triton.compiler.compile = lambda *args, **kw: compiled.append(0) or compile(*args, **kw)

from gnsfast.triton_kernels.launch import Launch


@triton.jit
def kernel(x_ptr, out_ptr, v_ptr, N, M, ADD: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs * M, mask=offs < N, other=0.0)
    if v_ptr is not None:
        x += tl.load(v_ptr)
    tl.store(out_ptr + offs, x)


launch = Launch(kernel, (7,), (5, 1, False, 16), num_warps=4)


def check(*tensors, compilations):
    before = len(compiled)
    launch(*tensors)
    assert len(compiled) - before == compilations, (len(compiled) - before, compilations)
    found = launched.pop()
    arguments = found[-7:]
    assert found[:3] == (7, 1, 1) and arguments[3:] == (5, 1, False, 16), found
    assert all(a is b for a, b in zip(arguments, tensors))
    return len(found)


x, wide = torch.ones(64), torch.ones(64, dtype=torch.float64)
bound = check(x, x, None, compilations=1)
again = check(torch.zeros(64), x, None, compilations=0)
assert again < bound, "it went through the binder again"
check(x[1:], x, None, compilations=1)
check(x[2:], x, None, compilations=0)
check(x, x[4:], None, compilations=0)
check(wide, x, None, compilations=1)
check(x, x, x, compilations=1)
check(x, x, x, compilations=0)
"""


def test_the_same_arguments(tmp_path: Path) -> None:
    """And another kernel for another dtype or alignment, or for a tensor that was absent."""
    script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(SCRIPT)
    run = [sys.executable, str(script)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_INTERPRET": "0"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
