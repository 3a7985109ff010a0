# SPDX-License-Identifier: Apache-2.0
"""The noise scale of a frozen model from single-sample gradients: slow, and nothing to trust."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.noise_scale import statistics
from gnsfast.noise_scale.result import ModuleNoiseScale, noise_scale_of


def brute_force_noise_scale(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    samples: Iterable[Any],
    *,
    blocks: int = 32,
) -> ModuleNoiseScale:
    """Measure tr Σ / |G|² by one forward and one backward pass for each single sample.

    Equals ``g.var(0).sum() / (g.mean(0).square().sum() - g.var(0).sum() / len(g))`` for the
    gradients g of all samples, over all trainable parameters, covered or not. Its interval comes
    from a jackknife over ``blocks`` blocks of consecutive samples. Modes, gradients and weights of
    the model stay as they are; memory holds ``blocks`` gradients in float64.

    Args:
        loss_fn: takes the model and one sample (as a batch of one), returns a scalar loss.
        samples: independent samples, at least two for each block.

    Raises:
        ValueError: for fewer samples than that.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A; Efron and Stein 1981 for the
    jackknife.

    >>> model, x = torch.nn.Linear(5, 2), torch.randn(256, 1, 5)
    >>> found = gnsfast.brute_force_noise_scale(model, lambda m, x: m(x).square().mean(), x)
    >>> found.lower <= found.noise_scale <= found.upper
    True
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no trainable parameter")
    kept = list(samples)
    if blocks < statistics.MINIMUM_MEASUREMENTS or len(kept) < 2 * blocks:
        raise ValueError(
            f"{len(kept)} samples in {blocks} blocks: a measurement takes at least "
            f"{statistics.MINIMUM_MEASUREMENTS} blocks of two samples"
        )
    sizes, p_K = [], []
    sums_KN = torch.zeros(blocks, sum(p.numel() for p in parameters), dtype=torch.float64)
    for row_N, block in zip(sums_KN, _split(kept, blocks)):
        total = row_N.split([p.numel() for p in parameters])
        squares = 0.0
        for sample in block:
            loss = loss_fn(model, sample)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            for t, g in zip(total, grads):
                if g is not None:
                    g = g.to_dense() if g.is_sparse else g
                    squares += reference.sqnorm(g).item()
                    t += g.flatten().to(t)
        sizes.append(float(len(block)))
        p_K.append(squares)
    n, p = (torch.tensor(each, dtype=torch.float64) for each in (sizes, p_K))
    whole = sums_KN.sum(0)
    q = whole.square().sum()
    # ‖s - s_k‖² for the sum without block k
    left_q = q - 2 * sums_KN @ whole + sums_KN.square().sum(1)
    estimate = torch.stack(_estimates(p.sum(), q, n.sum()))
    left = torch.stack(_estimates(p.sum() - p, left_q, n.sum() - n))
    trace, grad_sqnorm = blocks * estimate[:, None] - (blocks - 1) * left
    [found] = statistics.moments(
        trace[:, None], grad_sqnorm[:, None], torch.ones(blocks, dtype=torch.float64)
    )
    return noise_scale_of(found)


def _estimates(p: Tensor, q: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    grad_sqnorm = statistics.grad_sqnorm_estimate(p, q, n.square(), n)
    return statistics.trace_estimate(p, grad_sqnorm, n, n), grad_sqnorm


def _split(samples: list[Any], blocks: int) -> Iterator[list[Any]]:
    edges = [len(samples) * k // blocks for k in range(blocks + 1)]
    for start, stop in zip(edges, edges[1:]):
        yield samples[start:stop]
