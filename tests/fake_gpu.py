# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, as a pytest plugin: each launch of a Triton kernel goes through Triton's
own compiler, specialised for the tensors of the test, and then nothing runs.

    export PYTHONPATH=tests PYTHONOPTIMIZE=1
    python -m pytest --assert=plain -p fake_gpu --gpu 90 tests/triton_kernels/test_triton_linear.py

The interpreter runs kernels as Python; here the compiler's front end checks their types, for the
sizes of one, the aligned strides and the absent pointers that the tests' calls have. ``--compile``
goes on to machine code: a spilled register or too much shared memory fails the test. As nothing is
computed, assertions are off: ``PYTHONOPTIMIZE`` switches off Python's, this plugin torch's. Where
the code chooses the fastest of several tiles, each of them is launched.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # tests/conftest.py would set 1

import pytest
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", type=int, required=True, choices=SHARED, help="compute capability")
    parser.addoption("--multiprocessors", type=int, default=132, help="of the GPU; an H200 has 132")
    parser.addoption("--compile", action="store_true", help="to machine code; slow")


def pytest_configure(config: pytest.Config) -> None:
    if __debug__:
        raise pytest.UsageError("fake_gpu needs PYTHONOPTIMIZE=1: no kernel computes anything")
    capability = config.getoption("--gpu")
    driver.set_active(FakeDriver(capability))
    if not config.getoption("--compile"):
        compiler.compile = front_end
    processors = config.getoption("--multiprocessors")
    properties = SimpleNamespace(multi_processor_count=processors, total_memory=1 << 30)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.testing.assert_close = lambda *args, **kwargs: None

    from gnsfast.ops import backends
    from gnsfast.triton_kernels import outer

    backends.missing = lambda name, device: ""  # though the tensors are on the CPU
    outer.choose = every_one


launches: Counter[str] = Counter()
"""Of this process, and of those that pytest-xdist started."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that launches nothing proves nothing."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["launches"] = launches.total()
    elif not launches.total():
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist the workers launch."""
    launches["workers"] += node.workeroutput["launches"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{launches.total()} launches through Triton's compiler")


def every_one(key: object, configs: Sequence[Any], run: Callable[[Any], object]) -> Any:
    """In the place of ``tuning.choose``."""
    for config in configs:
        run(config)
    return configs[0]


class FakeDriver:
    """What Triton asks of its driver."""

    def __init__(self, capability: int) -> None:
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


def launch(x: int, y: int, z: int, *args: Any) -> None:
    launches["here"] += 1
    if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16):
        raise RuntimeError(f"no GPU takes a grid of {x} x {y} x {z} blocks")


def front_end(src: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
    """Triton's compiler up to its first intermediate form, which it verifies."""
    backend = compiler.make_backend(target)
    parsed = backend.parse_options(options | src.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generated = backend.get_codegen_implementation(parsed), backend.get_module_map()
    src.make_ir(target, parsed, *generated, context)
    nothing = lambda *args: None
    return SimpleNamespace(run=launch, launch_metadata=nothing, function=None, packed_metadata=None)
