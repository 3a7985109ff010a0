# SPDX-License-Identifier: Apache-2.0
"""A GPU by its stated and published numbers, and what plain matrix products cost on it, counted:
floating-point operations, bytes, waves of tiles. Pure arithmetic; nothing here was measured by us.

Legend: M x N a product's result, K what it sums over; seconds unless said.
"""

import math
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class GPU:
    """One processor, as its vendor states it, and its L2 as others measured it.

    Sources: NVIDIA's data sheets of the A100 80GB SXM (2021), the H100 SXM (2023), the H200 SXM
    (2024) and the HGX B200 (2025; an eighth of the board), without sparsity. SMs, L2, operations of
    a clock: the A100 and H100 architecture white papers; for the B200 what its driver reports.

    Reads out of L2, which no data sheet has for Hopper: RRZE's gpu-benches (github.com/te42kyfo/
    gpu-benches, gpu-l2-cache/h200.txt and a100_80.txt), where all SMs read what others have read:
    9.63 to 9.92 TB/s for 12 to 34 MB on an H200, whose plateau of 9.7 stands here; 5.4 TB/s for 3
    to 26 MB on an A100 80GB, three quarters of the 5120 bytes a clock of its white paper. The H100
    SXM has the H200's SMs, clocks and L2, so it is given the same. That of a PCIe H100 with 114 SMs
    reads 6.9 (h100_pcie.txt), and XLA counts with 6.65 within one half of an H100's L2. The B200's
    is unknown: nothing is bound by it, and what was just written is read from memory.
    """

    name: str
    devices: tuple[str, ...]  # as torch.cuda.get_device_name() has them
    flops: float  # dense bfloat16, a second
    memory: float  # bytes a second
    l2: float  # bytes
    processors: int
    flop_a_clock: int  # dense bfloat16, of a multiprocessor
    lanes: int  # float32 operations of a multiprocessor in a clock
    l2_reads: float | None  # bytes a second; None: unknown
    nvlink: float  # bytes a second, one way

    @property
    def clock(self) -> float:
        """Hz, at which the stated peak is reached: 1.41 GHz on the A100, 1.83 on the H100."""
        return self.flops / (self.processors * self.flop_a_clock)

    @property
    def hopper(self) -> bool:
        """Where the sm90 kernel runs."""
        return self.name in ("H100", "H200")


_H100, _A100 = ("NVIDIA H100 80GB HBM3",), ("NVIDIA A100-SXM4-80GB",)
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", _A100, 312e12, 2.039e12, 40e6, 108, 2048, 64, 5.4e12, 300e9),
        GPU("H100", _H100, 989.4e12, 3.35e12, 50e6, 132, 4096, 128, 9.7e12, 450e9),
        GPU("H200", ("NVIDIA H200",), 989.4e12, 4.8e12, 50e6, 132, 4096, 128, 9.7e12, 450e9),
        GPU("B200", ("NVIDIA B200",), 2250e12, 7.7e12, 126e6, 148, 8192, 128, None, 900e9),
    )
}


def of_device(name: str) -> GPU | None:
    """The GPU that torch names so; None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if name in gpu.devices), None)


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says.

    ``kernel`` is for plain's kernels and ours alike. gpu-benches' smallest kernels, 64 kB one after
    the other in a stream of an H200, take 2.5 µs each (gpu-small-kernels/h200.txt). ``arrival`` is
    eight trips to L2 one after the other, each 0.15 µs on an H100 (gpu-latency/h100_pcie.txt): a
    fence, a ticket, loads and a store, of a block of columns and then of all.
    """

    gemm: float = 0.8  # of the tensor cores' peak: cuBLAS, in a full wave
    loop: float = 0.8  # of that peak: our own loop, where nothing else binds
    gram: float = 0.6  # of that peak, in the Gram products
    attention: float = 0.5  # of that peak
    memory: float = 0.9  # of the stated bandwidth
    kernel: float = 2e-6  # each kernel, on top of what it moves and multiplies
    arrival: float = 1.2e-6  # of the last program of a finishing kernel, while the others are done
    drain: int = 150  # clocks to empty and refill the tensor cores' pipeline at a sample's end
    hop: float = 5e-6  # of an all-reduce, each of 2 log2(world)


ASSUMED = Assumed()


@dataclass(frozen=True)
class Kernel:
    """A product's tile; ``in_turn``: two warpgroups, of which one multiplies while the other ends
    its sample. ``cluster`` blocks share x.
    """

    name: str
    o: int
    i: int
    cluster: int = 1
    in_turn: bool = False

    @property
    def flop(self) -> int:
        """Of one token."""
        return 2 * self.o * self.i


SHARED_PORT = 128
"""Bytes a clock that a multiprocessor's shared memory gives or takes."""


def loop_share(gpu: GPU, kernel: Kernel, most: float) -> float:
    """Of the tensor cores' peak that a tile's loop can reach: ``most``, or less where L2 cannot
    feed the blocks, or on Hopper a block's shared memory its tensor cores.
    """
    shares = [most]
    if gpu.l2_reads is not None:
        bytes_a_token = 2 * (kernel.o + kernel.i / kernel.cluster)
        shares.append(gpu.l2_reads * kernel.flop / bytes_a_token / gpu.flops)
    if gpu.hopper:
        # wgmma reads 64 rows of one operand and all of the other; copies write both.
        clocks = kernel.flop / gpu.flop_a_clock
        reads = kernel.o / 64 * 2 * (64 + kernel.i)
        shares.append(SHARED_PORT * clocks / (reads + 2 * (kernel.o + kernel.i)))
    return min(shares)


CUBLAS = ((128, 256), (256, 128), (128, 192), (192, 128), (128, 128))
"""Tiles that a plain product chooses from; on Hopper and later two blocks share an operand."""

WORKSPACE = 32 << 20
"""Bytes that torch lends cuBLAS on Hopper, where a product's parts go if K is split."""


@cache
def product_seconds(gpu: GPU, M: int, N: int, K: int, nbytes: float, a: Assumed) -> float:
    """A plain product: waves of the best tile, K split where that fills the device better, or its
    bytes, whichever takes longer. A partly filled last wave takes as long as a full one.
    """
    best = math.inf
    for o, i in CUBLAS:
        tile = Kernel("cuBLAS", o, i, cluster=1 if gpu.name == "A100" else 2)
        rate = gpu.flop_a_clock * gpu.clock * loop_share(gpu, tile, a.gemm)
        tiles = math.ceil(M / o) * math.ceil(N / i)
        for parts in range(1, max(1, min(16, WORKSPACE // (4 * M * N), K // 256)) + 1):
            waves = math.ceil(tiles * parts / gpu.processors)
            seconds = waves * math.ceil(K / parts) * tile.flop / rate
            if parts > 1:  # written under the products, then added by a second kernel
                seconds += again_seconds(gpu, 4 * parts * M * N, a) + a.kernel
            best = min(best, seconds)
    return max(best, nbytes / (a.memory * gpu.memory))


def again_seconds(gpu: GPU, nbytes: float, a: Assumed) -> float:
    """To read what was just written: from L2 where half of it holds that, else from memory."""
    in_l2 = gpu.l2_reads if nbytes <= gpu.l2 / 2 else None
    return nbytes / (in_l2 or a.memory * gpu.memory)


@dataclass(frozen=True)
class Work:
    """Bytes that move, and kernels that move them."""

    nbytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nbytes + other.nbytes, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Work":
        return Work(times * self.nbytes, times * self.kernels)

    def seconds(self, gpu: GPU, a: Assumed) -> float:
        return self.nbytes / (a.memory * gpu.memory) + self.kernels * a.kernel
