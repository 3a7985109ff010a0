# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured in a CUDA graph is an error that says what to do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gnsfast import ops
from gnsfast.ops import Groups
from gnsfast.signatures import LinearWgrad

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[2]

FIRST_LAUNCHES = """
import torch
from benchmarks import no_gpu

launched, capturing = [], False
no_gpu.install("90", 132, lambda *arguments: launched.append(arguments), whole=True)
from triton.runtime import driver
load = driver.active.utils.load_binary

def load_binary(*arguments):
    if capturing:
        raise RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing")
    return "loaded", *load(*arguments)[1:]

driver.active.utils.load_binary = load_binary
from signed import Signed
from gnsfast import ops as gnsfast_ops
from gnsfast.triton_kernels import tuning
ops = Signed(gnsfast_ops)

def linear(T, dtype=torch.float32):
    x = torch.ones(2, T, 64, dtype=dtype)
    ops.linear_wgrad(x, x, True, True, False, dtype)

def refused(operator, call):
    before = len(launched)
    try:
        call()
    except RuntimeError as error:
        text = str(error)
        assert text.startswith(f"gnsfast::{operator} ") and "one measured update" in text, text
        assert "not permitted when stream is capturing" in text, text
        return
    raise AssertionError(f"{len(launched) - before} launches, and no error")

linear(200)
capturing = True
linear(200)
assert len(launched) == 4
refused("linear_wgrad", lambda: linear(4000))  # a bias in more chunks

torch.cuda.current_device, torch.cuda.is_current_stream_capturing = lambda: 0, lambda: True
tuning.tuned = lambda: True
refused("linear_wgrad", lambda: linear(200, torch.bfloat16))  # the fixed tile, not yet chosen
"""


@pytest.mark.second
def test_first_launches(tmp_path: Path) -> None:
    """A module cannot be loaded while a graph is captured."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_LAUNCHES)
    more = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TRITON_INTERPRET": "0"}
    more |= {"GNSFAST_BACKEND": "triton", "GNSFAST_AUTOTUNE": "0"}
    run = [sys.executable, str(script)]
    done = subprocess.run(run, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


GROUPED = {
    "operator": lambda groups: ops.by_group(
        LinearWgrad(torch.ones(3, 4, 5), torch.ones(3, 4, 2), True, True, False, torch.float32),
        groups,
        [True, True],
    ),
    "sums": lambda groups: groups.sums(torch.ones(3)),
    "move": lambda groups: groups.to(torch.device("cpu")),
}


@pytest.mark.parametrize("call", GROUPED.values(), ids=GROUPED)
def test_groups(call: Callable[[Groups], object], capturing: None) -> None:
    """A replay would take the sizes of the groups that were captured."""
    groups = Groups.of(torch.tensor([2, 0]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"groups=\[...\]\) cannot be captured"):
        call(groups)


def test_groups_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for call in GROUPED.values():
        call(Groups.of(torch.tensor([2, 0]), torch.tensor([1])))
