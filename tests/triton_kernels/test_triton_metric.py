# SPDX-License-Identifier: Apache-2.0
"""Norms under a metric by the Triton kernels, per sample against float64: on a GPU where there is
one, else in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import EPS, S, assert_gradient, assert_rows, draw
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast.ops import backends, extension
from gnsfast.triton_kernels import configs, linear_wgrad, operators  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
KERNELS = Signed(operators)


def moments(*shape: int) -> Tensor:
    """Second moments over six orders of magnitude, and some that are zero."""
    count = torch.Size(shape).numel()
    v = torch.logspace(-6, 0, count)[torch.randperm(count)].view(shape)
    v[torch.rand(shape) < 0.1] = 0.0
    return v


def constants(parameters: int) -> Tensor:
    return torch.tensor([[S, EPS]] * parameters, dtype=torch.float64)


# B, T, I, O: tiles are 128 x 64 and more.
SHAPES = {
    "several tiles": (2, 70, 72, 136, BF16),
    "odd everything": (3, 67, 37, 21, BF16),
    "float32": (3, 33, 70, 30, F32),
    "short": (4, 3, 16, 8, F32),
    "one token": (5, 1, 40, 24, BF16),
    "no token": (3, 0, 16, 8, F32),
    "no sample": (0, 9, 16, 8, F32),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_linear(
    shape: tuple[int, int, int, int, torch.dtype], transposed: bool, device: str
) -> None:
    x, dy = draw(*shape, device)
    I, O = shape[2:4]
    v, v_O = moments(*((I, O) if transposed else (O, I))).to(device), moments(O).to(device)
    metric = dict(moments=[v, v_O], constants_P2=constants(2).to(device))
    dw, db, rows, _ = KERNELS.linear_wgrad(x, dy, True, True, transposed, F32, **metric)
    g = dy.double().mT @ x.double()
    g = g.mT if transposed else g
    bias = dy.double().sum(1)
    assert_gradient(dw, g)
    assert_gradient(db, bias)
    assert_rows(rows, [g, bias], [v, v_O])


@pytest.mark.parametrize("programs", [3, 11])
def test_tiles(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs that have several, and of programs that share them."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    x, dy = draw(7, 20, 208, 136, BF16, device)
    v, dw = moments(136, 208).to(device), torch.empty(136, 208, device=device)
    metric = v, constants(1)[0].to(device)
    config = configs.candidates(BF16, True, metric=True)[0]
    rows = torch.empty(2, 9, device=device)
    linear_wgrad.fused(x, dy, dw, rows, config, programs=programs, metric=metric)
    g = dy.double().mT @ x.double()
    assert_gradient(dw, g)
    assert_rows(rows, [g], [v])


def test_the_extension_is_not_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave the rows under the metric unwritten."""
    monkeypatch.setattr(backends, "backend", lambda device: "cuda")
    monkeypatch.setattr(extension, "takes", lambda *args: True)
    x, dy = draw(2, 9, 40, 24, BF16, device)
    v = moments(24, 40).to(device)
    metric = dict(moments=[v], constants_P2=constants(1).to(device))
    _, _, rows, _ = KERNELS.linear_wgrad(x, dy, True, False, False, F32, **metric)
    assert_rows(rows, [dy.double().mT @ x.double()], [v])


def test_tied_rows(device: str) -> None:
    x, dy = draw(2, 9, 40, 152, BF16, device)
    ids = torch.randint(0, 152, (2, 9), device=device)
    v, v_O = moments(152, 40).to(device), moments(152).to(device)
    metric = dict(moments=[v, v_O], constants_P2=constants(2).to(device))
    dw, _, rows, tied = KERNELS.linear_wgrad(x, dy, True, True, False, F32, ids_BS=ids, **metric)
    g = dy.double().mT @ x.double()
    assert_gradient(dw, g)
    assert_rows(rows, [g, dy.double().sum(1)], [v, v_O])
    for b in range(2):
        torch.testing.assert_close(tied[b].double(), g[b, ids[b]], rtol=1e-5, atol=1e-5)


def test_second_moments_of_another_layout_and_dtype(device: str) -> None:
    x, dy = draw(3, 9, 24, 40, BF16, device)
    v = moments(24, 40).T.to(device, BF16)
    metric = dict(moments=[v], constants_P2=constants(1).to(device))
    _, _, rows, _ = KERNELS.linear_wgrad(x, dy, True, False, False, BF16, **metric)
    assert_rows(rows, [dy.double().mT @ x.double()], [v])


@pytest.mark.parametrize("small", [0, 256], ids=["sorted", "one-hot"])
@pytest.mark.parametrize("padding_idx", [-1, 4])
@pytest.mark.parametrize("D", [20, 600])
def test_embedding(
    D: int, padding_idx: int, small: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "SMALL_VOCABULARY", small)
    ids, v = torch.randint(0, 6, (3, 15), device=device), moments(6, D).to(device)
    dy = torch.randn(3, 15, D, device=device)
    onehot = F.one_hot(ids, 6).double()
    if padding_idx >= 0:
        onehot[..., padding_idx] = 0.0
    g = onehot.mT @ dy.double()
    metric = dict(moments=[v], constants_P2=constants(1).to(device))
    dw, rows = KERNELS.embedding_wgrad(dy, ids, 6, padding_idx, F32, **metric)
    assert_gradient(dw, g)
    assert_rows(rows, [g], [v])


@pytest.mark.parametrize("kind", ["layer norm", "layer norm without bias", "rms norm"])
def test_norms(kind: str, device: str) -> None:
    x = torch.randn(3, 9, 50, device=device)
    w, b, dy = (torch.randn(n, device=device) for n in ((50,), (50,), x.shape))
    v_w, v_b = moments(50).to(device), moments(50).to(device)
    rms, bias = kind == "rms norm", kind == "layer norm"
    mean = rstd = None
    wide = x.double()
    if rms:
        normed = F.rms_norm(wide, (50,), eps=1e-5)
    else:
        _, mean, rstd = torch.native_layer_norm(x, [50], w, b, 1e-5)
        normed = F.layer_norm(wide, (50,), eps=1e-5)
    g = [(normed * dy.double()).sum(1), dy.double().sum(1)][: 1 + bias]
    metric = dict(moments=[v_w, v_b][: 1 + bias], constants_P2=constants(1 + bias).to(device))
    dx, dw, db, rows = KERNELS.norm_backward(
        *(dy, x, mean, rstd, w, None if rms else b, True, bias, 1e-5, 0.0), **metric
    )
    assert_gradient(dw, g[0])
    assert_rows(rows, g, [v_w, v_b][: 1 + bias])
    if bias:
        assert_gradient(db, g[1])
    leaf = wide.requires_grad_()
    y = F.rms_norm(leaf, (50,), w.double(), 1e-5) if rms else F.layer_norm(leaf, (50,), w.double())
    (want,) = torch.autograd.grad(y, leaf, dy.double())
    torch.testing.assert_close(dx.double(), want, rtol=1e-4, atol=1e-5)
