# SPDX-License-Identifier: Apache-2.0
"""Noise scales in dual norms made anew from the gradients of micro-batches, in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import sample_of, widened
from torch import Tensor, nn

from gnsfast.noise_scale import statistics
from gnsfast.noise_scale.dual_norms import FLOOR, RESOLUTION

Numbers = Tensor
"""[U, NUMBERS]: what each update says, from the second on."""


def sample_grads(model: nn.Module, loss: Any, batch: Any, B: int) -> dict[str, Tensor]:
    """Parameter name -> [B, *shape]: every sample's gradient, one by one in float64."""
    wide, batch = widened(model, batch)
    named = {n: p for n, p in wide.named_parameters() if p.requires_grad}
    rows = []
    for b in range(B):
        found = torch.autograd.grad(
            loss(wide, sample_of(batch, b)), [*named.values()], allow_unused=True
        )
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found)]
        )
    return {name: torch.stack(grads) for name, grads in zip(named, zip(*rows))}


def sign_numbers(before: Tensor, after: Tensor, new: Tensor, square: Tensor, *grads: Tensor) -> Any:
    whole, first, second = grads
    root, past = after.sqrt(), before.sqrt()
    past = past + FLOOR * past.mean()
    seen = root > 0
    return (
        (root.sum() * (new[seen] / root[seen]).sum()).sqrt(),
        ((first.sign() * second).sum() + (second.sign() * first).sum()) / 2,
        (first.abs().sum() + second.abs().sum()) / 2,
        whole.abs().sum(),
        past.sum(),
        (new / past).sum(),
        (square / past).sum(),
    )


def spectral_numbers(
    before: Tensor, after: Tensor, new: Tensor, square: Tensor, *grads: Tensor
) -> Any:
    whole, first, second = grads
    root, inverse = roots(after, 0.0)
    past, inverse_past = roots(before, FLOOR)
    nuclear = [torch.linalg.svdvals(g).sum() for g in grads]
    return (
        (root.trace() * (new @ inverse).trace()).sqrt(),
        ((polar(first) * second).sum() + (polar(second) * first).sum()) / 2,
        (nuclear[1] + nuclear[2]) / 2,
        nuclear[0],
        past.trace(),
        (new @ inverse_past).trace(),
        (square @ inverse_past).trace(),
    )


def roots(moment: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp(min=0).sqrt() * (values > 1e-12 * values[-1])
    root = root + floor * root.mean()
    inverse = torch.where(root > 0, 1 / root, 0.0)
    return (vectors * root) @ vectors.T, (vectors * inverse) @ vectors.T


def polar(g: Tensor) -> Tensor:
    left, singular, right = torch.linalg.svd(g, full_matrices=False)
    return left[:, singular > 1e-14 * singular[0]] @ right[singular > 1e-14 * singular[0]]


def squares(g_B: Tensor) -> Tensor:
    return g_B.square()


def grams(g_B: Tensor) -> Tensor:
    wide = g_B.shape[-2] <= g_B.shape[-1]
    return g_B @ g_B.mT if wide else g_B.mT @ g_B


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Any]]] = {
    "sign": (squares, sign_numbers),
    "spectral": (grams, spectral_numbers),
}


def expected(metric: str, updates: list[dict[str, Tensor]], window: int) -> dict[str, Numbers]:
    """The numbers of each parameter, from every micro-batch's gradients in each update."""
    square, numbers = KINDS[metric]
    found: dict[str, Numbers] = {}
    for name in updates[0]:
        moment = torch.zeros((), dtype=torch.float64)
        total, rows = 0.0, []
        for grads in updates:
            g_B = grads[name]
            n, half = len(g_B), torch.arange(len(g_B)) % 2 == 0
            whole, first, second = g_B.mean(0), g_B[half].mean(0), g_B[~half].mean(0)
            new = square(g_B - whole).sum(0) / (n - 1)
            total = total * (1 - 1 / window) + n
            before, moment = moment, moment + n / total * (new - moment)
            if before.ndim:
                unbiased = square(whole) - new / n
                row = numbers(before, moment, new, unbiased, whole, first, second)
                rows.append(torch.stack(row))
        found[name] = torch.stack(rows)
        for block in found[name].split(8):  # σ² is averaged before the root
            root = block[:, 0].square().mean().sqrt()
            if root > 0:
                block[:, 0] = (block[:, 0].square() / root + root) / 2
    return found


def noise_scale(numbers: Numbers) -> float:
    """The estimate from updates of one size."""
    noise, aligned, halves, *_ = numbers.mean(0).tolist()
    square = min(aligned * halves, upper_bound(numbers) ** 2)
    return noise**2 / square if square > 0 else math.inf


def upper_bound(numbers: Numbers) -> float:
    """The bound of the gradient's norm, by the product where the window resolves it."""
    noise, whole = numbers[:, 0], numbers[:, 3].mean().item()
    product = numbers[:, 4] * numbers[:, 6]
    squared = (2 * noise - noise.mean()) * noise.mean()
    [m] = statistics.moments(squared[:, None], product[:, None], torch.ones(len(numbers)).double())
    if m.grad_sqnorm > RESOLUTION * whole**2 and statistics.fieller_interval(m)[1] < math.inf:
        return min(whole, m.grad_sqnorm**0.5)
    return whole


def assert_numbers(found: Any, numbers: dict[str, Numbers], rel: float, unit: int = 1) -> None:
    """A result is that of its parameters' numbers, each from ``unit`` samples, whose variance is
    so many times smaller than that of one.
    """
    whole = sum(numbers.values())
    assert isinstance(whole, Tensor)
    noise, aligned, *_ = whole.mean(0).tolist()
    assert found.noise == pytest.approx(math.sqrt(unit) * noise, rel=rel)
    assert found.grad_norm_lower == pytest.approx(aligned, rel=rel)
    assert found.grad_norm_upper == pytest.approx(upper_bound(whole), rel=rel)
    assert found.noise_scale == pytest.approx(unit * noise_scale(whole), rel=rel)
