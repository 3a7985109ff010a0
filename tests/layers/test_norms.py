# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, RMSNorm, and the RMS norms that models bring along."""

import copy

import pytest
import torch
from layers import assert_layer, scattered, weighted_loss
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

SHAPES = {
    "two dimensions": (6, 5),
    "three dimensions": (4, 9, 5),
    "four dimensions": (3, 2, 7, 5),
    "long samples": (2, 300, 33),
    "one sample": (1, 9, 5),
    "no sample": (0, 9, 5),
}
LAYERS = {
    "layer norm": lambda n: gnsfast.LayerNorm(n),
    "layer norm without bias": lambda n: gnsfast.LayerNorm(n, bias=False),
    "rms norm": lambda n: gnsfast.RMSNorm(n),
    "rms norm with eps": lambda n: gnsfast.RMSNorm(n, eps=1e-3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_shapes(make: object, shape: tuple[int, ...]) -> None:
    assert callable(make)
    assert_layer(scattered(make(shape[-1])), torch.randn(shape), shape[0])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_one_kernel_call_per_sample(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU route of samples with more than ``ROWWISE`` elements."""
    monkeypatch.setattr("gnsfast.reference.norms.ROWWISE", 4 * 5)
    assert_layer(scattered(gnsfast.LayerNorm(5, bias=bias)), torch.randn(4, 9, 5), 4)


@pytest.mark.parametrize("make", [gnsfast.LayerNorm, gnsfast.RMSNorm])
def test_two_normalized_dimensions(make: type[nn.Module]) -> None:
    assert_layer(scattered(make((3, 5))), torch.randn(4, 9, 3, 5), 4)
    assert_layer(scattered(make((3, 5))), torch.randn(4, 3, 5), 4)


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_sequence_first(make: type[nn.Module]) -> None:
    layer = scattered(make(5))
    assert_layer(layer, torch.randn(9, 4, 5), 4, batch_dim=1)


@pytest.mark.parametrize("make", [gnsfast.LayerNorm, gnsfast.RMSNorm])
def test_strided_input(make: type[nn.Module]) -> None:
    assert_layer(scattered(make(5)), torch.randn(9, 4, 5).transpose(0, 1), 4)
    assert_layer(scattered(make(5)), torch.randn(1, 9, 5).expand(4, -1, -1), 4)


def test_without_parameters() -> None:
    layer = gnsfast.LayerNorm(5, elementwise_affine=False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        gnsfast.per_sample_sqnorms(layer, 4)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm])
def test_foreign_norms(make: type[nn.Module]) -> None:
    layer = scattered(make(16))
    batch = torch.randn(4, 9, 16), torch.randn(4, 9, 16)
    loop, twin = loop_sqnorms(layer, weighted_loss, batch, 4), copy.deepcopy(layer)
    with gnsfast.per_sample_sqnorms(layer, 4) as norms:
        y = layer(batch[0])
        assert torch.equal(y, twin(batch[0]))
        (y * batch[1]).sum().backward()
    assert_norms(norms, loop)


def test_foreign_norm_keeps_its_rounding() -> None:
    for layer in (scattered(LlamaRMSNorm(16)), scattered(GemmaRMSNorm(16))):
        twin, x = copy.deepcopy(layer), torch.randn(4, 9, 16).bfloat16()
        with gnsfast.per_sample_sqnorms(layer, 4):
            y = layer(x)
            assert y.dtype == twin(x).dtype and torch.equal(y, twin(x))
            y.sum().backward()
