# SPDX-License-Identifier: Apache-2.0
"""The training step under pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

from typing import Any

import pytest
import torch

from benchmarks import contestants
from benchmarks.contestants import cases, gate


@pytest.fixture(scope="session")
def verdicts() -> dict[str, gate.Verdict]:
    return gate.judged(cases.small_gpt(most=3))


@pytest.mark.parametrize("contestant", contestants.ALL, ids=lambda c: c.name)
def test_training_step(
    benchmark: Any, contestant: contestants.Contestant, verdicts: dict[str, gate.Verdict]
) -> None:
    if complaint := verdicts[contestant.name].complaint:
        pytest.skip(complaint)
    torch.set_num_threads(2)
    benchmark.group = "training step, 2 threads"
    benchmark.pedantic(cases.training_step(contestant), rounds=5, iterations=1, warmup_rounds=1)
