# SPDX-License-Identifier: Apache-2.0
"""``pytest -p torch_gradients``: blocks measure the norms beside torch's own gradients, where a test
does not say who makes them.
"""

import gnsfast


def pytest_configure() -> None:
    gnsfast.per_sample_sqnorms.__init__.__kwdefaults__["gradients"] = "torch"  # type: ignore[misc]
