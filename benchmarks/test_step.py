# SPDX-License-Identifier: Apache-2.0
"""The training step under pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

from typing import Any

import pytest
import torch

from benchmarks import cases


@pytest.mark.parametrize("contestant", ["plain", "gnsfast"])
@pytest.mark.parametrize("threads", [1, 2])
def test_training_step(benchmark: Any, contestant: str, threads: int) -> None:
    torch.set_num_threads(threads)
    benchmark.group = f"training step, {threads} threads"
    benchmark.pedantic(
        cases.training_step(contestant == "gnsfast"), rounds=7, iterations=1, warmup_rounds=1
    )
