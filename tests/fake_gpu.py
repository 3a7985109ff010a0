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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # tests/conftest.py would set 1

import pytest
import torch

from benchmarks import no_gpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", required=True, choices=no_gpu.DEVICES, help="compute capability or AMD's name"
    )
    parser.addoption("--multiprocessors", type=int, default=132, help="of the GPU; an H200 has 132")
    parser.addoption("--compile", action="store_true", help="to machine code; slow")


def pytest_configure(config: pytest.Config) -> None:
    if __debug__:
        raise pytest.UsageError("fake_gpu needs PYTHONOPTIMIZE=1: no kernel computes anything")
    gpu = config.getoption("--gpu")
    processors, whole = config.getoption("--multiprocessors"), config.getoption("--compile")
    no_gpu.install(gpu, processors, launch, whole)
    torch.testing.assert_close = lambda *args, **kwargs: None

    from gnsfast.triton_kernels import outer

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


def launch(x: int, y: int, z: int, *args: Any) -> None:
    launches["here"] += 1
    if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16):
        raise RuntimeError(f"no GPU takes a grid of {x} x {y} x {z} blocks")
