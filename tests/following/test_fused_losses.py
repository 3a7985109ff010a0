# SPDX-License-Identifier: Apache-2.0
"""Forwards that hand a head's weight to a fused loss, as other projects patch them in."""

import types

import torch.nn.functional as F
from cross_entropy import B, D, T, V, draw
from torch import Tensor, nn

import gnsfast


class Causal(nn.Module):
    """As transformers' causal models are made."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Embedding(V, D), gnsfast.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.lm_head.cross_entropy(self.model(ids), labels)
        return out


def patched_forward(self: Causal, ids: Tensor, labels: Tensor) -> Tensor:
    """As the other projects' forwards do: the loss gets the weight, and nobody calls the head."""
    return F.cross_entropy(F.linear(self.model(ids), self.lm_head.weight).mT, labels)


def test_a_loss_that_takes_the_heads_weight_is_measured() -> None:
    """What ``run`` returns of each sample proves a model that returns its loss alone."""
    _, labels = draw(B, T)
    x = labels.abs(), labels
    for forward in (Causal.forward, patched_forward):
        model = Causal()
        model.forward = types.MethodType(forward, model)

        def run(x: tuple[Tensor, Tensor]) -> Tensor:
            h = model.model(x[0])  # noqa: B023
            if forward is patched_forward:  # noqa: B023
                return F.linear(h, model.lm_head.weight)  # noqa: B023
            return model.lm_head.cross_entropy(h, x[1], reduction="none")  # noqa: B023

        table = gnsfast.learn(model, x, run=run)
        with gnsfast.per_sample_sqnorms(model, B, audit="always", table=table) as norms:
            model(*x).backward()
        assert set(norms) == {"model.weight", "lm_head.weight"}
        assert all((norms[name] > 0).all() for name in norms)
