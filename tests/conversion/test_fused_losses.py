# SPDX-License-Identifier: Apache-2.0
"""Forwards that hand a head's weight to a fused loss, as other projects patch them in."""

import types
from typing import Any

import pytest
import torch.nn.functional as F
from cross_entropy import B, D, T, V, draw
from torch import Tensor, nn

import gnsfast


class Causal(nn.Module):
    """As transformers' causal models are made."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.lm_head.cross_entropy(self.model(ids), labels)
        return out


def patched_forward(self: Causal, ids: Tensor, labels: Tensor) -> Tensor:
    """As the other projects' forwards do: the loss gets the weight, and nobody calls the head."""
    return F.cross_entropy(F.linear(self.model(ids), self.lm_head.weight).mT, labels)


def wrapped(forward: Any) -> Any:
    """As accelerate wraps a model's forward: only ``__wrapped__`` tells what is inside."""

    def outer(*args: Any) -> Any:
        return forward(*args)

    outer.__wrapped__ = forward
    return outer


FORWARDS = {
    "liger_kernel.transformers.model.llama": "Liger-Kernel",
    "cut_cross_entropy.transformers.llama": "Cut Cross-Entropy",
}


@pytest.mark.parametrize("bound", [False, True], ids=["class", "instance"])
@pytest.mark.parametrize(("module", "project"), FORWARDS.items(), ids=FORWARDS.values())
def test_fused_losses_of_others_are_named(module: str, project: str, bound: bool) -> None:
    forward = types.FunctionType(patched_forward.__code__, patched_forward.__globals__)
    forward.__module__ = module
    cls = type("CausalLM", (Causal,), {} if bound else {"forward": forward})
    model, (_, labels) = gnsfast.convert(nn.ModuleDict({"inner": cls()})), draw(B, T)
    if bound:
        model["inner"].forward = types.MethodType(wrapped(forward), model["inner"])
    table, head = gnsfast.coverage(model).rows
    assert table.reason == "" and head.static
    assert project in head.reason and "inner.lm_head.cross_entropy" in head.reason
    with pytest.raises(gnsfast.ObservationError, match=rf"{project}.*inner\.lm_head\.cross_ent"):
        with gnsfast.per_sample_sqnorms(model, B):
            model["inner"](labels.abs(), labels).backward()
    gns = gnsfast.GradientNoiseScale(model)
    with pytest.raises(gnsfast.ObservationError, match=project):
        with gns.microbatch(B):
            model["inner"](labels.abs(), labels).backward()
        gns.update()
        gns.compute()


def test_other_fused_losses_still_raise() -> None:
    model, (_, labels) = gnsfast.convert(Causal()), draw(B, T)
    assert all(row.reason == "" for row in gnsfast.coverage(model).rows)
    with pytest.raises(gnsfast.ObservationError, match="the head's own cross_entropy"):
        with gnsfast.per_sample_sqnorms(model, B):
            patched_forward(model, labels.abs(), labels).backward()
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B):
        model(labels.abs(), labels).backward()


def norm_forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


def test_a_bound_kernel_is_not_taken_for_a_fused_loss() -> None:
    """Liger-Kernel also binds forwards to norm layers, below a forward of its own."""
    layer = types.FunctionType(norm_forward.__code__, norm_forward.__globals__)
    layer.__module__ = "liger_kernel.transformers.layer_norm"
    model, x = gnsfast.convert(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2))), draw(B, T)[0]
    model[0].forward = types.MethodType(layer, model[0])
    with pytest.raises(gnsfast.ObservationError, match=r"Liger-Kernel bound .*exclude=\['0'\]"):
        with gnsfast.per_sample_sqnorms(model, B):
            model(x).sum().backward()
