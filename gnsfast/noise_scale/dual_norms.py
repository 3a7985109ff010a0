# SPDX-License-Identifier: Apache-2.0
"""The mathematics of noise scales in a dual norm: sign descent's and spectral descent's.

Steepest descent in a norm measures gradients in its dual norm ‖·‖, which is the l1 norm for sign
descent and, matrix by matrix, the nuclear norm for spectral descent (Muon). The noise scale is
(σ / ‖G‖)² with σ = tr C^½. For sign descent C is the diagonal of the coordinates' variances σ_i²,
so that σ = Σ_i σ_i; for a matrix it is E N Nᵀ on its smaller side, with N = g_b - G (Naganuma et
al. 2026, arXiv 2602.03001). Over several matrices both σ and ‖G‖ add up.

Neither part has an unbiased estimate, since a root bends and noise makes a norm larger. An update
gives six numbers. Let c and Q be its unbiased estimates of C and of G Gᵀ (of G_i² for sign), V a
running mean of c over past updates and this one, and R = (V before this update)^½, plus a tenth of
its mean eigenvalue. Let ĝ be the update's mean gradient, g¹ and g² those of the halves of its
samples, and D(g) the step that g would take: its signs, or U Wᵀ of its singular vectors.

    noise    (tr V^½ + tr c V^-½) / 2            σ, nearly: for any V it is at least tr c^½
    aligned  (⟨D(g¹), g²⟩ + ⟨D(g²), g¹⟩) / 2     its mean is at most ‖G‖, as D has norm 1
    halves   (‖g¹‖ + ‖g²‖) / 2                   its mean is at least ‖G‖, by convexity
    whole    ‖ĝ‖                                 the same, and closer
    scale    tr R                                with
    weighed  tr R^-1 Q                           ‖G‖² ≤ scale · E weighed, by Cauchy and Schwarz

So ‖G‖ is bounded on both sides, and the interval reaches from one bound's 95 % limit to the
other's. In between, the estimate of ‖G‖² is aligned · halves. In the Euclidean norm that is g¹·g²,
unbiased for any G. It is right in the other norms too where G is spread like the noise; it is too
large where few entries hold most of G, and it never exceeds the upper bound.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnsfast.noise_scale import loss_factors, statistics
from gnsfast.noise_scale.result import DualNoiseScale, DualNormEstimate

NO_ESTIMATE = DualNormEstimate(math.nan, 0.0, math.inf, math.nan, math.nan, math.nan)

NUMBERS = 6
"""The numbers of a parameter in an update, in the order above."""

FLOOR = 0.1
"""The share of its mean that is added to R: a coordinate that few samples have moved would count
without end in tr R^-1 Q. The bound holds for any R."""


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
        scalars: [U, SCALARS], which hold the number of samples.
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
        found = dual_estimates(torch.einsum("upk,pm->umk", numbers, members), weights)
    return DualNoiseScale(
        **vars(found[0]),
        metric=metric,
        updates=len(numbers),
        left_out=left_out,
        per_module=dict(zip(paths, found[1:])),
    )


def dual_estimates(numbers: Tensor, weights: Tensor) -> list[DualNormEstimate]:
    """The noise scales of M modules, from the NUMBERS of K updates [K, M, NUMBERS]."""
    noise, aligned, halves, whole, scale, weighed = numbers.unbind(2)
    share = weights / weights.sum()
    mean_noise, mean_halves, mean_whole = (share @ t for t in (noise, halves, whole))
    product = scale * weighed
    # σ² to first order around the mean: linear in each update's numbers, as the interval needs.
    squared = (2 * noise - mean_noise) * mean_noise
    found = []
    for by_aligned, by_whole, by_product, half in zip(
        statistics.moments(noise, aligned, weights),
        statistics.moments(noise, whole, weights),
        statistics.moments(squared, product, weights),
        mean_halves.tolist(),
    ):
        _, upper = statistics.fieller_interval(by_aligned)
        lower, _ = statistics.fieller_interval(by_whole)
        lower_by_product, _ = statistics.fieller_interval(by_product)
        sigma, low, bound = by_aligned.trace, by_aligned.grad_sqnorm, by_product.grad_sqnorm
        square = min(low * half, bound, by_whole.grad_sqnorm**2)
        high = min(by_whole.grad_sqnorm, math.sqrt(bound)) if bound > 0 else by_whole.grad_sqnorm
        found.append(
            DualNormEstimate(
                noise_scale=sigma**2 / square if square > 0 else math.inf,
                lower=max(lower**2, lower_by_product),
                upper=upper**2 if square > 0 else math.inf,
                noise=sigma,
                grad_norm_lower=low,
                grad_norm_upper=high,
            )
        )
    return found


def sign_numbers(of: Parts) -> Tensor:
    """float64 [NUMBERS] of a parameter."""
    # With samples of equal weights only rounding makes a variance negative.
    root, past = (t.clamp(min=0.0).sqrt() for t in (of.after, of.before))
    past = past + FLOOR * past.mean()
    parts = (
        (root + torch.where(root > 0, of.new / root, 0.0)) / 2,
        (of.first.sign() * of.second + of.second.sign() * of.first) / 2,
        (of.first.abs() + of.second.abs()) / 2,
        of.whole.abs(),
        past,
        torch.where(past > 0, of.square / past, 0.0),
    )
    return torch.stack([t.sum(dtype=torch.float64) for t in parts])


def spectral_numbers(of: Parts) -> Tensor:
    """float64 [NUMBERS] of a matrix [R, C], whose V, C and G Gᵀ are on its smaller side."""
    root_S, weighed_S = _roots(of.after, of.new, 0.0)
    past_S, square_S = _roots(of.before, of.square, FLOOR)
    step_1, norm_1 = _steepest(of.first)
    step_2, norm_2 = _steepest(of.second)
    aligned = (step_1 * of.second + step_2 * of.first).sum() / 2
    whole = torch.linalg.svdvals(of.whole).sum()
    noise = (root_S + weighed_S).sum() / 2
    parts = noise, aligned, (norm_1 + norm_2) / 2, whole, past_S.sum(), square_S.sum()
    return torch.stack([t.double() for t in parts])


def _roots(moment: Tensor, other: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """The eigenvalues of R = ``moment``^½ + ``floor`` of their mean, and the parts of
    tr R^-1 ``other`` along its eigenvectors.
    """
    values_S, vectors_SS = torch.linalg.eigh(moment)
    # Eigenvalues of the size of the largest one's rounding are zeros.
    kept = values_S > values_S[-1] * torch.finfo(values_S.dtype).eps
    root_S = torch.where(kept, values_S, 0.0).sqrt()
    root_S = root_S + floor * root_S.mean()
    along_S = ((other @ vectors_SS) * vectors_SS).sum(0)
    return root_S, torch.where(root_S > 0, along_S / root_S, 0.0)


def _steepest(grad: Tensor) -> tuple[Tensor, Tensor]:
    """U Wᵀ of a matrix over the directions that it has, and its nuclear norm."""
    left, singular_S, right = torch.linalg.svd(grad, full_matrices=False)
    rounding = 16 * torch.finfo(singular_S.dtype).eps * singular_S[0]
    return left @ ((singular_S > rounding)[:, None] * right), singular_S.sum()


def gram(grad: Tensor) -> Tensor:
    """G Gᵀ of a matrix, on its smaller side."""
    return grad @ grad.mT if grad.shape[0] <= grad.shape[1] else grad.mT @ grad
