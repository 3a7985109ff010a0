# SPDX-License-Identifier: Apache-2.0
"""The tiles of the linear kernel: a fixed one, a few that tuning chooses from, and how tiles are
split over the device.
"""

from dataclasses import dataclass

import torch
import triton

from gnsfast.triton_kernels.tiles import INTERPRETED, tf32_allowed

GROUP_O = 8
"""Rows of tiles that run together: eight of 128 are 2 MiB of dy per 1024 tokens in bfloat16."""


@dataclass(frozen=True)
class Config:
    """A tile and how it is computed."""

    block_o: int
    block_i: int
    block_t: int
    num_warps: int
    num_stages: int
    resident: int = 1  # programs that a multiprocessor holds, by their registers

    def options(self) -> dict[str, int]:
        """The options that a kernel is launched with."""
        return {
            "BLOCK_O": self.block_o,
            "BLOCK_I": self.block_i,
            "BLOCK_T": self.block_t,
            "GROUP": GROUP_O,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def __str__(self) -> str:
        return (
            f"{self.block_o}x{self.block_i}x{self.block_t} "
            f"{self.num_warps} warps {self.num_stages} stages"
        )


# Two float32 accumulators of 128 x 128 fill half of the registers of eight warps; 128 x 256 spills.
# Under a metric √P is a third tile in registers, and the rows of a tied head need their own
# pointers. With these options no tile here spills a register on sm_80 to sm_100, by Triton 3.6 and
# 3.7; tests/triton_kernels/test_triton_compile.py compiles them all and prints the table.
HALF = (
    Config(128, 128, 64, 8, 3),
    Config(128, 128, 64, 8, 4),
    Config(128, 128, 32, 8, 4),
    Config(64, 128, 64, 8, 3, 2),
    Config(64, 64, 64, 4, 2, 2),
)
NARROWER = (Config(128, 64, 64, 8, 3), Config(64, 128, 64, 8, 3), Config(64, 64, 64, 4, 3, 2))
TF32 = (Config(64, 128, 32, 8, 3), Config(128, 128, 32, 8, 2))
NARROW = (Config(128, 64, 32, 8, 2),)
SMALL = (Config(64, 64, 32, 8, 2),)

CANDIDATES = {
    "plain": {
        "half": HALF,
        "half, unaligned": NARROW,  # loads of single elements take many registers
        "tf32": TF32,
        "tf32, unaligned": TF32[:1],
        "float32": NARROW,
    },
    "links": {
        "half": NARROWER,
        "half, unaligned": NARROW,
        "tf32": TF32[:1],
        "tf32, unaligned": (Config(64, 64, 32, 8, 3),),
        "float32": NARROW,
    },
    "metric": {
        "half": NARROWER,
        "half, unaligned": NARROW,
        "tf32": (*NARROW, Config(64, 128, 32, 8, 2)),
        "tf32, unaligned": NARROW,
        "float32": NARROW,
    },
    "links and metric": {
        "half": (Config(64, 64, 64, 8, 3), Config(64, 64, 64, 8, 2)),
        "half, unaligned": SMALL,
        "tf32": SMALL,
        "tf32, unaligned": SMALL,
        "float32": (Config(32, 64, 32, 8, 2),),
    },
}
"""What is measured beside dW -> how blocks are multiplied -> the tiles that tuning chooses from.
The first is the fixed one."""


def candidates(
    dtype: torch.dtype, aligned: bool, metric: bool = False, links: bool = False
) -> tuple[Config, ...]:
    """The row of ``CANDIDATES`` for inputs of this dtype."""
    measured = ("plain", "links", "metric", "links and metric")[links + 2 * metric]
    if dtype == torch.float32 and not tf32_allowed():
        return CANDIDATES[measured]["float32"]
    multiplied = "tf32" if dtype == torch.float32 else "half"
    return CANDIDATES[measured][multiplied + ("" if aligned else ", unaligned")]


def multiprocessors(device: torch.device) -> int:
    """How many the device has. The interpreter has 3, so that a program has several tiles there."""
    if INTERPRETED:
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


MERGE_LAUNCH = 16
"""Launching the kernel that adds the parts, in steps of a block (0.3 µs each, counted)."""

MERGE_TILE = 0.1
"""Writing and reading one part of one tile, in such steps: 2 · 64 KiB at 4.3 TB/s."""


def splits(tiles: int, B: int, blocks: int, programs: int) -> int:
    """Into how many parts of whole samples each tile is split, so that the last wave of programs is
    not half empty: the counted time of each choice, in steps of a block. Two full waves are enough:
    there parts would cost memory for a few per cent.
    """

    def steps(parts: int) -> float:
        waves = triton.cdiv(tiles * parts, programs)
        merge = MERGE_LAUNCH + MERGE_TILE * tiles * parts if parts > 1 else 0.0
        return waves * triton.cdiv(B, parts) * blocks + merge

    most = min(B, 16, max(1, 2 * programs // tiles)) if tiles < 2 * programs else 1
    return min(range(1, max(1, most) + 1), key=lambda parts: (steps(parts), parts))
