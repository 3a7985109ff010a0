# SPDX-License-Identifier: Apache-2.0
"""Says what to install where a framework is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(by: str, what: str, install: str) -> Iterator[None]:
    """Around imports of ``what``: a missing package raises an ImportError that names it."""
    try:
        yield
    except ImportError as e:
        raise ImportError(f"{by} needs {what}: pip install {install}") from e
