# SPDX-License-Identifier: Apache-2.0
"""Single layers under pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

from typing import Any

import pytest
import torch

from benchmarks import contestants
from benchmarks.contestants import cases, gate
from benchmarks.cpu import parts as cpu

CASES = [
    cases.LayerCase("GPT-2 out", 768, 768, 64, 2048),
    cases.LayerCase("GPT-2 up", 768, 3072, 256, 2048),
    cases.LayerCase("small GPT head", 384, 4096, 256, 2048),
]


@pytest.fixture(scope="session")
def verdicts() -> dict[str, dict[str, gate.Verdict]]:
    return {case.name: gate.judged(cases.linear(case, most=3)) for case in CASES}


@pytest.mark.parametrize("contestant", contestants.ALL, ids=lambda c: c.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer(
    benchmark: Any, case: cases.LayerCase, contestant: contestants.Contestant, verdicts: Any
) -> None:
    problem = cases.linear(case)
    if reason := cpu.skip_reason(verdicts[case.name][contestant.name], problem):
        pytest.skip(reason)
    torch.set_num_threads(2)
    benchmark.group = f"{case.name}, 2 threads"
    once = problem.prepare(contestant).once
    benchmark.pedantic(once, rounds=5, iterations=1, warmup_rounds=1)
