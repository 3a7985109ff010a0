# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, RMSNorm, and the RMS norms that models bring along."""

import pytest
import torch
from layers import assert_layer, scattered
from torch import nn

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
