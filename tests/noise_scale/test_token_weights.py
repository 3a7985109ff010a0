# SPDX-License-Identifier: Apache-2.0
"""Losses that weigh samples by their tokens, classes or lengths, on a population whose truth is
known: each batch that can be drawn is in the window once, so means are exact.
"""

import itertools

import pytest
import torch
from torch import Tensor

from gnsfast.noise_scale import NoiseScale, loss_factors, summarize

M, D = 4, 3


class Population:
    """M kinds of samples: numbers of tokens L_b, and gradients of their sums over tokens s_b, which
    depend on L_b.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths_M = torch.tensor([1.0, 2.0, 7.5, 12.0], dtype=torch.float64)
        means_MD = torch.randn(M, D, generator=generator, dtype=torch.float64)
        self.sums_MD = self.lengths_M[:, None] * (means_MD + 0.1 * self.lengths_M[:, None])

    @property
    def gradient_D(self) -> Tensor:
        """Of the mean over all tokens."""
        return self.sums_MD.mean(0) / self.lengths_M.mean()

    def window(self, a_per_pass: str, passes: int, size: int, local: bool = False) -> NoiseScale:
        """The result of all M ** (passes * size) updates."""
        updates = [*itertools.product(range(M), repeat=passes * size)]
        chosen = torch.tensor(updates).view(-1, passes, size)
        lengths, sums = self.lengths_M[chosen], self.sums_MD[chosen]
        of_pass = lengths.sum(2)  # [U, passes]
        a = {
            "sum": torch.ones_like(of_pass),
            "mean of the update": (1 / of_pass.sum(1, keepdim=True)).expand_as(of_pass),
            "mean of each pass": 1 / of_pass / passes,
        }[a_per_pass]
        grads = a[..., None, None] * sums
        norms = grads.square().sum((2, 3)), grads.sum(2).square().sum(2)
        parts = loss_factors.scalars_of(
            float(size), of_pass, lengths.square().sum(2), 0.0, a, local
        )
        scalars = torch.stack([torch.zeros_like(a) + part for part in parts], -1)
        if local:
            pairs, scalars = loss_factors.per_token(
                torch.stack(norms, -1)[:, :, None], scalars[:, :, None]
            )
            p, q = pairs[:, :, 0].sum(1).unbind(-1)
            scalars = scalars[:, :, 0]
        else:
            p, q = norms[0].sum(1), grads.sum((1, 2)).square().sum(1)
        return summarize(p[:, None], q[:, None], scalars.sum(1), local, [""], None)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("a", ["sum", "mean of the update"])
def test_of_one_mean(a: str, size: int) -> None:
    """The ratio of sums has no bias in small batches, though gradients depend on lengths."""
    of = Population()
    result = of.window(a, 1, size)
    square = of.gradient_D.square().sum()
    mean, spread = of.lengths_M.mean().square(), of.lengths_M.square().mean()
    trace = (of.sums_MD.square().sum(1).mean() - spread * square) / mean
    assert result.grad_sqnorm == pytest.approx(square.item(), rel=1e-12)
    assert result.trace == pytest.approx(trace.item(), rel=1e-12)
    assert result.unequal == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("a", ["mean of the update", "mean of each pass", "sum"])
def test_of_passes_that_are_measured_by_themselves(a: str) -> None:
    """What a pass divides its loss by does not matter: the truth is that of the tokens' mean."""
    of = Population()
    result = of.window(a, 2, 2, local=True)
    square = of.gradient_D.square().sum()
    mean, spread = of.lengths_M.mean().square(), of.lengths_M.square().mean()
    trace = (of.sums_MD.square().sum(1).mean() - spread * square) / mean
    assert result.grad_sqnorm == pytest.approx(square.item(), rel=1e-12)
    assert result.trace == pytest.approx(trace.item(), rel=1e-12)


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_of_means_of_single_samples(passes: int) -> None:
    """With one sample in each micro-batch, the gradient is the mean of the samples' own means: its
    noise scale is theirs, and not that of the mean over all tokens.
    """
    of = Population()
    means_MD = of.sums_MD / of.lengths_M[:, None]
    square = means_MD.mean(0).square().sum()
    result = of.window("mean of each pass", passes, 1)
    assert result.grad_sqnorm == pytest.approx(square.item(), rel=1e-12)
    trace = means_MD.square().sum(1).mean() - square
    assert result.trace == pytest.approx(trace.item(), rel=1e-12)
    assert result.unequal > 1.2


def test_of_unequal_means() -> None:
    """Micro-batches of several samples: the noise of a whole update is n times smaller."""
    of = Population()
    result = of.window("mean of each pass", 2, 2)
    pairs = torch.tensor([*itertools.product(range(M), repeat=2)])
    means = of.sums_MD[pairs].sum(1) / of.lengths_M[pairs].sum(1, keepdim=True)
    mean_D = means.mean(0)
    noise = (means - mean_D).square().sum(1).mean() / 2  # of the mean of two passes
    truth = 4 * noise / mean_D.square().sum()
    # What gradients and lengths have in common is left out: see trace_estimate.
    assert abs(result.trace / result.grad_sqnorm - truth) < 1.0
    assert result.unequal > 1.1


def test_equal_lengths_are_as_no_tokens() -> None:
    """Numbers of tokens that do not differ change nothing, to rounding."""
    norms = torch.rand(20, 2, dtype=torch.float64) + torch.tensor([0.0, 1.0])
    results = []
    for tokens in (None, 28, torch.full((4,), 7.0)):
        scalars = loss_factors.microbatch_scalars(
            4, tokens, 1.0, "mean", False, torch.device("cpu")
        )
        p, q = norms.split(1, 1)
        results.append(summarize(p, q, scalars.expand(20, -1), False, [""], None))
    for result in results[1:]:
        assert result.trace == pytest.approx(results[0].trace, rel=1e-12)
        assert result.grad_sqnorm == pytest.approx(results[0].grad_sqnorm, rel=1e-12)
        assert (result.lower, result.upper) == pytest.approx(
            (results[0].lower, results[0].upper), rel=1e-9
        )
