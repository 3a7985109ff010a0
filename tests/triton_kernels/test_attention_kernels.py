# SPDX-License-Identifier: Apache-2.0
"""The attention kernels beside their plain PyTorch: bfloat16 in blocks that differ, several of
each, and what only a kernel can get wrong.
"""

from typing import Any

import pytest
import torch
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import reference
from gnsfast.triton_kernels import operators  # noqa: E402

H, K = 4, 2
KERNELS, REFERENCE = Signed(operators), Signed(reference)


def run(ops: Signed, inputs: list[Tensor], learned: list[Any], pattern: Any, samples: int) -> Any:
    q, k, v, do = inputs
    o, highest, inverse = ops.attention_forward(q, k, v, *learned, *pattern)
    wanted = [p is not None for p in learned]
    grads = ops.attention_backward(
        do, q, k, v, o, highest, inverse, *learned, *pattern, samples, wanted
    )
    return o, *grads


def draw(B: int, T: int, S: int, D: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((H, T), (K, S), (K, S), (H, T))
    return [torch.randn(B, n, h, D, device=device).to(dtype).transpose(1, 2) for h, n in shapes]


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "causal": (150, 150, 64, dict(is_causal=True)),
    "window": (150, 150, 64, dict(window=50)),
    "causal window": (150, 150, 128, dict(is_causal=True, window=70)),
    "cross": (70, 150, 128, {}),
    "masked": (150, 150, 32, dict(mask=True)),
    "documents": (200, 200, 64, dict(is_causal=True, cu=[0, 90, 91, 200])),
    "documents, window": (200, 200, 128, dict(window=40, cu=[3, 90, 91, 197])),
}


GAINS = ("causal window", "documents")
"""Gains multiply rows as they are loaded, whatever the pattern is: two patterns stand for all."""

BLOCKS = [
    pytest.param(*case, gains, id=f"{name}-{'gains' if gains else 'sinks'}")
    for name, case in CASES.items()
    for gains in ((False, True) if name in GAINS else (False,))
]


@pytest.mark.parametrize(("T", "S", "D", "options", "gains"), BLOCKS)
def test_blocks(T: int, S: int, D: int, options: dict[str, Any], gains: bool, device: str) -> None:
    """Both configurations of narrow dtypes, against float32."""
    cu = options.get("cu")
    inputs = draw(1 if cu else 2, T, S, D, device, torch.bfloat16)
    learned: list[Any] = [torch.randn(H, device=device).abs() + 0.3 for _ in range(2)]
    learned += [torch.rand(D, device=device) + 0.5 if gains else None for _ in range(2)]
    mask = torch.randn(2, 1, T, S, device=device) if "mask" in options else None
    starts = torch.tensor(cu, device=device) if cu else None
    causal, window = options.get("is_causal", False), options.get("window", 0)
    pattern = (mask, starts, causal, D**-0.5, window, 0)
    samples = len(cu) - 1 if cu else 2
    exact = run(REFERENCE, [t.float() for t in inputs], learned, pattern, samples)
    for ours, theirs in zip(run(KERNELS, inputs, learned, pattern, samples), exact):
        scale = theirs.abs().max().item() if theirs.numel() else 1.0
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.02 * scale)


@pytest.mark.parametrize("cu", [None, [0, 4, 4, 9]], ids=["samples", "documents"])
def test_large_sinks(cu: list[int] | None, device: str) -> None:
    """exp(100) is infinite, and a block has rows beyond the queries, whose weights are zero."""
    given = draw(1 if cu else 2, 9, 9, 16, device, torch.float32)
    inputs = [t.mul(4).round() / 4 for t in given]  # scores of 200 are exact, else 1e-5 off
    learned = [torch.full((H,), 100.0, device=device), None, None, None]
    starts = torch.tensor(cu, device=device) if cu else None
    pattern = (None, starts, True, 30.0, 0, 0)
    samples = len(cu) - 1 if cu else 2
    exact = run(REFERENCE, inputs, learned, pattern, samples)
    assert any(t.abs().max() > 1e-3 for t in exact[4:] if t.numel())  # the gradient of the sinks
    for ours, theirs in zip(run(KERNELS, inputs, learned, pattern, samples), exact):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_heads_that_are_too_wide(device: str) -> None:
    inputs = draw(1, 4, 4, 264, device, torch.float32)
    pattern = (None, None, False, 1.0, 2, 0)
    with pytest.raises(NotImplementedError, match=r"at most 256, not for q \[1, 4, 4, 264\]"):
        KERNELS.attention_forward(*inputs[:3], *(None,) * 4, *pattern)


def test_documents_longer_than_said(device: str) -> None:
    """Not cut off in silence: an error, or NaN where nobody waits for the lengths."""
    q, k, v, _ = draw(1, 90, 90, 16, device, torch.float32)
    pattern = (None, torch.tensor([0, 20, 90], device=device), False, 1.0, 0, 20)
    o, *_ = KERNELS.attention_forward(q, k, v, *(None,) * 4, *pattern)
    assert bool(o[:, :, 20].isnan().all()) and bool(o[:, :, :20].isfinite().all())
    with pytest.raises(ValueError, match="a document has 70 tokens, but max_seqlen is 20"):
        REFERENCE.attention_forward(q, k, v, *(None,) * 4, *pattern)


def test_documents_beyond_the_row_and_strided_starts(device: str) -> None:
    q, k, v, _ = draw(1, 20, 20, 16, device, torch.float32)
    want, *_ = KERNELS.attention_forward(
        q, k, v, *(None,) * 4, None, torch.tensor([0, 9, 20], device=device), False, 1.0, 0, 0
    )
    starts = torch.tensor([0, 5, 9, 5, 40, 5], device=device)[::2]
    found, *_ = KERNELS.attention_forward(q, k, v, *(None,) * 4, None, starts, False, 1.0, 0, 0)
    assert torch.equal(found, want)


def test_large_logit_scales_in_half_precision(device: str) -> None:
    """As cosine attention clamps them: the keys' gradient fits where torch's does."""
    q, k, v, do = draw(1, 16, 16, 16, device, torch.float16)
    q, k = (torch.nn.functional.normalize(t, dim=3) for t in (q, k))
    learned = [None, torch.tensor([100.0, 1.0, 0.5, 90.0], device=device), None, None]
    pattern = (None, None, False, 1.0, 0, 0)
    _, _, dk, *_ = run(KERNELS, [q, k, v, 1000 * do], learned, pattern, 1)
    wide = [t.float() for t in (q, k, v, 1000 * do)]
    _, _, exact, *_ = run(REFERENCE, wide, learned, pattern, 1)
    if bool((exact.abs() < 60000).all()):
        assert bool(dk.isfinite().all())
        scale = exact.abs().max().item()
        torch.testing.assert_close(dk.float(), exact, rtol=0.05, atol=0.01 * scale)
