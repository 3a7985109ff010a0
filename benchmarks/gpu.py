# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks gpu``: first right, then fast. Each returns its tables.

On a fresh machine, from the checkout's root (``SECONDS`` says what each part is to take)::

    pip install -c constraints.txt torch triton setuptools pybind11 ninja pytest numpy
    pip install -c constraints.txt opacus einops unfoldNd  # peers
    pip install --no-deps backpack-for-pytorch==1.7.1  # its torchvision would bring another torch
    GNSFAST_CUDA=1 pip install --no-build-isolation --no-deps -e .  # with nvcc; 0 without
    python -m benchmarks gpu --only correctness --record out
    python -m benchmarks gpu --only ops --record out
    python -m benchmarks gpu --only routes attention cuda --record out
    python -m benchmarks gpu --only step --record out
    python -m benchmarks gpu --only curves --record out
    python -m benchmarks gpu --only peers host --record out

The first torch must be one with CUDA. Or all of it: ``python -m benchmarks gpu --record out``. A
record is written after each part.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention as attention_with_sinks
from benchmarks import cuda_kernels, gate, gpu_ops, gpu_peers, gpu_step, record
from benchmarks.attention import CASES
from benchmarks.cases import LayerCase
from benchmarks.gpu_ops import TOKENS, clock
from benchmarks.measure import Timing
from gnsfast import extension

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[1]

SECONDS = {
    "correctness": 300,
    "ops": 180,
    "routes": 60,
    "attention": 90,
    "cuda": 60,
    "step": 240,
    "curves": 300,
    "peers": 150,
    "host": 150,
}
"""Of each part, estimated before any GPU ran it."""

ops, routes = gpu_ops.ops, gpu_ops.routes
step, host = gpu_peers.step, gpu_step.host
curves, peers = gpu_peers.curves, gpu_peers.peers


def run(options: argparse.Namespace) -> None:
    """Part by part, a record after each, and after each case of those whose tables come as they
    grow: an interrupted run keeps what it has.
    """
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False")
    parts: list[str] = options.only
    plan = [{"part": part, "estimated s": SECONDS[part]} for part in parts]
    total = {"part": "all", "estimated s": sum(SECONDS[part] for part in parts)}
    print("\n".join(record.markdown([*plan, total])), flush=True)
    short, broken = [], False
    for part in parts:
        start = time.perf_counter()
        keep = partial(record.write, f"gpu-{part}", f"python -m benchmarks gpu --only {part}")
        tables: dict[str, Rows] = {}
        try:
            found = globals()[part]("cuda")
            for tables in (found,) if isinstance(found, dict) else found:
                keep(tables, options.record)
        except Exception as error:  # the other parts still have their time on the GPU
            traceback.print_exc()
            result = gate.raised(error)
            tables |= {part: [{"check": part, "exit status": 1, "result": result}]}
        print(f"\n{part}: {time.perf_counter() - start:.0f} s of {SECONDS[part]} estimated")
        for title, rows in tables.items():
            print(f"\n{title}\n")
            print("\n".join(record.markdown(rows)), flush=True)
        print(f"\nwritten: {keep(tables, options.record)}", flush=True)
        short += summary(tables)
        wrong = any(row.get("exit status") for rows in tables.values() for row in rows)
        broken |= wrong
        if part == "correctness" and wrong:
            break  # what is wrong is not timed
    print("\nIn short\n\n" + "\n".join(record.markdown(short)))
    if broken:
        raise SystemExit(1)


def correctness(device: str) -> dict[str, Rows]:
    """The kernels' tests against float64, then compute-sanitizer, where it is installed."""
    suites = (
        "test_triton_linear.py",
        "test_triton_layers.py",
        "test_segments.py",
        "test_experts.py",
        "test_experts_other_ranks.py",
        "test_documents.py",
        "test_attention.py",
        "test_gpu.py",
        "test_backends.py",
    )
    tests = [str(ROOT / "tests" / name) for name in suites]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return {
        "Tests against float64": [_outcome("pytest", run)],
        "compute-sanitizer": [_sanitized(tool) for tool in ("memcheck", "racecheck")],
    }


def _sanitized(tool: str) -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"check": tool, "result": "compute-sanitizer is not installed"}
    run = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    run += [sys.executable, "-m", "benchmarks.small_shapes"]
    return _outcome(tool, run, PYTORCH_NO_CUDA_MEMORY_CACHING="1", GNSFAST_AUTOTUNE="0")


def _outcome(check: str, run: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    print("\n".join(lines[-40:] if done.returncode else lines[-1:]), flush=True)
    return {"check": check, "exit status": done.returncode, "result": lines[-1]}


CUDA = [
    LayerCase(model, I, O, T, TOKENS)
    for model, I, O in (gpu_ops.SIZES[0], gpu_ops.SIZES[3], gpu_ops.SIZES[4])
    for T in (64, 128, 256, 512, 1024, 2048, 8192)
]


def cuda(device: str, rounds: int = 11) -> dict[str, Rows]:
    """The CUDA extension's kernels, bf16; on Hopper its kernel taken apart too."""
    if extension.missing():
        return {"The CUDA kernels": [{"check": "extension", "result": extension.missing()}]}
    tables = {"The CUDA kernels": cuda_kernels.beside_triton(device, CUDA, rounds)}
    if extension.kernel_for(torch.cuda.get_device_capability()) == "sm90":
        tables["The Hopper kernel taken apart"] = cuda_kernels.taken_apart(device, rounds)
    return tables


def attention(device: str, rounds: int = 11) -> dict[str, Rows]:
    """Attention with sinks and their norms, beside torch's."""
    return {"Attention": attention_with_sinks.table(device, CASES, rounds, clock(device))}


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
