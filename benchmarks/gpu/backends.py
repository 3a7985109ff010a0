# SPDX-License-Identifier: Apache-2.0
"""gnsfast's own back-ends as contestants."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from gnsfast.ops import backends, extension

OURS = {"triton": "gnsfast, Triton", "cuda": "gnsfast, CUDA", "reference": "gnsfast, plain PyTorch"}
"""``GNSFAST_BACKEND`` -> the contestant's name."""


def forced(backend: str) -> AbstractContextManager[Any]:
    """Set ``GNSFAST_BACKEND``, which operators read at each call, within the block."""
    return mock.patch.dict(os.environ, {backends.VARIABLE: backend})


def present(device: str, *names: str) -> list[str]:
    """Those of ``names`` that run here; prints why the others do not."""
    found = []
    for name in names:
        if why := backends.missing(name, device):
            print(f"not timed: {OURS[name]}: {why}", flush=True)
        else:
            found.append(name)
    return found


def launches(run: Callable[[], object]) -> int:
    """How many weight gradients of ``run`` go to the CUDA extension: what it does not take goes to
    Triton.
    """
    with mock.patch.object(extension, "linear_wgrad", wraps=extension.linear_wgrad) as launch:
        run()
    count: int = launch.call_count
    return count
