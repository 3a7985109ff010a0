# SPDX-License-Identifier: Apache-2.0
"""Tiles of the linear kernel: the fixed one, the named few that tuning chooses from, and how tiles
are split over the device.
"""

from dataclasses import dataclass

import torch
import triton

from gnsfast.triton_kernels.tiles import INTERPRETED, tf32_allowed

GROUP_O = 8
"""Rows of tiles that go together: eight of 128 are 2 MiB of dy per 1024 tokens in bfloat16."""


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
        """What a kernel of such tiles is launched with."""
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


# Two float32 accumulators of 128 x 128 are half of the registers of eight warps; 128 x 256 spills.
# No configuration here spills a register, on sm_80 to sm_100; tests/test_triton_compile.py compiles
# them all and prints the table.
HALF = (
    Config(128, 128, 64, 8, 3),
    Config(128, 128, 64, 8, 4),
    Config(128, 128, 32, 8, 4),
    Config(64, 128, 64, 4, 3, 2),
    Config(64, 64, 64, 4, 3, 2),
)
HALF_UNALIGNED = (Config(128, 64, 32, 8, 2),)
"""For rows that are no multiple of 16 bytes: loads of single elements take many registers."""

TF32 = (Config(64, 128, 32, 8, 3), Config(128, 128, 32, 8, 2))
TF32_UNALIGNED = TF32[:1]
SINGLE = (Config(128, 64, 32, 8, 2), Config(64, 64, 32, 4, 2, 2))
"""float32 on the ordinary cores."""

# Under a metric √P is a third tile in registers: 128 x 128 spills up to 160 bytes, even where v is
# read anew for each sample.
HALF_METRIC = (Config(128, 64, 64, 8, 3), Config(64, 128, 64, 8, 3), Config(64, 64, 64, 4, 3, 2))
LINKED_METRIC = (Config(128, 64, 64, 8, 2),)
"""With the rows of a tied head: three stages spill 88 bytes on sm_100."""

TF32_METRIC = (Config(128, 64, 32, 8, 2), Config(64, 128, 32, 8, 3))
NARROW_METRIC = (Config(128, 64, 32, 8, 2),)
"""For float32 on the ordinary cores, and for unaligned rows."""


def candidates(
    dtype: torch.dtype, aligned: bool, metric: bool = False, links: bool = False
) -> tuple[Config, ...]:
    """What tuning chooses from; the first is the fixed configuration."""
    if metric:
        if not aligned or (dtype == torch.float32 and not tf32_allowed()):
            return NARROW_METRIC
        if dtype == torch.float32:
            return TF32_METRIC
        return LINKED_METRIC if links else HALF_METRIC
    if dtype != torch.float32:
        return HALF if aligned else HALF_UNALIGNED
    if tf32_allowed():
        return TF32 if aligned else TF32_UNALIGNED
    return SINGLE


def multiprocessors(device: torch.device) -> int:
    """Of the device; of the interpreter a few, so that a program has several tiles there too."""
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
