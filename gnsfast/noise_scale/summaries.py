# SPDX-License-Identifier: Apache-2.0
"""From the measurements of a window of updates to the result."""

import torch
from torch import Tensor

from gnsfast.noise_scale import loss_factors, statistics
from gnsfast.noise_scale.loss_factors import Coefficients
from gnsfast.noise_scale.present import present
from gnsfast.noise_scale.result import (
    NO_ESTIMATE,
    NOT_MEASURED,
    AdamNoiseScale,
    Estimate,
    GroupNoiseScale,
    ModuleNoiseScale,
    NoiseScale,
)


def summarize(
    p: Tensor,
    q: Tensor,
    scalars: Tensor,
    local: bool,
    modules: list[str],
    decay: float | None,
) -> NoiseScale:
    """The result of a window of U updates, each weighted by its number of samples.

    An update is skipped where it has a single sample, a NaN or an infinity, such as from a gradient
    scaler's overflow.

    Args:
        p, q: [U, K], oldest update first, for K units.
        scalars: [U, SCALARS], which determine the weights of the samples.
        modules: the module path of each unit.
    """
    usable, of, weights = usable_updates(torch.cat([p, q], 1), scalars, local, decay)
    p, q = p[usable], q[usable]
    whole = p.sum(1, keepdim=True), q.sum(1, keepdim=True)
    trace, grad_sqnorm = estimates(*whole, of, weights)
    per_module: dict[str, ModuleNoiseScale] = {}
    total, now = NOT_MEASURED, NO_ESTIMATE
    if len(p):
        [total] = _noise_scales(*whole, of, weights)
        if total.lower > 0:
            ages = len(usable) - 1.0 - usable.nonzero()[:, 0]
            now = Estimate(*present(trace[:, 0], grad_sqnorm[:, 0], weights, ages.double()))
        paths = list(dict.fromkeys(modules))
        members = torch.zeros(len(modules), len(paths), dtype=torch.float64)
        for k, path in enumerate(modules):
            members[k, paths.index(path)] = 1.0
        per_module = dict(zip(paths, _noise_scales(p @ members, q @ members, of, weights)))
    return NoiseScale(
        **vars(total),
        drift=len(p) > 0 and statistics.drifted(trace[:, 0], grad_sqnorm[:, 0], weights),
        updates=len(p),
        skipped=int((~usable).sum()),
        samples=int(of.samples.sum()),
        unequal=float(weights @ of.unequal / weights.sum()),
        per_module=per_module,
        present=now,
    )


def summarize_adam(metric: Tensor, scalars: Tensor, decay: float | None) -> AdamNoiseScale:
    """The result under Adam's metric, from p and q [U, 2]. Updates without these do not count."""
    found, of = _summarize_pair(metric, scalars, False, decay)
    return AdamNoiseScale(**vars(found), updates=len(of.samples))


def summarize_group(
    measured: Tensor, left_out: tuple[str, ...], decay: float | None
) -> GroupNoiseScale:
    """The result of a group of samples, from p, q and the scalars of their weights.

    An update without two of the samples in a micro-batch does not count.

    Args:
        measured: [U, 2 + SCALARS].
    """
    found, of = _summarize_pair(measured[:, :2], measured[:, 2:], True, decay)
    samples = int(of.samples.sum())
    return GroupNoiseScale(
        **vars(found), updates=len(of.samples), samples=samples, left_out=left_out
    )


def _summarize_pair(
    pair: Tensor, scalars: Tensor, local: bool, decay: float | None
) -> tuple[ModuleNoiseScale, Coefficients]:
    """The noise scale from p and q [U, 2], and the coefficients of the updates that count."""
    usable, of, weights = usable_updates(pair, scalars, local, decay)
    found = NOT_MEASURED
    if len(weights):
        p, q = pair[usable].split(1, 1)
        [found] = _noise_scales(p, q, of, weights)
    return found, of


def usable_updates(
    norms: Tensor, scalars: Tensor, local: bool, decay: float | None
) -> tuple[Tensor, Coefficients, Tensor]:
    """Which updates, bool [U], are finite and have two samples; their coefficients and weights."""
    usable = torch.cat([norms, scalars], 1).isfinite().all(1)
    finite = loss_factors.coefficients(scalars[usable], local)
    usable[usable.clone()] = finite.v - finite.u2 > 1e-9 * finite.v
    of = loss_factors.coefficients(scalars[usable], local)
    return usable, of, statistics.decay_weights(len(norms), decay)[usable] * of.samples


def estimates(p: Tensor, q: Tensor, of: Coefficients, weights: Tensor) -> tuple[Tensor, Tensor]:
    """tr Σ and |G|² of each update, from p and q; all are [U, M]. Their means with ``weights`` [U]
    are those of the window.
    """
    v, u2, weight = (each[:, None] for each in (of.v, of.u2, of.weight))
    grad_sqnorm = statistics.grad_sqnorm_estimate(p, q, v, u2)
    grad_sqnorm = statistics.over_pairs(grad_sqnorm, of.pairs, weights)
    return statistics.of_window(p, grad_sqnorm, u2, weight, weights), grad_sqnorm


def _noise_scales(
    p: Tensor, q: Tensor, of: Coefficients, weights: Tensor
) -> list[ModuleNoiseScale]:
    """The noise scales of M modules over the window, from p and q [U, M]."""
    rounding = statistics.RESOLUTION * p / (of.v - of.u2)[:, None]
    found = statistics.moments(*estimates(p, q, of, weights), weights, rounding)
    return [from_moments(m) for m in found]


def from_moments(m: statistics.Moments) -> ModuleNoiseScale:
    """The ratio of two means, with its 95 % interval."""
    return ModuleNoiseScale(m.ratio, *statistics.fieller_interval(m), m.trace, m.grad_sqnorm)
