# SPDX-License-Identifier: Apache-2.0
"""Tests that take minutes, and whose outcome hangs on a few files and a compiler alone: ``make
proof`` runs them and notes in ``proven.json`` what they ran on. They are skipped until one of those
files, or the compiler, changes.

``python tests/proofs.py`` prints the note; ``GNSFAST_PROVE=1`` runs the tests in any case.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTE = Path(__file__).with_name("proven.json")


def gcc() -> str:
    """Empty without one, where its tests are skipped."""
    if shutil.which("g++") is None:
        return ""
    return subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout


PROOFS: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "triton": (
        ("triton_kernels/*.py", "gnsfast/reference/attention.py", "benchmarks/compile_*.py")
        + ("tests/test_triton_compile.py", "tests/proofs.py", "benchmarks/budgets/triton-*.json")
        + ("benchmarks/budget.py", "benchmarks/kernel_tables.py"),
        lambda: importlib.metadata.version("triton"),
    ),
    "host model": (
        ("csrc/*.cuh", "csrc/*.h", "csrc/host_model/*.cpp", "csrc/host_model/*.h")
        + ("tests/test_host_model.py", "tests/proofs.py"),
        gcc,
    ),
}
"""Files that an outcome hangs on, and the compiler's version."""


def digest(name: str) -> str:
    patterns, version = PROOFS[name]
    found = hashlib.sha256(version().encode())
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(path.relative_to(ROOT).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def proven(name: str) -> pytest.MarkDecorator:
    """Skips a test whose files have not changed since it was last proven."""
    known = json.loads(NOTE.read_text()).get(name) if NOTE.exists() else None
    again = os.environ.get("GNSFAST_PROVE") == "1" or known != digest(name)
    return pytest.mark.skipif(
        not again, reason="proven, and nothing has changed since: make proof repeats it"
    )


if __name__ == "__main__":
    print(json.dumps({name: digest(name) for name in PROOFS}, indent=1))
