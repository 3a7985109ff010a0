# SPDX-License-Identifier: Apache-2.0
"""Launches the CUDA extension ``gnsfast._C``, and decides which tensors it takes."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from gnsfast.torch_internals import cuda_stream

PREFERRED = False
"""Whether the extension is used before the Triton kernel. It becomes True once a record in
``benchmarks/results/`` shows it faster; until then ``GNSFAST_BACKEND=cuda`` asks for it."""

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@functools.cache
def missing() -> str:
    """Why the extension cannot run here. Empty if it can."""
    if importlib.util.find_spec("gnsfast._C") is None:
        return (
            "gnsfast was installed without nvcc. GNSFAST_CUDA=1 pip install . builds the CUDA "
            "extension"
        )
    try:
        why: str = _module().missing_device()  # its CUDA runtime may be newer than the driver
    except ImportError as error:
        return f"gnsfast._C cannot be loaded: {error}"
    return f"no device: {why}" if why else ""


def takes(x_BTI: Tensor, dy_BTO: Tensor, dw_OI: Tensor | None, add: bool = False) -> bool:
    """Whether the extension can compute this weight gradient. Triton computes all others.

    It needs sm_80 or later, bfloat16 or float16 rows that start at multiples of 16 bytes and are
    not expanded, and a contiguous dW of that dtype or float32 (with ``add``: float32), or none.
    """
    if dw_OI is None:
        return _reads(x_BTI, dy_BTO)
    outputs = (torch.float32,) if add else (torch.float32, x_BTI.dtype)
    stored = dw_OI.dtype in outputs and dw_OI.is_contiguous() and dw_OI.data_ptr() % 8 == 0
    return stored and _reads(x_BTI, dy_BTO)


def _reads(x_BTI: Tensor, dy_BTO: Tensor) -> bool:
    """Whether the extension runs on this device and can read both tensors."""
    if not x_BTI.is_cuda or missing() or x_BTI.dtype != dy_BTO.dtype:
        return False
    return _capability(x_BTI.get_device()) >= (8, 0) and fits(x_BTI) and fits(dy_BTO)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def fits(t_BTN: Tensor) -> bool:
    """Whether the kernels can load the rows of ``t_BTN`` 16 bytes at a time."""
    return t_BTN.data_ptr() % 16 == 0 and _laid_out(t_BTN.shape, t_BTN.stride(), t_BTN.dtype)


@functools.lru_cache(4096)  # 3 us otherwise
def _laid_out(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> bool:
    strides = [step for n, step in zip(shape[:2], stride) if n > 1]
    rows = all(0 < step < 1 << 39 and step % 8 == 0 for step in strides)
    return dtype in ELEMENTS and rows and stride[2] == 1 and shape[2] % 8 == 0 and 0 not in shape


def kernel_for(capability: tuple[int, int]) -> str:
    """The kernel's name. Hopper has its own, and all other devices from sm_80 on share one."""
    return "sm90" if capability == (9, 0) else "sm80"


def takes_tokens(x_BI: Tensor, dy_BO: Tensor) -> bool:
    """Whether the extension can compute the squared norms of one-token samples. It needs sm_80 or
    later, and bfloat16 or float16 rows that start at multiples of 16 bytes.
    """
    return _reads(x_BI[:, None], dy_BO[:, None])


def linear_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor | None,
    db_O: Tensor | None,
    rows: Tensor,
    add: bool,
    kernel: str | None = None,
) -> None:
    """Fill ``dw_OI`` and ``db_O``, or add to them with ``add``, and fill ``rows`` in two launches.

    ``rows`` [1, or 2 with a bias; B + 2] float32 holds the squared norms of each sample's
    dy_bᵀ x_b, that of their sum, and 1, then the same for the bias. The rows need not be adjacent
    in memory. ``db_O`` is contiguous and has dW's dtype. Without ``dw_OI`` there is no ``db_O``
    either, and the rows alone are written, with the same bits.

    Needs ``takes(x_BTI, dy_BTO, dw_OI, add)``. ``kernel`` is that of the device, or another one for
    a comparison. Raises RuntimeError with what CUDA reports, and ValueError for a kernel that was
    not built (``GNSFAST_CUDA_ARCHS`` in ``setup.py``).
    """
    device, shape = x_BTI.get_device(), (*x_BTI.shape, dy_BTO.shape[2])
    output, bias = None if dw_OI is None else dw_OI.dtype, len(rows) == 2
    call, nbytes = _planned(kernel, shape, x_BTI.dtype, output, bias, device)
    workspace = x_BTI.new_empty(nbytes, dtype=torch.uint8)  # kept until the launches are made
    stride_b, stride_t, _ = x_BTI.stride()
    dy_stride_b, dy_stride_t, _ = dy_BTO.stride()
    call(
        x_BTI.data_ptr(),
        stride_b,
        stride_t,
        dy_BTO.data_ptr(),
        dy_stride_b,
        dy_stride_t,
        0 if dw_OI is None else dw_OI.data_ptr(),
        0 if db_O is None else db_O.data_ptr(),
        rows.data_ptr(),
        rows.stride(0),
        workspace.data_ptr(),
        add,
        cuda_stream(device),
    )


@functools.lru_cache(4096)
def _planned(
    kernel: str | None,
    shape: tuple[int, ...],
    element: torch.dtype,
    output: torch.dtype | None,
    bias: bool,
    device: int,
) -> tuple[Any, int]:
    """The facts that calls of this shape share, and the bytes that each call needs."""
    call = _module().LinearWgrad(
        kernel or kernel_for(_capability(device)),
        shape=shape,
        element=ELEMENTS[element],
        output=str(output).removeprefix("torch.").lower(),
        bias=bias,
        processors=torch.cuda.get_device_properties(device).multi_processor_count,
        device=device,
    )
    return call, call.workspace


def token_sqnorms(x_BI: Tensor, dy_BO: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms of one-token samples, both [B] float32: of the weight's gradient,
    ‖x_b‖² ‖dy_b‖², and of the bias's, ‖dy_b‖².

    Needs ``takes_tokens(x_BI, dy_BO)``. Raises RuntimeError with what CUDA reports.
    """
    (B, I), O = x_BI.shape, dy_BO.shape[1]
    product_B, dy_sqnorm_B = x_BI.new_empty((2, B), dtype=torch.float32)
    device = x_BI.get_device()
    _module().token_sqnorms(
        x=x_BI.data_ptr(),
        x_stride=x_BI.stride(0),
        dy=dy_BO.data_ptr(),
        dy_stride=dy_BO.stride(0),
        shape=(B, I, O),
        element=ELEMENTS[x_BI.dtype],
        product=product_B.data_ptr(),
        dy_sqnorm=dy_sqnorm_B.data_ptr(),
        stream=cuda_stream(device),
        device=device,
    )
    return product_B, dy_sqnorm_B


@functools.cache
def _module() -> Any:
    return importlib.import_module("gnsfast._C")
