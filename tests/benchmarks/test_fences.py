# SPDX-License-Identifier: Apache-2.0
"""The check of PTX for products without a fence: planted faults, each noticed, and kernels that
read by pointers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import compile_reading  # noqa: E402

pytestmark = pytest.mark.source

PRODUCT = "@%p24 tcgen05.mma.cta_group::1.kind::f16 [ %r627 + 0 ], %rd37, %rd38, %r55, %p23;"
OF_HOPPER = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0, 1, 1, 0, 0;"
FENCE = "fence.proxy.async.shared::cta;"
RIGHT = f"""
    cp.async.cg.shared.global [ %r81 + 0 ], [ %rd47 + 0 ], 0x10, %r82;
    cp.async.commit_group;
    cp.async.wait_group \t1;
    bar.sync \t0;
    {FENCE}
    {PRODUCT}
    {PRODUCT}
"""

FAULTS = {
    "no fence": RIGHT.replace(FENCE, ""),
    "a fence before the wait": f"{FENCE}\n{RIGHT.replace(FENCE, '')}",
    "a fence after the products": f"{RIGHT.replace(FENCE, '')}\n{FENCE}",
    "on Hopper": RIGHT.replace(FENCE, "wgmma.fence.sync.aligned;").replace(PRODUCT, OF_HOPPER),
}

ROOT = Path(__file__).parents[2]
BY_POINTERS = r"^(linear_\w+ 128x128x64 8 warps 3 stages|gram (16|64)), bf16"


@pytest.mark.parametrize("code", [RIGHT, f"{PRODUCT}\n{RIGHT}", RIGHT.replace(PRODUCT, OF_HOPPER)])
def test_right_code(code: str) -> None:
    assert compile_reading.unfenced(code) == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name: str) -> None:
    products = [OF_HOPPER if "Hopper" in name else PRODUCT] * 2
    assert compile_reading.unfenced(FAULTS[name]) == products


@pytest.mark.slow
def test_kernels_that_read_by_pointers() -> None:
    """Seen to fail on Triton 3.6.0 and 3.7.0, where none of them has a fence after its waits. All
    other kernels, and Hopper's, are read in ``test_triton_compile.py``.
    """
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    command = [sys.executable, "-m", "benchmarks.fences", "100", BY_POINTERS]
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    how = dict(stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=compiled)
    done = subprocess.run(command, **how)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    assert [row["kernel"] for row in rows if row["unfenced"]] == []
