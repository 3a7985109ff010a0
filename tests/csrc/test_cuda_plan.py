# SPDX-License-Identifier: Apache-2.0
"""How the CUDA kernels share out their tiles, by arithmetic."""

import math

import pytest

_C = pytest.importorskip("gnsfast._C", reason="built without nvcc")

SHAPES = {  # I, O
    "gpt-2 qkv": (768, 2304),
    "gpt-2 out": (768, 768),
    "gpt-2 up": (768, 3072),
    "gpt-2 down": (3072, 768),
    "1b square": (2048, 2048),
    "1b up": (2048, 8192),
    "1b down": (8192, 2048),
    "llama-8b q": (4096, 4096),
    "llama-8b k": (4096, 1024),
    "llama-8b up": (4096, 14336),
    "llama-8b down": (14336, 4096),
}
PROCESSORS = (132, 108, 148)  # H100 and H200, A100, B200
BATCHES = (8, 16, 32)

WHOLE_SAMPLES_FORBID = {
    # Few samples for each block: one more or less is more than a tenth of them.
    ("sm90", "gpt-2 qkv", 132): {8: 0.87},
    ("sm90", "gpt-2 qkv", 108): {8: 0.89},
    ("sm90", "gpt-2 out", 132): {8: 0.73},
    ("sm90", "gpt-2 out", 108): {8: 0.89, 16: 0.89, 32: 0.89},
    ("sm90", "gpt-2 out", 148): {8: 0.65, 16: 0.86, 32: 0.86},
    ("sm90", "gpt-2 up", 108): {8: 0.89},
    ("sm90", "gpt-2 up", 148): {8: 0.86},
    ("sm90", "gpt-2 down", 108): {8: 0.89},
    ("sm90", "gpt-2 down", 148): {8: 0.86},
    ("sm80", "gpt-2 out", 132): {8: 0.73, 16: 0.87},
    ("sm80", "gpt-2 out", 108): {8: 0.89, 16: 0.89},
}
"""Where less than nine tenths of the blocks' time is filled. A block takes whole samples, so the
busiest one has at least the mean rounded up: no other plan fills more."""

hopper = pytest.mark.skipif("sm90" not in _C.kernels(), reason="GNSFAST_CUDA_ARCHS without 90")
KERNELS = [pytest.param("sm90", marks=hopper), "sm80"]


def plan(kernel: str, B: int, T: int, I: int, O: int, processors: int = 132) -> dict[str, int]:
    return _C.plan_linear_wgrad(kernel, (B, T, I, O), processors)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_are_filled(kernel: str, shape: str, processors: int) -> None:
    """The mean samples of a block and those of the busiest one."""
    less = {}
    for B in BATCHES:
        found = plan(kernel, B, 1024, *SHAPES[shape], processors)
        mean = found["tiles"] * B / found["at_once"]
        assert found["busiest"] == math.ceil(mean)
        if mean / found["busiest"] < 0.9:
            less[B] = round(mean / found["busiest"], 2)
    assert less == WHOLE_SAMPLES_FORBID.get((kernel, shape, processors), {})


@pytest.mark.parametrize("B", [1, 3, *BATCHES])
@pytest.mark.parametrize("shape", SHAPES)
@hopper
def test_the_counted_model_has_this_plan(shape: str, B: int) -> None:
    model = pytest.importorskip("benchmarks.model_linear", reason="a wheel has none")
    for processors in PROCESSORS:
        found = plan("sm90", B, 1024, *SHAPES[shape], processors)
        counted = model.balance(found["tiles"], B, processors // 2)
        assert counted.most == found["busiest"]
        assert counted.unfinished * 2 * 128 * 192 == found["scratch_elements"]


@hopper
def test_plan_for_hopper() -> None:
    """Tiles of a pair of blocks are 256 x 192; 66 pairs run at a time."""
    square = plan("sm90", 16, 1024, 4096, 4096)
    assert (square["tiles"], square["whole_tiles"]) == (352, 330)  # five waves
    assert (square["run"], square["runs"]) == (6, 59)  # 22 tiles of 16 samples for 66 pairs
    assert square["busiest"] == 5 * 16 + 6
    small = plan("sm90", 16, 1024, 768, 768)
    assert (small["whole_tiles"], small["run"], small["runs"]) == (0, 3, 64)
    assert small["partial_rows"] == 12 * 2 * 8
    assert small["scratch_elements"] == (64 + 12 - 1) * 2 * 128 * 192
    assert plan("sm90", 1, 8192, 768, 768)["runs"] == 0  # one sample cannot be cut
    assert plan("sm90", 2, 1024, 768, 2304)["runs"] == 0  # nor does it help here


@hopper
def test_scratch() -> None:
    """Of GPT-2's qkv, 36 tiles, in MB: where 16 parts of each tile took 113."""
    for B in BATCHES:
        assert 4e-6 * plan("sm90", B, 1024, 768, 2304)["scratch_elements"] < 20


def test_plan_for_others() -> None:
    """Tiles are 128 x 128, and 132 run at a time."""
    small = plan("sm80", 16, 1024, 768, 768)  # 36 tiles
    assert (small["whole_tiles"], small["run"], small["runs"]) == (0, 5, 116)
    assert small["partial_rows"] == 36 * 8
    assert small["scratch_elements"] == (116 + 36 - 1) * 128 * 128
    assert plan("sm80", 16, 1024, 4096, 4224)["runs"] == 0  # 1056 tiles: eight whole waves
