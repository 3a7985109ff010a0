# SPDX-License-Identifier: Apache-2.0
"""Every test starts from one seed and computes in full float32. Uninitialised memory is filled with
NaN.
"""

import gc
import importlib.util
import os
from collections.abc import Iterator

import interpreter
import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic cuBLAS asks for
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
torch.backends.cudnn.allow_tf32 = False  # torch leaves it on: convolutions have 10 bits then


def pytest_sessionstart() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        interpreter.spare_work()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need a device: without one they are left out, and counted as skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(trylast=True)  # xdist has passed the report on by then
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """After an illegal access a process cannot use the device any more. It would fail its tests at
    once and take over those of the other processes: it ends, and xdist starts another.
    """
    worker = "PYTEST_XDIST_WORKER" in os.environ
    if worker and report.failed and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """TF32 is off in cuDNN, and no test has left it on for its successors."""
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Deterministic mode fills ``torch.empty`` with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What imports have made stays. Each ``Trainer.train()`` would search it for garbage: 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def global_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus sets one; torch's own test tools, once another test has imported them, forbid it."""
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)


@pytest.fixture
def device() -> str:
    """Where the Triton kernels run: a GPU, or the CPU by Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
