# SPDX-License-Identifier: Apache-2.0
"""Operators on a GPU, alone, beside torch's own: the weight gradient with norms, its routes and
tiles, the CUDA extension's kernels, and the Hopper kernel with one choice changed at a time; then
other layers' backward.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.contestants import cases
from benchmarks.contestants.cases import LayerCase, plain_wgrad
from benchmarks.record import Growing, Rows, Tables
from gnsfast.ops import extension, operators
from gnsfast.signatures import EmbeddingWgrad, LinearWgrad, NormBackward, empty_rows

ROUNDS = 11
TOKENS = 16384
BATCH = 16, 1024
"""Samples and tokens, for layers other than linear ones."""

SIZES = (("GPT-2 out", 768, 768), ("GPT-2 up", 768, 3072), ("Llama-1B out", 2048, 2048))
SIZES += (("Llama-7B out", 4096, 4096), ("Llama-8B up", 4096, 14336), ("down", 14336, 4096))
LENGTHS = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)
OPS = [LayerCase(model, I, O, T, TOKENS) for model, I, O in SIZES for T in LENGTHS]
# Rows of dy that any load takes, and rows that are copied first.
OPS += [LayerCase("GPT-2 head", 768, V, 1024, TOKENS) for V in (50304, 50257)]
ROUTES = [
    LayerCase(model, I, O, T, TOKENS)
    for model, I, O in (SIZES[0], SIZES[2], SIZES[3])
    for T in (2, 8, 16, 32, 64, 96, 128)
]
CUDA = [
    LayerCase(model, I, O, T, TOKENS)
    for model, I, O in (SIZES[0], SIZES[3], SIZES[4])
    for T in (64, 128, 256, 512, 1024, 2048, 8192)
]
BACKWARD = "backward, bf16"
WIDTHS = (768, 4096, 8192)
VOCABULARIES = ((50304, 768), (128256, 4096))

SIZE = 4096
"""Of the square layer whose kernel is taken apart: 352 tiles of 256 x 192, 66 at a time."""

VARIANTS = (
    "sm90 unordered",
    "sm90 cluster of 1",
    "sm90 unsplit",
    "sm90 128 x 256, one sample",
)
"""Of ``csrc/variants_sm90.cu``, which ``GNSFAST_CUDA_VARIANTS=1`` builds."""

LENGTHS_APART = (128, 512, 2048, 16384)
"""Tokens of a sample in the kernel that is taken apart; the last is all tokens in one sample."""


def clock(device: str) -> measure.Clock:
    """For operators and layers: the device's own time."""
    return measure.cuda_seconds if device == "cuda" else measure.wall_seconds


def wall_clock(device: str) -> measure.Clock:
    """For whole passes and steps: the host's time counts too."""
    return measure.cuda_wall_seconds if device == "cuda" else measure.wall_seconds


def ops(device: str) -> Iterator[Tables]:
    """The weight gradient with norms beside plain dW, bf16; then norm layers and embeddings."""
    found, title = Growing(), "Other layers' backward"
    yield from found.over("The weight gradient alone", OPS, partial(weight_gradient, device))
    yield from found.over(title, WIDTHS, partial(layer_norm, device))
    yield from found.over(title, VOCABULARIES, partial(embedding, device))


def timed(case: LayerCase, device: str, *names: str) -> dict[str, measure.Timing]:
    """Ways to a case's weight gradient, bf16 in and out."""
    x, dy = cases.operands(case, device=device, dtype=torch.bfloat16)
    ways = {name: partial(way(name), x, dy, x.new_empty((case.O, case.I))) for name in names}
    return measure.interleave(ways, ROUNDS, clock(device))


def way(name: str) -> Callable[[Tensor, Tensor, Tensor], object]:
    """A function of x, dy and dW by its name: plain, gnsfast's operator, a route, Triton's fixed
    tile, which is never the extension, or a kernel of that.
    """
    if name == "plain":
        return lambda x, dy, dw: plain_wgrad(x, dy)
    if name == "gnsfast":
        return lambda x, dy, dw: operators.linear_wgrad(
            LinearWgrad(x, dy, True, False, False, x.dtype)
        )
    if name not in ("gram", "fused", "triton"):
        return partial(_extension, name)
    from gnsfast.triton_kernels import configs, outer

    if name == "triton":
        config = configs.candidates(torch.bfloat16, aligned=True)[0]
        return lambda x, dy, dw: outer.fused_wgrad(x, dy, dw, norms_of(x), config=config)
    return lambda x, dy, dw: outer.outer_wgrad(x, dy, dw, norms_of(x), route=name)


def norms_of(x: Tensor) -> Tensor:
    return empty_rows(x, 1, len(x))


def _extension(kernel: str, x: Tensor, dy: Tensor, dw: Tensor) -> None:
    rows = x.new_empty((1, len(x) + 2), dtype=torch.float32)
    extension.linear_wgrad(x, dy, dw, None, rows, False, kernel)


def rates(case: LayerCase, timings: dict[str, measure.Timing]) -> dict[str, Any]:
    """Of each way to a case's weight gradient, then its ratio to the plain one."""
    flop = 2 * case.B * case.T * case.I * case.O
    found = {f"{k} TFLOP/s": round(flop / (1e9 * t.milliseconds), 1) for k, t in timings.items()}
    return found | ratios(timings)


def ratios(timings: dict[str, measure.Timing]) -> dict[str, Any]:
    first, *others = timings
    return {f"{name} / {first}": timings[name] for name in others}


def weight_gradient(device: str, case: LayerCase) -> Rows:
    timings = timed(case, device, "plain", "gnsfast")
    row: dict[str, Any] = {"weight gradient, bf16": case.name, "T": case.T, "B": case.B}
    row |= {"route": route(case, device), "plain ms": round(timings["plain"].milliseconds, 4)}
    return [row | rates(case, timings)]


def route(case: LayerCase, device: str) -> str:
    from gnsfast.triton_kernels.crossovers import linear_route

    x = torch.empty(0, device=device, dtype=torch.bfloat16)
    return linear_route(case.B, case.T, case.I, case.O, x)


def layer_norm(device: str, N: int) -> Rows:
    """Beside torch's own backward, and beside the plain aten that runs under ``torch.compile``."""
    B, T = BATCH
    x, dy = (torch.randn(B, T, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    w, b = (torch.randn(N, device=device, dtype=torch.bfloat16) for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, [N], w, b, 1e-5)
    args = (dy, x, mean, rstd, w, b, True, True)
    aten = torch.ops.aten.native_layer_norm_backward
    ours = lambda *fields: operators.norm_backward(NormBackward(*fields))
    ways = {
        "plain": lambda: aten(dy, x, [N], mean, rstd, w, b, [True, True, True]),
        "gnsfast": lambda: ours(*args),
        "gnsfast, compiled aten": partial(torch.compile(ours, dynamic=False), *args),
    }
    return [_row(BACKWARD, f"layer norm {N}", measure.interleave(ways, ROUNDS, clock(device)))]


def embedding(device: str, table: tuple[int, int]) -> Rows:
    """Beside torch's own backward."""
    B, T = BATCH
    V, D = table
    ids = torch.randint(0, V, (B, T), device=device)
    dy = torch.randn(B, T, D, device=device, dtype=torch.bfloat16)
    ways = {
        "plain": lambda: torch.ops.aten.embedding_dense_backward(dy, ids, V, -1, False),
        "gnsfast": lambda: operators.embedding_wgrad(EmbeddingWgrad(dy, ids, V, -1, dy.dtype)),
    }
    return [_row(BACKWARD, f"embedding {V} x {D}", measure.interleave(ways, ROUNDS, clock(device)))]


def _row(what: str, name: str, timings: dict[str, measure.Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {what: name, "plain ms": round(timings["plain"].milliseconds, 4)}
    return row | ratios(timings)


def routes(device: str) -> Iterator[Tables]:
    """Gram against fused, each as the whole weight gradient, and every tile of the fused route."""
    found = Growing()
    yield from found.over("Crossover of the routes", ROUTES, partial(crossover, device))
    sizes = {(case.I, case.O): case for case in ROUTES}.values()
    yield from found.over("Tiles of the fused route", sizes, partial(tiles, device))


def crossover(device: str, case: LayerCase) -> Rows:
    timings = timed(case, device, "plain", "gram", "fused")
    return [_row("weight gradient", case.name, timings) | {"counted rule": route(case, device)}]


def tiles(device: str, case: LayerCase) -> Rows:
    from triton.runtime.errors import OutOfResources

    from gnsfast.triton_kernels import outer
    from gnsfast.triton_kernels.configs import candidates

    long = replace(case, T=1024)
    x, dy = cases.operands(long, device=device, dtype=torch.bfloat16)
    dw = x.new_empty((case.O, case.I))
    rows: Rows = []
    flop, norms = 2 * long.B * long.T * case.I * case.O, norms_of(x)
    for config in candidates(x.dtype, aligned=True):
        row: dict[str, Any] = {"fused, T = 1024": f"{case.I}x{case.O}", "tile": str(config)}
        run = partial(outer.fused_wgrad, x, dy, dw, norms, config=config)
        try:
            run()
            seconds = statistics.median(clock(device)(run) for _ in range(ROUNDS))
            row["TFLOP/s"] = round(flop / seconds / 1e12, 1)
        except OutOfResources:  # of shared memory or registers
            row["TFLOP/s"] = "too large"
        rows.append(row)
    return rows


def cuda(device: str) -> Iterator[Tables]:
    """The CUDA extension's kernels, bf16; on Hopper its kernel taken apart too."""
    found = Growing()
    title = "The CUDA kernels"
    if why := extension.missing():
        yield {title: [{"check": "extension", "result": why}]}
        return
    yield from found.over(title, CUDA, partial(beside_triton, device))
    if extension.kernel_for(torch.cuda.get_device_capability()) == "sm90":
        title = "The Hopper kernel taken apart"
        yield from found.over(title, LENGTHS_APART, partial(taken_apart, device))


def beside_triton(device: str, case: LayerCase) -> Rows:
    """Ratios to plain dW."""
    own = extension.kernel_for(torch.cuda.get_device_capability())
    row: dict[str, Any] = {"fused weight gradient, bf16": case.name, "B": case.B}
    names = "plain", "triton", *sorted({own, "sm80"})
    return [row | rates(case, timed(case, device, *names))]


def taken_apart(device: str, T: int, size: int = SIZE) -> Rows:
    """Times beside the Hopper kernel that ships, interleaved with it."""
    case = LayerCase("square", size, size, T, max(LENGTHS_APART))
    names = [name for name in VARIANTS if (case.B > 1) != name.endswith("one sample")]
    return [
        {
            "variant": name,
            "T": T,
            "B": case.B,
            "ms": round(timing.milliseconds, 4),
            "time / sm90": timing,
        }
        for name, timing in timed(case, device, "sm90", *names, "plain").items()
    ]
