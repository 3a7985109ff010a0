# SPDX-License-Identifier: Apache-2.0
"""The Triton operators at sizes of one, which the compiler takes as constants of another type,
beside plain PyTorch: in Triton's interpreter, on a GPU, and through the compiler (``fake_gpu.py``).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import reference
from gnsfast.triton_kernels import operators  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16


def compare(op: str, *args: Any, **more: Any) -> None:
    """Every result of an operator, on the same arguments."""
    theirs, ours = (getattr(Signed(m), op)(*args, **more) for m in (reference, operators))
    for want, got in zip(theirs, ours, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype, op
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{op}: {m}")


LINEAR = [
    (1, 2, 1, 1),
    (1, 70, 1, 40),
    (1, 70, 40, 1),
    (2, 70, 1, 1),
    (3, 1, 1, 1),
    (1, 300, 16, 16),
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    B, T, I, O = shape
    x, dy = (torch.randn(B, T, n, device=device).to(dtype) for n in (I, O))
    ids = torch.zeros(B, 1, dtype=torch.long, device=device)
    compare("linear_wgrad", x, dy, True, True, False, F32)
    compare("linear_wgrad", x, dy, True, True, False, F32, ids_BS=ids)
    compare("linear_wgrad", x, dy, True, False, False, F32, ids_BS=ids)
    for bounds in ([0, T // 2, T], [0, T], [0, 0, T]):
        starts = torch.tensor(bounds, device=device)
        for experts in (0, 1):
            segments = (x[0], dy[0], True, True, False, F32, starts, experts)
            compare("linear_wgrad", *segments)


@pytest.mark.parametrize("D", [1, 40, 600])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 2), (2, 1)])
def test_embedding(B: int, T: int, D: int, device: str) -> None:
    ids = torch.zeros(B, T, dtype=torch.long, device=device)
    dy = torch.randn(B, T, D, device=device)
    for padding_idx in (-1, 0, 1):
        compare("embedding_wgrad", dy, ids, 300, padding_idx, F32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 40), (1, 5, 1), (3, 1, 9000)], ids=str)
def test_norms(shape: tuple[int, int, int], device: str) -> None:
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    w = torch.randn(shape[2], device=device)
    _, mean, rstd = torch.native_layer_norm(x, [shape[2]], w, w, 1e-5)
    compare("norm_backward", dy, x, None, None, w, None, True, False, 1e-3, 0.0)
    compare("norm_backward", dy, x, mean, rstd, w, w, True, True)
    compare("norm_backward", dy, x, mean, rstd, None, w, False, True)


def patterns(T: int, S: int, device: str) -> Iterator[tuple[Any, ...]]:
    """Mask, documents, causal, scale, window, longest document."""
    boolean, added = torch.ones(T, S, dtype=torch.bool), torch.zeros(T, S)
    for causal, window in product((False, True), (0, 1, 3)):
        yield None, None, causal, 0.3, window, 0
    for mask, causal, window in ((added, False, 0), (added, True, 3), (boolean, True, 1)):
        yield mask.to(device), None, causal, 0.3, window, 0
    for bounds in ([0, T], [0, 0, T]):
        if T == S:
            for causal, window in ((False, 0), (True, 3)):
                yield None, torch.tensor(bounds, device=device), causal, 0.3, window, 0


@pytest.mark.parametrize("all_learned", [True, False], ids=["all", "sinks"])
@pytest.mark.parametrize(
    ("H", "K", "T", "S", "D"), [(1, 1, 1, 1, 16), (2, 1, 1, 9, 16), (2, 2, 9, 1, 40)]
)
def test_attention(H: int, K: int, T: int, S: int, D: int, all_learned: bool, device: str) -> None:
    q, k, v = (torch.randn(1, h, n, D, device=device) for h, n in ((H, T), (K, S), (K, S)))
    learned: list[Tensor | None] = [torch.randn(n, device=device) for n in (H, H, D, D)]
    if not all_learned:
        learned[1:] = [None] * 3
    wanted = [p is not None for p in learned]
    for pattern in patterns(T, S, device):
        compare("attention_forward", q, k, v, *learned, *pattern)
        saved = Signed(reference).attention_forward(q, k, v, *learned, *pattern)
        samples = 1 if pattern[1] is None else len(pattern[1]) - 1
        backward = (q, q, k, v, *saved, *learned, *pattern, samples, wanted)
        compare("attention_backward", *backward)
