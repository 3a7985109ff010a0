# SPDX-License-Identifier: Apache-2.0
"""Layers with a forward of their own, as other projects write them: they give the same outputs, and
right norms in every dtype.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt_models import BiasNorm, CastedLinear
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, D = 4, 6, 8


class MatrixLinear(nn.Linear):
    """Falcon's way of writing a linear layer without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Norm2d(nn.LayerNorm):
    """timm's layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class NormFp32(nn.LayerNorm):
    """timm's layer norm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.float() if self.weight is not None else None
        b = self.bias.float() if self.bias is not None else None
        return F.layer_norm(x.float(), self.normalized_shape, w, b, self.eps).to(x.dtype)


class OlmoCoreLayerNorm(nn.Module):
    """OLMo-core's layer norm, whose weight may have a shape of its own."""

    def __init__(self, *weight_shape: int, bias: bool = True) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.full_precision = (D,), 1e-6, True
        self.weight_shape = weight_shape or (D,)
        self.weight = nn.Parameter(torch.ones(self.weight_shape))
        self.register_parameter("bias", nn.Parameter(torch.zeros(D)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(enabled=False, device_type=x.device.type):
            dtype = x.dtype
            if self.full_precision:
                x = x.float()
            if self.weight is not None and self.weight_shape != self.normalized_shape:
                x = F.layer_norm(x, self.normalized_shape, eps=self.eps)
                x = self.weight.type_as(x) * x
            else:
                w = None if self.weight is None else self.weight.type_as(x)
                b = None if self.bias is None else self.bias.type_as(x)
                x = F.layer_norm(x, self.normalized_shape, weight=w, bias=b, eps=self.eps)
            return x.to(dtype)


class Padded(nn.Embedding):
    """torch leaves out the gradient of its padding, this one does not."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6
        self.register_parameter("bias", None)
        self.full_precision, self.add_unit_offset = True, False


class LitRMSNorm(RMS):
    """litgpt's, of which Gemma's adds 1 to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


class GemmaRMSNorm(LitRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.add_unit_offset = True


def tokens() -> Tensor:
    return torch.randn(B, T, D)


def images() -> Tensor:
    return torch.randn(B, D, 3, 2)


def ids() -> Tensor:
    return torch.randint(7, (B, T))


CASES: dict[str, tuple[Any, Any]] = {
    "cast linear": (lambda: CastedLinear(D, 3), tokens),
    "matrix linear": (lambda: MatrixLinear(D, 3), tokens),
    "nanoGPT's norm": (lambda: BiasNorm(D, True), tokens),
    "without bias": (lambda: BiasNorm(D, False), tokens),
    "of channels": (lambda: Norm2d(D), images),
    "in float32": (lambda: NormFp32(D), tokens),
    "OLMo-core's layer norm": (OlmoCoreLayerNorm, tokens),
    "a weight of another shape": (lambda: OlmoCoreLayerNorm(T, D, bias=False), tokens),
    "padded embedding": (lambda: Padded(7, D, padding_idx=0), ids),
    "litgpt": (LitRMSNorm, tokens),
    "litgpt's Gemma": (GemmaRMSNorm, tokens),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).double()
    return (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)).square().sum()


def scattered(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


@pytest.mark.parametrize("name", CASES)
def test_own_forwards(name: str) -> None:
    make, inputs = CASES[name]
    model, x = scattered(nn.Sequential(make())), inputs()
    want = model(x)
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        assert torch.equal(model(x), want)
        loss(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, loss, x, B))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[1] is tokens])
def test_other_dtypes(name: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """An open layer gives what it gives closed, and its norms are those of its own gradients."""
    layer, x = scattered(CASES[name][0]()).to(w_dtype), tokens().to(x_dtype)
    try:
        want = layer(x)
    except RuntimeError:
        return
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == want.dtype and torch.equal(y, want)
    bar = 5e-2 if min(x_dtype.itemsize, w_dtype.itemsize) < 4 else 1e-5
    for b in range(B):
        (one,) = torch.autograd.grad(layer(x[b : b + 1]).float().square().sum(), layer.weight)
        want_b = one.double().square().sum().item()
        assert norms["weight"][b].item() == pytest.approx(want_b, rel=bar, abs=1e-30)


@pytest.mark.parametrize("name", ["litgpt", "litgpt's Gemma", "in float32", "cast linear"])
def test_under_autocast(name: str) -> None:
    layer, x = scattered(CASES[name][0]()), tokens().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x)
        with gnsfast.per_sample_sqnorms(layer, B):
            y = layer(x)
            y.float().sum().backward()
    assert y.dtype == want.dtype and torch.equal(y, want)
