# SPDX-License-Identifier: Apache-2.0
"""The judge of last resort: single samples, one by one, through plain autograd in float64."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Loss = Callable[[nn.Module, Any], Tensor]


def sample_of(batch: Any, b: int, batch_dim: int = 0) -> Any:
    """Sample ``b`` of a batch of tensors, as a batch of one."""

    def pick(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.narrow(batch_dim if t.ndim > 1 else 0, b, 1)

    return pytree.tree_map(pick, batch)


def widened(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """A float64 copy of the model and of its floating-point inputs."""

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    return copy.deepcopy(model).double(), pytree.tree_map(wide, batch)


def loop_sqnorms(
    model: nn.Module, loss: Loss, batch: Any, num_samples: int, *, batch_dim: int = 0
) -> dict[str, Tensor]:
    """Parameter name -> [B] float64 squared gradient norms; ``loss`` must be a sum over samples."""
    model, batch = widened(model, batch)
    norms = {
        n: torch.zeros(num_samples, dtype=torch.float64)
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    parameters = [dict(model.named_parameters())[n] for n in norms]
    for b in range(num_samples):
        value = loss(model, sample_of(batch, b, batch_dim))
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        for name, g in zip(norms, grads):
            if g is not None:
                norms[name][b] = g.square().sum()
    return norms


def gradients_of(model: nn.Module, losses: Any) -> Tensor:
    """[samples, elements]: the gradients of each of these losses."""
    rows = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def noise_scale_of(g_KnP: Tensor, weight_Kn: Tensor | None = None) -> float:
    """That of a mean over the units of samples, such as tokens, from the gradients of a unit of n
    samples in each of K updates.

    |G|² is the mean product of the gradients of two different samples, and tr Σ what is left of
    their squares, both weighed by units; the divisor has a sample's mean number of units.
    """
    if weight_Kn is None:
        weight_Kn = torch.ones_like(g_KnP[..., 0])
    u_KnP = weight_Kn[..., None] * g_KnP
    p, q = u_KnP.square().sum(), u_KnP.sum(1).square().sum()
    squares, whole = weight_Kn.square().sum(), weight_Kn.sum(1).square().sum()
    grad_sqnorm = (q - p) / (whole - squares)
    trace = (p - squares * grad_sqnorm) / (weight_Kn.numel() * weight_Kn.mean().square())
    return float(trace / grad_sqnorm)


def assert_norms(
    norms: Any, loop: dict[str, Tensor], rtol: float = 1e-5, names: Any = None
) -> None:
    """Every parameter's every sample within ``rtol``.

    A gradient that is zero in exact arithmetic (a key bias) is rounding noise in both: below 1e-10
    of the sample's whole squared norm, nothing is compared.
    """
    total_B = torch.stack(list(loop.values())).sum(0)
    assert set(norms) == (set(loop) if names is None else set(names))
    for name in norms:
        ours, theirs = norms[name].double().cpu(), loop[name]
        assert norms[name].dtype == torch.float32
        assert ours.shape == theirs.shape, name
        error = (ours - theirs).abs() - 1e-10 * total_B
        worst = (error / theirs.clamp_min(1e-300)).max().item() if len(error) else 0.0
        assert bool((error <= rtol * theirs).all()), f"{name}: relative error {worst:.2e}"
