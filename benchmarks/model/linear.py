# SPDX-License-Identifier: Apache-2.0
"""What a linear layer's weight gradient costs on a GPU, plain and with norms, counted: the GEMM's
floating-point operations, the bytes that move, the ends of samples, kernels launched. Pure
arithmetic; nothing here was measured.

Legend: B samples, T tokens of a sample, I in_features, O out_features; seconds unless said.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from benchmarks.model.gpu import (
    ASSUMED,
    GPU,
    Assumed,
    Kernel,
    again_seconds,
    loop_share,
    product_seconds,
)

BLOCK_T = 64
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("triton", 128, 128),
        Kernel("triton wide", 128, 192),
        Kernel("sm90", 128, 192, cluster=2, in_turn=True),
    )
}
"""Fused kernels. The wide one is a candidate of Triton's tuning, 128 x (128 + 64)."""

LAUNCHES = {"closed": 3, "gram": 3, "fused": 2}
"""Kernels of a weight gradient with norms, each route: its product, for short samples their norms,
and the finishing kernel. That also makes the bias's part, in eager mode."""

BIAS_LAUNCHES = {"plain": 2, "compiled plain": 2, "compiled": 4}
"""Kernels of a bias gradient that are not in the finishing kernel. Plain, eager: the sum over rows
and its cast to float32. Compiled: a reduction in two stages; ours of each sample, and two more for
their squares and the probe's row."""


@dataclass(frozen=True)
class Layer:
    """A linear layer [O, I], ``count`` times in its model."""

    name: str
    I: int
    O: int
    count: int = 1
    bias: bool = False
    tied: bool = False  # to the embedding


@dataclass(frozen=True)
class Cost:
    """Seconds of one weight gradient: plain, and what norms add to it, by cause."""

    route: str
    plain: float
    plain_bytes: float
    more_bytes: float
    reads: float = 0.0  # of x and dy once more, or the Gram products
    ends: float = 0.0  # of samples: squaring and adding the tile
    tiles: float = 0.0  # ours beside cuBLAS's: slower loop, programs with more work than others
    parts: float = 0.0  # reading partial norms, and the scratch of unfinished tiles
    stores: float = 0.0  # dW's, ours beside plain ones, and its read for the summed norm
    launches: float = 0.0  # kernels, and the finishing kernel's last program

    @property
    def more(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)[4:]))

    @property
    def overhead(self) -> float:
        return self.more / self.plain


class Balance(NamedTuple):
    """How the pairs (tile, sample) lie on programs: pairs of the busiest one, and most parts of
    tiles that more than one program works at, which go through scratch.
    """

    programs: int
    most: int
    unfinished: int


def balance(tiles: int, B: int, programs: int, blocks: int) -> Balance:
    """As the CUDA kernels do it (``csrc/plan.h``), for samples of ``blocks`` steps of 64 tokens:
    whole waves of tiles; each tile that is left has an owner, and helpers take what owners leave,
    where the parts cost less than is saved. Counted as if x and dy came from memory once.
    """
    waves, left = divmod(tiles, programs)
    own = math.ceil(left * B / programs)
    rest = B - own
    whole = Balance(programs if waves else left, (waves + bool(left)) * B, 0)
    if not own or not rest:
        return whole
    helpers = math.ceil(left * rest / own)
    parts = 2 * left + helpers - 1
    stored, added = math.ceil((own - 1) / rest) + 1, math.ceil((rest - 1) / own) + 2
    if rest * blocks <= math.ceil(7 * parts / programs) + stored + added:
        return whole
    return Balance(programs if waves else left + helpers, waves * B + own, parts)


def end_clocks(gpu: GPU, kernel: Kernel, T: int, share: float, a: Assumed) -> float:
    """What a block waits at a sample's end: an addition and a multiply-add for each number of its
    tile, and the pipeline; in turn only what the other warpgroup's products do not cover.
    """
    numbers = kernel.o * kernel.i
    if not kernel.in_turn:
        return 2 * numbers / gpu.lanes + a.drain
    own = 2 * (numbers / 2) / gpu.lanes + a.drain
    return max(0.0, own - padded(T) * kernel.flop / 2 / (gpu.flop_a_clock * share))


def padded(T: int) -> int:
    return math.ceil(T / BLOCK_T) * BLOCK_T


class Plain(NamedTuple):
    """A weight gradient without norms."""

    product: float  # seconds of the kernel that multiplies
    seconds: float
    nbytes: float
    kernels: int


def plain_gradient(
    gpu: GPU, layer: Layer, T: int, B: int, weights: int, a: Assumed, compiled: bool
) -> Plain:
    """The product; under autocast dW is then widened to float32; a bias's sum reads dy again."""
    I, O = layer.I, layer.O
    nbytes: float = 2 * B * T * (I + O) + 2 * O * I
    product = product_seconds(gpu, O, I, B * T, nbytes, a)
    more, kernels = 0.0, 1
    if weights == 4:
        more, kernels = 6 * O * I, 2
    if layer.bias:
        more += 2 * B * T * O
        kernels += BIAS_LAUNCHES["compiled plain" if compiled else "plain"]
        kernels -= not compiled and weights == 2  # no cast
    seconds = product + more / (a.memory * gpu.memory) + kernels * a.kernel
    return Plain(product, seconds, nbytes + more, kernels)


def weight_gradient(
    gpu: GPU,
    layer: Layer,
    T: int,
    B: int,
    *,
    weights: int = 2,
    kernel: str = "triton",
    route: str | None = None,
    a: Assumed = ASSUMED,
    compiled: bool = False,
) -> Cost:
    """Counted for operands of two bytes. ``weights``: bytes of an element of the weight and its
    gradient, 2, or 4 under autocast, where plain PyTorch stores two and then widens them. With a
    bias its gradient is counted too. A tied head's rows are counted by ``step.tie``.
    """
    from gnsfast.triton_kernels.crossovers import counted_route

    I, O = layer.I, layer.O
    plain = plain_gradient(gpu, layer, T, B, weights, a, compiled)
    route = route or counted_route(B, T, I, O, gpu.processors)
    kernels = LAUNCHES[route]
    if layer.bias and compiled:
        kernels += BIAS_LAUNCHES["compiled"]
    if route == "fused":
        return _fused(gpu, KERNELS[kernel], (B, T, I, O), weights, plain, kernels, layer.bias, a)
    bandwidth = a.memory * gpu.memory
    rows, out = 2 * B * T * (I + O), O * I
    copied = 2 * weights * out if weights == 4 else 0  # the product, copied into dW
    bias = 2 * B * T * O if layer.bias else 0
    ours = product_seconds(gpu, O, I, B * T, rows + weights * out, a)
    beside = plain.seconds - plain.kernels * a.kernel - bias / bandwidth
    return Cost(
        *(route, plain.seconds, plain.nbytes),
        2 * rows + 2 * weights * out + copied + 8 * B + bias - plain.nbytes,
        reads=rows / bandwidth if route == "closed" else gram_seconds(gpu, B, T, I, O, a),
        stores=ours - beside + copied / bandwidth + again_seconds(gpu, weights * out, a),
        launches=(kernels + bool(copied) - plain.kernels) * a.kernel + a.arrival,
    )


def gram_seconds(gpu: GPU, B: int, T: int, I: int, O: int, a: Assumed) -> float:
    """The two products of whole squares, a sample to a multiprocessor, or one read of x and dy."""
    block = max(16, 1 << (T - 1).bit_length())
    filled = B / (math.ceil(B / gpu.processors) * gpu.processors)
    flop = 2 * B * block * block * (I + O)
    return max(flop / (a.gram * gpu.flops * filled), 2 * B * T * (I + O) / (a.memory * gpu.memory))


def work(gpu: GPU, kernel: Kernel, B: int, T: int, I: int, O: int) -> tuple[int, Any]:
    """Tiles, of a whole cluster, and how they lie on the device."""
    from gnsfast.triton_kernels import configs

    tiles = math.ceil(O / (kernel.o * kernel.cluster)) * math.ceil(I / kernel.i)
    blocks = math.ceil(T / BLOCK_T)
    if kernel.in_turn:
        return tiles, balance(tiles, B, gpu.processors // kernel.cluster, blocks)
    return tiles, configs.balance(tiles, B, gpu.processors, blocks)


def _fused(
    gpu: GPU,
    kernel: Kernel,
    shape: tuple[int, int, int, int],
    weights: int,
    plain: Plain,
    kernels: int,
    bias: bool,
    a: Assumed,
) -> Cost:
    B, T, I, O = shape
    share, bandwidth = loop_share(gpu, kernel, a.loop), a.memory * gpu.memory
    tiles, plan = work(gpu, kernel, B, T, I, O)
    clocks = padded(T) * kernel.flop / (gpu.flop_a_clock * share)
    rows, out = 2 * B * T * (I + O), weights * O * I
    sums = 2 * B * T * O if bias else 0  # dy once more, as plain's own sum
    warps = 8 if kernel.in_turn else 1  # that store a partial of their own
    partials = 4 * tiles * kernel.cluster * warps * (B + 1)
    scratch = 4 * plan.unfinished * kernel.cluster * kernel.o * kernel.i
    kept = partials + scratch  # written under the products, and read by the finishing kernel
    loop = max(plan.most * clocks / gpu.clock, (rows + out + kept) / bandwidth)
    beside = plain.seconds - plain.kernels * a.kernel - sums / bandwidth
    return Cost(
        *("fused", plain.seconds, plain.nbytes, rows + out + sums + 2 * kept - plain.nbytes),
        ends=plan.most * end_clocks(gpu, kernel, T, share, a) / gpu.clock,
        tiles=loop - plain.product,
        parts=again_seconds(gpu, kept, a),
        stores=plain.product - beside,
        launches=(kernels - plain.kernels) * a.kernel + a.arrival,
    )
