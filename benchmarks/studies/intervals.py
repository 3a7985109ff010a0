# SPDX-License-Identifier: Apache-2.0
"""Whether the interval of a noise scale holds the truth given what is shown, on simulated windows
of a known noise scale, beside plain Fieller limits, which show a value wherever they are bounded.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import Tables
from gnsfast.noise_scale import selection, statistics
from gnsfast.noise_scale.statistics import Moments

N = 32
"""Samples of an update."""
RATIOS = (1, 8, 32, 125)
"""Noise scales, in N."""
UPDATES = (16, 64, 256)
DIMENSIONS = (8, 100, 1000)
WINDOWS, AT_ONCE = 40_000, 2_000
DRAWN, IN_DIMENSIONS = 2_000, (2, 20, 100)
"""Windows whose single samples are drawn, and their dimensions."""
F64 = torch.float64

Interval = Callable[[Moments], tuple[float, float]]


def plain(m: Moments) -> tuple[float, float]:
    """Fieller's set alone: bounded where |G|² differs from zero at 95 %."""
    z = m.grad_sqnorm / math.sqrt(m.var_grad_sqnorm)
    t = max(selection.student_quantile(0.95, m.freedom), -math.sqrt(2) * z)
    upper = statistics.fieller_end(m, t, 1) if z > t else math.inf
    return statistics.fieller_end(m, t, -1), upper


METHODS: dict[str, Interval] = {"plain": plain, "gnsfast": statistics.fieller_interval}


def gaussian(ratio: float, dimensions: int, updates: int) -> Iterator[list[Moments]]:
    """Samples of the unit covariance. Their mean and the χ² rest around it are independent, so
    that p and q are drawn exactly without a single sample.
    """
    for _ in range(WINDOWS // AT_ONCE):
        shape = updates, AT_ONCE
        along = math.sqrt(dimensions / (ratio * N)) + torch.randn(shape, dtype=F64) / math.sqrt(N)
        across, rest = (
            2 * torch._standard_gamma(torch.full(shape, freedom / 2, dtype=F64))
            for freedom in (dimensions - 1.0, (N - 1.0) * dimensions)
        )
        whole = along.square() + across / N
        estimates = rest / (N - 1), whole - rest / (N * (N - 1))
        yield statistics.moments(*estimates, torch.ones(updates, dtype=F64))


def spreads(kind: str, shape: tuple[int, ...]) -> Tensor:
    """How far each sample's noise spreads, with a mean square of 1."""
    if kind == "t(3)":
        return (2 * torch._standard_gamma(torch.full(shape, 1.5, dtype=F64))).rsqrt()
    if kind == "lognormal":
        return (torch.randn(shape, dtype=F64) - 1).exp()
    return torch.ones(shape, dtype=F64)


def drawn(kind: str, ratio: float, dimensions: int, updates: int) -> Iterator[list[Moments]]:
    """Single samples in a mean over tokens, of 1 to 9 tokens or of one."""
    unequal = kind == "1 to 9 tokens"
    for _ in range(DRAWN // 20):
        shape = updates, 20, N, 1
        length = torch.randint(1, 10, shape).double() if unequal else torch.ones(shape, dtype=F64)
        noise = spreads(kind, shape) * torch.randn(*shape[:-1], dimensions, dtype=F64)
        noise *= math.sqrt(75 / 95) if unequal else 1.0  # tr Σ is E[L² v] / L̄²
        noise[..., 0] += math.sqrt(dimensions / (ratio * N))
        u = length / length.sum(2, keepdim=True)
        p, q = (u * noise).square().sum((2, 3)), (u * noise).sum(2).square().sum(2)
        u2, total = u.square().sum((2, 3)), length.sum((2, 3))
        weight = N * (total.mean(0) / N / total).square()
        grad_sqnorm = statistics.grad_sqnorm_estimate(p, q, torch.ones_like(p), u2)
        trace = statistics.trace_estimate(p, grad_sqnorm, u2, weight)
        yield statistics.moments(trace, grad_sqnorm, torch.ones(updates, dtype=F64))


def row(windows: Iterator[list[Moments]], truth: float) -> dict[str, Any]:
    """What each method shows, how often it is right, and medians: of the windows that it resolves,
    and of the others, where it says "at least".
    """
    listed = [m for part in windows for m in part]
    value = torch.tensor([m.ratio for m in listed], dtype=F64) / truth
    found: dict[str, Any] = {}
    for name, interval in METHODS.items():
        lower, upper = torch.tensor([interval(m) for m in listed], dtype=F64).unbind(1)
        resolved, hits = upper.isfinite(), (lower <= truth) & (truth <= upper)
        found |= {
            f"{name}: resolved": _percent(resolved),
            f"{name}: these right": _percent(hits[resolved]),
            f"{name}: value / truth": _median(value[resolved]),
            f"{name}: upper / lower": _median((upper / lower)[resolved]),
            f"{name}: others right": _percent(hits[~resolved]),
            f"{name}: at least / truth": _median(lower[~resolved] / truth),
        }
    return found


def _percent(flags: Tensor) -> str | None:
    return f"{flags.double().mean().item():.1%}" if len(flags) >= 20 else None


def _median(values: Tensor) -> str | None:
    return f"{values.median().item():.2g}" if len(values) >= 20 else None


def tables() -> Tables:
    torch.manual_seed(0)
    found: Tables = {}

    def add(title: str, ratio: int, windows: Iterator[list[Moments]], **at: Any) -> None:
        rows = found.setdefault(title, [])
        rows.append(at | {"B_simple / n": ratio} | row(windows, float(ratio * N)))
        print(rows[-1], flush=True)

    for updates, dimensions, ratio in product(UPDATES, DIMENSIONS, RATIOS):
        title = f"Normal samples, windows of {updates} updates of {N} samples, {WINDOWS:,} windows"
        add(title, ratio, gaussian(ratio, dimensions, updates), dimensions=dimensions)
    title = f"Other samples, windows of 64 updates of {N} samples, {DRAWN:,} windows"
    kinds = "t(3)", "lognormal", "1 to 9 tokens"
    for kind, dimensions, ratio in product(kinds, IN_DIMENSIONS, (1, 8)):
        windows = drawn(kind, ratio, dimensions, 64)
        add(title, ratio, windows, samples=kind, dimensions=dimensions)
    return found
