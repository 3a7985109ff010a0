# SPDX-License-Identifier: Apache-2.0
"""The CUDA extension as far as a machine without a device goes: it is imported, plans, and says in
one line what it refuses. ``test_gpu.py`` runs its kernels.
"""

from typing import Any

import pytest
import torch

from gnsfast.ops import extension

_C = pytest.importorskip("gnsfast._C", reason="built without nvcc")

CALL: dict[str, Any] = dict(
    kernel="sm80",
    x=1024,
    x_strides=(64, 8),
    dy=1024,
    dy_strides=(64, 8),
    shape=(2, 8, 8, 8),
    element="bfloat16",
    dw=1024,
    output="float32",
    add=False,
    partial=1024,
    scratch=0,
    processors=132,
    stream=0,
    device=0,
)

REFUSED = {
    "every size must be 1 to .*T 0": dict(shape=(2, 0, 8, 8)),
    r"shape must be \(B, T, I, O\)": dict(shape=(2, 8, 8)),
    "no kernel for float64": dict(element="float64"),
    "x and dy must be bfloat16 or float16": dict(element="float32"),
    "dw must be float32 or bfloat16, not float16": dict(output="float16"),
    "only a float32 dw is added to": dict(output="bfloat16", add=True),
    "dw is a null pointer": dict(dw=0),
    "this build has no kernel sm70": dict(kernel="sm70"),
    "processors must be two or more": dict(processors=0),
    r"x_strides must be": dict(x_strides=(8,)),
    "scratch is a null pointer": dict(shape=(16, 1024, 768, 768)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.linear_wgrad(**{**CALL, **REFUSED[message]})


def test_without_a_device() -> None:
    if torch.cuda.is_available():
        assert _C.missing_device() == extension.missing() == ""
    else:
        assert extension.missing().startswith("no device: ")
        for kernel in _C.kernels():
            with pytest.raises(RuntimeError, match="cudaSetDevice: "):
                _C.linear_wgrad(**{**CALL, "kernel": kernel})


TOKENS: dict[str, Any] = dict(x=1024, x_stride=8, dy=1024, dy_stride=8, shape=(2, 8, 8))
TOKENS |= dict(element="float16", product=1024, dy_sqnorm=1024, stream=0, device=0)

REFUSED_TOKENS = {
    "every size must be 1 to": dict(shape=(0, 8, 8)),
    r"shape must be \(B, I, O\)": dict(shape=(2, 8)),
    "x and dy must be bfloat16 or float16": dict(element="float32"),
    "product is a null pointer": dict(product=0),
}


@pytest.mark.parametrize("message", REFUSED_TOKENS)
def test_refused_tokens(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.token_sqnorms(**{**TOKENS, **REFUSED_TOKENS[message]})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cudaSetDevice: "):
            _C.token_sqnorms(**TOKENS)


def plan(kernel: str, B: int, T: int, I: int, O: int) -> dict[str, int]:
    return _C.plan_linear_wgrad(kernel, (B, T, I, O), 132)


@pytest.mark.skipif("sm90" not in _C.kernels(), reason="built without 90 in GNSFAST_CUDA_ARCHS")
def test_plan_for_hopper() -> None:
    """Tiles of a pair of blocks are 256 x 192; 66 pairs run at a time."""
    assert plan("sm90", 16, 1024, 4096, 4096)["whole_tiles"] == 330  # of 352: five waves
    assert plan("sm90", 16, 1024, 4096, 4096)["parts"] == 3  # 22 tiles left for 66 pairs
    small = plan("sm90", 16, 1024, 768, 768)
    assert (small["whole_tiles"], small["parts"]) == (0, 16)  # three waves of one sample
    assert small["partial_rows"] == 12 * 2 * 8
    assert small["scratch_elements"] == 12 * 16 * 2 * 128 * 192
    assert plan("sm90", 16, 1024, 768, 2304)["parts"] == 16  # 36 tiles: nine waves, not sixteen
    assert plan("sm90", 1, 8192, 768, 768)["parts"] == 1  # one sample cannot be split
    assert plan("sm90", 4, 16, 768, 768)["parts"] == 1  # too little to do


def test_plan_for_others() -> None:
    """Tiles are 128 x 128, and 132 run at a time."""
    small = plan("sm80", 16, 1024, 768, 768)
    assert small["whole_tiles"] == 0 and small["parts"] > 2  # 36 tiles
    assert small["partial_rows"] == 36 * 8
    assert small["scratch_elements"] == 36 * small["parts"] * 128 * 128
    assert plan("sm80", 16, 1024, 4096, 4224)["parts"] == 1  # 1056 tiles: eight whole waves


FITS = {
    "contiguous": (lambda t: t, True),
    "sequence first": (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), True),
    "a slice of packed projections": (lambda t: t.repeat(1, 1, 3)[..., 16:32], True),
    "rows of 9": (lambda t: t[..., :9].contiguous(), False),
    "expanded": (lambda t: t[:1].expand(3, -1, -1), False),
    "every second feature": (lambda t: t[..., ::2], False),
    "unaligned": (lambda t: t.repeat(1, 1, 2)[..., 4:20], False),
    "empty": (lambda t: t[:, :0], False),
    "float32": (lambda t: t.float(), False),
}


@pytest.mark.parametrize(("view", "wanted"), FITS.values(), ids=FITS.keys())
def test_fits(view: Any, wanted: bool) -> None:
    assert extension.fits(view(torch.randn(3, 5, 16).bfloat16())) is wanted
