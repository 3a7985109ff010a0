# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: Triton kernels are compiled for it and launched, and nothing runs.

Tensors stay on the CPU. What the host does for a launch it does here too, up to the last call into
the driver.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Device(NamedTuple):
    """What kernels are compiled for, and how many bytes of shared memory a thread block may have
    there (CUDA C++ Programming Guide, table of compute capabilities; AMD's instruction sets).
    """

    target: GPUTarget
    shared: int

    @property
    def capability(self) -> tuple[int, int]:
        """As torch says it, also of an AMD device: gfx942 is (9, 4)."""
        arch = self.target.arch
        return divmod(arch, 10) if isinstance(arch, int) else (int(arch[3]), int(arch[4]))

    @property
    def cuda(self) -> bool:
        """Whether it is NVIDIA's."""
        return self.target.backend == "cuda"

    @property
    def tma(self) -> bool:
        """Whether it has a tensor memory accelerator."""
        return self.cuda and self.capability >= (9, 0)


DEVICES = {
    "75": Device(GPUTarget("cuda", 75, 32), 64 << 10),
    "80": Device(GPUTarget("cuda", 80, 32), 163 << 10),
    "90": Device(GPUTarget("cuda", 90, 32), 227 << 10),
    "100": Device(GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx90a": Device(GPUTarget("hip", "gfx90a", 64), 64 << 10),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 64 << 10),
}

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

Launch = Callable[..., None]


class FakeDriver:
    """What Triton asks of its driver. ``launch`` takes the grid, then the kernel's arguments."""

    def __init__(self, device: Device, launch: Launch | None) -> None:
        self.target = device.target
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: {"max_shared_mem": device.shared},
            load_binary=load_cubin if device.cuda else load_hsaco,
        )
        self.launcher_cls = lambda src, metadata: launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Loaded = tuple[None, None, int, int, int]
"""Module, function, registers, spilled bytes and most threads; nothing is loaded."""


def load_cubin(name: str, cubin: bytes, shared: int, device: int) -> Loaded:
    """By the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return loaded(name, *map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()))


def load_hsaco(name: str, hsaco: bytes, shared: int, device: int) -> Loaded:
    """By the kernel's note in the file, in MessagePack."""
    counts = []
    for key in (b"vgpr_count", b"private_segment_fixed_size"):
        found = re.search(rb"\." + key + rb"(?:([\x00-\x7f])|\xcc(.)|\xcd(..))", hsaco, re.DOTALL)
        counts.append(int.from_bytes(next(n for n in found.groups() if n), "big"))
    return loaded(name, *counts)


def loaded(name: str, registers: int, spilled: int) -> Loaded:
    if spilled:
        raise RuntimeError(f"{name} spills {spilled} bytes a thread ({registers} registers)")
    return None, None, registers, spilled, 1024


class Compiled:
    """What Triton's compiler returns."""

    function = packed_metadata = None

    def __init__(self, launch: Launch) -> None:
        self.run = launch

    def launch_metadata(self, *args: Any) -> None:
        """For profilers."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Launch:
        return lambda *args: self.run(*grid, *args)


def front_end(launch: Launch) -> Callable[[Any, GPUTarget, dict[str, Any]], Any]:
    """Triton's compiler up to its first intermediate form, which it verifies."""

    def compile(src: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        backend = compiler.make_backend(target)
        parsed = backend.parse_options(options | src.parse_options())
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        generated = backend.get_codegen_implementation(parsed), backend.get_module_map()
        src.make_ir(target, parsed, *generated, context)
        return Compiled(launch)

    return compile


def pretend(name: str, launch: Launch | None = None) -> Device:
    """What this process asks torch and Triton about its GPU is answered for a device of
    ``DEVICES``.
    """
    device = DEVICES[name]
    torch.version.hip = None if device.cuda else "6.4"
    torch.cuda.get_device_capability = lambda index=None: device.capability
    driver.set_active(FakeDriver(device, launch))
    return device


def install(name: str, processors: int, launch: Launch, whole: bool = False) -> None:
    """Let this process take tensors on the CPU for those of a GPU, and its operators Triton's
    kernels. ``whole``: compile kernels to machine code.
    """
    pretend(name, launch)
    if not whole:
        compiler.compile = front_end(launch)
    properties = SimpleNamespace(multi_processor_count=processors, total_memory=1 << 30)
    torch.cuda.get_device_properties = lambda device=None: properties
    from gnsfast.ops import backends
    from gnsfast.probing import audit

    backends.missing = lambda name, device: ""
    audit.norm_on_cpu = audit.norm_on_gpu
