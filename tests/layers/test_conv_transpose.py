# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions of one, two and three dimensions."""

from typing import Any

import pytest
import torch
from layers import assert_as_loop, assert_layer, in_a_block, plain
from made import Made
from torch import Tensor, nn

import gnsfast

LAYERS = {1: gnsfast.ConvTranspose1d, 2: gnsfast.ConvTranspose2d, 3: gnsfast.ConvTranspose3d}
SIZES = {1: (7,), 2: (5, 4), 3: (3, 4, 3)}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": dict(kernel_size=3),
    "padded": dict(kernel_size=3, padding=2),
    "strided": dict(kernel_size=2, stride=3),
    "patches": dict(kernel_size=2, stride=2),
    "patches, output padding": dict(kernel_size=2, stride=2, output_padding=1),
    "output padding": dict(kernel_size=3, stride=2, padding=1, output_padding=1),
    "dilated": dict(kernel_size=3, stride=2, dilation=2, padding=1),
    "output padding beyond the stride": dict(
        kernel_size=2, stride=1, dilation=3, padding=1, output_padding=2
    ),
    "output padding beyond the stride, padded more": dict(
        kernel_size=2, stride=2, dilation=4, padding=3, output_padding=2
    ),
    "groups": dict(kernel_size=3, groups=2),
    "depthwise": dict(kernel_size=3, groups=4, stride=2),
    "no bias": dict(kernel_size=3, bias=False),
    "pointwise": dict(kernel_size=1),
}


def drawn(B: int, d: int = 2) -> Tensor:
    return torch.randn(B, 4, *SIZES[d])


@pytest.mark.parametrize("options", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("d", LAYERS)
def test_geometries(d: int, options: dict[str, Any]) -> None:
    layer, x = LAYERS[d](4, 6 if options.get("groups") != 4 else 8, **options), drawn(3, d)
    assert_layer(layer, x, 3)
    assert torch.equal(in_a_block(layer, x, 3), plain(layer)(x))


@pytest.mark.parametrize("B", [0, 1])
def test_few_samples(B: int) -> None:
    assert_layer(gnsfast.ConvTranspose2d(4, 6, 3, stride=2), drawn(B), B)


def test_uneven_geometry() -> None:
    """Dimension by dimension; beyond the stride in the last one alone."""
    geometry = dict(stride=(3, 1), padding=(0, 2), dilation=(1, 3), output_padding=(2, 2))
    layer = gnsfast.ConvTranspose2d(4, 6, kernel_size=(2, 3), **geometry)
    assert_layer(layer, drawn(3), 3)


def test_output_size() -> None:
    up = nn.ConvTranspose2d(4, 6, 3, stride=3)
    model, x = Made(lambda m, x: m.up(x, output_size=[17, 13]), up=up), drawn(3)
    batch = x, torch.randn_like(model(x))
    assert_as_loop(model, batch, 3)
    assert {row.route for row in gnsfast.coverage(model).rows} == {"conv_transpose2d"}


def test_channels_last() -> None:
    for d, last in ((2, torch.channels_last), (3, torch.channels_last_3d)):
        assert_layer(LAYERS[d](4, 6, 3), drawn(3, d).to(memory_format=last), 3)


def test_compiled() -> None:
    model = nn.Sequential(
        nn.Conv3d(4, 6, 2), nn.GELU(), nn.ConvTranspose3d(6, 3, 3, stride=2, output_padding=1)
    )
    x = drawn(3, 3)
    batch = x, torch.randn_like(model(x))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_as_loop(model, batch, 3, run=run)
