# SPDX-License-Identifier: Apache-2.0
"""Adapters over frozen weights: quantized by bitsandbytes and torchao, and the same patterns
without them.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import squares
from oracle import assert_norms
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import gnsfast

B, T, D, V = 4, 5, 64, 11


class Dequantized(torch.autograd.Function):
    """A product with a weight of bytes, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(w, scale)
        return x @ ((w.float() - 128) * scale).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        w, scale = ctx.saved_tensors
        return dy @ ((w.float() - 128) * scale), None, None


class OwnQuantized(nn.Linear):
    """The pattern of ``bitsandbytes.nn.Linear4bit``."""

    def __init__(self) -> None:
        super().__init__(D, D)
        scale = self.weight.detach().abs().amax() / 127
        w = (self.weight.detach() / scale).round() + 128
        self.weight = nn.Parameter(w.to(torch.uint8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Dequantized.apply(x, self.weight, self.scale) + self.bias
        return y


class Int8(Tensor):
    """The pattern of torchao's quantized weights: a tensor without a storage of its own."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> "Int8":
        made: Any = Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, w, bias = args
        return Dequantized.apply(x, w.values + 128.0, w.scale) + bias

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.detach.default  # no other operator takes such a weight
        return cls(args[0].values, args[0].scale)


def own_int8() -> nn.Module:
    layer = nn.Linear(D, D)
    scale = layer.weight.detach().abs().amax() / 127
    values = (layer.weight.detach() / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(Int8(values, scale), requires_grad=False)
    return layer


def four_bits(**options: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer: nn.Module = bnb.nn.Linear4bit(D, D, compute_dtype=torch.float32, **options)
    return layer.to("cpu")  # which quantizes


def eight_bits(**options: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer: nn.Module = bnb.nn.Linear8bitLt(D, D, has_fp16_weights=False, **options)
    return layer.to("cpu")


def by_torchao(config: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(D, D)).requires_grad_(False)
    quantization.quantize_(model, getattr(quantization, config)())
    layer: nn.Module = model[0]
    return layer


BASES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(D, D),
    "own bytes": OwnQuantized,
    "own int8": own_int8,
    "nf4": lambda: four_bits(quant_type="nf4"),
    "fp4, its scales quantized": lambda: four_bits(quant_type="fp4", compress_statistics=True),
    "int8": eight_bits,
    "int8, with outliers": lambda: eight_bits(threshold=2.0),
    "torchao's int8": lambda: by_torchao("Int8WeightOnlyConfig"),
    "torchao's int8 of both": lambda: by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao's float8": lambda: by_torchao("Float8WeightOnlyConfig"),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "biases of the base": {"bias": "lora_only"},
    "biases of the adapter": {"lora_bias": True},
    "whole layers": {"modules_to_save": ["head", "tokens"]},
    "dora": {"use_dora": True},
}


class Block(nn.Module):
    def __init__(self, base: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V)
        self.q, self.k = base(), base()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids))
        y: Tensor = self.head(x + torch.tanh(self.k(F.relu(self.q(x)))))
        return y


def adapted(base: str, adapter: str) -> nn.Module:
    config = LoraConfig(
        target_modules=["q", "k"], r=4, init_lora_weights=False, **ADAPTERS[adapter]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says which releases of torchao it knows
        model: nn.Module = get_peft_model(Block(BASES[base]), config)
    return model


def loop(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The norms of single samples. Quantized weights have no float64."""
    norms: dict[str, list[Tensor]] = {}
    for b in range(B):
        model.zero_grad()
        squares(model, ids[b : b + 1]).backward()
        for n, p in model.named_parameters():
            if p.requires_grad:
                norms.setdefault(n, []).append(p.grad.double().square().sum())
    model.zero_grad()
    return {n: torch.stack(each) for n, each in norms.items()}


def bits(p: Tensor) -> Tensor:
    """What a weight holds; of torchao's the bytes."""
    whole = getattr(p, "qdata", getattr(p, "values", p.detach()))
    return whole if isinstance(whole, Tensor) else p.detach()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("base", BASES)
def test_norms_of_adapters(base: str, adapter: str) -> None:
    """Each adapter's norms are right; the frozen base stays what it is."""
    if adapter == "dora" and base not in ("plain", "nf4", "fp4, its scales quantized"):
        pytest.skip("peft knows how to take the norms of few quantized weights")
    if adapter == "biases of the adapter" and "torchao" in base:
        pytest.skip("peft has no biases there")
    ids, model = torch.randint(0, V, (B, T)), adapted(base, adapter)
    want = loop(model, ids)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: bits(p).clone() for n, p in frozen.items()}
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        squares(model, ids).backward()
    assert gnsfast.coverage(model).covered_fraction == 1
    assert_norms(norms, want)
    for name in frozen:
        p = model.get_parameter(name)  # peft makes a new one of four bits each time it looks at it
        assert torch.equal(bits(p), before[name]) and not p.requires_grad and p.grad is None


def test_dropout_of_dora() -> None:
    """Each sample's replay draws the masks that the pass drew."""
    config = LoraConfig(
        target_modules=["q"], lora_dropout=0.1, use_dora=True, init_lora_weights=False
    )
    model, ids = get_peft_model(Block(BASES["plain"]), config), torch.randint(0, V, (B, T))
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        torch.manual_seed(0)
        squares(model, ids).backward()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for b in range(B):
        torch.manual_seed(0)
        y = model(ids)
        own = (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape))[b].square().sum()
        for name, g in zip(named, torch.autograd.grad(own, named.values())):
            if name in norms:
                assert norms[name][b].item() == pytest.approx(g.square().sum().item(), rel=1e-4)
    assert set(norms) == set(named)


@pytest.mark.parametrize(
    "how", ["int8_mixed_precision_training", "int8_weight_only_quantized_training"]
)
def test_weights_that_train_in_int8(how: str) -> None:
    """The layer's own gradient, which is quantized as well, stays what it is."""
    torchao = pytest.importorskip("torchao")
    training = pytest.importorskip("torchao.prototype.quantized_training")
    model, ids = Block(lambda: nn.Linear(D, D)), torch.randint(0, V, (B, T))
    only = lambda m, name: name in ("q", "k")
    torchao.quantize_(model, getattr(training, how)(), filter_fn=only)
    want = loop(model, ids)
    squares(model, ids).backward()
    grads = [p.grad for p in model.q.parameters()]
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, ids).backward()
    assert_norms(norms, want)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.q.parameters(), grads))
