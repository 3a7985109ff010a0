# SPDX-License-Identifier: Apache-2.0
"""Operators on a GPU, alone, beside torch's own: the weight gradient with norms, its routes and
tiles, other layers' backward.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.contestants.cases import LayerCase, plain_wgrad
from benchmarks.gpu.cuda_kernels import operands, rates, ratios
from benchmarks.model.tables import predicted
from benchmarks.record import Growing, Rows, Tables
from gnsfast.ops import operators
from gnsfast.signatures import EmbeddingWgrad, LinearWgrad, NormBackward

TOKENS = 16384

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
BACKWARD = "backward, bf16"
WIDTHS = (768, 4096, 8192)
VOCABULARIES = ((50304, 768), (128256, 4096))


def clock(device: str) -> measure.Clock:
    """For operators and layers: the device's own time."""
    return measure.cuda_seconds if device == "cuda" else measure.wall_seconds


def wall_clock(device: str) -> measure.Clock:
    """For whole passes and steps: the host's time counts too."""
    return measure.cuda_wall_seconds if device == "cuda" else measure.wall_seconds


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "this CPU"


def ops(
    device: str, cases_: list[LayerCase] = OPS, rounds: int = 11, others: bool = True
) -> Iterator[Tables]:
    """The weight gradient with norms beside plain dW, bf16, and what was counted for it; then
    norm layers and embeddings.
    """
    found = Growing()
    alone = partial(weight_gradient, device, rounds)
    yield from found.over("The weight gradient alone", cases_, alone)
    if others:
        tokens = (device, rounds, TOKENS)
        title = "Other layers' backward"
        yield from found.over(title, WIDTHS, partial(layer_norm, *tokens))
        yield from found.over(title, VOCABULARIES, partial(embedding, *tokens))


def weight_gradient(device: str, rounds: int, case: LayerCase) -> Rows:
    x, dy = operands(case, device=device)
    plain = partial(plain_wgrad, x, dy)
    ours = lambda: operators.linear_wgrad(LinearWgrad(x, dy, True, False, False, x.dtype))
    timing = measure.interleave({"plain": plain, "gnsfast": ours}, rounds, clock(device))
    row: dict[str, Any] = {"weight gradient, bf16": case.name, "T": case.T, "B": case.B}
    row |= {"route": route(case, device), "plain ms": round(timing["plain"].milliseconds, 4)}
    return [row | rates(case, timing) | {"predicted": predicted(case, device_name(device))}]


def route(case: LayerCase, device: str) -> str:
    from gnsfast.triton_kernels.crossovers import linear_route

    x = torch.empty(0, device=device, dtype=torch.bfloat16)
    return linear_route(case.B, case.T, case.I, case.O, x)


def layer_norm(device: str, rounds: int, tokens: int, N: int) -> Rows:
    """Beside torch's own backward, and beside the plain aten that runs under ``torch.compile``."""
    B, T = tokens // min(1024, tokens), min(1024, tokens)
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
    return [_row(BACKWARD, f"layer norm {N}", measure.interleave(ways, rounds, clock(device)))]


def embedding(device: str, rounds: int, tokens: int, table: tuple[int, int]) -> Rows:
    """Beside torch's own backward."""
    B, T = tokens // min(1024, tokens), min(1024, tokens)
    V, D = table
    ids = torch.randint(0, V, (B, T), device=device)
    dy = torch.randn(B, T, D, device=device, dtype=torch.bfloat16)
    ways = {
        "plain": lambda: torch.ops.aten.embedding_dense_backward(dy, ids, V, -1, False),
        "gnsfast": lambda: operators.embedding_wgrad(EmbeddingWgrad(dy, ids, V, -1, dy.dtype)),
    }
    return [_row(BACKWARD, f"embedding {V} x {D}", measure.interleave(ways, rounds, clock(device)))]


def _row(what: str, name: str, timings: dict[str, measure.Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {what: name, "plain ms": round(timings["plain"].milliseconds, 4)}
    return row | ratios(timings)


def routes(device: str, cases_: list[LayerCase] = ROUTES, rounds: int = 11) -> Iterator[Tables]:
    """Gram against fused, each as the whole weight gradient, and every tile of the fused route."""
    found = Growing()
    yield from found.over("Crossover of the routes", cases_, partial(crossover, device, rounds))
    sizes = {(case.I, case.O): case for case in cases_}.values()
    yield from found.over("Tiles of the fused route", sizes, partial(tiles, device, rounds))


def crossover(device: str, rounds: int, case: LayerCase) -> Rows:
    from gnsfast.signatures import empty_rows
    from gnsfast.triton_kernels import outer

    x, dy = operands(case, device=device)

    def by(route: str) -> None:
        dw = x.new_empty((dy.shape[2], x.shape[2]))
        outer.outer_wgrad(x, dy, dw, empty_rows(x, 1, len(x)), route=route)

    plain = partial(plain_wgrad, x, dy)
    ways = {"plain": plain, "gram": partial(by, "gram"), "fused": partial(by, "fused")}
    timings = measure.interleave(ways, rounds, clock(device))
    return [_row("weight gradient", case.name, timings) | {"counted rule": route(case, device)}]


def tiles(device: str, rounds: int, case: LayerCase) -> Rows:
    from triton.runtime.errors import OutOfResources

    from gnsfast.signatures import empty_rows
    from gnsfast.triton_kernels import outer
    from gnsfast.triton_kernels.configs import candidates

    x, dy = operands(replace(case, T=1024), device=device)
    dw = x.new_empty((case.O, case.I))
    rows: Rows = []
    flop, norms = 2 * x.shape[0] * x.shape[1] * case.I * case.O, empty_rows(x, 1, len(x))
    for config in candidates(x.dtype, aligned=True):
        row: dict[str, Any] = {"fused, T = 1024": f"{case.I}x{case.O}", "tile": str(config)}
        run = partial(outer.fused_wgrad, x, dy, dw, norms, config=config)
        try:
            run()
            seconds = statistics.median(clock(device)(run) for _ in range(rounds))
            row["TFLOP/s"] = round(flop / seconds / 1e12, 1)
        except OutOfResources:  # of shared memory or registers
            row["TFLOP/s"] = "too large"
        rows.append(row)
    return rows
