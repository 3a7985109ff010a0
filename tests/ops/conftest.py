# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Iterator

import pytest
import torch
from cpu_cases import SETS

from gnsfast.ops import cpu


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instructions", lambda: request.param)
    monkeypatch.setattr(cpu, "for_bfloat16", lambda: "")
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
