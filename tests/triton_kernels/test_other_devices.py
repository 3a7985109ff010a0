# SPDX-License-Identifier: Apache-2.0
"""Devices that lack what others have: the kernels that are launched there can be compiled. And
those for which Triton makes other code: they take other tiles.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from gnsfast.signatures import Parameters, Pattern
from gnsfast.triton_kernels import attention_tiles, tiles  # noqa: E402

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
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert tiles.precision(torch.float32) == ("tf32" if capability == (8, 0) else "ieee")
        assert tiles.precision(torch.bfloat16) == "ieee"
    finally:  # monkeypatch would set "none", which keeps what was set
        torch.backends.cuda.matmul.fp32_precision = "ieee"


ONE_STAGE = {  # of a causal attention with sinks, and of one with a mask, by head dim
    (16, False): {"keys"},
    (64, False): {"keys"},
    (128, False): set(),
    (256, False): {"forward", "queries", "keys"},
    (16, True): {"forward", "queries", "keys"},
    (64, True): {"queries"},
    (128, True): {"forward", "queries"},
    (256, True): {"queries", "keys"},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend that there is one of such a capability, of NVIDIA's."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


def stages(D: int, masked: bool) -> dict[str, int]:
    """Of the attention's kernels in bfloat16."""
    learned = Parameters(torch.ones(2), None, None, None)
    pattern = Pattern(torch.ones(1) if masked else None, None, True, 1.0, 0, 0)
    q = torch.empty(1, 2, 9, D, dtype=torch.bfloat16)
    found = attention_tiles.config(learned, pattern, q)
    return {kernel: tile["num_stages"] for kernel, tile in found.items()}


@pytest.mark.parametrize(("D", "masked"), ONE_STAGE)
def test_attention_without_copies_on_blackwell(
    D: int, masked: bool, gpu: Callable[[tuple[int, int]], None]
) -> None:
    """Where Triton's fence is before the wait for copies: see ``UNFENCED_HALF``."""
    of: dict[tuple[int, int], dict[str, int]] = {}
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0)):
        gpu(capability)
        of[capability] = stages(D, masked)
    assert of[10, 0] == of[10, 3] and of[9, 0] == of[12, 0]
    assert {kernel for kernel, found in of[10, 0].items() if found == 1} == ONE_STAGE[D, masked]
    more = {kernel: found for kernel, found in of[10, 0].items() if found > 1}
    assert more.items() <= of[9, 0].items()


CALL = """
import sys
import torch
from benchmarks import no_gpu

launched = []
no_gpu.install(sys.argv[1], 132, lambda *arguments: launched.append(arguments), whole=True)
from signed import Signed
from gnsfast.triton_kernels import operators
ops = Signed(operators)
{call}
assert len(launched) == {launches}
"""

FLOAT32 = """
torch.backends.cuda.matmul.fp32_precision = "tf32"
x, dy = torch.ones(2, 64, 32), torch.ones(2, 64, 48)
ops.linear_wgrad(x, dy, True, True, False, torch.float32)
"""

HALF = """
x = torch.ones(2, 300, 256, dtype=torch.bfloat16)
ops.linear_wgrad(x, x, True, True, False, x.dtype)
"""

FLOAT16 = """
x = torch.ones(2, 300, 256, dtype=torch.float16)
ops.linear_wgrad(x, x, True, False, False, x.dtype)
"""

ATTENTION = """
q = torch.ones(1, 2, 64, 128, dtype=torch.bfloat16)
sinks = torch.ones(2), None, None, None
pattern = None, None, True, 0.1, 0, 0
saved = ops.attention_forward(q, q, q, *sinks, *pattern)
ops.attention_backward(q, q, q, q, *saved, *sinks, *pattern, 1, [True, False, False, False])
"""

CALLS = {
    "gfx942": (HALF + ATTENTION + FLOAT32, 8),
    "gfx90a": (FLOAT16, 2),
    "75": (FLOAT32, 2),
}


@pytest.mark.second
@pytest.mark.parametrize("gpu", CALLS)
def test_compiles(gpu: str, tmp_path: Path) -> None:
    """To machine code, without a spilled register, in as much shared memory as there is."""
    call, launches = CALLS[gpu]
    run = [sys.executable, "-c", CALL.format(call=call, launches=launches), gpu]
    more = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GNSFAST_AUTOTUNE": "0"}
    more |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(run, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
