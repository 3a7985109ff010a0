# SPDX-License-Identifier: Apache-2.0
"""Computes the factors that turn the sums of an update into means in a dual norm."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.micro_batch_noise import scalars_of_pass
from gnsfast.estimator.records import Pass
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes


class Factors(NamedTuple):
    """The factors that turn the sums of an update into means over its samples, float64 scalars.

    For p and q of a coordinate, C (times the square of the mean length) is ``p_new`` p - ``q_new``
    ĝ², and G² is ``q_square`` ĝ² - ``p_square`` p, both without bias. ĝ is ``mean`` times
    ``.grad``. It is ``total`` / Σ u times the sum of which the first half of the micro-batches has
    ``half`` / Σ u. ``known`` says that each half has one.
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
    in_first_half: Callable[[int], bool],
    loss_scale: Tensor | None,
    s: Settings,
    processes: Processes,
    device: torch.device,
) -> Factors:
    """The factors of the update's ``passes``, summed over processes. ``in_first_half`` says of the
    number of a pass whether the first half holds it. ``.grad`` has the factor ``loss_scale``.
    """
    scalars = []
    for k, each in enumerate(passes):
        own = scalars_of_pass(each, s, device)
        half = own[4] if in_first_half(k) else torch.zeros_like(own[4])
        scalars.append(torch.cat([own, torch.stack([half, own[4].square()])]))
    summed = torch.stack(scalars).sum(0)
    if processes.world > 1:
        dist.all_reduce(summed, group=s.group)
    of = loss_factors.coefficients(summed[None, :-2], local=False)
    total, half, v, u2 = summed[4], summed[-2], of.v[0], summed[-1]
    weight = v * summed[0] / summed[1].square()  # without the mean length's square
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
