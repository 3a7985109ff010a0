# SPDX-License-Identifier: Apache-2.0
"""A loss that gives the head a backward pass for each part of the sequence, as torchtitan's
``ChunkedLossWrapper`` does: the messages say what takes its place, and that is exact.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import linear_cross_entropy

B, T, D, V = 3, 8, 8, 11
PARTS = 4
INSTEAD = r"do not add up.*cross_entropy"


class Model(nn.Module):
    """The loss calls the head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.up(self.tokens(ids)))


class _Given(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, dhidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(dhidden)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None


def in_parts(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden, grads, whole = model(batch[0]), [], torch.zeros(())
    for part, labels in zip(hidden.detach().chunk(PARTS, 1), batch[1].chunk(PARTS, 1)):
        leaf = part.clone().requires_grad_()
        loss = F.cross_entropy(model.head(leaf).flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        grads.append(leaf.grad)
        whole += loss.detach()
    return _Given.apply(hidden, torch.cat(grads, 1), whole)


def at_once(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model.head(model(batch[0])).flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), reduction="sum")


def own_loss(model: Any, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    return linear_cross_entropy(model(batch[0]), model.head.weight, batch[1], reduction=reduction)


def draw() -> tuple[Tensor, Tensor]:
    return torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))


def table_of(model: Any) -> gnsfast.Table:
    return gnsfast.learn(model, draw()[0], run=lambda ids: model.head(model(ids)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_message_says_what_is_exact(tied: bool) -> None:
    model = Model(tied)
    table = table_of(model)
    if tied:  # the link between both uses has one backward pass
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            with gnsfast.per_sample_sqnorms(model, B, table=table):
                in_parts(model, draw()).backward()
        return
    with pytest.raises(gnsfast.ObservationError, match=f"weight: .*{INSTEAD}.*exclude="):
        with gnsfast.per_sample_sqnorms(model, B, table=table):
            in_parts(model, draw()).backward()
    model.zero_grad()
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    with pytest.raises(gnsfast.ObservationError, match=f"weight: .*{INSTEAD}"):
        with gns.update(B):
            in_parts(model, draw()).backward()
        gns.compute()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_instead(tied: bool) -> None:
    """The same loss and gradients as in parts, and the norms of single samples."""
    model, batch = Model(tied), draw()
    loop = loop_sqnorms(model, at_once, batch, B)
    theirs = in_parts(model, batch)
    theirs.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    table = gnsfast.learn(model, batch, run=lambda batch: own_loss(model, batch, "none"))
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        loss = own_loss(model, batch, "sum")
        loss.backward()
    assert_norms(norms, loop)
    torch.testing.assert_close(loss, theirs)
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_without_the_head() -> None:
    """The other layers have one backward pass, so they are exact with the loss in parts."""
    model, batch = gnsfast.configure(Model(tied=False), exclude=["head"]), draw()
    loop = loop_sqnorms(model, at_once, batch, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        in_parts(model, batch).backward()
    assert_norms(norms, loop, names=[n for n in loop if not n.startswith("head")])
