# SPDX-License-Identifier: Apache-2.0
"""What is installed, which devices there are, and which back-end serves each."""

import importlib.metadata
import os
import platform
from typing import Any

import torch

import gnsfast
from gnsfast.ops import backends, cpu

PACKAGES = ("torch", "triton", "numpy", "typer", "rich", "plotly", "transformers", "peft")


def examine() -> dict[str, Any]:
    """Versions, devices and back-ends; ``why`` is empty if nothing is missing."""
    versions = {"gnsfast": gnsfast.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    found = {"devices": _devices(), "backends": _backends(), "choices": _choices()}
    return {"kind": "doctor", "versions": versions, **found}


def _devices() -> list[dict[str, str]]:
    name = ", ".join((platform.machine(), *_instructions(), f"{torch.get_num_threads()} threads"))
    count, why = torch.cuda.device_count(), "torch finds no device"
    devices = [_device(f"cuda:{k}", torch.cuda.get_device_name(k)) for k in range(count)]
    if not torch.backends.cuda.is_built():
        why = f"torch {torch.__version__} is built without CUDA"
    return [_device("cpu", name), *(devices or [_row("cuda", "-", "none", why)])]


def _instructions() -> list[str]:
    """The instruction sets of the CPU kernel."""
    if backends.missing("cpu", "cpu"):
        return []
    halves = cpu.for_bfloat16()
    return [cpu.instructions(), *[f"{halves} for bfloat16"] * bool(halves)]


def _device(device: str, name: str) -> dict[str, str]:
    """A device and its back-end; ``why`` says why its layers would raise."""
    kind = device.partition(":")[0]
    try:
        backend = backends.backend(kind)
    except ValueError as error:
        return _row(device, name, "none", str(error))
    return _row(device, name, backend, backends.missing(backend, kind))


def _row(device: str, name: str, backend: str, why: str) -> dict[str, str]:
    return {"device": device, "name": name, "backend": backend, "why": why}


def _backends() -> list[dict[str, str]]:
    triton = backends.missing("triton", "cuda")
    interpreted = os.environ.get(backends.VARIABLE) == "triton" and not backends.missing(
        "triton", "cpu"
    )
    if not triton and not torch.cuda.is_available() and not interpreted:
        triton = "no device; TRITON_INTERPRET=1 GNSFAST_BACKEND=triton runs it on CPU tensors"
    rows = [
        ("reference", "plain PyTorch on any device", ""),
        ("cpu", "linear layers on a CPU; else reference", backends.missing("cpu", "cpu")),
        ("triton", "CUDA, ROCm", triton),
        ("cuda", "linear layers on sm_80 and up; else triton", backends.missing("cuda", "cuda")),
    ]
    return [
        {"backend": name, "for": what, "state": "missing" if why else "ready", "why": why}
        for name, what, why in rows
    ]


def _choices() -> list[dict[str, str]]:
    """What the CPU kernel chooses on this processor."""
    if backends.missing("cpu", "cpu"):
        return []
    choice = "product of short samples in float32"
    try:
        taken, why = cpu.product()
    except ValueError as error:
        taken, why = "none", str(error)
    return [{"choice": choice, "taken": taken, "why": why}]
