# SPDX-License-Identifier: Apache-2.0
"""The mathematics of noise scales in a dual norm: sign descent's and spectral descent's.

Steepest descent in a norm measures gradients in its dual norm ‖·‖, which is the l1 norm for sign
descent and, matrix by matrix, the nuclear norm for spectral descent (Muon). The noise scale is
(σ / ‖G‖)², with σ = Σ_i σ_i over coordinates, or σ = tr C^½ for a matrix, C = E N Nᵀ on its smaller
side and N = g_b - G (Naganuma et al. 2026, arXiv 2602.03001, table 1). Both are tr C^½, if C is
diag σ_i² for coordinates. Over several matrices σ and ‖G‖ add up: Muon's steps have one size.

Neither part has an unbiased estimate from one update: a root bends, and noise makes a norm larger.
M and V are running means over past updates of the gradient and of C. With them an update, of mean
gradient ĝ and unbiased C estimate c, gives three numbers that are linear in what is new in it:

    noise   a = (tr V^½ + tr c V^-½) / 2     V holds c too; a ≥ tr c^½ for any V, and = for V = c
    aligned l = ⟨D(M), ĝ⟩                    D(M) is the step that M would take: sign M, or U Wᵀ
    norm    u = ‖M‖

For any M from other samples E l = ⟨D(M), G⟩ ≤ ‖G‖, since D(M) has norm 1: a lower bound. By
convexity E u ≥ ‖E M‖: an upper bound. Where M = G + noise and G's entries are spread like the
noise, E l · E u = ‖G‖²; in the Euclidean norm l u = ⟨M, ĝ⟩ is unbiased for any G. So the estimate
is a² / (l u), and the interval reaches from a² / u² to a² / l², each with its own 95 % limit.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gnsfast.noise_scale import loss_factors, statistics
from gnsfast.noise_scale.result import DualNoiseScale, DualNormEstimate

NO_ESTIMATE = DualNormEstimate(math.nan, 0.0, math.inf, math.nan, math.nan, math.nan)

NUMBERS = 3
"""The numbers of a parameter in an update: noise, aligned and norm."""


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
        noise, aligned, norm = (t @ members for t in numbers.unbind(2))
        found = dual_estimates(noise, aligned, norm, weights)
    return DualNoiseScale(
        **vars(found[0]),
        metric=metric,
        updates=len(numbers),
        left_out=left_out,
        per_module=dict(zip(paths, found[1:])),
    )


def dual_estimates(
    noise: Tensor, aligned: Tensor, norm: Tensor, weights: Tensor
) -> list[DualNormEstimate]:
    """The noise scales of M modules, from the numbers [K, M] of K updates."""
    norms = (weights / weights.sum() @ norm).tolist()
    found = []
    for m, upper_norm in zip(statistics.moments(noise, aligned, weights), norms):
        # What changes u from update to update is what changed l before: their means vary alike.
        ends = statistics.fieller_interval(replace(m, grad_sqnorm=upper_norm))
        limits = *ends, *statistics.fieller_interval(m)
        found.append(
            DualNormEstimate(
                noise_scale=m.ratio * m.trace / upper_norm if m.grad_sqnorm > 0 else math.inf,
                lower=min(limits) ** 2,
                upper=max(limits) ** 2,
                noise=m.trace,
                grad_norm_lower=m.grad_sqnorm,
                grad_norm_upper=upper_norm,
            )
        )
    return found


def sign_numbers(mean: Tensor, variance: Tensor, grad: Tensor, new: Tensor) -> Tensor:
    """float64 [NUMBERS] of a parameter: ``mean`` is M before the update, ``variance`` V with it,
    ``grad`` the update's ĝ and ``new`` its estimates of σ_i².
    """
    root = variance.clamp(min=0.0).sqrt()  # of equal weights only rounding makes it negative
    weighed = torch.where(root > 0, new / root, 0.0)
    parts = (root + weighed) / 2, mean.sign() * grad, mean.abs()
    return torch.stack([t.sum(dtype=torch.float64) for t in parts])


def spectral_numbers(mean: Tensor, variance: Tensor, grad: Tensor, new: Tensor) -> Tensor:
    """The same of a matrix [R, C], whose ``variance`` and ``new`` are on its smaller side."""
    values_S, vectors_SS = torch.linalg.eigh(variance)
    # Eigenvalues below the rounding of the largest are zeros that rounding has moved.
    kept = values_S > values_S[-1] * torch.finfo(values_S.dtype).eps * len(values_S)
    root_S = torch.where(kept, values_S, 0.0).sqrt()
    along_S = ((new @ vectors_SS) * vectors_SS).sum(0)
    noise = (root_S + torch.where(kept, along_S / root_S, 0.0)).sum(dtype=torch.float64) / 2
    left, singular_S, right = torch.linalg.svd(mean, full_matrices=False)
    aligned = ((left @ right) * grad).sum(dtype=torch.float64)
    return torch.stack([noise, aligned, singular_S.sum(dtype=torch.float64)])


def gram(grad: Tensor) -> Tensor:
    """G Gᵀ of a matrix, on its smaller side."""
    return grad @ grad.mT if grad.shape[0] <= grad.shape[1] else grad.mT @ grad
