# SPDX-License-Identifier: Apache-2.0
"""The tiles of the linear kernel: a fixed one, a few that tuning chooses from, and how tiles are
shared out among programs.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from gnsfast.triton_kernels.tiles import INTERPRETED, most_registers, tf32_allowed

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

    def registers(self, roomy: bool = False) -> int:
        """The most that a thread may have, so that ``resident`` programs fit; one alone where that
        would spill (``roomy``).
        """
        return most_registers(self.num_warps * (1 if roomy else self.resident))

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
# With these options no tile here spills a register on sm_80 to sm_100, gfx90a and gfx942, by Triton
# 3.7; tests/triton_kernels/test_triton_compile.py compiles them all and prints the tables. By
# pointers the first tile spills 16 to 24 bytes on sm_120.
HALF = (
    Config(128, 128, 64, 8, 3),
    Config(128, 128, 64, 8, 4),
    Config(128, 128, 32, 8, 4),
    Config(64, 128, 64, 8, 3, 2),
    Config(64, 64, 64, 4, 2, 2),
)
TF32 = (Config(64, 128, 32, 8, 3), Config(128, 128, 32, 8, 2))
NARROW = (Config(128, 64, 32, 8, 2),)
SMALL = (Config(64, 64, 32, 8, 2, 2),)

CANDIDATES = {
    "half": HALF,
    "half, unaligned": NARROW,  # loads of single elements take many registers
    "tf32": TF32,
    "tf32, unaligned": TF32[:1],
    "float32": NARROW,
}
"""How blocks are multiplied -> the tiles that tuning chooses from. The first is the fixed one."""


AMD_STAGES = 2
"""With a third stage a tile of 128 x 128 takes up to 96 KiB of shared memory, and spills registers.
A block has 64 KiB on gfx90a and gfx942."""


def candidates(dtype: torch.dtype, aligned: bool) -> tuple[Config, ...]:
    """The row of ``CANDIDATES`` for inputs of this dtype, as the device can run it."""
    if dtype == torch.float32 and not tf32_allowed():
        return runnable(CANDIDATES["float32"])
    multiplied = "tf32" if dtype == torch.float32 else "half"
    return runnable(CANDIDATES[multiplied + ("" if aligned else ", unaligned")])


def runnable(tiles: tuple[Config, ...]) -> tuple[Config, ...]:
    """With ``AMD_STAGES`` at most on an AMD device."""
    if not torch.version.hip:
        return tiles
    fewer = (replace(tile, num_stages=min(tile.num_stages, AMD_STAGES)) for tile in tiles)
    return tuple(dict.fromkeys(fewer))


def multiprocessors(device: torch.device) -> int:
    """How many the device has. The interpreter has 3, so that a program has several tiles there."""
    if INTERPRETED:
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


MERGE = 7
"""Writing one part of a tile in each program, in steps of a block (0.3 µs each): 132 · 64 KiB at
4.3 TB/s, counted. The finishing kernel reads the parts from L2 while it waits for dy."""


class Balance(NamedTuple):
    """How the (tile, sample) pairs of a weight gradient are shared out among programs.

    Program p computes the whole tiles ``p``, ``p + programs``, ... of ``waves`` waves. The
    ``remaining`` tiles, fewer than there are programs, each have a program that takes their first
    ``own`` samples. The other programs, the helpers, cut the line of what is left, tile after tile,
    into runs of ``own`` samples. So each program ends with at most one run, and the busiest has as
    many pairs as whole samples allow.

    All owners are at the same sample at the same time, and the helpers at the few samples that
    owners leave out: tiles of a row or a column of dW share dy and x in L2. One line over all tiles
    cut into equal runs would have the same busiest program, but its programs would be at as many
    samples as there are, and read several times what they share.

    What is left unbalanced is less than a sample for each program: B = 1 has whole tiles alone.
    """

    programs: int
    waves: int
    remaining: int
    own: int
    most: int  # (tile, sample) pairs of the busiest program
    unfinished: int  # parts of tiles in the scratch tensor

    @property
    def first_tile(self) -> int:
        """The first of the remaining tiles."""
        return self.waves * self.programs


def balance(tiles: int, B: int, programs: int, blocks: int = 16) -> Balance:
    """The plan for ``tiles`` of ``B`` samples of ``blocks`` steps each, on a device that holds so
    many programs. Tiles stay whole where their parts would cost more than they save.
    """
    waves, remaining = divmod(tiles, programs)
    at_once = programs if waves else remaining
    whole = Balance(at_once, waves, remaining, B, (waves + (remaining > 0)) * B, 0)
    if not remaining:
        return whole
    own = triton.cdiv(remaining * B, programs)
    rest = B - own
    if not rest:
        return whole
    helpers = triton.cdiv(remaining * rest, own)
    parts = 2 * remaining + helpers - 1  # where cuts of the line fall on a tile's end, fewer
    # A step for each part that the busiest helper stores, and for each that a tile consists of.
    stored, added = triton.cdiv(own - 1, rest) + 1, triton.cdiv(rest - 1, own) + 2
    if rest * blocks <= MERGE * parts / programs + stored + added:
        return whole
    at_once = programs if waves else remaining + helpers
    return Balance(at_once, waves, remaining, own, waves * B + own, parts)
