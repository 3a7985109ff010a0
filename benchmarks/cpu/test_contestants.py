# SPDX-License-Identifier: Apache-2.0
"""Every contestant under pytest-benchmark, in single layers and in the training step: ``pytest
benchmarks --benchmark-only``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.contestants import ALL, Contestant, cases, gate
from benchmarks.cpu.parts import skip_reason

CASES = [
    cases.LayerCase("GPT-2 out", 768, 768, 64, 2048),
    cases.LayerCase("GPT-2 up", 768, 3072, 256, 2048),
    cases.LayerCase("small GPT head", 384, 4096, 256, 2048),
]
contestants = pytest.mark.parametrize("contestant", ALL, ids=lambda c: c.name)


@cache
def judged(case: cases.LayerCase | None) -> dict[str, gate.Verdict]:
    """On three samples of a layer, or of the training step."""
    return gate.judged(cases.linear(case, most=3) if case else cases.small_gpt(most=3))


def timed(benchmark: Any, what: str, reason: str, prepare: Callable[[], Any]) -> None:
    if reason:
        pytest.skip(reason)
    torch.set_num_threads(2)
    benchmark.group = f"{what}, 2 threads"
    benchmark.pedantic(prepare(), rounds=5, iterations=1, warmup_rounds=1)


@contestants
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer(benchmark: Any, case: cases.LayerCase, contestant: Contestant) -> None:
    problem = cases.linear(case)
    reason = skip_reason(judged(case)[contestant.name], problem)
    timed(benchmark, case.name, reason, lambda: problem.prepare(contestant).once)


@contestants
def test_training_step(benchmark: Any, contestant: Contestant) -> None:
    reason = judged(None)[contestant.name].complaint
    timed(benchmark, "training step", reason, lambda: cases.training_step(contestant))
