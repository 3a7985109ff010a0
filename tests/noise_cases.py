# SPDX-License-Identifier: Apache-2.0
"""A small model with a noise scale, and data for it."""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast

I, N = 6, 8

ALWAYS: dict[str, Any] = {"budget": None, "gradients": "fused", "on_error": "raise"}
"""Of a callback that measures each update, as ``GradientNoiseScale`` does."""


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(I, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))


def learn(model: nn.Module) -> None:
    """Show the first two batches, which the host waits for."""
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(model, N):
            model(torch.randn(N, I)).sum().backward()
        model.zero_grad()


def draw(count: int, n: int = N) -> list[tuple[Tensor, Tensor]]:
    """Mostly of one class, so that |G|² is far from zero."""
    return [(torch.randn(n, I), (torch.rand(n) < 0.1).long()) for _ in range(count)]


@contextmanager
def one_update(gns: Any, n: Any, **given: Any) -> Iterator[None]:
    """Of the pass in the block."""
    with gns.update(n, **given):
        yield
    gns.model.zero_grad()


def in_updates(data: Sequence[Any], passes: int) -> list[Sequence[Any]]:
    """Batches in turn, so many for each update."""
    return [data[k : k + passes] for k in range(0, len(data), passes)]


def measured(gns: Any, model: nn.Module, passes: int = 1, n: int = N) -> None:
    """An update of data that is drawn now."""
    with gns.update():
        for x, y in draw(passes, n):
            with gns.microbatch(n, scale=1 / passes):
                (F.cross_entropy(model(x), y) / passes).backward()


def through_a_file(state: Any) -> Any:
    """As ``torch.save`` and ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def every_draw(
    gns: Any, model: nn.Module, x_M: Tensor, r_M: Tensor, units: list[int], lengths: Any
) -> Tensor:
    """An update for each way to draw samples from the population x with the gradients r, in passes
    of ``units`` samples; ``lengths``: tokens of the samples. Returns the samples' lengths.
    """
    counts = torch.ones(sum(units)) if lengths is None else torch.tensor(lengths)
    u = counts.double() / counts.sum()
    for drawn in itertools.product(range(len(x_M)), repeat=sum(units)):
        at = 0
        with gns.update():
            for b in units:
                own, of = list(drawn[at : at + b]), slice(at, at + b)
                tokens = None if lengths is None else counts[of]
                with gns.microbatch(b, tokens=tokens, scale=u[of].sum().item()):
                    per_sample = (model(x_M[own]) * r_M[own]).sum(1)
                    (per_sample * u[of]).sum().backward()
                at += b
        model.zero_grad()
    return counts.double()


def check(found: Any, truth: tuple[float, float], rtol: float = 1e-5) -> None:
    """tr Σ, |G|² and the noise scale are those of ``truth``, tr Σ and |G|²."""
    assert found.trace == pytest.approx(truth[0], rel=rtol)
    assert found.grad_sqnorm == pytest.approx(truth[1], rel=rtol)
    ratio = truth[0] / truth[1] if truth[1] > 0 else math.inf
    assert found.noise_scale == pytest.approx(ratio, rel=rtol)


def assert_same(ours: Any, theirs: Any, rel: float) -> None:
    """All numbers of two results of one kind."""
    assert ours.updates == theirs.updates > 3
    of_dual_norms = "noise", "grad_norm_lower", "grad_norm_upper"
    for name in ("trace", "grad_sqnorm", *of_dual_norms, "noise_scale", "lower", "upper"):
        if hasattr(theirs, name):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=rel), name
