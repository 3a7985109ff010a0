# SPDX-License-Identifier: Apache-2.0
"""Tests that take minutes, and whose outcome depends on a few files and a compiler alone.

``make proof`` runs them, then notes in ``proven.json`` what they ran on. Every other run skips
them, and ``test_proofs.py`` fails while the note does not hold for today's files and compiler.

``python tests/proofs.py`` prints what is stale and exits with 1 if anything is; ``--note`` prints
the note of a run that starts now. ``GNSFAST_PROVE=1`` runs the tests.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTE = Path(__file__).with_name("proven.json")


def triton() -> str:
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def printed(pattern: str, *command: str) -> str:
    """What a compiler prints of its version; empty where the compiler is missing."""
    if shutil.which(command[0]) is None:
        return ""
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"{command[0]} {re.findall(pattern, said)[0]}"


PROOFS: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "triton": (
        ("triton_kernels/*.py", "gnsfast/signatures.py", "benchmarks/compile_*.py")
        + ("tests/triton_kernels/test_triton_compile.py", "tests/proofs.py")
        + ("benchmarks/budgets/triton-*.json", "benchmarks/budget.py")
        + ("benchmarks/kernel_tables.py", "benchmarks/no_gpu.py", "benchmarks/in_flight.py"),
        triton,
    ),
    "host model": (
        ("csrc/*.cuh", "csrc/*.h", "csrc/host_model/*.cpp", "csrc/host_model/*.h")
        + ("tests/csrc/test_host_model.py", "tests/proofs.py"),
        lambda: printed(r"\S+", "g++", "-dumpfullversion"),
    ),
    "cpu kernel": (
        ("csrc/cpu/*", "tests/csrc/test_cpu_kernel.py", "tests/proofs.py"),
        lambda: printed(r"\S+", "g++", "-dumpfullversion"),
    ),
    "cuda": (
        ("csrc/*.cu", "csrc/*.cuh", "csrc/*.h", "benchmarks/compile_cuda.py")
        + ("tests/csrc/test_cuda_binary.py", "tests/proofs.py", "benchmarks/budgets/cuda.json")
        + ("benchmarks/budget.py", "benchmarks/in_flight.py"),
        lambda: printed(r"\bV([\d.]+)", "nvcc", "--version"),
    ),
}
"""Files that an outcome depends on, and the compiler with its version: empty without one, where
nothing can be proven."""


def digest(patterns: tuple[str, ...]) -> str:
    """Of the names and the contents of all files that the patterns match."""
    paths = {pattern: list(ROOT.glob(pattern)) for pattern in patterns}
    if unmatched := [pattern for pattern, found in paths.items() if not found]:
        raise FileNotFoundError(f"no file matches {unmatched}: correct tests/proofs.py")
    found = hashlib.sha256()
    for path in sorted({path for each in paths.values() for path in each}):
        found.update(path.relative_to(ROOT).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def proven() -> dict[str, Any]:
    """The note: for each proof its files' digest and the compilers that proved these files."""
    known: dict[str, Any] = json.loads(NOTE.read_text()) if NOTE.exists() else {}
    return known


def stale(name: str) -> str:
    """Why a proof has to be repeated; empty where it holds, or where nothing can be proven."""
    patterns, version = PROOFS[name]
    known, compiler = proven().get(name), version()
    if not compiler:
        return ""
    if known is None or known["files"] != digest(patterns):
        return f"{name}: its files have changed since they were last proven: run make proof"
    if compiler not in known["compilers"]:
        return f"{name}: not proven with {compiler}: run make proof"
    return ""


def note() -> dict[str, Any]:
    """What holds once today's proofs have passed. A second compiler for the same files is added."""
    found = proven()
    for name, (patterns, version) in PROOFS.items():
        if compiler := version():
            files, known = digest(patterns), found.get(name, {"files": ""})
            others = known["compilers"] if known["files"] == files else []
            found[name] = {"files": files, "compilers": sorted({*others, compiler})}
    return found


proof = pytest.mark.skipif(
    os.environ.get("GNSFAST_PROVE") != "1", reason="make proof runs it, after a change of its files"
)

if __name__ == "__main__":
    if sys.argv[1:] == ["--note"]:
        print(json.dumps(note(), indent=1))
    else:
        reasons = [why for name in PROOFS if (why := stale(name))]
        print("\n".join(reasons) or "every proof holds")
        sys.exit(bool(reasons))
