# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of embeddings, norm layers and convolutions, per sample against float64: on a
GPU where there is one, else in Triton's interpreter.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_gradient, assert_rows
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import reference
from gnsfast.triton_kernels import conv, norms, operators  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNELS, REFERENCE = Signed(operators), Signed(reference)
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)


def embedding_gradients(dy_BTD: Tensor, ids_BT: Tensor, V: int, padding_idx: int) -> Tensor:
    """[B, V, D], row by row in float64."""
    g = dy_BTD.new_zeros((len(ids_BT), V, dy_BTD.shape[2]), dtype=torch.float64)
    for b, ids_T in enumerate(ids_BT.tolist()):
        for t, i in enumerate(ids_T):
            if i != padding_idx:
                g[b, i] += dy_BTD[b, t].double()
    return g


IDS = {
    "repeated": lambda: torch.randint(0, 6, (3, 50)),
    "all the same": lambda: torch.full((3, 40), 4),
    "one token": lambda: torch.randint(0, 6, (5, 1)),
    "one sample": lambda: torch.randint(0, 6, (1, 9)),
    "int32": lambda: torch.randint(0, 6, (3, 7), dtype=torch.int32),
    "no sample": lambda: torch.zeros((0, 7), dtype=torch.int64),
    "no token": lambda: torch.zeros((3, 0), dtype=torch.int64),
}


@pytest.mark.parametrize("small", [0, 256], ids=["sorted", "one-hot"])
@pytest.mark.parametrize("padding_idx", [-1, 4])
@pytest.mark.parametrize("make", IDS.values(), ids=IDS.keys())
def test_embedding_wgrad(
    make: Any, padding_idx: int, small: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "SMALL_VOCABULARY", small)
    ids = make().to(device)
    dy = torch.randn(*ids.shape, 20, device=device)
    g = embedding_gradients(dy, ids, 6, padding_idx)
    dw, rows = KERNELS.embedding_wgrad(dy, ids, 6, padding_idx, F32)
    assert_gradient(dw, g)
    assert_rows(rows, [g])


@DTYPES
@pytest.mark.parametrize("D", [1, 100, 600])
def test_embedding_widths(
    D: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A width below, in, and over one block; a strided gradient."""
    monkeypatch.setattr(operators, "SMALL_VOCABULARY", 0)
    ids = torch.randint(0, 9, (3, 11), device=device)
    dy = torch.randn(11, 3, D, device=device).to(dtype).transpose(0, 1)
    g = embedding_gradients(dy, ids, 9, -1)
    dw, rows = KERNELS.embedding_wgrad(dy, ids, 9, -1, F32)
    assert_gradient(dw, g)
    assert_rows(rows, [g])


def rms(w: Tensor) -> tuple[Any, ...]:
    """Of an RMS norm: no statistics, its gain, which is wanted, and no bias."""
    return None, None, w, None, True, False


WIDTHS = {"a few rows at a time": 50, "one row at a time": 2500, "in columns": norms.ROW // 2 + 300}


def norm_gradients(
    x: Tensor, dy: Tensor, w: Tensor | None, b: Tensor | None, eps: float, offset: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the samples' gain and bias gradients [B, N], by autograd in float64."""
    x = x.double().requires_grad_()
    gain = torch.ones(x.shape[2], device=x.device).double() if w is None else w.double() + offset
    if rms:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    else:
        normed = F.layer_norm(x, x.shape[2:], eps=eps)
    (dx,) = torch.autograd.grad(normed * gain, x, dy.double())
    return dx, (normed.detach() * dy.double()).sum(1), dy.double().sum(1)


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", "frozen"])
@pytest.mark.parametrize("N", WIDTHS.values(), ids=WIDTHS.keys())
def test_layer_norm_backward(N: int, affine: str, device: str) -> None:
    x, dy = torch.randn(3, 11, N, device=device) + 0.5, torch.randn(3, 11, N, device=device)
    w, b = torch.randn(N, device=device), torch.randn(N, device=device)
    weight, bias = "weight" in affine, "bias" in affine
    _, mean, rstd = torch.native_layer_norm(x, [N], w, b, 1e-5)
    dx, dw, db, rows = KERNELS.norm_backward(dy, x, mean, rstd, w, b, weight, bias)
    want_dx, dw_BN, db_BN = norm_gradients(x, dy, w, b, 1e-5, 0.0, rms=False)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    for grad, g, wanted in ((dw, dw_BN, weight), (db, db_BN, bias)):
        if wanted:
            assert_gradient(grad, g)
        else:
            assert grad.numel() == 0
    kept = [g for g, wanted in ((dw_BN, weight), (db_BN, bias)) if wanted]
    assert_rows(rows, kept)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("N", WIDTHS.values(), ids=WIDTHS.keys())
def test_rms_norm_backward(N: int, offset: float, device: str) -> None:
    x, dy = torch.randn(3, 11, N, device=device), torch.randn(3, 11, N, device=device)
    w = torch.randn(N, device=device)
    dx, dw, _, rows = KERNELS.norm_backward(dy, x, *rms(w), 1e-3, offset)
    want_dx, dw_BN, _ = norm_gradients(x, dy, w, None, 1e-3, offset, rms=True)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    assert_gradient(dw, dw_BN)
    assert_rows(rows, [dw_BN])


NORM_SHAPES = {
    "one sample": (1, 40, 24),
    "one token": (5, 1, 24),
    "one number": (3, 7, 1),
    "no sample": (0, 7, 24),
    "no token": (3, 0, 24),
    "many chunks": (2, 150, 40),
}


@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_norm_shapes(shape: tuple[int, int, int], device: str) -> None:
    x, dy, w = (torch.randn(n, device=device) for n in (shape, shape, shape[2:]))
    dx, dw, _, rows = KERNELS.norm_backward(dy, x, *rms(w), 1e-3, 0.0)
    want_dx, dw_BN, _ = norm_gradients(x, dy, w, None, 1e-3, 0.0, rms=True)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    assert_gradient(dw, dw_BN)
    assert_rows(rows, [dw_BN])


def test_rms_norm_without_eps(device: str) -> None:
    """Eleven rows in blocks of 32: the missing ones must not divide by zero."""
    x, dy, w = (torch.randn(*n, device=device) for n in ((3, 11, 50), (3, 11, 50), (50,)))
    _, dw, _, rows = KERNELS.norm_backward(dy, x, *rms(w), 0.0, 0.0)
    dw_BN = norm_gradients(x, dy, w, None, 0.0, 0.0, rms=True)[1]
    assert_gradient(dw, dw_BN)
    assert_rows(rows, [dw_BN])


def test_strided_gain(device: str) -> None:
    x, dy = (torch.randn(3, 11, 50, device=device) for _ in range(2))
    for w in (torch.randn(100, device=device)[::2], torch.randn(1, device=device).expand(50)):
        dx = KERNELS.norm_backward(dy, x, *rms(w), 1e-3, 0.0)[0]
        want_dx = norm_gradients(x, dy, w, None, 1e-3, 0.0, rms=True)[0]
        torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_narrow_norms(dtype: torch.dtype, device: str) -> None:
    """Narrow inputs that are strided; dx is rounded once, norms are not rounded."""
    x = torch.randn(30, 3, 40, device=device).to(dtype).transpose(0, 1)
    dy = torch.randn(3, 30, 80, device=device).to(dtype)[..., ::2]
    w = torch.randn(40, device=device).to(dtype)
    dx, dw, _, rows = KERNELS.norm_backward(dy, x, *rms(w), 1e-3, 0.0)
    want_dx, dw_BN, _ = norm_gradients(x, dy, w, None, 1e-3, 0.0, rms=True)
    assert dx.dtype == dw.dtype == dtype and dx.is_contiguous()
    torch.testing.assert_close(dx.double(), want_dx, rtol=2**-6, atol=1e-3)
    assert_rows(rows, [dw_BN])


CONVOLUTIONS = {
    "1-d": dict(x=(4, 6, 20), dy=(4, 8, 18), kernel=[3], stride=[1], padding=[0], dilation=[1]),
    "2-d": dict(
        x=(4, 6, 9, 8), dy=(4, 8, 4, 5), kernel=[3, 2], stride=[2, 1], padding=[0, 0],
        dilation=[1, 3],
    ),
    "padded": dict(
        x=(4, 6, 5, 5), dy=(4, 8, 5, 5), kernel=[3, 3], stride=[1, 1], padding=[1, 1],
        dilation=[1, 1],
    ),
    "patches": dict(
        x=(4, 6, 8, 8), dy=(4, 8, 2, 2), kernel=[4, 4], stride=[4, 4], padding=[0, 0],
        dilation=[1, 1],
    ),
    "3-d": dict(
        x=(4, 6, 5, 4, 6), dy=(4, 8, 5, 2, 4), kernel=[3, 2, 2], stride=[1, 2, 1],
        padding=[1, 0, 0], dilation=[1, 1, 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("columns", [1 << 26, 1], ids=["together", "sample by sample"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("samples", [4, 2], ids=["a row a sample", "two rows a sample"])
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_conv_wgrad(
    case: dict[str, Any],
    samples: int,
    groups: int,
    columns: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv, "PATCHES", columns)
    x, dy = torch.randn(case["x"], device=device), torch.randn(case["dy"], device=device)
    geometry = (case["kernel"], case["stride"], case["padding"], case["dilation"], groups)
    dw, db, rows = KERNELS.conv_wgrad(x, dy, samples, *geometry, True, True, F32)
    grads = []
    for x_b, dy_b in zip(x.double().chunk(samples), dy.double().chunk(samples)):
        alone = REFERENCE.conv_wgrad(x_b, dy_b, 1, *geometry, True, True, torch.float64)
        grads.append(alone[:2])
    g_w, g_b = (torch.stack(list(g)) for g in zip(*grads))
    assert_gradient(dw, g_w)
    assert_gradient(db, g_b)
    assert_rows(rows, [g_w, g_b])


@pytest.mark.parametrize("B, C, O", [(0, 2, 3), (2, 2, 0)])
def test_conv_wgrad_of_nothing(B: int, C: int, O: int, device: str) -> None:
    x, dy = torch.randn(B, C, 5, device=device), torch.randn(B, O, 3, device=device)
    arguments = x, dy, B, [3], [1], [0], [1], 1, True, True, F32
    for ours, theirs in zip(KERNELS.conv_wgrad(*arguments), REFERENCE.conv_wgrad(*arguments)):
        torch.testing.assert_close(ours, theirs)
