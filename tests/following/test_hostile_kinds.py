# SPDX-License-Identifier: Apache-2.0
"""Several kinds of batches in one run, whose order may change, rows at a mask, and hooks that a
model adds: each parameter is right or left out by name.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hostile import D, linear, per_sample, right_or_named
from made import Made
from torch import Tensor, nn

import gnsfast


def of_texts_and_images(m: Any, x: Any) -> Tensor:
    """Texts are sorted by their length, in an order that Python has made."""
    if isinstance(x, Tensor):
        return m.body(m.patches(x).relu())[:, None]
    x, lengths = x
    order = sorted(range(len(x)), key=lambda b: -lengths[b].item())
    back = [order.index(b) for b in range(len(x))]
    return m.body(m.words(x)[order].relu())[back]


def test_each_kind_of_batch() -> None:
    """Texts of equal length show no order: the sums of norms are right all the same."""
    model = Made(of_texts_and_images, words=linear(), patches=nn.Linear(6, D), body=linear())
    B = 12
    equal = torch.randn(B, 7, D), torch.full((B,), 7)
    table = gnsfast.learn(model, (equal,)) | gnsfast.learn(model, torch.randn(B, 6))
    for k in range(4):
        x: Any = torch.randn(B, 6) if k % 2 else (torch.randn(B, 7, D), torch.randperm(B))
        assert len(right_or_named(model, x, B, table=table, ordered=bool(k % 2))) == 6
    other = (torch.randn(B, 7, D), torch.randperm(B))
    table |= gnsfast.learn(model, (other,))
    assert not {"body.weight", "body.bias"} & table.proofs.keys()


def test_documents_first() -> None:
    """Batches after packed documents are measured by what these have shown."""

    def run(m: Any, ids: Tensor) -> Tensor:
        y: Tensor = m.body(m.table(ids).relu())
        return y

    model = Made(run, table=nn.Embedding(20, D), body=linear())
    starts = torch.tensor([0, 4, 9, 15, 20], dtype=torch.int32)
    with gnsfast.per_sample_sqnorms(model, 4, cu_seqlens=starts):
        per_sample(model(torch.randint(20, (1, 20)))).sum().backward()
    model.zero_grad()
    for B in (12, 1, 3):
        assert len(right_or_named(model, torch.randint(20, (B, 6)), B)) == 3


def test_tokens_of_a_mask_in_heads() -> None:
    """A view with one more dimension does not hide that the data have chosen the rows."""

    def run(m: Any, x: Any) -> Tensor:
        x, mask = x
        y = m.last(m.first(x)[mask].view(-1, 2, D // 2).relu().flatten(1))
        return torch.zeros_like(x).masked_scatter(mask[..., None].expand_as(x), y)

    model = Made(run, first=linear(), last=linear())
    for counts in ([4] * 4, [4] * 4, [2, 6, 3, 5], [4] * 4, [6, 2, 5, 3], [3, 3, 3, 6]):
        mask = torch.arange(6) < torch.tensor(counts)[:, None]
        assert len(right_or_named(model, (torch.randn(4, 6, D), mask), 4)) == 4


def halved(p: Tensor) -> Tensor | None:
    """A hook of a parameter, which gets its gradient, or itself when that has arrived."""
    if p.grad is None:
        return p * 0.5
    p.grad.mul_(0.5)
    return None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_the_first_pass_adds_to_a_parameter(kind: str) -> None:
    """It acts once on the gradient."""

    def run(m: Any, x: Tensor) -> Tensor:
        if not m.is_hooked:
            getattr(m.layer.weight, kind)(halved)
            m.is_hooked = True
        return m.layer(x)

    model, x = Made(run, layer=linear(), is_hooked=False), torch.randn(4, D)
    plain = deepcopy(model.layer)
    plain(x).square().sum().backward()
    with gnsfast.per_sample_sqnorms(model, 4):
        model(x).square().sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.weight.grad * 0.5)
