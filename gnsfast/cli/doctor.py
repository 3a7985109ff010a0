# SPDX-License-Identifier: Apache-2.0
"""What is installed, which devices there are, and which back-end serves each."""

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gnsfast

PACKAGES = ("torch", "triton", "numpy", "typer", "rich", "plotly", "transformers", "peft")


def examine() -> dict[str, Any]:
    """Versions, devices and back-ends; ``why`` is empty where nothing is missing."""
    versions = {"gnsfast": gnsfast.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "devices": _devices(), "backends": _backends()}


def _devices() -> list[dict[str, str]]:
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    devices = [{"device": "cpu", "name": cpu, "backend": "reference", "why": ""}]
    why = "CUDA kernels are not part of this version: layers on this device raise"
    for k in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(k)
        devices.append({"device": f"cuda:{k}", "name": name, "backend": "none", "why": why})
    if len(devices) == 1:
        why = (
            "torch finds no device"
            if torch.backends.cuda.is_built()
            else f"torch {torch.__version__} is built without CUDA"
        )
        devices.append({"device": "cuda", "name": "-", "backend": "none", "why": why})
    return devices


def _backends() -> list[dict[str, str]]:
    missing = "not part of this version"
    triton = "" if importlib.util.find_spec("triton") else "; triton is not installed either"
    return [
        {"backend": "reference", "for": "CPU, plain PyTorch", "state": "ready", "why": ""},
        {"backend": "triton", "for": "CUDA, ROCm", "state": "missing", "why": missing + triton},
        {"backend": "cuda", "for": "CUDA, sm_80 and up", "state": "missing", "why": missing},
    ]


def show(found: dict[str, Any], console: Console) -> None:
    """Three tables."""
    versions = Table("package", "version", box=None, pad_edge=False)
    for package, version in found["versions"].items():
        versions.add_row(package, version)
    console.print(versions)
    for rows in (found["devices"], found["backends"]):
        table = Table(*rows[0], box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row.values())
        console.print()
        console.print(table)
