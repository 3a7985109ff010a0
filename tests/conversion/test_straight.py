# SPDX-License-Identifier: Apache-2.0
"""Layers that give what a kernel gives when they are converted, and may do otherwise later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast import layers
from gnsfast.conversion.recognition import recognised

B, T, D = 3, 6, 8
FLAG = False
TWOS = torch.full((D,), 2.0)


class RMS(nn.Module):
    """With all that the layers below name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6
        self.register_parameter("bias", None)
        self.register_buffer("alpha", torch.ones(()))
        self.gain, self.offset, self.T = 1.0, 0, 1.0


class OfBufferRMSNorm(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.alpha * y * self.weight


class OfGainRMSNorm(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y * self.gain


class OfOffsetRMSNorm(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        if self.offset > 0:
            y = y + self.offset
        return y


class OfGlobalRMSNorm(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        if FLAG:
            y = y + y
        return y


class OfFourDimensions(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + self.eps) * self.weight


class OfTemperature(nn.LayerNorm):
    T = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) * self.T


class OfScaledLinear(nn.Linear):
    T = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) / self.T


class OfLambda(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        w, b, eps = self.weight, self.bias, self.eps
        f = lambda t, w, b, eps: F.layer_norm(t, t.shape[2:], w, b, eps) * (1 + (len(t) > 9))
        return f(x, w, b, eps)


class OfAnotherName(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        me = self
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) * me.T

    T = 1.0


class OfResidualRMSNorm(RMS):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x if residual is None else x + residual
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


RMS_NORMS = [OfBufferRMSNorm, OfGainRMSNorm, OfOffsetRMSNorm, OfGlobalRMSNorm]


@pytest.mark.parametrize("cls", [*RMS_NORMS, OfFourDimensions, OfResidualRMSNorm])
def test_rms_norms_that_may_change(cls: Any) -> None:
    assert recognised(cls()) is None


@pytest.mark.parametrize("cls", [OfTemperature, OfLambda, OfAnotherName])
def test_layer_norms_that_may_change(cls: Any) -> None:
    assert recognised(cls(D)) is None


def test_a_linear_layer_with_a_temperature() -> None:
    assert recognised(OfScaledLinear(4, 3)) is None


class LlamaRMSNorm(RMS):
    """By its name another layer."""

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        if x.shape[1] > 4:
            x = 2 * x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class OfMethodRMSNorm(RMS):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class OfMethods(OfMethodRMSNorm):
    def _root(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def _norm(self, x: Tensor) -> Tensor:
        return x * self._root(x) if self.offset == 0 else x + self.offset


class OfBranchInMethod(OfMethodRMSNorm):
    def _norm(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return 2 * y if x.shape[1] > 4 else y


class OfBufferInMethod(OfMethodRMSNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return self.alpha * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OfDefaultInMethod(OfMethodRMSNorm):
    def _norm(self, x: Tensor = TWOS) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OfMethodThatATensorHas(OfMethodRMSNorm):
    def softmax(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.softmax(x.float()) * (1.0 + self.weight.float())).type_as(x)


class OfMethodAsValue(OfMethodRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        me = self
        return (me._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class OfWeightsDtype(RMS):
    """T5's."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class OfReturnByDtype(RMS):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return self.alpha * x


class OfSidesByDtype(RMS):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        else:
            y = self.alpha * x
        return y


class OfInputsDtype(RMS):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in [torch.float16, torch.bfloat16]:
            x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OfProperty(OfMethodRMSNorm):
    calls = 0

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(D))

    @property
    def eps(self) -> float:
        OfProperty.calls += 1
        return 1e-6 if OfProperty.calls < 200 else 1.0


class OfOwnAttributes(OfMethodRMSNorm):
    def __getattribute__(self, name: str) -> Any:
        if name == "_norm":
            return lambda x: OfMethodRMSNorm._norm(self, x) * (1 + (x.shape[1] > 4))
        return super().__getattribute__(name)


class OfComparison(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y + y * (x.square().mean() > 1e8)


class OfFloor(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y + y * (x.square() // 1e9)


def shadowed() -> nn.Module:
    module: Any = OfMethodRMSNorm()
    module._norm = lambda x: OfMethodRMSNorm._norm(module, x) * (1 + (x.shape[1] > 4))
    return module


ODD = [OfBranchInMethod, OfBufferInMethod, OfDefaultInMethod, OfMethodThatATensorHas]
ODD += [
    OfProperty,
    OfOwnAttributes,
    OfComparison,
    OfFloor,
    OfMethodAsValue,
    OfReturnByDtype,
    OfSidesByDtype,
    OfInputsDtype,
]


@pytest.mark.parametrize("make", [LlamaRMSNorm, *ODD, shadowed])
def test_names_and_methods_that_may_change(make: Any) -> None:
    assert recognised(make()) is None


def test_norms_of_a_misleading_name() -> None:
    """A class that is Llama's by its name alone has its own norms."""
    model, x = nn.Sequential(LlamaRMSNorm(), nn.Linear(D, D)), torch.randn(B, T, D)
    loss = lambda model, x: model(x).square().sum()
    loop = loop_sqnorms(model, loss, x, B)
    with pytest.warns(match="has no kernel"):
        gnsfast.convert(model)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize(
    "cls, wanted",
    [
        (OfMethodRMSNorm, layers.GemmaRMSNorm),
        (OfMethods, layers.GemmaRMSNorm),
        (OfWeightsDtype, layers.T5RMSNorm),
    ],
)
def test_methods_and_dtypes_that_trials_try(cls: Any, wanted: Any) -> None:
    assert recognised(cls()) is wanted


class OfBias(RMS):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y


def test_a_bias_that_comes_later() -> None:
    model = gnsfast.convert(nn.Sequential(OfBias()))
    assert {row.route for row in gnsfast.coverage(model).rows} == {"rms_norm"}
    model[0].bias = nn.Parameter(torch.ones(D))
    with (
        pytest.raises(gnsfast.ObservationError, match="bias is a Parameter, which was otherwise"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(torch.randn(B, T, D))


class OfEmptyBlock(RMS):
    fused = False

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            if self.fused:
                return 2 * x
        return x * self.weight


def counted(start: int) -> Callable[[Any, Tensor], Tensor]:
    n = start

    def forward(self: Any, x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * self.weight

    return forward


class OfOuterName(RMS):
    forward = counted(0)


@pytest.mark.parametrize("cls", [OfEmptyBlock, OfOuterName])
def test_forwards_that_do_not_compile_alone(cls: Any) -> None:
    """They are replayed."""
    model, x = nn.Sequential(cls()), torch.randn(B, T, D)
    loss = lambda model, x: model(x).square().sum()
    loop = loop_sqnorms(model, loss, x, B)
    with gnsfast.per_sample_sqnorms(gnsfast.convert(model), B) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop)


class Named(RMS):
    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class NamedLayerNorm(nn.LayerNorm):
    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, self.normalized_shape, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("make", [Named, lambda: NamedLayerNorm(D)], ids=["rms", "layer"])
def test_an_argument_by_its_name(make: Callable[[], nn.Module]) -> None:
    model, h = make(), torch.randn(B, T, D)
    want = model(h)
    model = gnsfast.convert(model)
    assert {row.route for row in gnsfast.coverage(model).rows} <= {"rms_norm", "layer_norm"}
    assert torch.equal(model(h=h), want)
    with gnsfast.per_sample_sqnorms(model, B):
        y = model(h=h)
        y.sum().backward()
    assert torch.equal(y, want)
