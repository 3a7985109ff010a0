# SPDX-License-Identifier: Apache-2.0
"""Noise scales in dual norms made anew from single samples' gradients, in float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from oracle import sample_of, widened
from torch import Tensor, nn

Parts = tuple[Tensor, Tensor, Tensor]
"""The numbers noise, aligned and norm of each update that has them."""


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


def sign_parts(mean: Tensor, second: Tensor, grad: Tensor, new: Tensor) -> list[float]:
    root = second.sqrt()
    seen = root > 0
    noise = (root.sum() + (new[seen] / root[seen]).sum()) / 2
    return [float(noise), float((mean.sign() * grad).sum()), float(mean.abs().sum())]


def spectral_parts(mean: Tensor, second: Tensor, grad: Tensor, new: Tensor) -> list[float]:
    values, vectors = torch.linalg.eigh(second)
    keep = values > 1e-12 * values[-1]
    root = (vectors[:, keep] * values[keep].sqrt()) @ vectors[:, keep].T
    inverse = (vectors[:, keep] / values[keep].sqrt()) @ vectors[:, keep].T
    left, singular, right = torch.linalg.svd(mean, full_matrices=False)
    noise = (root.trace() + (new @ inverse).trace()) / 2
    return [float(noise), float(((left @ right) * grad).sum()), float(singular.sum())]


def squares(g_B: Tensor) -> Tensor:
    return g_B.square()


def grams(g_B: Tensor) -> Tensor:
    wide = g_B.shape[1] <= g_B.shape[2]
    return g_B @ g_B.mT if wide else g_B.mT @ g_B


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., list[float]]]] = {
    "sign": (squares, sign_parts),
    "spectral": (grams, spectral_parts),
}


def expected_parts(metric: str, updates: list[dict[str, Tensor]], window: int) -> dict[str, Parts]:
    """The numbers of each parameter, from every sample's gradients in each update."""
    square, parts = KINDS[metric]
    found: dict[str, Parts] = {}
    for name in updates[0]:
        mean = second = torch.zeros((), dtype=torch.float64)
        total, rows = 0.0, []
        for grads in updates:
            g_B = grads[name]
            n = len(g_B)
            grad = g_B.mean(0)
            new = square(g_B - grad).sum(0) / (n - 1)
            total = total * (1 - 1 / window) + n
            second = second + n / total * (new - second)
            if mean.ndim:
                rows.append(parts(mean, second, grad, new))
            mean = mean + n / total * (grad - mean)
        noise, aligned, norm = torch.tensor(rows, dtype=torch.float64).T
        found[name] = noise, aligned, norm
    return found


def summed(parts: dict[str, Parts]) -> Parts:
    """The numbers of all parameters together."""
    noise, aligned, norm = (sum(t) for t in zip(*parts.values()))
    return noise, aligned, norm  # type: ignore[return-value]


def noise_scale(parts: Parts) -> float:
    """The estimate from updates of one size."""
    noise, aligned, norm = (float(t.mean()) for t in parts)
    return noise**2 / (aligned * norm) if aligned > 0 else math.inf
