# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks gpu``: first right, then fast. Each yields its tables as they
grow case by case, and its record grows with them.

On your own machine, from the checkout's root, with a torch that has CUDA::

    pip install -c constraints.txt setuptools pybind11 ninja pytest pytest-xdist numpy transformers
    pip install -c constraints.txt opacus einops unfoldNd  # peers
    pip install --no-deps backpack-for-pytorch==1.7.1  # its torchvision would bring another torch
    export GNSFAST_CUDA=1 GNSFAST_CUDA_VARIANTS=1  # where there is an nvcc
    pip install --no-build-isolation --no-deps -e .
    python -m benchmarks gpu --record out

On a bare machine without a network, for a limited time: ``make gpu-wheels`` before and ``make gpu``
there (``gpu_machine.py``), which runs the parts in processes of their own and resumes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.apart import ROOT
from benchmarks.gpu import attention, operators, peers, step
from benchmarks.gpu_machine import SECONDS, command_of
from benchmarks.machine.processes import following
from benchmarks.measure import Timing
from benchmarks.record import FAILED, Growing, Rows, Tables, failure

SUITES = (
    "triton_kernels/test_linear_finish.py",
    "triton_kernels/test_triton_finish.py",
    "triton_kernels/test_triton_linear.py",
    "triton_kernels/test_triton_layers.py",
    "triton_kernels/test_triton_sizes.py",
    "triton_kernels/test_triton_norms_alone.py",
    "ops/test_operator_results.py",
    "reference/test_segments.py",
    "functional/test_attention.py",
    "triton_kernels/test_attention_kernels.py",
    "ops/test_backends.py",
    "ops/test_extension.py",
    "test_gpu.py",
    "layers/test_cross_entropy_models.py::test_triton",
    "test_documents.py::test_on_gpu",
    "layers/test_experts.py::test_on_gpu",
)
"""Tests that launch kernels on a device: whole files, or one test of a file with much else."""
PROCESSES = 12
"""Of pytest, at most: the tests compile some 410 kernels, 7 to 9 minutes' work of one core."""
TEST_SECONDS = 150
"""Of one test: a kernel that hangs then costs its own test and one process, which is replaced. The
tests that compile most took 25 s with three others on two cores."""

FAILED_TEST = re.compile(r"(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?")
"""A line of pytest's summary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=SECONDS, nargs="+", default=list(SECONDS))
    parser.add_argument("--record", type=Path, default=record.RESULTS, help="folder of the record")
    parser.add_argument("--rehearse", action="store_true", help="tiny cases, on this CPU")
    parser.add_argument("--summary", action="store_true", help="only of the folder's records")


def run(options: argparse.Namespace) -> None:
    if options.rehearse:
        from benchmarks.gpu.rehearsal import arranged

        with arranged():
            return run_on("cpu", options)
    run_on("cuda", options)


def run_on(device: str, options: argparse.Namespace) -> None:
    """Part by part, a record after each case. What fails is a row of its part's record, and the
    next part runs; the exit status and the summary show it.
    """
    if options.summary:
        return conclude(("extension", *SECONDS), options.record)
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False")
    parts: list[str] = options.only
    plan = [{"part": part, "estimated s": SECONDS[part]} for part in parts]
    total = {"part": "all", "estimated s": sum(SECONDS[part] for part in parts)}
    print("\n".join(record.markdown([*plan, total])), flush=True)
    for part in parts:
        start = time.perf_counter()
        tables = measured(part, device, options)
        print(f"\n{part}: {time.perf_counter() - start:.0f} s of {SECONDS[part]} estimated")
        record.show(tables)
        if device == "cuda" and (why := lost()):
            raise SystemExit(f"after {part} the device answers only new processes: {why}")
    conclude(parts, options.record)


def measured(part: str, device: str, options: argparse.Namespace) -> Tables:
    """One part's tables; its record has another name until it is whole."""
    about = f"gpu-{part}", " ".join(["python -m", *command_of([part], options.rehearse)])
    keep = partial(record.write_unfinished, *about, folder=options.record)
    tables: Tables = {}
    keep(tables={})
    try:
        for tables in PARTS[part](device):
            keep(tables=tables)
    except (Exception, SystemExit) as error:  # the other parts still have their time on the GPU
        tables = {**tables, FAILED: [*tables.get(FAILED, []), failure(part, error)]}
    print(f"\nwritten: {record.write_whole(*about, tables, options.record)}", flush=True)
    return tables


def lost() -> str:
    """Empty, or what CUDA says: after an illegal access this process cannot use the device any
    more.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def conclude(parts: Sequence[str], folder: Path) -> None:
    """A short table over the newest records of these parts; exits with 1 if something is wrong."""
    short: Rows = []
    wrong = False
    for part in parts:
        tables: Tables = {}
        if whole := record.newest(f"gpu-{part}", folder):
            tables = whole.tables
        elif begun := record.newest(f"gpu-{part}-unfinished", folder):
            rows_so_far = f"unfinished: {sum(map(len, begun.tables.values()))} rows"
            row = {"check": part, "exit status": 1, "result": rows_so_far}
            tables = {**begun.tables, FAILED: [*begun.tables.get(FAILED, []), row]}
        short += summary(tables)
        wrong |= any(row.get("exit status") for rows in tables.values() for row in rows)
    print("\nIn short\n\n" + "\n".join(record.markdown(short)), flush=True)
    if wrong:
        raise SystemExit(1)


def correctness(device: str) -> Iterator[Tables]:
    """The kernels' tests against float64, and which of them failed."""
    processes = min(PROCESSES, len(os.sched_getaffinity(0)))
    run = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider"]
    run += ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
    run += ["-n", str(processes), "--dist", "worksteal", *(f"tests/{name}" for name in SUITES)]
    failed: Rows = []

    def heard(line: str) -> None:
        if match := FAILED_TEST.fullmatch(line.strip()):
            failed.append({"test": match[1], "why": match[2] or "see the log"})

    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}  # of 80 a test's name takes most
    tests = lambda check: [outcome(check, run, "exit status", heard, **environment)]
    for tables in Growing().over("Tests against float64", ("pytest",), tests):
        yield {**tables, "Tests that failed": failed} if failed else tables


def sanitizers(device: str) -> Iterator[Tables]:
    """What compute-sanitizer reports on every kernel, if it is installed."""
    return Growing().over("compute-sanitizer", ("memcheck", "racecheck"), sanitized)


def sanitized(tool: str) -> Rows:
    """Its exit status does not fail the run; that of the tests does."""
    if shutil.which("compute-sanitizer") is None:
        return [{"check": tool, "result": "compute-sanitizer is not installed"}]
    run = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    run += ["--report-api-errors", "no", sys.executable, "-m", "benchmarks.gpu.small_shapes"]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GNSFAST_AUTOTUNE": "0"}
    return [outcome(tool, run, "its status", **environment)]


def outcome(
    check: str,
    run: list[str],
    status: str,
    heard: Callable[[str], object] = lambda line: None,
    **environment: str,
) -> dict[str, Any]:
    """A row with the last line of what a program prints. Each is shown, and ``heard``, at once."""
    last = "no output"
    with subprocess.Popen(
        run,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=following(),
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            heard(line)
            last = line.strip(" =\n") or last
    return {"check": check, status: process.returncode, "result": last}


PARTS: dict[str, Callable[[str], Iterator[Tables]]] = {
    "correctness": correctness,
    "ops": operators.ops,
    "routes": operators.routes,
    "attention": attention.tables,
    "cuda": operators.cuda,
    "step": peers.step,
    "curves": peers.curves,
    "peers": peers.peers,
    "host": step.host,
    "sanitizers": sanitizers,
}


STEP_TARGETS = {"gpt2": 1.02, "llama": 1.01}


def summary(tables: dict[str, Rows]) -> Rows:
    """The few lines that a run ends with: outcomes, the operator's ratios by T, the steps; beside
    them the targets.
    """
    short: Rows = []
    for title, rows in tables.items():
        if rows and "check" in rows[0]:
            short += [{"what": row["check"], "result": row["result"]} for row in rows]
        elif title == "The weight gradient alone":
            short += _by_length(rows)
        elif title == "Whole training step":
            for row in rows:
                if row["contestant"] != "plain":
                    short += _of_step(row)
        elif title == "Whole step, peers":
            for row in (row for row in rows if row["contestant"] != "plain"):
                result = row["ratio"] if "ratio" in row else row["failed"]
                what = f"{row['layer']}, B={row['B']}, {row['contestant']} / plain"
                short.append({"what": what, "result": result})
        elif title == "Host synchronisations":
            for row in rows:
                what = f"host synchronisations in 5 steps, {row['step of GPT-2']}"
                short.append({"what": what, "result": row["in 5 steps"], "target": 0})
    return short


def _by_length(rows: Rows) -> Rows:
    short: Rows = []
    for T in dict.fromkeys(row["T"] for row in rows):
        ratios: list[Timing] = [row["gnsfast / plain"] for row in rows if row["T"] == T]
        low, high = (f(t.ratio for t in ratios) for f in (min, max))
        spread = f"{low:.3f} to {high:.3f} over {len(ratios)} sizes"
        target = 1.05 if T >= 512 else 1.10 if T == 128 else None
        short.append({"what": f"weight gradient / plain, T={T}", "result": spread})
        short[-1] |= {"target": target} if target else {}
    return short


def _of_step(row: dict[str, Any]) -> Rows:
    what = f"{row['training step']}, {row['mode']}, {row['contestant']}"
    compiled = row["mode"] == "compiled"
    short: Rows = [{"what": f"step / plain, {what}", "result": row["ratio"]}]
    short[-1] |= {"target": STEP_TARGETS[row["training step"]]} if compiled else {}
    if "memory" in row:
        short.append({"what": f"memory / plain, {what}", "result": row["memory"], "target": 1.01})
    return short
