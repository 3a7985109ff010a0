# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks gpu``: first right, then fast. Each returns its tables."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from benchmarks import attention as attention_with_sinks
from benchmarks import cases, cuda_kernels, measure
from benchmarks.attention import CASES
from benchmarks.cases import LayerCase
from benchmarks.cuda_kernels import operands, plain_wgrad
from gnsfast import extension

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[1]
TOKENS = 16384

SIZES = (("GPT-2 out", 768, 768), ("GPT-2 up", 768, 3072), ("Llama-1B out", 2048, 2048))
SIZES += (("Llama-7B out", 4096, 4096), ("Llama-8B up", 4096, 14336), ("down", 14336, 4096))
LENGTHS = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)
OPS = [LayerCase(model, I, O, T, TOKENS) for model, I, O in SIZES for T in LENGTHS]
ROUTES = [
    LayerCase(model, I, O, T, TOKENS)
    for model, I, O in (SIZES[0], SIZES[2], SIZES[3])
    for T in (2, 8, 16, 32, 64, 96, 128)
]


def clock(device: str) -> Callable[[Callable[[], object]], float]:
    return measure.cuda_seconds if device == "cuda" else measure.wall_seconds


def correctness(device: str) -> dict[str, Rows]:
    """The kernels' tests against float64, then compute-sanitizer, where it is installed."""
    suites = (
        "test_triton_linear.py",
        "test_triton_layers.py",
        "test_segments.py",
        "test_experts.py",
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


def ops(device: str, cases_: list[LayerCase] = OPS, rounds: int = 11) -> dict[str, Rows]:
    """The weight gradient with norms beside plain dW, bf16."""
    rows = []
    for case in cases_:
        x, dy = operands(case, device)
        plain = partial(plain_wgrad, x, dy)
        ours = lambda: torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, x.dtype)  # noqa: B023
        timing = measure.interleave({"plain": plain, "gnsfast": ours}, rounds, clock(device))
        flop = 2 * case.B * case.T * case.I * case.O
        rates = {name: flop / (1e9 * t.milliseconds) for name, t in timing.items()}
        rows.append(
            {
                "weight gradient, bf16": case.name,
                "B": case.B,
                "route": route(case, device),
                "plain TFLOP/s": round(rates["plain"], 1),
                "gnsfast TFLOP/s": round(rates["gnsfast"], 1),
                "gnsfast / plain": str(timing["gnsfast"]),
            }
        )
    return {"The weight gradient alone": rows, **other_ops(device, rounds)}


def route(case: LayerCase, device: str) -> str:
    from gnsfast.triton_kernels.routes import linear_route

    x = torch.empty(0, device=device, dtype=torch.bfloat16)
    return linear_route(case.B, case.T, case.I, case.O, x)


def other_ops(
    device: str,
    rounds: int,
    tokens: int = TOKENS,
    widths: tuple[int, ...] = (768, 4096, 8192),
    tables: tuple[tuple[int, int], ...] = ((50304, 768), (128256, 4096)),
) -> dict[str, Rows]:
    """Norm layers and embeddings beside torch's own backward; for norm layers the plain aten that
    runs under ``torch.compile`` too.
    """
    from gnsfast.functional._norms import layer_norm_backward

    rows, what = [], "backward, bf16"
    B, T = tokens // min(1024, tokens), min(1024, tokens)
    for N in widths:
        x, dy = (torch.randn(B, T, N, device=device, dtype=torch.bfloat16) for _ in range(2))
        w, b = (torch.randn(N, device=device, dtype=torch.bfloat16) for _ in range(2))
        _, mean, rstd = torch.native_layer_norm(x, [N], w, b, 1e-5)
        args = (dy, x, mean, rstd, w, b, True, True)
        aten = torch.ops.aten.native_layer_norm_backward
        ways = {
            "plain": lambda: aten(dy, x, [N], mean, rstd, w, b, [True, True, True]),  # noqa: B023
            "gnsfast": lambda: torch.ops.gnsfast.layer_norm_backward(*args),  # noqa: B023
            "gnsfast, compiled aten": _compiled(layer_norm_backward, args),
        }
        rows.append(_row(what, f"layer norm {N}", measure.interleave(ways, rounds, clock(device))))
    for V, D in tables:
        ids = torch.randint(0, V, (B, T), device=device)
        dy = torch.randn(B, T, D, device=device, dtype=torch.bfloat16)
        plain = lambda: torch.ops.aten.embedding_dense_backward(dy, ids, V, -1, False)  # noqa: B023
        ours = lambda: torch.ops.gnsfast.embedding_wgrad(dy, ids, V, -1, dy.dtype)  # noqa: B023
        ways = {"plain": plain, "gnsfast": ours}
        rows.append(
            _row(what, f"embedding {V} x {D}", measure.interleave(ways, rounds, clock(device)))
        )
    return {"Other layers' backward": rows}


def _compiled(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], object]:
    compiled = torch.compile(fn, dynamic=False)
    return lambda: compiled(*args)


def _row(what: str, name: str, timings: dict[str, measure.Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {what: name}
    row["plain ms"] = f"{timings['plain'].milliseconds:.3f}"
    return row | {f"{k} / plain": str(t) for k, t in timings.items() if k != "plain"}


def routes(device: str, cases_: list[LayerCase] = ROUTES, rounds: int = 11) -> dict[str, Rows]:
    """Gram against fused, each as the whole weight gradient, and every tile of the fused route."""
    from gnsfast.triton_kernels import gram, operators
    from gnsfast.triton_kernels.configs import candidates

    crossover, tiles = [], []
    for case in cases_:
        x, dy = operands(case, device)

        def gram_route(x: Tensor = x, dy: Tensor = dy) -> Tensor:
            dw = x.new_empty((dy.shape[2], x.shape[2]))
            operators.dense_wgrad(x, dy, dw)
            return operators.with_sum(gram.gram(x, dy), dw)

        def fused_route(x: Tensor = x, dy: Tensor = dy) -> Tensor:
            dw = x.new_empty((dy.shape[2], x.shape[2]))
            return operators.fused_wgrad(x, dy, dw)

        plain = partial(plain_wgrad, x, dy)
        ways = {"plain": plain, "gram": gram_route, "fused": fused_route}
        timings = measure.interleave(ways, rounds, clock(device))
        row = _row("weight gradient", case.name, timings)
        crossover.append(row | {"counted rule": route(case, device)})
    for case in {(c.I, c.O): c for c in cases_}.values():
        x, dy = operands(LayerCase(case.model, case.I, case.O, 1024, case.tokens), device)
        dw = x.new_empty((case.O, case.I))
        configs = candidates(x.dtype, aligned=True)
        for config, seconds in zip(configs, _seconds_of_tiles(x, dy, dw, configs, device)):
            flop = 2 * x.shape[0] * x.shape[1] * case.I * case.O
            tiles.append(
                {
                    "fused, T = 1024": f"{case.I}x{case.O}",
                    "tile": str(config),
                    "TFLOP/s": round(flop / seconds / 1e12, 1),
                }
            )
    return {"Crossover of the routes": crossover, "Tiles of the fused route": tiles}


def _seconds_of_tiles(
    x: Tensor, dy: Tensor, dw: Tensor, configs: Any, device: str
) -> Iterator[float]:
    from gnsfast.triton_kernels import operators

    for config in configs:
        run = lambda: operators.fused_wgrad(x, dy, dw, config=config)  # noqa: B023
        run()
        times = sorted(clock(device)(run) for _ in range(7))
        yield times[3]


CUDA = [
    LayerCase(model, I, O, T, TOKENS)
    for model, I, O in (SIZES[0], SIZES[3], SIZES[4])
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


def step(
    device: str, rounds: int = 11, models: tuple[str, ...] = ("gpt2", "llama")
) -> dict[str, Rows]:
    """Whole training steps, plain and converted, eager and compiled: bf16 autocast, AdamW."""
    rows = []
    for name in models:
        for compiled in (False, True):
            ways, peaks = {}, {}
            for per_sample in (False, True):
                key = "gnsfast" if per_sample else "plain"
                before = torch.cuda.memory_allocated()
                ways[key] = training_step(name, per_sample, compiled, device)
                for _ in range(3):
                    torch.cuda.reset_peak_memory_stats()
                    ways[key]()
                peaks[key] = (torch.cuda.max_memory_allocated() - before) / 2**20
            timings = measure.interleave(ways, rounds, clock(device))
            rows.append(
                {
                    "training step": f"{name}, {'compiled' if compiled else 'eager'}",
                    "plain ms": round(timings["plain"].milliseconds, 2),
                    "gnsfast / plain": str(timings["gnsfast"]),
                    "plain MiB": round(peaks["plain"]),
                    "memory": f"{peaks['gnsfast'] / max(peaks['plain'], 1e-9):.3f}",
                }
            )
            print(rows[-1], flush=True)
            del ways
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return {"Whole training step": rows}


def training_step(name: str, per_sample: bool, compiled: bool, device: str) -> Callable[[], object]:
    """Forward, loss, backward, AdamW; with ``per_sample`` under an estimator, as a user has it."""
    torch.manual_seed(0)
    model, loss_of, B = (_gpt2 if name == "gpt2" else _llama)(device)
    gns = gnsfast.GradientNoiseScale(gnsfast.convert(model)) if per_sample else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    forward = torch.compile(loss_of) if compiled else loss_of

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            if gns is None:
                forward(model).backward()
            else:
                with gns.microbatch(B):
                    forward(model).backward()
                gns.update()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _gpt2(device: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    batch = cases.gpt_batch(cases.GPT2, device)
    return cases.GPT2().to(device), lambda model: cases.gpt_loss(model, batch), cases.GPT2.B


def _llama(device: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """Four blocks over random activations: what a 1B Llama is made of, without its head."""
    B, T, width = 8, 2048, 2048
    x, y = (torch.randn(B, T, width, device=device) for _ in range(2))
    model = nn.Sequential(*(cases.LlamaBlock() for _ in range(4))).to(device)
    return model, lambda model: F.mse_loss(model(x).float(), y), B


def summary(tables: dict[str, Rows]) -> Rows:
    """The few lines that a run ends with: outcomes, the operator's ratios by T, the steps."""
    short: Rows = []
    for rows in tables.values():
        if "check" in rows[0]:
            short += [{"what": row["check"], "result": row["result"]} for row in rows]
        elif "weight gradient, bf16" in rows[0]:
            by_length: dict[str, list[float]] = {}
            for row in rows:
                length = row["weight gradient, bf16"].rpartition(" ")[2]
                by_length.setdefault(length, []).append(float(row["gnsfast / plain"].split()[0]))
            for length, ratios in by_length.items():
                spread = f"{min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} sizes"
                short.append({"what": f"weight gradient / plain, {length}", "result": spread})
        elif "training step" in rows[0]:
            for row in rows:
                what = f"step / plain, {row['training step']}"
                short.append({"what": what, "result": row["gnsfast / plain"]})
    return short
