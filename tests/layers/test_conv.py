# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one, two and three dimensions."""

from typing import Any

import pytest
import torch
from layers import assert_layer

import gnsfast

CONVS: dict[str, dict[str, Any]] = {
    "plain": dict(kernel_size=3),
    "padded": dict(kernel_size=3, padding=1),
    "same, even kernel": dict(kernel_size=4, padding="same"),
    "same, odd kernel": dict(kernel_size=3, padding="same"),
    "valid": dict(kernel_size=3, padding="valid"),
    "strided and dilated": dict(kernel_size=3, stride=2, dilation=2, padding=2),
    "patches": dict(kernel_size=3, stride=3),
    "dilated patches": dict(kernel_size=3, stride=3, dilation=2),
    "groups": dict(kernel_size=3, groups=2, padding=2),
    "depthwise": dict(kernel_size=3, groups=4),
    "reflected": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "circular": dict(kernel_size=3, padding=1, padding_mode="circular"),
    "pointwise": dict(kernel_size=1),
    "no bias": dict(kernel_size=3, bias=False),
}


@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
@pytest.mark.parametrize("B", [0, 1, 5])
def test_conv1d(options: dict[str, Any], B: int) -> None:
    if B == 0 and options.get("padding_mode") == "circular":
        pytest.skip("torch's circular padding refuses an empty batch")
    assert_layer(gnsfast.Conv1d(4, 8, **options), torch.randn(B, 4, 11), B)


@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_conv2d(options: dict[str, Any]) -> None:
    assert_layer(gnsfast.Conv2d(4, 8, **options), torch.randn(5, 4, 11, 10), 5)


@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_conv3d(options: dict[str, Any]) -> None:
    assert_layer(gnsfast.Conv3d(4, 8, **options), torch.randn(3, 4, 7, 6, 5), 3)


def test_uneven_geometry() -> None:
    layer = gnsfast.Conv2d(3, 4, kernel_size=(2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1))
    assert_layer(layer, torch.randn(4, 3, 9, 8), 4)


def test_uneven_geometry_of_three_dimensions() -> None:
    geometry = dict(stride=(1, 2, 3), padding=(1, 0, 2), dilation=(2, 1, 1))
    layer = gnsfast.Conv3d(3, 4, kernel_size=(2, 3, 1), **geometry)
    assert_layer(layer, torch.randn(4, 3, 5, 9, 4), 4)


def test_channels_last() -> None:
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_layer(gnsfast.Conv2d(3, 4, 3), x, 4)
    x = torch.randn(4, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert_layer(gnsfast.Conv3d(3, 4, 3), x, 4)
