# SPDX-License-Identifier: Apache-2.0
"""Devices that lack what others have: the kernels that are launched there can be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from second_moments import coarse_products

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from gnsfast.triton_kernels import tiles  # noqa: E402

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[2]

DEVICES = {"gfx942": ("6.4", (9, 4)), "75": (None, (7, 5)), "80": (None, (8, 0))}


@pytest.mark.parametrize(("hip", "capability"), DEVICES.values(), ids=DEVICES)
def test_tf32_only_where_it_exists(
    hip: str | None, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's switch may be on anywhere."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert tiles.precision(torch.float32) == "ieee"
    with coarse_products():
        assert tiles.precision(torch.float32) == ("tf32" if capability == (8, 0) else "ieee")
        assert tiles.precision(torch.bfloat16) == "ieee"


FLOAT32 = """
import sys
import torch
from benchmarks import no_gpu

launched = []
no_gpu.install(sys.argv[1], 132, lambda *arguments: launched.append(arguments), whole=True)
torch.backends.cuda.matmul.fp32_precision = "tf32"
from gnsfast.signatures import LinearWgrad
from gnsfast.triton_kernels import operators

x, dy = torch.ones(2, 64, 32), torch.ones(2, 64, 48)
operators.linear_wgrad(LinearWgrad(x, dy, True, True, False, torch.float32))
assert len(launched) == 2
"""


@pytest.mark.second
@pytest.mark.parametrize("device", ["gfx942", "75"])
def test_float32_compiles_with_the_switch_on(device: str, tmp_path: Path) -> None:
    run = [sys.executable, "-c", FLOAT32, device]
    more = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    more["GNSFAST_AUTOTUNE"] = "0"
    done = subprocess.run(run, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
