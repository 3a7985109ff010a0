# SPDX-License-Identifier: Apache-2.0
"""Computes the factors that turn the sums of an update into means in a dual norm."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.records import Pass
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes


class Factors(NamedTuple):
    """The factors that turn the sums of an update into means over its samples, float64 scalars.

    For p and q of a coordinate, C (times the square of the mean length) is ``p_new`` p - ``q_new``
    ĝ², and G² is ``q_square`` ĝ² - ``p_square`` p, both without bias. ĝ is ``mean`` times
    ``.grad``. It is ``total`` / Σ u times the sum of which the first half of the samples has
    ``half`` / Σ u. ``known`` says that there are two samples, and that each half has one.
    """

    samples: Tensor
    known: Tensor
    p_new: Tensor
    q_new: Tensor
    p_square: Tensor
    q_square: Tensor
    mean: Tensor
    scale: Tensor
    half: Tensor
    total: Tensor


def factors(
    passes: list[Pass],
    first_sample: Callable[[int], int],
    loss_scale: Tensor | None,
    s: Settings,
    processes: Processes,
    device: torch.device,
) -> Factors:
    """The factors of the update's ``passes``, summed over processes. The first half holds every
    second sample of pass k, from ``first_sample(k)`` on. With noise from micro-batches it holds the
    passes where that is 0. ``.grad`` has the factor ``loss_scale``.
    """
    scalars = []
    for k, each in enumerate(passes):
        tokens, first = each.tokens, first_sample(k)
        own = loss_factors.block_scalars(
            *(each.num_samples, each.passes, tokens, each.divided * each.scale),
            *(s.loss_reduction, s.local, device),
        )
        if s.micro_batches:
            half = own.new_tensor(1.0 - first)
        elif isinstance(tokens, Tensor):
            lengths = tokens.to(device, torch.float64, non_blocking=True)
            half = lengths[first::2].sum() / lengths.sum()
        else:
            half = own.new_tensor(len(range(first, each.num_samples, 2)) / each.num_samples)
        scalars.append(torch.cat([own, torch.stack([half * own[4], own[4].square()])]))
    summed = torch.stack(scalars).sum(0)
    if processes.world > 1:
        dist.all_reduce(summed, group=s.group)
    of = loss_factors.coefficients(summed[None, :-2], s.local)
    total, half, weight = summed[4], summed[-2], summed[5]  # of C times mean length's square
    v, u2 = of.v[0], summed[-1] if s.micro_batches else of.u2[0]
    rest = v - u2
    added, left = (
        total.new_ones(()) if scale is None else scale.to(device, torch.float64)
        for scale in (passes[-1].loss_scale, loss_scale)
    )
    return Factors(
        samples=of.samples[0],
        known=(rest > 1e-9 * v) & (half > 1e-9 * total) & (total - half > 1e-9 * total),
        p_new=(1 + u2 / rest) / weight / added.square(),
        q_new=v * u2 / rest / weight,
        p_square=1 / rest / added.square(),
        q_square=v / rest,
        mean=processes.divisor / total / left,  # DDP averages, the micro-batches add up
        scale=1 / added,
        half=half,
        total=total,
    )
