# SPDX-License-Identifier: Apache-2.0
"""Every test starts from one seed, and whatever nobody wrote is NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Deterministic mode fills ``torch.empty`` with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
