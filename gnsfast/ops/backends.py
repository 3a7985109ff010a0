# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of an operator: the CPU kernel for CPU tensors, Triton kernels for
CUDA tensors, or for debugging the one that ``GNSFAST_BACKEND`` names. Plain PyTorch (``reference``)
runs what the CPU kernel (``cpu.py``) does not take, and Triton runs what the CUDA extension
(``extension.py``) does not take.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gnsfast import guard, reference
from gnsfast.ops import cpu, extension

VARIABLE = "GNSFAST_BACKEND"
NAMES = ("reference", "cpu", "triton", "cuda")


def chosen() -> str | None:
    """The back-end that ``GNSFAST_BACKEND`` names, or None if it is not set.

    Raises ValueError for an unknown name.
    """
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in NAMES:
        raise ValueError(f"{VARIABLE}={name}: it must be one of {', '.join(NAMES)}, or not set")
    return name


def backend(device: str) -> str:
    """The back-end that runs tensors of a device type, ``cpu`` or ``cuda``."""
    if name := chosen():
        return name
    if device == "cpu":
        return "reference" if cpu.missing() else "cpu"
    return "cuda" if extension.PREFERRED and not extension.missing() else "triton"


def missing(name: str, device: str) -> str:
    """Why a back-end cannot run tensors of this device type. Empty if it can."""
    if name == "reference":
        return ""
    if name == "cpu":
        return cpu.missing() if device == "cpu" else "the CPU kernel takes only CPU tensors"
    if name == "cuda" and extension.missing():
        return extension.missing()
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "for CPU tensors Triton needs its interpreter: set TRITON_INTERPRET=1 before Python "
            "starts"
        )
    return _unfenced() if device == "cuda" else ""


def _unfenced() -> str:
    """Why this version of Triton may compute wrong numbers on this GPU; empty if it does not.

    Before 3.7.1 Triton's products on a Blackwell GPU may read shared memory before a copy to it can
    be seen (triton#10537; pytorch#181248 saw wrong numbers on a B200).
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ""
    if torch.cuda.get_device_capability() < (10, 0):
        return ""
    version = importlib.metadata.version("triton")
    if tuple(int(n) for n in re.findall(r"\d+", version)[:3]) >= (3, 7, 1):
        return ""
    return (
        f"Triton {version} may compute wrong products on this GPU (triton#10537): install Triton "
        "3.7.1 or newer"
    )


def implementation(op: str, device: str) -> Callable[[Any], Any]:
    """The function that runs operator ``op`` on a device type. Its argument is the signature."""

    def run(a: Any) -> Any:
        try:
            implemented = getattr(_module(backend(device), op, device), op)
            if device == "cpu":
                return implemented(a)
            # Triton launches on the current device, even if its tensors are on another one.
            with torch.cuda.device_of(a[0]):
                return implemented(a)
        except Exception as error:
            if guard.takes(error):  # nobody reads the norms, but the gradients have to come
                return getattr(reference, op)(a)
            if not isinstance(error, RuntimeError) or "capturing" not in str(error):
                raise
            raise RuntimeError(
                f"gnsfast::{op} has a kernel that this process has not loaded yet, and none can be "
                f"loaded while a CUDA graph is captured ({error}). Before the capture, run one "
                "measured update with the shapes, dtypes and settings that the graph will have."
            ) from error

    return run


@functools.cache  # a search for installed packages at every call would slow the backward pass
def _module(name: str, op: str, device: str) -> ModuleType:
    if why := missing(name, device):
        raise RuntimeError(
            f"gnsfast::{op} has no kernel for this {device} tensor: {why}. {VARIABLE}=reference "
            "runs plain PyTorch instead."
        )
    if name == "reference" or (name == "cpu" and not hasattr(cpu, op)):
        return reference
    if name == "cpu":
        return cpu
    return importlib.import_module("gnsfast.triton_kernels.operators")
