# SPDX-License-Identifier: Apache-2.0
"""What the demo's single samples say in other metrics than the Euclidean one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.noise_scale import Estimate, dual_norms


class SingleSamples:
    """Sums over the gradients of single samples as they arrive at a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_parameters())
        # Even and odd samples have sums of their own: the bound of the norm needs two halves.
        self._sums = {name: torch.zeros(2, *p.shape).double() for name, p in self._named.items()}
        self._squares = {name: torch.zeros(p.shape).double() for name, p in self._named.items()}
        self._grams = {
            name: torch.zeros(min(p.shape), min(p.shape)).double()
            for name, p in self._named.items()
            if p.ndim == 2
        }
        self._seen = dict.fromkeys(self._named, 0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every backward pass in the block is that of one sample."""
        handles = [p.register_hook(partial(self._arrived, n)) for n, p in self._named.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrived(self, name: str, grad: Tensor) -> None:
        g = grad.detach().double()
        self._sums[name][self._seen[name] % 2] += g
        self._squares[name] += g.square()
        if name in self._grams:
            self._grams[name] += dual_norms.gram(g)
        self._seen[name] += 1

    def estimate(self, metric: str, left_out: tuple[str, ...], optimizer: Any) -> Estimate:
        """The noise scale without the parameters ``left_out``. Its ends are the bounds of a dual
        norm that n samples give, ‖ĝ‖ and ⟨D(g¹), g²⟩ of their halves; under Adam's metric the norm
        has an unbiased estimate.
        """
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        sigma = most = least = 0.0
        for name, sums in self._sums.items():
            if name in left_out or (metric == "spectral" and name not in self._grams):
                continue
            n, sum_ = self._seen[name], sums.sum(0)
            first, second = sums[0] / (n - n // 2), sums[1] / (n // 2)
            squared = sum_.square() / n
            variance = (self._squares[name] - squared) / (n - 1)
            if metric == "sign":
                sigma += variance.clamp(min=0).sqrt().sum().item()
                most += sum_.abs().sum().item() / n
                least += (first.sign() * second + second.sign() * first).sum().item() / 2
            elif metric == "spectral":
                covariance = (self._grams[name] - dual_norms.gram(sum_) / n) / (n - 1)
                sigma += torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum().item()
                most += torch.linalg.svdvals(sum_).sum().item() / n
                least += (_step(first) * second + _step(second) * first).sum().item() / 2
            elif group := groups.get(self._named[name]):
                state = optimizer.state[self._named[name]]
                unbiased = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].item())
                P = 1 / (unbiased.double().sqrt() + group["eps"])
                sigma += (P * variance).sum().item()
                most += (P * (squared - variance)).sum().item() / n
        if metric == "adam":
            return Estimate(*[sigma / most if most > 0 else math.inf] * 3)
        ends = [(sigma / norm) ** 2 if norm > 0 else math.inf for norm in (most, least)]
        return Estimate(math.sqrt(ends[0] * ends[1]), *ends)


def _step(g: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(g, full_matrices=False)
    return left @ right  # type: ignore[no-any-return]
