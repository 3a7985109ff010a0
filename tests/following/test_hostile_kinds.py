# SPDX-License-Identifier: Apache-2.0
"""Several kinds of batches in one run, and arguments that have as many entries as samples by
chance: each parameter is right or left out by name.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hostile import D, linear, over_batches, per_sample, right_or_named
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


@pytest.mark.parametrize("first", [0, 1], ids=["texts first", "images first"])
def test_each_kind_of_batch_is_checked_again(first: int) -> None:
    """Numbers 2, 8, and so on of all batches would be those of one kind."""
    model = Made(of_texts_and_images, words=linear(), patches=nn.Linear(6, D), body=linear())
    B = 12
    equal = torch.randn(B, 7, D), torch.full((B,), 7)
    of_kinds: list[Any] = [equal, torch.randn(B, 6)]
    batches = of_kinds[::-1] if first else of_kinds
    for _ in range(3):
        images, texts = torch.randn(B, 6), (torch.randn(B, 7, D), torch.randperm(B))
        batches += [images, texts] if first else [texts, images]
    found = over_batches(model, batches, B)
    assert len(found) < len(batches)  # the order is found


def test_documents_first() -> None:
    """What packed documents have shown says nothing of which arguments hold samples."""

    def run(m: Any, ids: Tensor) -> Tensor:
        order = ids.sum(1).argsort().tolist() if m.is_sorted else [*range(len(ids))]
        back = [order.index(b) for b in range(len(ids))]
        return m.body(m.table(ids)[order])[back]

    model = Made(run, table=nn.Embedding(20, D), body=linear(), is_sorted=False)
    starts = torch.tensor([0, 4, 9, 15, 20], dtype=torch.int32)
    with gnsfast.per_sample_sqnorms(model, 4, cu_seqlens=starts):
        per_sample(model(torch.randint(20, (1, 20)))).sum().backward()
    model.zero_grad()
    model.is_sorted = True
    for _ in range(3):
        right_or_named(model, torch.randint(20, (12, 6)), 12)


def test_lists_beside_each_other() -> None:
    """Lengths in a list of numbers sort images in a list of tensors."""

    def run(m: Any, x: Any) -> Tensor:
        lengths, images = x
        h = m.first(torch.stack(images))
        order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
        return m.body(h[order].relu())[[order.index(b) for b in range(len(order))]]

    model = Made(run, first=linear(), body=linear())
    for B in (2, 12, 12, 12):
        lengths = [3] * B if B == 2 else torch.randperm(B).tolist()
        if not right_or_named(model, (lengths, [torch.randn(5, D) for _ in range(B)]), B):
            return
    raise AssertionError("the order was not found")


@pytest.mark.parametrize("sizes", [(4, 4, 3), (5, 5), (6, 4, 4)])
def test_times_that_all_samples_share(sizes: tuple[int, ...]) -> None:
    """As many as samples, also in the first batch."""

    def run(m: Any, x: Any) -> Tensor:
        x, times = x
        return m.last((m.first(x) + m.of_time(times[:, None])).tanh())

    model = Made(run, first=linear(), of_time=nn.Linear(1, D), last=linear())
    for T in sizes:
        x = torch.randn(4 if T != 5 else 5, T, D), torch.rand(T)
        assert len(right_or_named(model, x, len(x[0]))) == 6


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
