# SPDX-License-Identifier: Apache-2.0
"""How the linear kernel reads x and dy: by the tensor memory accelerator, by wide loads or by
single elements, and whether a copy with aligned rows is worth its time.
"""

import copy
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gnsfast.triton_kernels.configs import NARROW
from gnsfast.triton_kernels.tiles import INTERPRETED, tf32_allowed


class Operand(NamedTuple):
    """What decides how a tensor [B, T, N] is read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # of its first byte, after a multiple of 16
    device: torch.device

    @property
    def row_strides(self) -> list[int]:
        """The strides of samples and tokens; a dimension of one is left out."""
        return [stride for n, stride in zip(self.shape[:2], self.strides) if n > 1]


def operand(t_BTN: Tensor) -> Operand:
    address = t_BTN.data_ptr()
    return Operand(t_BTN.shape, t_BTN.stride(), t_BTN.dtype, address % 16, t_BTN.device)


def wide(o: Operand) -> bool:
    """Whether wide loads by pointers can read blocks of it: Triton knows that its row strides are
    multiples of 16 elements.
    """
    return o.offset == 0 and all(stride % 16 == 0 for stride in o.row_strides)


def aligned(o: Operand) -> bool:
    """Whether wide loads can read blocks of it, by pointers or by the tensor memory accelerator."""
    return wide(o) or fits_tma(o)


def fits_tma(o: Operand) -> bool:
    """Whether the tensor memory accelerator reads it: aligned rows that are not expanded, on Hopper
    and later and in the interpreter. float32 without tf32 takes pointers: with blocks from shared
    memory it spills 440 bytes a thread.
    """
    if not INTERPRETED:
        if torch.version.hip or torch.cuda.get_device_capability(o.device) < (9, 0):
            return False
        if o.dtype == torch.float32 and not tf32_allowed():
            return False
    size = o.dtype.itemsize
    rows = all(stride > 0 and stride * size % 16 == 0 for stride in o.row_strides)
    return rows and o.offset == 0 and o.shape[2] * size >= 16


PADDING_PAYS = 3.5
"""How often an element must be loaded, for each of its bytes, so that a copy with aligned rows
costs less (counted for an H200). A copy reads and writes the byte: 0.47 ps at 4.3 TB/s. A load
takes 0.13 ps, if each of 132 multiprocessors loads a warp of single elements every cycle."""


class Reading(NamedTuple):
    """How x and dy are read."""

    pad_x: bool
    pad_dy: bool
    aligned: bool
    tma: bool


@functools.lru_cache(maxsize=4096)
def reading(x: Operand, dy: Operand, tf32: bool) -> Reading:
    """``tf32`` is whether float32 may be multiplied as such."""
    I, O = x.shape[2], dy.shape[2]
    tile = NARROW[0]  # for unaligned rows, loaded once for each block of the other operand
    tma = fits_tma(x) and fits_tma(dy)
    both_aligned = tma or (wide(x) and wide(dy))
    # Rows of dW that no wide store can write need as many registers as unaligned loads.
    return Reading(
        _padding_pays(x, O / tile.block_o, tf32),
        _padding_pays(dy, I / tile.block_i, tf32),
        both_aligned and I % 16 == 0,
        tma,
    )


def _padding_pays(o: Operand, loads: float, tf32: bool) -> bool:
    """Whether a copy with aligned rows costs less than ``loads`` loads of each element. Without
    tf32 the product of float32 takes longer than its loads.
    """
    if o.dtype == torch.float32 and not tf32:
        return False
    return not aligned(o) and loads >= PADDING_PAYS * o.dtype.itemsize


def padded(t_BTN: Tensor) -> Tensor:
    """A copy with aligned rows. A vocabulary of 50257 words makes rows that no wide load and no
    descriptor can read.

    The copy is as large as ``t_BTN``: 1.65 GB for 16k tokens of that vocabulary in bfloat16. It
    lives while the kernel runs, after the loss has freed what it keeps of the logits.
    """
    B, T, N = t_BTN.shape
    return t_BTN.new_empty((B, T, triton.cdiv(N, 16) * 16))[..., :N].copy_(t_BTN)


def descriptor(t_BTN: Tensor, block_t: int, block_n: int) -> TensorDescriptor:
    """A descriptor of blocks [1, block_t, block_n]; a dimension of one gets a valid stride."""
    shape, strides = tuple(t_BTN.shape), t_BTN.stride()
    found = copy.copy(_descriptor(shape, strides, t_BTN.dtype, block_t, block_n))
    found.base = t_BTN
    return found


@functools.lru_cache(maxsize=4096)
def _descriptor(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    block_t: int,
    block_n: int,
) -> TensorDescriptor:
    """Of an empty tensor: its checks take longer than a launch."""
    row = triton.cdiv(shape[2], 16) * 16
    valid = [s if n > 1 else row for n, s in zip(shape[:2], strides)]
    base = torch.empty(0, dtype=dtype)
    return TensorDescriptor(base, list(shape), [*valid, 1], [1, block_t, block_n])
