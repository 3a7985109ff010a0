# SPDX-License-Identifier: Apache-2.0
"""What a linear layer's weight gradient costs on a GPU, plain and with norms, counted: the GEMM's
floating-point operations, the bytes that move, the ends of samples, kernels launched. Pure
arithmetic; nothing here was measured.

Legend: B samples, T tokens of a sample, I in_features, O out_features; seconds unless said.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class GPU:
    """One processor, as its vendor states it.

    Sources: NVIDIA's data sheets of the A100 80GB SXM (2021), the H100 SXM (2023), the H200 SXM
    (2024) and the HGX B200 (2025; an eighth of the board), without sparsity. SMs, L2, operations of
    a clock: the A100 and H100 architecture white papers; for the B200 what its driver reports. L2
    reads 5120 bytes a clock by the A100's white paper; none is published for its successors, which
    are given the same, and the B200's two dies twice that.
    """

    name: str
    devices: tuple[str, ...]  # as torch.cuda.get_device_name() has them
    flops: float  # dense bfloat16, a second
    memory: float  # bytes a second
    l2: float  # bytes
    processors: int
    flop_a_clock: int  # dense bfloat16, of a multiprocessor
    lanes: int  # float32 operations of a multiprocessor in a clock
    l2_a_clock: int  # bytes
    nvlink: float  # bytes a second, one way

    @property
    def clock(self) -> float:
        """Hz, at which the stated peak is reached: 1.41 GHz on the A100, 1.83 on the H100."""
        return self.flops / (self.processors * self.flop_a_clock)

    @property
    def hopper(self) -> bool:
        """Where the sm90 kernel runs."""
        return self.name in ("H100", "H200")


_H100 = ("NVIDIA H100 80GB HBM3",)
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", ("NVIDIA A100-SXM4-80GB",), 312e12, 2.039e12, 40e6, 108, 2048, 64, 5120, 300e9),
        GPU("H100", _H100, 989.4e12, 3.35e12, 50e6, 132, 4096, 128, 5120, 450e9),
        GPU("H200", ("NVIDIA H200",), 989.4e12, 4.8e12, 50e6, 132, 4096, 128, 5120, 450e9),
        GPU("B200", ("NVIDIA B200",), 2250e12, 7.7e12, 126e6, 148, 8192, 128, 10240, 900e9),
    )
}


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says."""

    gemm: float = 0.8  # of the tensor cores' peak: cuBLAS, and our loop where nothing else binds
    gram: float = 0.6  # of that peak, in the Gram products
    attention: float = 0.5  # of that peak
    memory: float = 0.9  # of the stated bandwidth
    kernel: float = 2e-6  # each kernel beside the plain ones, on top of what it moves
    drain: int = 150  # clocks to empty and refill the tensor cores' pipeline at a sample's end
    hop: float = 5e-6  # of an all-reduce, each of 2 log2(world)


ASSUMED = Assumed()


@dataclass(frozen=True)
class Kernel:
    """A fused kernel's tile; ``in_turn``: two warpgroups, of which one multiplies while the other
    ends its sample. ``cluster`` blocks share x.
    """

    name: str
    o: int
    i: int
    cluster: int
    in_turn: bool

    @property
    def flop(self) -> int:
        """Of one token."""
        return 2 * self.o * self.i


BLOCK_T = 64
KERNELS = {
    kernel.name: kernel
    for kernel in (Kernel("triton", 128, 128, 1, False), Kernel("sm90", 128, 192, 2, True))
}

LAUNCHES = {"closed": 9, "gram": 9, "fused": 3}
"""Kernels of a weight gradient with norms beside the plain product, each route: those that make,
sum and widen partials, and lay them into the probe's row."""

SHARED_PORT = 128
"""Bytes a clock that a multiprocessor's shared memory gives or takes."""


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
    tiles: float = 0.0  # ours beside cuBLAS's: slower loop, idle blocks of the last wave
    parts: float = 0.0  # reading partial norms, and the scratch of split tiles
    stores: float = 0.0  # dW's, ours beside plain ones, and its read for the summed norm
    launches: float = 0.0

    @property
    def more(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)[4:]))

    @property
    def overhead(self) -> float:
        return self.more / self.plain


def gemm_seconds(gpu: GPU, flop: float, nbytes: float, a: Assumed, share: float) -> float:
    """The roofline: operations at ``share`` of the peak, or the bytes, whichever takes longer."""
    return max(flop / (share * gpu.flops), nbytes / (a.memory * gpu.memory))


def loop_share(gpu: GPU, kernel: Kernel, a: Assumed) -> float:
    """Of the tensor cores' peak that a tile's loop can reach: ``a.gemm``, or less where L2 cannot
    feed the blocks, or on Hopper a block's shared memory its tensor cores.
    """
    bytes_a_token = 2 * (kernel.o + kernel.i / kernel.cluster)
    from_l2 = gpu.l2_a_clock * gpu.clock * kernel.flop / bytes_a_token / gpu.flops
    shares = [a.gemm, from_l2]
    if gpu.hopper:
        # wgmma reads 64 rows of one operand and all of the other; copies write both.
        clocks = kernel.flop / gpu.flop_a_clock
        reads = kernel.o / 64 * 2 * (64 + kernel.i)
        shares.append(SHARED_PORT * clocks / (reads + 2 * (kernel.o + kernel.i)))
    return min(shares)


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


@dataclass(frozen=True)
class Plan:
    """How tiles lie on the device: samples that the busiest block goes through one after another,
    and the tiles and parts of those that are split.
    """

    tiles: int
    samples: int
    split_tiles: int
    parts: float


def triton_plan(gpu: GPU, kernel: Kernel, B: int, T: int, I: int, O: int) -> Plan:
    from gnsfast.triton_kernels.configs import balance

    tiles = math.ceil(O / kernel.o) * math.ceil(I / kernel.i)
    plan = balance(tiles, B, gpu.processors, padded(T) // BLOCK_T)
    parts = plan.unfinished
    return Plan(tiles, plan.most, plan.remaining if parts else 0, parts / max(1, plan.remaining))


def sm90_plan(gpu: GPU, kernel: Kernel, B: int, T: int, I: int, O: int) -> Plan:
    """As ``plan_tiles`` of ``csrc/launch.h``: only the last wave's tiles are split."""
    at_once = gpu.processors // kernel.cluster
    tiles = math.ceil(O / (kernel.o * kernel.cluster)) * math.ceil(I / kernel.i)
    whole, last = divmod(tiles, at_once)
    plan, best = Plan(tiles, (whole + bool(last)) * B, 0, 1), float(B * T)
    for parts in range(2, min(B, 16) + 1) if last else ():
        samples = math.ceil(last * parts / at_once) * math.ceil(B / parts)
        cost = samples * T + 500 + 100 * parts * last / at_once
        if cost < best:
            best, plan = cost, Plan(tiles, whole * B + samples, last, parts)
    return plan


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
) -> Cost:
    """Counted for operands of two bytes. ``weights``: bytes of an element of the weight and its
    gradient, 2, or 4 under autocast, where plain PyTorch stores two and then widens them.
    """
    from gnsfast.triton_kernels.crossovers import counted_route

    I, O = layer.I, layer.O
    bandwidth = a.memory * gpu.memory
    flop, rows, out = 2 * B * T * I * O, 2 * B * T * (I + O), O * I
    widened = 6 * out if weights == 4 else 0
    product = gemm_seconds(gpu, flop, rows + 2 * out, a, a.gemm)
    plain = product + widened / bandwidth + (a.kernel if widened else 0.0)
    plain_bytes = rows + 2 * out + widened
    route = route or ("fused" if layer.tied else counted_route(B, T, I, O, gpu.processors))
    if route == "fused":
        return _fused(gpu, KERNELS[kernel], (B, T, I, O), weights, (product, plain, plain_bytes), a)
    copied = 2 * weights * out if weights == 4 else 0  # the product, copied into dW
    ours = gemm_seconds(gpu, flop, rows + weights * out, a, a.gemm)
    stores = ours - plain + copied / bandwidth + again_seconds(gpu, weights * out, a)
    launches = LAUNCHES[route] + bool(copied)
    return Cost(
        *(route, plain, plain_bytes),
        2 * rows + 2 * weights * out + copied + 8 * B - plain_bytes,
        reads=rows / bandwidth if route == "closed" else gram_seconds(gpu, B, T, I, O, a),
        stores=stores,
        launches=launches * a.kernel,
    )


def again_seconds(gpu: GPU, nbytes: float, a: Assumed) -> float:
    """To read what was just written: from L2 where half of it holds that, else from memory."""
    in_l2 = nbytes <= gpu.l2 / 2
    return nbytes / (gpu.l2_a_clock * gpu.clock if in_l2 else a.memory * gpu.memory)


def gram_seconds(gpu: GPU, B: int, T: int, I: int, O: int, a: Assumed) -> float:
    """The two products of whole squares, a sample to a multiprocessor, or one read of x and dy."""
    block = max(16, 1 << (T - 1).bit_length())
    filled = B / (math.ceil(B / gpu.processors) * gpu.processors)
    flop = 2 * B * block * block * (I + O)
    return max(flop / (a.gram * gpu.flops * filled), 2 * B * T * (I + O) / (a.memory * gpu.memory))


def _fused(
    gpu: GPU,
    kernel: Kernel,
    shape: tuple[int, int, int, int],
    weights: int,
    beside: tuple[float, float, float],
    a: Assumed,
) -> Cost:
    (B, T, I, O), (product, plain, plain_bytes) = shape, beside
    share = loop_share(gpu, kernel, a)
    make = sm90_plan if kernel.in_turn else triton_plan
    plan = make(gpu, kernel, B, T, I, O)
    clocks = padded(T) * kernel.flop / (gpu.flop_a_clock * share)
    rows, out = 2 * B * T * (I + O), weights * O * I
    ends = plan.samples * end_clocks(gpu, kernel, T, share, a) / gpu.clock
    warps = 8 if kernel.in_turn else 1  # that store a partial of their own
    partials = 4 * plan.tiles * kernel.cluster * warps * (B + 1)
    scratch = 4 * plan.split_tiles * plan.parts * kernel.cluster * kernel.o * kernel.i
    kept = partials + scratch  # written under the products, and read by kernels of their own
    loop = max(plan.samples * clocks / gpu.clock, (rows + out + kept) / (a.memory * gpu.memory))
    return Cost(
        *("fused", plain, plain_bytes, rows + out + 2 * kept - plain_bytes),
        ends=ends,
        tiles=loop - product,
        parts=again_seconds(gpu, kept, a),
        stores=product - plain,
        launches=(LAUNCHES["fused"] + (plan.parts > 1)) * a.kernel,
    )


def of_device(name: str) -> GPU | None:
    """The GPU that torch names so; None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if name in gpu.devices), None)
