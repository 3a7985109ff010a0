# SPDX-License-Identifier: Apache-2.0
"""The mathematics of noise scales in a dual norm: sign descent's and spectral descent's.

Steepest descent in a norm measures gradients in its dual norm ‖·‖, which is the l1 norm for sign
descent and, matrix by matrix, the nuclear norm for spectral descent (Muon). The noise scale is
(σ / ‖G‖)² with σ = tr C^½. For sign descent C is the diagonal of the coordinates' variances σ_i²,
so that σ = Σ_i σ_i; for a matrix it is E N Nᵀ on its smaller side, with N = g_b - G (Naganuma et
al. 2026, arXiv 2602.03001). Over several matrices both σ and ‖G‖ add up.

Neither part has an unbiased estimate, since a root bends and noise makes a norm larger. An update
gives seven numbers. Let c and Q be its unbiased estimates of C and of G Gᵀ (of G_i² for sign), V a
running mean of c over past updates and this one, and R = (V before this update)^½, plus a tenth of
its mean eigenvalue. Let ĝ be the update's mean gradient, g¹ and g² those of the halves of its
samples, and D(g) the step that g would take: its signs, or U Wᵀ of its singular vectors.

    noise    (tr V^½ · tr c V^-½)^½              its square's mean is at most σ²; where the product
                                                 is below zero by chance, so is this
    aligned  (⟨D(g¹), g²⟩ + ⟨D(g²), g¹⟩) / 2     its mean is at most ‖G‖, as D has norm 1
    halves   (‖g¹‖ + ‖g²‖) / 2                   its mean is at least ‖G‖, by convexity
    whole    ‖ĝ‖                                 the same, and closer
    scale    tr R                                for any R from other samples,
    excess   tr R^-1 c                           σ² ≤ scale · E excess and
    weighted tr R^-1 Q                           ‖G‖² ≤ scale · E weighted, by Cauchy and Schwarz

The square of noise, with its sign, has the mean E (tr V^½)² where the updates that V is made of are
alike, which is at most σ², as (tr V^½)² is concave in V: σ is 1 / (4 d) too small for a V of d
samples. A root of each square would lose more, 4 to 7 % where samples have heavy tails, so squares
of ``AVERAGED`` updates are averaged first. A root of the whole window's would not fit norms that
fall meanwhile.
So σ and ‖G‖ are bounded on both sides. The interval ends at the 95 % limits of the least and of the
largest (σ / ‖G‖)² that the bounds allow. Within it, the estimate of ‖G‖² is aligned · halves, or
the upper bound if that is smaller. Its limit is exact where the entries of G (or its singular
values) are spread as those of Gaussian noise are. If they are all alike, it is up to π / 2 times
too small. If few entries hold most of G, it is several times too large.

In the sums over samples of unequal lengths C has the square of the samples' mean length, by which
the window divides (``statistics.trace_estimate``).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnsfast.noise_scale import loss_factors, statistics
from gnsfast.noise_scale.result import DualNoiseScale, DualNormEstimate

NO_ESTIMATE = DualNormEstimate(math.nan, 0.0, math.inf, math.nan, math.nan, math.nan)

NUMBERS = 7
"""The numbers of a parameter in an update, in the order above."""

FLOOR = 0.1
"""The share of its mean that is added to R. Without it, a coordinate that few samples have moved
would dominate tr R^-1 c and tr R^-1 Q. The bounds hold for any positive R."""

AVERAGED = 8
"""The σ² of this many updates are averaged before the root."""

RESOLUTION = 1e-5
"""The smallest share of ‖ĝ‖² that scale · weighted can tell from float32's rounding."""


class Parts(NamedTuple):
    """What an update says of a parameter: V ``before`` it and ``after``, its unbiased ``new`` C and
    ``square`` of G, and its mean gradients, ``whole`` and of its halves ``first`` and ``second``.
    """

    before: Tensor
    after: Tensor
    new: Tensor
    square: Tensor
    whole: Tensor
    first: Tensor
    second: Tensor


def summarize_dual(
    metric: str,
    numbers: Tensor,
    scalars: Tensor,
    modules: Sequence[str],
    left_out: tuple[str, ...],
    decay: float | None,
) -> DualNoiseScale:
    """The result of a window of U updates; those with a NaN, such as the first, do not count.

    Args:
        numbers: [U, P, NUMBERS] of P parameters, oldest update first.
        scalars: [U, SCALARS], which hold the numbers of samples and tokens.
        modules: the module path of each parameter.
    """
    usable = numbers.flatten(1).isfinite().all(1) & scalars.isfinite().all(1)
    samples = loss_factors.coefficients(scalars[usable], local=False).samples
    weights = statistics.decay_weights(len(numbers), decay)[usable] * samples
    numbers, paths = numbers[usable], list(dict.fromkeys(modules))
    members = torch.zeros(len(modules), 1 + len(paths), dtype=torch.float64)
    members[:, 0] = 1.0
    for k, path in enumerate(modules):
        members[k, 1 + paths.index(path)] = 1.0
    found = [NO_ESTIMATE] * (1 + len(paths))
    if len(numbers):
        noise = averaged_before_root(numbers[..., 0], weights)
        numbers = torch.cat([noise[..., None], numbers[..., 1:]], 2)
        numbers = torch.einsum("upk,pm->umk", numbers, members)
        samples, length = scalars[usable, :2].sum(0).tolist()
        found = dual_estimates(numbers, weights, length / samples)
    return DualNoiseScale(
        **vars(found[0]),
        metric=metric,
        updates=len(numbers),
        left_out=left_out,
        per_module=dict(zip(paths, found[1:])),
    )


def dual_estimates(numbers: Tensor, weights: Tensor, length: float = 1.0) -> list[DualNormEstimate]:
    """The noise scales of M modules, from the NUMBERS of K updates [K, M, NUMBERS]; ``length`` is
    the samples' mean length.
    """
    noise, aligned, halves, whole, scale, excess, weighted = numbers.unbind(2)
    noise, excess = noise / length, excess / length**2
    share = weights / weights.sum()
    mean_aligned, mean_halves, mean_noise = (share @ t for t in (aligned, halves, noise))
    of = statistics.moments
    found = []
    for by_whole, by_product, by_aligned, low, half in zip(
        of(noise, whole, weights),
        # Squares to first order around the mean: linear in each update's numbers.
        of((2 * noise - mean_noise) * mean_noise, scale * weighted, weights),
        of(scale * excess, (2 * aligned - mean_aligned) * mean_aligned, weights),
        mean_aligned.tolist(),
        mean_halves.tolist(),
    ):
        sigma, high = by_whole.trace, by_whole.grad_sqnorm
        lower, square = statistics.fieller_interval(by_whole)[0] ** 2, min(low * half, high**2)
        lower_by_product, upper_by_product = statistics.fieller_interval(by_product)
        if by_product.grad_sqnorm > RESOLUTION * high**2 and math.isfinite(upper_by_product):
            lower, square = max(lower, lower_by_product), min(square, by_product.grad_sqnorm)
            high = min(high, math.sqrt(by_product.grad_sqnorm))
        _, upper = statistics.fieller_interval(by_aligned)
        resolved = low > 0 and math.isfinite(upper)
        found.append(
            DualNormEstimate(
                noise_scale=sigma**2 / square if square > 0 else math.inf,
                lower=lower,
                upper=upper if resolved else math.inf,
                noise=sigma,
                grad_norm_lower=low,
                grad_norm_upper=high,
            )
        )
    return found


def averaged_before_root(noise: Tensor, weights: Tensor) -> Tensor:
    """``noise`` of P parameters [K, P], made linear in its square around the root of the mean of
    ``AVERAGED`` squares, so that the mean of these updates is that root.
    """
    found = []
    for own, share in zip(noise.split(AVERAGED), weights.split(AVERAGED)):
        squares = own * own.abs()
        root = ((share / share.sum()) @ squares).sqrt()
        found.append(torch.where(root > 0, (squares / root + root) / 2, 0.0))
    return torch.cat(found)


def sign_numbers(of: Parts) -> Tensor:
    """float64 [NUMBERS] of a parameter."""
    # With samples of equal weights only rounding makes a variance negative.
    root, past = (t.clamp(min=0.0).sqrt() for t in (of.after, of.before))
    past_sum = past.sum(dtype=torch.float64)
    past = past + (FLOOR * past_sum / past.numel()).to(past.dtype)
    # Without any variance so far, R is the gradient's own size: with R = 0 it would not count.
    past = torch.where(past_sum > 0, past, of.whole.abs())
    parts = (
        root,
        torch.where(root > 0, of.new / root, 0.0),
        (of.first.sign() * of.second + of.second.sign() * of.first) / 2,
        (of.first.abs() + of.second.abs()) / 2,
        of.whole.abs(),
        past,
        *(torch.where(past > 0, t / past, 0.0) for t in (of.new, of.square)),
    )
    sums = torch.stack([t.sum(dtype=torch.float64) for t in parts])
    return torch.cat([_signed_root(sums[:2].prod(0, keepdim=True)), sums[2:]])


def spectral_numbers(of: Parts) -> Tensor:
    """float64 [NUMBERS] of a matrix [R, C], whose V, C and G Gᵀ are on its smaller side."""
    root_S, along_S = _roots(of.after, 0.0, of.new)
    before = torch.where(of.before.any(), of.before, gram(of.whole))  # as for ``sign_numbers``
    past_S, excess_S, weighted_S = _roots(before, FLOOR, of.new, of.square)
    step_1, norm_1 = _steepest(of.first)
    step_2, norm_2 = _steepest(of.second)
    aligned = (step_1 * of.second + step_2 * of.first).sum() / 2
    whole = torch.linalg.svdvals(of.whole).sum()
    noise = _signed_root(root_S.sum() * along_S.sum())
    last = past_S.sum(), excess_S.sum(), weighted_S.sum()
    parts = noise, aligned, (norm_1 + norm_2) / 2, whole, *last
    return torch.stack([t.double() for t in parts])


def _signed_root(square: Tensor) -> Tensor:
    """The root of a square that is below zero where an unbiased variance is."""
    return square.sign() * square.abs().sqrt()


def _roots(moment: Tensor, floor: float, *others: Tensor) -> list[Tensor]:
    """The eigenvalues of R = ``moment``^½ + ``floor`` of their mean, and the parts of each
    tr R^-1 ``other`` along its eigenvectors.
    """
    values_S, vectors_SS = torch.linalg.eigh(moment)
    # Eigenvalues of the size of the largest one's rounding are zeros.
    kept = values_S > values_S[-1] * torch.finfo(values_S.dtype).eps
    root_S = torch.where(kept, values_S, 0.0).sqrt()
    root_S = root_S + floor * root_S.mean()
    along = (((other @ vectors_SS) * vectors_SS).sum(0) for other in others)
    return [root_S, *(torch.where(root_S > 0, t / root_S, 0.0) for t in along)]


def _steepest(grad: Tensor) -> tuple[Tensor, Tensor]:
    """U Wᵀ of a matrix over the directions that it has, and its nuclear norm."""
    left, singular_S, right = torch.linalg.svd(grad, full_matrices=False)
    rounding = 16 * torch.finfo(singular_S.dtype).eps * singular_S[0]
    return left @ ((singular_S > rounding)[:, None] * right), singular_S.sum()


def gram(grad: Tensor) -> Tensor:
    """G Gᵀ of a matrix, on its smaller side."""
    return grad @ grad.mT if grad.shape[0] <= grad.shape[1] else grad.mT @ grad
