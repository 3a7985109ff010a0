# SPDX-License-Identifier: Apache-2.0
"""What ``source="local"``, each pass by itself, costs in precision beside ``"update"``.

Of N samples in K passes of n = N / K each, |G|² has a variance of 4 GᵀΣG / N + 2 tr Σ² / (N (m -
1)), with m = n for ``"local"`` and m = N for ``"update"``. Where Σ is a multiple of the identity,
that is proportional to 2 + B / (m - 1), for the noise scale B.
"""

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import Tables
from gnsfast.noise_scale import statistics

PASSES = (2, 8, 64)
SAMPLES = (2, 8, 32)
"""Of a pass."""
RATIOS = (0.25, 1.0, 4.0)
"""Noise scales, in samples of an update."""
DIMENSIONS, UPDATES = 100, 200_000
F64 = torch.float64


def drawn(passes: int, samples: int, ratio: float) -> tuple[Tensor, Tensor]:
    """|G|² of ``"local"`` and of ``"update"``, over the true one, for each of ``UPDATES``. Samples
    have the unit covariance; the sums are drawn exactly without a single sample.
    """
    N = passes * samples
    truth = DIMENSIONS / (ratio * N)

    def chi2(freedom: float) -> Tensor:
        return 2 * torch._standard_gamma(torch.full((UPDATES,), freedom / 2, dtype=F64))

    along = math.sqrt(truth) + torch.randn(UPDATES, passes, dtype=F64) / math.sqrt(samples)
    across = chi2(DIMENSIONS - 1.0) / N  # of the whole update's mean
    apart = chi2((passes - 1.0) * (DIMENSIONS - 1.0)) / samples  # of passes around it
    means = along.square().sum(1) + passes * across + apart  # Σ of squared means of passes
    within = chi2(passes * (samples - 1.0) * DIMENSIONS)
    ones = torch.ones(UPDATES, dtype=F64)
    p = (within + samples * means) / N**2  # u = 1 / N
    update = along.mean(1).square() + across, ones
    local = means / passes**2, ones / passes
    u2 = ones / N
    of_local, of_update = (
        statistics.grad_sqnorm_estimate(p, q, v, u2) / truth for q, v in (local, update)
    )
    return of_local, of_update


def expected(passes: int, samples: int, ratio: float) -> float:
    """The variance of ``"local"`` over that of ``"update"``."""
    N = passes * samples
    return (2 + ratio * N / (samples - 1)) / (2 + ratio * N / (N - 1))


def tables() -> Tables:
    torch.manual_seed(0)
    rows = []
    for passes in PASSES:
        for samples in SAMPLES:
            row: dict[str, Any] = {"passes": passes, "samples of a pass": samples}
            for ratio in RATIOS:
                local, update = drawn(passes, samples, ratio)
                row[f"noise scale {ratio:g} N"] = f"{(local.var() / update.var()).item():.2g}"
            rows.append(row)
            print(row, flush=True)
    return {"Updates that local needs for one that update needs": rows}
