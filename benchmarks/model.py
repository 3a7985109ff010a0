# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks model``: what per-sample norms cost on a GPU, counted. It measures nothing
and needs no GPU; ``python -m benchmarks gpu`` prints these numbers beside what it measures.
"""

import argparse
import json
from typing import Any

from benchmarks import record
from benchmarks.cases import LayerCase
from benchmarks.model_linear import GPU, GPUS, KERNELS, Assumed, Layer, of_device, weight_gradient
from benchmarks.model_step import MODELS, Model, step
from benchmarks.record import Rows

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = {"bfloat16": 2, "float32": 4}
CAUSES = {
    "reads": "x, dy again",
    "ends": "ends of samples",
    "tiles": "tiles",
    "parts": "partials, scratch",
    "stores": "dW",
    "launches": "kernels",
}
"""Fields of ``Cost`` -> columns of the layers' table."""


def predicted(
    case: LayerCase, device: str, kernel: str = "triton", route: str | None = None
) -> float | str:
    """Time with norms over plain of one bfloat16 weight gradient, counted for the GPU that torch
    names ``device``, by the route that is taken or another; "-" for one that is not in the table.
    """
    gpu = of_device(device)
    if gpu is None:
        return "-"
    layer = Layer(case.model, case.I, case.O)
    cost = weight_gradient(gpu, layer, case.T, case.B, kernel=kernel, route=route)
    return round(1 + cost.overhead, 3)


def assumptions(gpu: GPU, weights: str, kernel: str, a: Assumed) -> Rows:
    """What the numbers rest on, a row each."""
    tile = KERNELS[kernel]
    values = {
        f"{gpu.name}, stated": f"{gpu.flops / 1e12:.0f} TFLOP/s dense bfloat16, "
        f"{gpu.memory / 1e12:.2f} TB/s, {gpu.processors} SMs, L2 {gpu.l2 / 1e6:.0f} MB, NVLink "
        f"{gpu.nvlink / 1e9:.0f} GB/s each way",
        "matrix products": f"{a.gemm:.0%} of that peak, Gram products {a.gram:.0%}, attention "
        f"{a.attention:.0%}; memory at {a.memory:.0%}; cuBLAS fills the device at any shape",
        "L2": f"{gpu.l2_a_clock} bytes a clock; what was just written and fits half of it is read "
        "from it",
        "fused kernel": f"{kernel}, {tile.o} x {tile.i} tile, fixed; a sample's end: its "
        f"additions and {a.drain} clocks"
        + (", under the other warpgroup's products" if tile.in_turn else ""),
        "kernels": f"{1e6 * a.kernel:.1f} µs for each beside the plain ones, eager",
        "weights": f"{weights}" + (", under bfloat16 autocast" if weights == "float32" else ""),
        "processes": f"FSDP2; all-reduce 2 log2(world) x {1e6 * a.hop:.0f} µs",
        "plain step": "6 x parameters of linear layers x tokens, and causal attention; optimizer "
        "and pointwise operations left out",
        "host": "launches are hidden: the device never waits for the host",
    }
    return [{"assumed": key, "value": value} for key, value in values.items()]


def layer_rows(gpu: GPU, model: Model, T: int, B: int, **options: Any) -> Rows:
    rows = []
    for layer in model.layers:
        cost = weight_gradient(gpu, layer, T, B, **options)
        row: dict[str, Any] = {"layer": layer.name, "I x O": f"{layer.I} x {layer.O}"}
        row |= {"layers": layer.count, "route": cost.route, "plain µs": round(1e6 * cost.plain, 1)}
        row |= {f"{c} µs": round(1e6 * getattr(cost, name), 1) for name, c in CAUSES.items()}
        row |= {"overhead %": round(100 * cost.overhead, 1)}
        row |= {"plain MB": round(cost.plain_bytes / 1e6, 1)}
        rows.append(row | {"more MB": round(cost.more_bytes / 1e6, 1)})
    return rows


def step_rows(gpu: GPU, model: Model, T: int, B: int, **options: Any) -> Rows:
    counted = step(gpu, model, T, B, **options)
    rows: Rows = [{"part": "plain step", "ms": round(1e3 * counted.plain, 3), "of the step %": 100}]
    whole = {**counted.added, "all": sum(counted.added.values())}
    for part, seconds in whole.items():
        share = round(100 * seconds / counted.plain, 2)
        rows.append({"part": part, "ms": round(1e3 * seconds, 3), "of the step %": share})
    return rows


def length_rows(gpu: GPU, model: Model, tokens: int, **options: Any) -> Rows:
    rows = []
    for T in LENGTHS:
        if T > tokens:
            break
        counted = step(gpu, model, T, tokens // T, **options)
        routes = dict.fromkeys(cost.route for cost in counted.costs)
        row: dict[str, Any] = {"T": T, "B": tokens // T, "routes": ", ".join(routes)}
        row["weight gradients %"] = round(100 * counted.gradient_overhead, 1)
        rows.append(row | {"step %": round(100 * counted.overhead, 2)})
    return rows


def tables(
    gpu: GPU, model: Model, tokens: int, T: int, world: int, weights: str, kernel: str, a: Assumed
) -> dict[str, Rows]:
    B, options = tokens // T, {"weights": WEIGHTS[weights], "kernel": kernel, "a": a}
    whole = {**options, "world": world}
    return {
        "Assumptions": assumptions(gpu, weights, kernel, a),
        f"Weight gradients of {model.name} with norms, T={T}, B={B}: counted": layer_rows(
            gpu, model, T, B, **options
        ),
        f"A step of {model.name}, T={T}, B={B}, {world} processes: counted": step_rows(
            gpu, model, T, B, **whole
        ),
        f"Overhead against T, {tokens} tokens: counted": length_rows(gpu, model, tokens, **whole),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=16384, help="of a process's micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--world", type=int, default=1, help="data-parallel processes")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="their dtype")
    parser.add_argument("--kernel", choices=KERNELS, default="triton", help="of the fused route")
    parser.add_argument("--gemm", type=float, default=Assumed.gemm, help="share of the peak")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    gpu = GPUS[options.gpu]
    if not 0 < options.length <= options.tokens or options.world < 1:
        raise SystemExit("--length must be between 1 and --tokens, --world at least 1")
    if not 0 < options.gemm <= 1:
        raise SystemExit(f"--gemm is a share of the peak, in (0, 1], not {options.gemm}")
    if options.kernel == "sm90" and not gpu.hopper:
        raise SystemExit(
            f"the sm90 kernel runs on Hopper alone, not on the {gpu.name}: --kernel triton"
        )
    counted = tables(
        *(gpu, MODELS[options.model], options.tokens, options.length, options.world),
        *(options.weights, options.kernel, Assumed(gemm=options.gemm)),
    )
    if options.json:
        print(json.dumps(counted, indent=1, ensure_ascii=False))
        return
    for title, rows in counted.items():
        print(f"\n{title}\n\n" + "\n".join(record.markdown(rows)))
