# SPDX-License-Identifier: Apache-2.0
"""Which back-end runs, what ``GNSFAST_BACKEND`` changes, and what is said where none can."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from layers import assert_layer

import gnsfast
from gnsfast.ops import backends

BACKEND = backends.VARIABLE


@pytest.fixture
def triton_ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that ran as Triton kernels, which are asked for."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    from gnsfast.triton_kernels import operators

    monkeypatch.setenv(BACKEND, "triton")
    seen: list[str] = []
    for name in ("linear_wgrad", "embedding_wgrad", "norm_backward"):
        kernel = getattr(operators, name)

        def spy(*args: Any, name: str = name, kernel: Any = kernel) -> Any:
            seen.append(name)
            return kernel(*args)

        monkeypatch.setattr(operators, name, spy)
    return seen


LAYERS = {
    "Linear": ("linear_wgrad", lambda: (gnsfast.Linear(40, 24), torch.randn(3, 70, 40))),
    "Embedding": (
        "embedding_wgrad",
        lambda: (gnsfast.Embedding(9, 24), torch.randint(0, 9, (3, 70))),
    ),
    "LayerNorm": ("norm_backward", lambda: (gnsfast.LayerNorm(24), torch.randn(3, 70, 24))),
    "RMSNorm": ("norm_backward", lambda: (gnsfast.RMSNorm(24), torch.randn(3, 70, 24))),
}


@pytest.mark.parametrize(("name", "make"), LAYERS.values(), ids=LAYERS.keys())
def test_public_modules_through_triton(
    name: str, make: Any, triton_ran: list[str], device: str
) -> None:
    layer, x = make()
    assert_layer(layer.to(device), x.to(device), 3)
    assert triton_ran == [name] * 3  # the first batch is proven, too, in two passes


def test_what_runs_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND, raising=False)
    monkeypatch.setattr(backends.cpu, "missing", lambda: "")
    assert backends.backend("cpu") == "cpu" and backends.backend("cuda") == "triton"
    monkeypatch.setattr(backends.cpu, "missing", lambda: "no compiler")
    assert backends.backend("cpu") == "reference"
    monkeypatch.setenv(BACKEND, "reference")
    assert backends.backend("cuda") == "reference"


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND, "fast")
    layer = gnsfast.Linear(5, 3)
    why = "not proven: ValueError: GNSFAST_BACKEND=fast: it must be one of reference"
    with pytest.raises(gnsfast.ObservationError, match=why):
        with gnsfast.per_sample_sqnorms(layer, 2):
            layer(torch.randn(2, 5)).sum().backward()


@pytest.mark.second
@pytest.mark.parametrize(
    ("block", "why"),
    [("", "before Python starts"), ("import sys; sys.modules['triton'] = None", "pip install")],
    ids=["not interpreted", "not installed"],
)
def test_triton_that_cannot_run(block: str, why: str) -> None:
    """One error that says why, and what to do instead."""
    code = f"""{block}
import importlib.util, torch, gnsfast
if {bool(block)}:
    importlib.util.find_spec = lambda name: None
layer = gnsfast.Linear(5, 3)
with gnsfast.per_sample_sqnorms(layer, 2):
    layer(torch.randn(2, 5)).sum().backward()
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment | {BACKEND: "triton"},
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "RuntimeError: gnsfast::linear_wgrad has no kernel for this cpu tensor" in last
    assert why in last and "GNSFAST_BACKEND=reference" in last


@pytest.mark.parametrize(
    ("version", "capability", "runs"),
    [
        ("3.6.0", (10, 0), False),
        ("3.7.0+git1", (12, 0), False),
        ("3.7.1", (10, 0), True),
        ("3.10.0", (10, 0), True),
        ("3.6.0", (9, 0), True),
    ],
)
def test_a_version_of_triton_with_wrong_products(
    version: str, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(backends.importlib.metadata, "version", lambda name: version)
    assert (backends.missing("triton", "cuda") == "") is runs


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """The module, on a device that it measures for the first time."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    from gnsfast.triton_kernels import tuning

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "tuned", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_chosen", {})
    return tuning


def test_tuning_measures_once(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest configuration is kept in memory and on disk; what fails to launch is never it."""
    from gnsfast.triton_kernels.configs import HALF

    times = dict(zip(HALF, [3.0, float("inf"), 1.0, 2.0, 4.0]))
    measured = []

    def milliseconds(config: Any, run: Any) -> float:
        measured.append(config)
        return times[config]

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    assert tuning.choose(("op", 1), HALF, lambda config: None) == HALF[2]
    assert tuning.choose(("op", 1), HALF, lambda config: None) == HALF[2]
    assert measured == list(HALF)
    tuning._chosen.clear()  # another process
    assert tuning.choose(("op", 1), HALF, lambda config: None) == HALF[2]
    assert measured == list(HALF)
    tuning.choose(("op", 2), HALF, lambda config: None)
    assert len(measured) == 2 * len(HALF)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.choose(("op", 1), HALF, lambda config: None) == HALF[2]  # known before
    assert tuning.choose(("op", 3), HALF, lambda config: None) == HALF[0]
    assert len(measured) == 2 * len(HALF)


def test_tuning_without_memory(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed configuration in this process; the next one measures."""
    import triton

    from gnsfast.triton_kernels.configs import HALF

    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **options: run() or 1.0)
    calls = []

    def run(config: Any) -> None:
        calls.append(config)
        if config is HALF[1]:
            raise torch.OutOfMemoryError

    assert tuning.choose(("op",), HALF, run) == HALF[0]
    assert tuning.choose(("op",), HALF, run) == HALF[0] and len(calls) == 2
    tuning._chosen.clear()  # another process
    calls.clear()
    tuning.choose(("op",), HALF, calls.append)
    assert calls == list(HALF)


def test_tuning_knows_the_batch_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tiles are shared depends on it."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    from gnsfast.triton_kernels import outer

    keys = []
    monkeypatch.setattr(outer, "choose", lambda key, configs, run: keys.append(key) or configs[0])
    for B, T in ((5, 100), (8, 128), (9, 128), (8, 129)):
        x, *results = (torch.zeros(s, device=device) for s in ((B, T, 32), (32, 32), (1, B + 2)))
        outer.fused_wgrad(x, x, *results)
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_tuning_is_off_where_bits_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    from gnsfast.triton_kernels import tuning
    from gnsfast.triton_kernels.configs import HALF

    monkeypatch.setattr(tuning, "INTERPRETED", False)
    assert not tuning.tuned()  # the tests run with deterministic algorithms
    torch.use_deterministic_algorithms(False)
    assert tuning.tuned()
    monkeypatch.setenv("GNSFAST_AUTOTUNE", "0")
    assert not tuning.tuned()
    assert tuning.choose(("op",), HALF, lambda config: None) == HALF[0]
