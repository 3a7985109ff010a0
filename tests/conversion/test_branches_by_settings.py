# SPDX-License-Identifier: Apache-2.0
"""Layers whose own forward has branches: those that settings decide are taken out, and the kernel's
route holds as long as the settings do.
"""

import copy
import importlib
import linecache
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.conversion.recognition import recognised
from gnsfast.conversion.straight import _source

B, T, D = 4, 6, 8


def fast(x: Tensor, *others: Any) -> Tensor:
    return 2 * F.layer_norm(x, *others)


class TimmNorm(nn.LayerNorm):
    """timm's layer norm."""

    _fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if self._fast_norm:
            x = fast(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class TimmNorm2d(nn.LayerNorm):
    _fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        if self._fast_norm:
            x = fast(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


class TimmGroupNorm(nn.GroupNorm):
    _fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if self._fast_norm:
            return 2 * F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        else:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class RMS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6
        self.register_parameter("bias", None)
        self.full_precision, self.add_unit_offset = True, False


class OlmoCoreRMSNorm(RMS):
    """OLMo-core's, with its branches."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(enabled=False, device_type=x.device.type):
            dtype = x.dtype
            if self.full_precision:
                x = x.float()
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + self.eps)
            if self.weight is not None:
                if self.bias is not None:
                    x = self.weight.type_as(x) * x + self.bias.type_as(x)
                else:
                    x = self.weight.type_as(x) * x
            return x.to(dtype)


class OlmoQwenRMSNorm(RMS):
    """Of OLMo-core's for Qwen."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(enabled=False, device_type=x.device.type):
            dtype = x.dtype
            x = x.float()
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            x = x.to(dtype)
            if self.weight is not None:
                x = x * self.weight.type_as(x)
            return x


class NarrowRMSNorm(RMS):
    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.type_as(x) * x


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


class NoUpcast(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TimmRmsNorm(RMS):
    _fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if self._fast_norm:
            x = fast(x, self.weight.shape, self.weight)
        else:
            x = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return x


class Sharded(nn.Parameter):
    """In the place of DTensor."""


class TitanEmbedding(nn.Embedding):
    """torchtitan's."""

    group: Any = None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.data if isinstance(self.weight, Sharded) else self.weight
        if self.group is None:
            return F.embedding(
                input,
                weight,
                self.padding_idx,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.sparse,
            )

        mask = (input >= 0) & (input < self.group)
        return F.embedding(input.clamp(0, self.group), weight) * mask.unsqueeze(-1)


def tokens() -> Tensor:
    return torch.randn(B, T, D)


def images() -> Tensor:
    return torch.randn(B, D, 3, 2)


CASES: dict[str, tuple[Any, str, Any]] = {
    "timm's LayerNorm": (lambda: TimmNorm(D), "layer_norm", tokens),
    "timm's LayerNorm2d": (lambda: TimmNorm2d(D), "layer_norm", images),
    "timm's GroupNorm": (lambda: TimmGroupNorm(2, D), "channel_norm", images),
    "OLMo-core": (OlmoCoreRMSNorm, "rms_norm", tokens),
    "OLMo-core's Qwen": (OlmoQwenRMSNorm, "rms_norm", tokens),
    "OLMo-core, narrow": (NarrowRMSNorm, "rms_norm", tokens),
    "litgpt": (LitRMSNorm, "rms_norm", tokens),
    "litgpt's Gemma": (GemmaRMSNorm, "rms_norm", tokens),
    "no upcast": (NoUpcast, "rms_norm", tokens),
    "timm's RmsNorm": (TimmRmsNorm, "rms_norm", tokens),
    "torchtitan": (lambda: TitanEmbedding(7, D), "embedding", lambda: torch.randint(7, (B, T))),
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
def test_recognised(name: str) -> None:
    make, route, inputs = CASES[name]
    model, x = scattered(nn.Sequential(make())), inputs()
    loop, want = loop_sqnorms(model, loss, x, B), model(x)
    x.requires_grad_(x.is_floating_point())
    leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(loss(model, x), leaves)
    gnsfast.convert(model)
    assert {r.route for r in gnsfast.coverage(model).rows} == {route}
    with gnsfast.per_sample_sqnorms(model, B):
        loss(model, x).backward()
    for leaf, grad in zip(leaves, grads):
        assert torch.allclose(leaf.grad, grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item())
    x = x.detach()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, again, gnsfast.convert(model, example=x)):
        with gnsfast.per_sample_sqnorms(each, B) as norms:
            assert torch.equal(each(x), want)
            loss(each, x).backward()
        assert_norms(norms, loop)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[1] == "rms_norm"])
def test_other_dtypes(name: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """An open norm gives what it gives closed, and its norms are those of its own gradients."""
    layer = gnsfast.convert(scattered(CASES[name][0]())).to(w_dtype)
    x = tokens().to(x_dtype)
    try:
        want = layer(x)
    except RuntimeError:
        return
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == want.dtype and torch.equal(y, want)
    bar = 3e-2 if min(x_dtype.itemsize, w_dtype.itemsize) < 4 else 1e-5
    for b in range(B):
        one = torch.autograd.grad(layer(x[b : b + 1]).float().square().sum(), layer.weight)[0]
        assert norms["weight"][b].item() == pytest.approx(
            one.double().square().sum().item(), rel=bar
        )


@pytest.mark.parametrize("name", ["OLMo-core", "litgpt", "timm's LayerNorm", "no upcast"])
def test_under_autocast(name: str) -> None:
    layer, x = gnsfast.convert(scattered(CASES[name][0]())), tokens().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x)
        with gnsfast.per_sample_sqnorms(layer, B):
            y = layer(x)
            y.float().sum().backward()
    assert y.dtype == want.dtype and torch.equal(y, want)


SETTINGS = {
    "timm's LayerNorm": ("_fast_norm", True),
    "OLMo-core": ("full_precision", False),
    "litgpt": ("add_unit_offset", True),
    "torchtitan": ("group", 5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_refused_until_the_next_convert(name: str) -> None:
    make, _, inputs = CASES[name]
    model, x = gnsfast.convert(scattered(nn.Sequential(make()))), inputs()
    setattr(model[0], *SETTINGS[name])
    want = model(x)  # without a probe it is the user's own layer
    with (
        pytest.raises(
            gnsfast.ObservationError, match=rf"{SETTINGS[name][0]} is .*convert\(model\)"
        ),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(x)
    gnsfast.convert(model)
    loop = loop_sqnorms(model, loss, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        assert torch.equal(model(x), want)
        loss(model, x).backward()
    assert_norms(norms, loop)


def test_another_kind_of_parameter_is_refused() -> None:
    model = gnsfast.convert(nn.Sequential(TitanEmbedding(7, D)))
    model[0].weight = Sharded(model[0].weight.detach())
    with (
        pytest.raises(gnsfast.ObservationError, match="weight is a Sharded"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(torch.randint(7, (B, T)))


class OfMode(TimmNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return y if self.training or not self._fast_norm else y + y


class OfInput(TimmNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return y if x.shape[1] < 5 else y + y


class OfBuffer(TimmNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("fast", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return y + y if self.fast else y


class OfWeight(TimmNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return y + y if self.weight.sum() > 1e6 else y


class OfProperty(TimmNorm):
    @property
    def fast(self) -> bool:
        return bool(self.weight[0] > 1e6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return y + y if self.fast else y


TORCH = nn.functional
HALF = types.SimpleNamespace(layer_norm=lambda x, *others: TORCH.layer_norm(x, *others))


class OfAnother(TimmNorm):
    def forward(self, x: Tensor) -> Tensor:
        return HALF.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("cls", [OfMode, OfInput, OfBuffer, OfWeight, OfProperty, OfAnother])
def test_what_more_than_settings_decide_is_replayed(cls: Any) -> None:
    assert recognised(cls(D)) is None


def test_a_function_that_bears_a_name_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``F`` of the layer's module may be anything."""
    monkeypatch.setattr(sys.modules[__name__], "F", HALF)
    assert recognised(TimmNorm(D)) is None


def test_a_source_that_is_not_that_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may change after its import: then its branches stay, and the layer is replayed."""
    text = (
        "import torch.nn.functional as F\n"
        "from torch import nn\n"
        "class Norm(nn.LayerNorm):\n"
        "    odd = False\n"
        "    def forward(self, x):\n"
        "        if self.odd:\n"
        "            x = x + x\n"
        "        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)\n"
    )
    path = tmp_path / "changed_after_import.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    Norm = importlib.import_module(path.stem).Norm
    path.write_text(text.replace("x + x", "x - x"))
    linecache.checkcache(str(path))
    assert recognised(Norm(D)) is None
    _source.cache_clear()
    path.write_text(text)
    linecache.checkcache(str(path))
    assert recognised(Norm(D)) is not None


class OfNoKnownName(OlmoQwenRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_replayed_cast_is_no_use_outside_of_the_module() -> None:  # bfloat16 rounds its gradient
    layer, x = gnsfast.convert(scattered(OfNoKnownName())), tokens().bfloat16()
    assert {r.route for r in gnsfast.coverage(layer).rows} == {"replay"}
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        layer(x).float().square().sum().backward()
    assert_norms(norms, loop_sqnorms(layer, lambda m, x: m(x).float().square().sum(), x, B), 2e-2)
