# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel in every configuration, compiled for GPUs that need not be there, and read:
no spilled register, tensor cores where they belong, within the shared memory of the architecture.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is there on Linux alone")

pytestmark = pytest.mark.source

TENSOR_CORES = {80: ("HMMA",), 90: ("HGMMA", "HMMA"), 100: ("UTCHMMA", "HMMA")}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a thread block may have (CUDA C++ Programming Guide, table of compute
capabilities)."""


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':56} {'dtype':5} warps registers spilled shared  instructions"]
    for row in rows:
        used = " ".join(f"{k} {row[k]}" for k in list(row)[8:] if row[k])
        lines.append(
            f"{row['kernel']:56} {row['dtype']:5} {row['warps']:5} {row['registers']:9} "
            f"{row['stack']:7} {row['shared']:6}  {used}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_kernels(capability: int) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"\nsm_{capability}\n{table(rows)}")
    assert len(rows) > 40
    for row in rows:
        assert row["stack"] == row["STL"] == row["LDL"] == 0, f"{row['kernel']} spills"
        assert row["shared"] <= SHARED[capability], f"{row['kernel']} takes too much shared memory"
        if row["tensor_cores"]:
            assert any(row[name] for name in TENSOR_CORES[capability]), f"{row['kernel']}: none"
        if row["kernel"].startswith("linear_wgrad") and row["tensor_cores"] and capability == 90:
            assert row["HGMMA"] and not row["HMMA"], f"{row['kernel']} is not on the fast path"
            if row["dtype"] != "fp32" and "unaligned" not in row["kernel"]:
                assert row["in_flight"], f"{row['kernel']} waits for each product"
        if "TMA" in row["kernel"]:
            assert row["UTMALDG"] and not row["LDGSTS"], f"{row['kernel']} reads by pointers"
