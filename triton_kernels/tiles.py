# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: the order of tiles, the products of blocks, the dtypes they take."""

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), on CPU tensors."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def tile_position(tile, tiles_o, tiles_i, GROUP: tl.constexpr):
    """The row and column of a tile. ``GROUP`` rows of tiles run together, so that programs that run
    at the same time share dy and x in L2.
    """
    first = tile // (GROUP * tiles_i) * GROUP
    rows = min(tiles_o - first, GROUP)
    within = tile % (GROUP * tiles_i)
    return first + within % rows, within // rows


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``a @ b + acc`` in float32. The interpreter holds bfloat16 as bits, so it widens first, which
    is exact.
    """
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if PRECISION == "tf32":
        a, b = round_tf32(a), round_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def round_tf32(t):
    """Round to the nearest tf32. Tensor cores just drop the 13 bits that tf32 lacks: squared norms
    would be 0.14 % low. Rounded they are off by 4e-6 (both simulated, T = 256).
    """
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
    )


def most_registers(num_warps: int) -> int:
    """``maxnreg`` for a kernel of which one block fills a multiprocessor. Without it ptxas spills
    up to 48 bytes so that a second block fits.
    """
    return min(255, 65536 // (32 * num_warps))


def precision(dtype: torch.dtype) -> str:
    """How blocks are multiplied: float32 as tf32 only where ``tf32_allowed``."""
    if INTERPRETED:
        return "widen"
    return "tf32" if dtype == torch.float32 and tf32_allowed() else "ieee"


def tf32_allowed() -> bool:
    """Whether float32 may be multiplied as tf32: PyTorch's own switch allows it, and the current
    device can. The compilers for AMD devices and for those before Ampere refuse its rounding.
    """
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    if INTERPRETED:
        return True
    return not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0)


def blackwell() -> bool:
    """Whether the current device has Blackwell's tensor cores (capability 10.x), which read their
    blocks from shared memory by a path of their own.
    """
    if INTERPRETED or torch.version.hip:
        return False
    return torch.cuda.get_device_capability()[0] == 10


def check_dtypes(op: str, *tensors: Tensor, one: bool = True) -> None:
    """Raise for tensors of a dtype that no kernel takes, or with ``one`` of several dtypes. The
    error names the operator and the remedy.
    """
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= set(DTYPES) or (one and len(dtypes) > 1):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise NotImplementedError(
            f"{op} has no Triton kernel for {names} (shapes {shapes}): it takes float32, float16 "
            f"{'or' if one else 'and'} bfloat16. GNSFAST_BACKEND=reference runs plain PyTorch "
            "instead."
        )


def unit_inner(t: Tensor) -> Tensor:
    """``t`` if its inner stride is one, else a contiguous copy."""
    return t if t.stride(-1) == 1 else t.contiguous()
