# SPDX-License-Identifier: Apache-2.0
"""``pytest -p torch_gradients``: where a test does not say who makes the gradients, torch does, and
blocks measure the norms beside.
"""

import pytest

import gnsfast

OWN = {
    "test_channels_last": "torch's group norm crashes without an input gradient",
    "test_channels_last_in_half_precision": "the same",
    "test_other_layouts": "torch's batch norm gives wrong gradients, which an audit refuses",
    "test_uses_under_autocast[in place]": "float32 parameters in bfloat16 data, in place: left out",
}
"""Tests in which torch's own gradients are not to be had, or differ."""


def pytest_configure() -> None:
    gnsfast.per_sample_sqnorms.__init__.__kwdefaults__["gradients"] = "torch"  # type: ignore[misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, why in OWN.items():
            if item.name == name or getattr(item, "originalname", "") == name:
                item.add_marker(pytest.mark.skip(reason=why))
