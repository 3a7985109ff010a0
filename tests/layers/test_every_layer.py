# SPDX-License-Identifier: Apache-2.0
"""What holds for layers of any kind: frozen parameters, narrow dtypes, layouts of samples."""

from collections.abc import Callable

import pytest
import torch
from layers import (
    assert_autocast,
    assert_folded,
    assert_half,
    assert_layer,
    assert_unbatched,
    plain,
    scattered,
)
from torch import Tensor, nn

import gnsfast

C = 6
MAKE: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda: gnsfast.Linear(5, 3), ((9, 5),)),
    "bilinear": (lambda: gnsfast.Bilinear(5, 6, 3), ((7, 5), (7, 6))),
    "layer norm": (lambda: gnsfast.LayerNorm(32), ((9, 32),)),
    "rms norm": (lambda: gnsfast.RMSNorm(32), ((9, 32),)),
    "conv": (lambda: gnsfast.Conv2d(3, 4, 3), ((3, 8, 8),)),
    "conv, 1-d": (lambda: gnsfast.Conv1d(4, 6, 3), ((4, 11),)),
    "transposed conv": (lambda: gnsfast.ConvTranspose2d(4, 6, 3, stride=2), ((4, 5, 4),)),
    "transposed conv, 1-d": (lambda: gnsfast.ConvTranspose1d(4, 6, 3, stride=2), ((4, 7),)),
    "group norm": (lambda: gnsfast.GroupNorm(3, C), ((C, 5, 3),)),
    "instance norm": (lambda: gnsfast.InstanceNorm2d(C, affine=True), ((C, 5, 3),)),
    "instance norm, 1-d": (lambda: gnsfast.InstanceNorm1d(C, affine=True), ((C, 7),)),
    "batch norm": (lambda: gnsfast.BatchNorm2d(C, eps=1e-3).eval(), ((C, 5, 3),)),
}
"""Layers, and the shapes of a sample's inputs."""
CHANNELS = ("group norm", "instance norm", "batch norm")


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def drawn(name: str, B: int = 4) -> tuple[nn.Module, list[Tensor]]:
    make, shapes = MAKE[name]
    layer = scattered(make()) if "norm" in name else make()
    return layer, [torch.randn(B, *shape) for shape in shapes]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@of("linear", "layer norm", "conv", "transposed conv", *CHANNELS)
def test_frozen(name: str, frozen: str) -> None:
    layer, [x] = drawn(name)
    getattr(layer, frozen).requires_grad_(False)
    assert_layer(layer, x, 4)


@of("conv, 1-d", "transposed conv, 1-d", "instance norm, 1-d")
def test_unbatched(name: str) -> None:
    layer, [x] = drawn(name, 1)
    assert_unbatched(layer, x[0])


@of("conv", "transposed conv", *CHANNELS)
def test_rows_folded_into_samples(name: str) -> None:
    """As of videos: twelve images are four samples of three frames."""
    layer, [x] = drawn(name, 12)
    assert_folded(plain(layer), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@of("bilinear", "layer norm", "rms norm", "transposed conv", *CHANNELS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    layer, inputs = drawn(name)
    assert_half(layer.to(dtype), *(x.to(dtype) for x in inputs))


@of("bilinear", "layer norm", "rms norm", "conv", "transposed conv", *CHANNELS)
def test_autocast(name: str) -> None:
    """Norms of float32 inputs are computed in float32."""
    layer, inputs = drawn(name)
    assert_autocast(layer, *inputs, rtol=1e-5 if "norm" in name else 2e-2)
    if name in CHANNELS:
        assert_autocast(layer, *(x.bfloat16() for x in inputs))


@of("bilinear", "transposed conv, 1-d", "group norm")
def test_of_a_graph_is_refused(name: str) -> None:
    layer, inputs = drawn(name)
    with pytest.raises(gnsfast.ObservationError, match="create_graph"):
        with gnsfast.per_sample_sqnorms(layer, 4):
            layer(*inputs).square().sum().backward(create_graph=True)
