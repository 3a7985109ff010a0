# SPDX-License-Identifier: Apache-2.0
"""``pytest -p torch_gradients``: where a test does not say who makes the gradients, torch does, and
blocks measure the norms beside.
"""

import gnsfast


def pytest_configure() -> None:
    gnsfast.per_sample_sqnorms.__init__.__kwdefaults__["gradients"] = "torch"  # type: ignore[misc]
