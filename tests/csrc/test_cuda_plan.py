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
LONG = 4096  # tokens of a sample

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


NOT_WORTH_CUTTING = {
    # A cut saves one sample of 1024 tokens, 16 steps, and costs more.
    ("sm90", "gpt-2 up", 108): {16: 0.89},  # 48 tiles on 54 clusters: a helper has 15 parts
    ("sm90", "gpt-2 down", 108): {16: 0.89},
    ("sm80", "gpt-2 qkv", 132): {8: 0.82},  # 108 tiles on 132 blocks: a helper has 7 parts
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_are_filled(kernel: str, shape: str, processors: int) -> None:
    """The mean samples of a block and those of the busiest one."""
    key = kernel, shape, processors
    filled: dict[int, dict[int, float]] = {1024: {}, LONG: {}}
    for T, less in filled.items():
        for B in BATCHES:
            found = plan(kernel, B, T, *SHAPES[shape], processors)
            mean = found["tiles"] * B / found["at_once"]
            assert T < LONG or found["busiest"] == math.ceil(mean)
            if mean / found["busiest"] < 0.9:
                less[B] = round(mean / found["busiest"], 2)
    forbidden = WHOLE_SAMPLES_FORBID.get(key, {})
    assert filled[LONG] == forbidden
    assert filled[1024] == forbidden | NOT_WORTH_CUTTING.get(key, {})


@hopper
def test_plan_for_hopper() -> None:
    """Tiles of a pair of blocks are 256 x 192; 66 pairs run at a time."""
    square = plan("sm90", 16, 1024, 4096, 4096)
    assert (square["tiles"], square["whole_tiles"]) == (352, 330)  # five waves
    # Of 22 tiles of 16 samples, owners take 6 each; 10 of each are left for 37 of 44 pairs.
    assert (square["own"], square["helpers"]) == (6, 37)
    assert square["busiest"] == 5 * 16 + 6
    small = plan("sm90", 16, 1024, 768, 768)
    assert (small["whole_tiles"], small["own"], small["helpers"]) == (0, 3, 52)  # 12 · 13 / 3
    assert small["partial_rows"] == 12 * 2 * 8
    assert small["scratch_elements"] == (12 + 52 + 12 - 1) * 2 * 128 * 192
    assert plan("sm90", 1, 8192, 768, 768)["helpers"] == 0  # one sample cannot be cut
    assert plan("sm90", 2, 1024, 768, 2304)["helpers"] == 0  # nor does it help here
    # Eleven samples saved, of one step of 64 tokens each or of two: the parts cost 16 steps.
    assert plan("sm90", 14, 64, 768, 768)["helpers"] == 0
    assert plan("sm90", 14, 128, 768, 768)["helpers"] == 44
    # 63 tiles of 32 samples: three helpers would have a sample of 21 tiles each, to save one.
    assert plan("sm90", 32, 1024, 192 * 63, 256)["helpers"] == 0


@hopper
def test_scratch() -> None:
    """Of GPT-2's qkv, 36 tiles, in MB: where 16 parts of each tile took 113."""
    for B in BATCHES:
        assert 4e-6 * plan("sm90", B, 1024, 768, 2304)["scratch_elements"] < 20


def test_many_short_samples() -> None:
    """A bias takes 26 MB for the sums of 128 blocks' samples and 26 MB for partial norms; sums of
    every sample would take as much as dy, 824 MB.
    """
    B, O = 4096, 50304
    made = dict(
        shape=(B, 2, 64, O), element="bfloat16", output="bfloat16", processors=132, device=0
    )
    without, has = (_C.LinearWgrad("sm80", bias=bias, **made).workspace for bias in (False, True))
    columns = math.ceil(O / 256)
    assert has - without == pytest.approx(4 * columns * (128 * 256 + 8 * (B + 1) + 1), abs=32)


def test_plan_for_others() -> None:
    """Tiles are 128 x 128, and 132 run at a time."""
    small = plan("sm80", 16, 1024, 768, 768)  # 36 tiles
    assert (small["whole_tiles"], small["own"], small["helpers"]) == (0, 5, 80)  # 36 · 11 / 5
    assert small["partial_rows"] == 36 * 8
    assert small["scratch_elements"] == (36 + 80 + 36 - 1) * 128 * 128
    assert plan("sm80", 16, 1024, 4096, 4224)["helpers"] == 0  # 1056 tiles: eight whole waves
