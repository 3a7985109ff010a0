# SPDX-License-Identifier: Apache-2.0
"""The noise scale of a frozen model from single-sample gradients: slow, but plain to check."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.noise_scale import statistics
from gnsfast.noise_scale.result import ModuleNoiseScale
from gnsfast.noise_scale.summaries import from_moments


def brute_force_noise_scale(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    samples: Iterable[Any],
    *,
    blocks: int = 32,
) -> ModuleNoiseScale:
    """Measure tr Σ / |G|² by one forward and one backward pass for each single sample.

    Equals ``g.var(0).sum() / (g.mean(0).square().sum() - g.var(0).sum() / len(g))`` for the
    gradients g of all samples. It includes all trainable parameters, also those without a gnsfast
    layer. The interval comes from a jackknife over ``blocks`` blocks of consecutive samples. Modes,
    gradients and weights of the model do not change. Memory holds ``blocks`` gradients in float64.

    Args:
        loss_fn: takes the model and one sample (as a batch of one), returns a scalar loss.
        samples: independent samples, at least two for each block.

    Raises:
        ValueError: for too few samples or blocks, or a model without trainable parameters.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A; Efron and Stein 1981 for the
    jackknife.

    >>> model, x = torch.nn.Linear(5, 2), torch.randn(256, 1, 5)
    >>> found = gnsfast.brute_force_noise_scale(model, lambda m, x: m(x).square().mean(), x)
    >>> found.lower <= found.noise_scale <= found.upper
    True
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those "
            "to measure"
        )
    listed = list(samples)
    if blocks < statistics.MINIMUM_MEASUREMENTS or len(listed) < 2 * blocks:
        raise ValueError(
            f"brute_force_noise_scale got {len(listed)} samples for {blocks} blocks, and needs two "
            f"samples for each block and at least {statistics.MINIMUM_MEASUREMENTS} blocks"
        )
    edges = [len(listed) * k // blocks for k in range(blocks + 1)]
    p_K = []
    sums_KN = torch.zeros(blocks, sum(p.numel() for p in parameters), dtype=torch.float64)
    for row_N, start, stop in zip(sums_KN, edges, edges[1:]):
        total = row_N.split([p.numel() for p in parameters])
        squares = 0.0
        for sample in listed[start:stop]:
            loss = loss_fn(model, sample)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            for t, g in zip(total, grads):
                if g is not None:
                    g = g.to_dense() if g.is_sparse else g
                    squares += reference.sqnorm(g).item()
                    t += g.flatten().to(t)
        p_K.append(squares)
    # Row 0 has all samples, row k all but block k: ‖s - s_k‖² = ‖s‖² - 2 s·s_k + ‖s_k‖².
    n = _all_and_without(torch.tensor(edges, dtype=torch.float64).diff())
    p = _all_and_without(torch.tensor(p_K, dtype=torch.float64))
    sum_N = sums_KN.sum(0)
    q = sum_N.square().sum()[None]
    q = torch.cat([q, q - 2 * sums_KN @ sum_N + sums_KN.square().sum(1)])
    grad_sqnorm = statistics.grad_sqnorm_estimate(p, q, n.square(), n)
    trace = statistics.trace_estimate(p, grad_sqnorm, n, n)
    trace, grad_sqnorm = (
        blocks * each[:1, None] - (blocks - 1) * each[1:, None] for each in (trace, grad_sqnorm)
    )
    [found] = statistics.moments(trace, grad_sqnorm, torch.ones(blocks, dtype=torch.float64))
    return from_moments(found)


def _all_and_without(each_K: Tensor) -> Tensor:
    """The sum of all blocks, then the sums without block k, [1 + K]."""
    return torch.cat([each_K.sum()[None], each_K.sum() - each_K])
