# SPDX-License-Identifier: Apache-2.0
"""Layers with a forward of their own: a kernel's route if they do the same, in every dtype."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt_models import BiasNorm, CastedLinear
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.conversion.recognition import recognised

B, T, D = 4, 6, 5


class OwnEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


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


class PlainNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class OlmoCoreNorm(nn.Module):
    """OLMo-core's RMS norm, which registers a bias that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x).to(dtype)


class NormFp32(nn.LayerNorm):
    """timm's layer norm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.float() if self.weight is not None else None
        b = self.bias.float() if self.bias is not None else None
        return F.layer_norm(x.float(), self.normalized_shape, w, b, self.eps).to(x.dtype)


class Norm2dFp32(NormFp32):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        w = self.weight.float() if self.weight is not None else None
        b = self.bias.float() if self.bias is not None else None
        x = F.layer_norm(x.float(), self.normalized_shape, w, b, self.eps).to(x.dtype)
        return x.permute(0, 3, 1, 2)


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


CASES: dict[str, tuple[Any, str, Any]] = {
    "cast linear": (lambda: CastedLinear(D, 3), "linear", lambda: torch.randn(B, T, D)),
    "matrix linear": (lambda: MatrixLinear(D, 3, False), "linear", lambda: torch.randn(B, T, D)),
    "nanoGPT's norm": (lambda: BiasNorm(D, True), "layer_norm", lambda: torch.randn(B, T, D)),
    "without bias": (lambda: BiasNorm(D, False), "layer_norm", lambda: torch.randn(B, T, D)),
    "plain norm": (lambda: PlainNorm(D, 1e-3), "layer_norm", lambda: torch.randn(B, T, D)),
    "of channels": (lambda: Norm2d(D), "layer_norm", lambda: torch.randn(B, D, T, 2)),
    "in float32": (lambda: NormFp32(D), "layer_norm", lambda: torch.randn(B, T, D)),
    "of channels in float32": (
        *(lambda: Norm2dFp32(D), "layer_norm", lambda: torch.randn(B, D, T, 2)),
    ),
    "OLMo-core's layer norm": (OlmoCoreLayerNorm, "layer_norm", lambda: torch.randn(B, T, D)),
    "OLMo-core": (OlmoCoreNorm, "rms_norm", lambda: torch.randn(B, T, D)),
    "embedding": (lambda: OwnEmbedding(7, D), "embedding", lambda: torch.randint(7, (B, T))),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).double()
    return (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)).square().sum()


@pytest.mark.parametrize("name", CASES)
def test_recognised(name: str) -> None:
    make, route, inputs = CASES[name]
    model, x = nn.Sequential(make()), inputs()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    loop, want, before = loop_sqnorms(model, loss, x, B), model(x), type(model[0])
    gnsfast.convert(model)
    assert {r.route for r in gnsfast.coverage(model).rows} == {route}
    assert isinstance(model[0], before) and torch.equal(model(x), want)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, again, gnsfast.convert(model, example=x)):
        with gnsfast.per_sample_sqnorms(each, B) as norms:
            assert torch.equal(each(x), want)
            loss(each, x).backward()
        assert_norms(norms, loop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["cast linear", "nanoGPT's norm", "OLMo-core", "in float32"])
def test_recognised_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """An open layer gives what it gives closed, dtype included, or raises as it does closed."""
    make, _, inputs = CASES[name]
    layer, x = gnsfast.convert(make()), inputs().to(dtype)
    for each in (layer, copy.deepcopy(layer).to(dtype)):
        try:
            want = each(x)
        except RuntimeError:
            continue
        with gnsfast.per_sample_sqnorms(each, B) as norms:
            y = each(x)
            y.float().square().sum().backward()
        assert y.dtype == want.dtype and torch.equal(y, want)
        grad = each.weight.grad.double()
        each.weight.grad = None
        loop = torch.zeros(())
        for b in range(B):
            one = torch.autograd.grad(each(x[b : b + 1]).float().square().sum(), each.weight)[0]
            loop = loop + one.double()
            bar = 2e-2 if each.weight.dtype.itemsize < 4 or dtype.itemsize < 4 else 1e-5
            assert norms["weight"][b].item() == pytest.approx(
                one.double().square().sum().item(), rel=bar
            )
        assert torch.allclose(loop, grad, rtol=5e-2, atol=5e-2 * grad.abs().max().item())


def test_a_weight_of_another_shape_is_replayed() -> None:
    assert recognised(OlmoCoreLayerNorm(2, D)) is None


class Scaled(CastedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 1e-6)


class Clamped(CastedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-300.0, 300.0))


class Detached(nn.Linear):
    """It gives what a linear layer gives, with another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return F.linear(x, 0.5 * w + (w - 0.5 * w).detach(), self.bias)


class InMode(nn.Linear):
    """A linear layer in one of its modes."""

    def __init__(self, training: bool) -> None:
        super().__init__(D, 3)
        self.other = not training

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(2 * x if self.training == self.other else x, self.weight, self.bias)


class Cut(BiasNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.round(), self.bias, 1e-5)


class Padded(nn.Embedding):
    """torch leaves out the gradient of its padding, this one does not."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(D, 3),
        lambda: Clamped(D, 3),
        lambda: Detached(D, 3),
        lambda: InMode(True),
        lambda: InMode(False),
        lambda: Cut(D, True),
        lambda: MatrixLinear(D, 3),
        lambda: Padded(7, D, padding_idx=0),
    ],
)
def test_what_merely_resembles_is_replayed(make: Any) -> None:
    model = gnsfast.convert(nn.Sequential(make()).eval())
    assert {r.route for r in gnsfast.coverage(model).rows} == {"replay"}
    x = torch.randn(B, T, D) if not isinstance(model[0], Padded) else torch.randint(7, (B, T))
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, loss, x, B))


def test_the_look_changes_nothing() -> None:
    """Neither buffers nor random numbers."""

    class Counting(CastedLinear):
        def __init__(self) -> None:
            super().__init__(D, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            torch.rand(3)
            return super().forward(x)

    layer = Counting()
    state = torch.get_rng_state()
    gnsfast.convert(layer)
    assert layer.calls == 0 and torch.equal(torch.get_rng_state(), state)


def test_one_warning_says_how_much_is_replayed() -> None:
    model, x = nn.Sequential(*(Scaled(D, D) for _ in range(4))), torch.randn(B, T, D)
    calls = r"runs 4 layers again for each sample, one after another \(256 calls in a batch of 64\)"
    with pytest.warns(
        match=rf"^4 modules .*: 0 \(Scaled\), 1 .* and 1 more\..* {calls}\. .*example=batch"
    ) as said:
        gnsfast.convert(model)
    assert len(said) == 1 and "test_recognition" in said[0].filename
    with pytest.warns(match=rf"^4 modules .* {calls}\. print") as said:
        gnsfast.convert(model, example=x)
    assert len(said) == 1


def test_no_warning_without_a_replay_or_for_one_that_is_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gnsfast.convert(nn.Sequential(CastedLinear(D, D)))
        gnsfast.convert(nn.Sequential(Scaled(D, D)), replay=["0"])
        gnsfast.convert(nn.Sequential(Scaled(D, D)), exclude=["0"])


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if x.shape[1] < 5 else 2 * y


class Scheduled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.clamp(-8, 8), self.bias)


class Optional(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return F.linear(x, self.weight, self.bias) * scale


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = F.linear(x, self.weight, self.bias)
        return self.last


@pytest.mark.parametrize("cls", [Branches, Scheduled, Clipped, Optional, Keeps])
def test_what_may_do_otherwise_later_is_replayed(cls: Any) -> None:
    """It gives what a linear layer gives on small random input, but not always."""
    model, x = nn.Sequential(cls(D, 3)), torch.randn(B, T, D)
    with pytest.warns(match="no kernel"):
        gnsfast.convert(model)
    assert {r.route for r in gnsfast.coverage(model).rows} == {"replay"}
    model[0].scale = 3.0
    loop = loop_sqnorms(model, loss, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop)
