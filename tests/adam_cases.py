# SPDX-License-Identifier: Apache-2.0
"""Adam's metric made anew from an optimizer's state, and the norms of micro-batches under it."""

import math
from typing import Any

import torch
from oracle import widened
from torch import Tensor, nn

EPS = 1e-3
Updates = list[list[tuple[Tensor, Tensor]]]


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Every parameter in a group of its own: another beta2, another eps."""
    groups = [
        {"params": [p], "betas": (0.8, 0.8 + 0.03 * (k % 5)), "eps": EPS * (k + 1)}
        for k, p in enumerate(model.parameters())
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def metric_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """P of every parameter that has a state, as torch.optim.Adam divides by it."""
    found = {}
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if state := optimizer.state.get(p):
                v = state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
                correction = 1 - group["betas"][1] ** float(state["step"])
                found[names[p]] = 1 / (v.sqrt() / math.sqrt(correction) + group["eps"])
    return found


def unit_norms(
    model: nn.Module, loss: Any, batches: list[Any], metric: dict[str, Tensor]
) -> Tensor:
    """[K + 1]: Σ P g² of the gradient of each of K micro-batches and of their mean, in float64."""
    wide, batches = widened(model, batches)
    named = dict(wide.named_parameters())
    grads: dict[str, list[Tensor]] = {name: [] for name in metric}
    for batch in batches:
        found = torch.autograd.grad(
            loss(wide, batch), [named[n] for n in metric], allow_unused=True
        )
        for name, g in zip(metric, found):
            grads[name].append(torch.zeros_like(named[name]) if g is None else g)
    each = [
        torch.stack([(metric[name] * g.square()).sum() for g in [*gs, sum(gs) / len(gs)]])
        for name, gs in grads.items()
    ]
    return torch.stack(each).sum(0)


class Tied(nn.Module):
    """One weight: two embeddings and a head, with a padding index."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Embedding(7, 4, padding_idx=2) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(4), nn.Linear(4, 7)
        self.second.weight = self.head.weight = self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.first(ids) + self.second(ids.flip(1)))
        y: Tensor = self.head(torch.tanh(h))
        return y
