# SPDX-License-Identifier: Apache-2.0
"""Registers, spills, shared memory and instructions of the kernels, as compilers make them for GPUs
that need not be there.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.budget import Budget

ROOT = Path(__file__).parents[1]
CAPABILITIES = ("80", "90", "100")
AMD = ("gfx90a", "gfx942")


def triton_rows(device: str) -> list[dict[str, Any]]:
    """Of every Triton kernel in every configuration."""
    return _lines("compile_kernels", device)


def triton_budget(rows: list[dict[str, Any]]) -> Budget:
    columns = {"registers": "registers", "spilled": "stack", "shared": "shared", "blocks": "blocks"}
    columns["instructions"] = "instructions"
    named = {
        f"{row['kernel']}, {row['dtype']}": {name: row[key] for name, key in columns.items()}
        for row in rows
    }
    assert len(named) == len(rows), "two kernels of one name"
    return Budget({"triton": importlib.metadata.version("triton")}, named)


def cuda_budget() -> Budget:
    """Of the CUDA kernels that the tests compile."""
    versions, *rows = _lines("compile_cuda")
    named = {name: row for each in rows for name, row in each.items()}
    return Budget(versions, dict(sorted(named.items())))


def _lines(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The JSON objects that a module of this folder prints, one on each line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]
