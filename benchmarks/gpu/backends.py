# SPDX-License-Identifier: Apache-2.0
"""gnsfast's own back-ends as contestants."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.model.gpu import GPU
from gnsfast.ops import backends, extension

OURS = {"triton": "gnsfast, Triton", "cuda": "gnsfast, CUDA", "reference": "gnsfast, plain PyTorch"}
"""``GNSFAST_BACKEND`` -> the contestant's name."""


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Set ``GNSFAST_BACKEND``, which operators read at each call, within the block."""
    before = os.environ.get(backends.VARIABLE)
    os.environ[backends.VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[backends.VARIABLE]
        else:
            os.environ[backends.VARIABLE] = before


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


def kernel_of(contestant: str, gpu: GPU | None) -> str:
    """The kernel of the fused route that the model counts for one of ``OURS``."""
    return "sm90" if contestant == OURS["cuda"] and gpu is not None and gpu.hopper else "triton"
