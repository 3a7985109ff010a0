# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks model``: what per-sample norms cost on a GPU, counted. It measures nothing
and needs no GPU; ``python -m benchmarks gpu`` prints these numbers beside what it measures.
"""

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks import record
from benchmarks.contestants.cases import LayerCase
from benchmarks.model.gpu import ASSUMED, GPU, GPUS, Assumed, of_device
from benchmarks.model.linear import KERNELS, Layer, weight_gradient
from benchmarks.model.plain import MODELS, Model
from benchmarks.model.step import OPERATOR, RATE, step
from benchmarks.record import Rows

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = {"bfloat16": 2, "float32": 4}
GPT2_TOKENS, GPT2_SAMPLES = 1024, (8, 16, 32)
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
    reads = gpu.l2_reads
    l2 = "unknown" if reads is None else f"{reads / 1e12:.1f} TB/s, as others measured"
    values = {
        f"{gpu.name}, stated": f"{gpu.flops / 1e12:.0f} TFLOP/s dense bfloat16, "
        f"{gpu.memory / 1e12:.2f} TB/s, {gpu.processors} SMs, L2 {gpu.l2 / 1e6:.0f} MB, NVLink "
        f"{gpu.nvlink / 1e9:.0f} GB/s each way",
        "matrix products": f"{a.gemm:.0%} of that peak in full waves of cuBLAS's best tile, "
        f"{a.loop:.0%} in our loop, Gram products {a.gram:.0%}, attention {a.attention:.0%}; "
        f"memory at {a.memory:.0%}",
        "L2": f"{l2}; what was just written and fits half of it is read from it",
        "fused kernel": f"{kernel}, {tile.o} x {tile.i} tile, fixed; a sample's end: its "
        f"additions and {a.drain} clocks"
        + (", under the other warpgroup's products" if tile.in_turn else ""),
        "kernels": f"{1e6 * a.kernel:.1f} µs for each, plain ones and ours; {1e6 * a.arrival:.1f} "
        "µs until a finishing kernel's last program is done",
        "weights": f"{weights}" + (", under bfloat16 autocast" if weights == "float32" else ""),
        "processes": f"FSDP2; all-reduce 2 log2(world) x {1e6 * a.hop:.0f} µs",
        "between the products": "eager, torch's own modules, an operation at a time; compiled, one "
        "kernel between two products, sums over tokens apart; fused AdamW",
        "tied head": "words drawn evenly from the vocabulary",
        "host": f"{RATE / 1e9:.2f} instructions a nanosecond, counted on a CPU; compiled, a plain "
        f"kernel is a quarter of a linear layer's, ours {OPERATOR:.0%} of eager's",
        "step": "the device's time or the host's, whichever is longer; neither waits in between",
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
    device, added = counted.device, sum(counted.added.values())
    times = {f"plain: {part}": seconds for part, seconds in counted.parts.items()}
    times |= {"plain, device": device, **counted.added, "norms, device": added}
    times |= {"plain, host": counted.host, "norms, host": counted.host_added}
    times |= {"plain step": counted.plain, "step with norms": counted.ours}
    return [
        {
            "part": part,
            "ms": round(1e3 * seconds, 3),
            "of the plain step %": round(100 * seconds / counted.plain, 2),
        }
        for part, seconds in times.items()
    ]


def ratio_rows(gpu: GPU, model: Model, T: int, batches: Iterable[int], **options: Any) -> Rows:
    """Time with norms over plain of whole steps: every batch size, mode and kernel. The last column
    is how much rests on our loop being as fast as cuBLAS's.
    """
    a = options.pop("a", ASSUMED)
    slower = replace(a, loop=0.9 * a.loop)
    rows: Rows = []
    for B, mode, kernel in itertools.product(batches, ("eager", "compiled"), KERNELS):
        if KERNELS[kernel].in_turn and not gpu.hopper:
            continue
        how = {**options, "kernel": kernel, "compiled": mode == "compiled"}
        counted = step(gpu, model, T, B, a=a, **how)
        audited = step(gpu, model, T, B, a=a, audit=True, **how)
        row: dict[str, Any] = {"B": B, "mode": mode, "kernel": kernel}
        row["plain ms"] = round(1e3 * counted.plain, 2)
        row |= {"device": round(1 + counted.on_device, 3)}
        row |= {"host": round((counted.host + counted.host_added) / counted.plain, 3)}
        row["step"] = round(1 + counted.overhead, 3)
        row["with audit"] = round(1 + audited.overhead, 3)
        late = step(gpu, model, T, B, a=slower, **how)
        rows.append(row | {"our loop at 0.9": round(1 + late.overhead, 3)})
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
        row["device %"] = round(100 * counted.on_device, 2)
        rows.append(row | {"step %": round(100 * counted.overhead, 2)})
    return rows


def tables(
    gpu: GPU, model: Model, tokens: int, T: int, world: int, weights: str, kernel: str, a: Assumed
) -> dict[str, Rows]:
    B, options = tokens // T, {"weights": WEIGHTS[weights], "a": a}
    one = {**options, "kernel": kernel}
    whole = {**one, "world": world}
    gpt2 = ratio_rows(gpu, MODELS["gpt-2"], GPT2_TOKENS, GPT2_SAMPLES, **options)
    return {
        "Assumptions": assumptions(gpu, weights, kernel, a),
        f"Steps of gpt-2 with norms over plain, T={GPT2_TOKENS}: counted": gpt2,
        f"Steps of {model.name} with norms over plain, T={T}: counted": ratio_rows(
            gpu, model, T, (B,), **options, world=world
        ),
        f"Weight gradients of {model.name} with norms, T={T}, B={B}: counted": layer_rows(
            gpu, model, T, B, **one
        ),
        f"A step of {model.name}, T={T}, B={B}, {world} processes, eager: counted": step_rows(
            gpu, model, T, B, **whole
        ),
        f"Overhead against T, {tokens} tokens, eager: counted": length_rows(
            gpu, model, tokens, **whole
        ),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=16384, help="of a process's micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--world", type=int, default=1, help="data-parallel processes")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="their dtype")
    parser.add_argument("--kernel", choices=KERNELS, default="triton", help="of the fused route")
    parser.add_argument("--gemm", type=float, default=Assumed.gemm, help="plain's share of peak")
    parser.add_argument("--loop", type=float, help="our loop's share of it; by default --gemm")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> None:
    gpu = GPUS[options.gpu]
    if not 0 < options.length <= options.tokens or options.world < 1:
        raise SystemExit("--length must be between 1 and --tokens, --world at least 1")
    loop = options.gemm if options.loop is None else options.loop
    for name, share in (("gemm", options.gemm), ("loop", loop)):
        if not 0 < share <= 1:
            raise SystemExit(f"--{name} is a share of the peak, in (0, 1], not {share}")
    if options.kernel == "sm90" and not gpu.hopper:
        raise SystemExit(
            f"the sm90 kernel runs on Hopper alone, not on the {gpu.name}: --kernel triton"
        )
    counted = tables(
        *(gpu, MODELS[options.model], options.tokens, options.length, options.world),
        *(options.weights, options.kernel, Assumed(gemm=options.gemm, loop=loop)),
    )
    if options.json:
        print(json.dumps(counted, indent=1, ensure_ascii=False))
        return
    record.show(counted)
