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
from typing import Any

import torch
import triton
from triton import compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a thread block may have (CUDA C++ Programming Guide, table of compute
capabilities)."""

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

Launch = Callable[..., None]


class FakeDriver:
    """What Triton asks of its driver. ``launch`` takes the grid, then the kernel's arguments."""

    def __init__(self, capability: int, launch: Launch) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED[capability]},
            load_binary=load_binary,
        )
        self.launcher_cls = lambda src, metadata: launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def load_binary(
    name: str, cubin: bytes, shared: int, device: int
) -> tuple[None, None, int, int, int]:
    """Module, function, registers, spilled bytes and most threads; nothing is loaded."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    if spilled:
        raise RuntimeError(f"{name} spills {spilled} bytes a thread ({registers} registers)")
    return None, None, registers, spilled, 1024


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
        nothing = lambda *args: None
        return SimpleNamespace(
            run=launch, launch_metadata=nothing, function=None, packed_metadata=None
        )

    return compile


def install(capability: int, processors: int, launch: Launch, whole: bool = False) -> None:
    """Let this process take tensors on the CPU for those of a GPU, and its operators Triton's
    kernels. ``whole``: compile kernels to machine code.
    """
    driver.set_active(FakeDriver(capability, launch))
    if not whole:
        compiler.compile = front_end(launch)
    properties = SimpleNamespace(multi_processor_count=processors, total_memory=1 << 30)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    from gnsfast.ops import backends
    from gnsfast.probing import gradient_watch

    backends.missing = lambda name, device: ""
    gradient_watch.norm_on_cpu = gradient_watch.norm_on_gpu
