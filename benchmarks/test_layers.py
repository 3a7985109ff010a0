# SPDX-License-Identifier: Apache-2.0
"""Single layers under pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

from typing import Any

import pytest
import torch

from benchmarks import cases


@pytest.mark.parametrize("contestant", ["plain", "gnsfast"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", cases.LAYERS, ids=lambda c: c.name)
def test_layer(benchmark: Any, case: cases.LayerCase, threads: int, contestant: str) -> None:
    torch.set_num_threads(threads)
    benchmark.group = f"{case.name}, {threads} threads"
    benchmark.pedantic(
        cases.layer_passes(case)[contestant], rounds=5, iterations=1, warmup_rounds=1
    )
