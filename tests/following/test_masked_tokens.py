# SPDX-License-Identifier: Apache-2.0
"""Heads that get the tokens at which a mask is set, as those of masked language models."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hostile import over_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast

V, D = 12, 8


class MaskedLM(nn.Module):
    """The head predicts the tokens with a label. It may share its weight with the embedding."""

    def __init__(self, norm: str, tied: bool, *, is_fused: bool = False, again: bool = False):
        super().__init__()
        self.table, self.dense = nn.Embedding(V, D), nn.Linear(D, D)
        kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda _: nn.Identity()}
        self.norm = kinds[norm](D)
        self.head = (gnsfast.Linear if is_fused else nn.Linear)(D, V, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.is_fused, self.again = is_fused, again

    def transform(self, rows_ND: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(rows_ND)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token that has a label, of [B, T]."""
        mask = labels >= 0
        rows, own = self.table(ids)[mask], labels[mask]
        rows = (
            checkpoint(self.transform, rows, use_reentrant=False)
            if self.again
            else self.transform(rows)
        )
        if self.is_fused:
            losses = self.head.cross_entropy(rows, own, reduction="none")
        else:
            losses = F.cross_entropy(self.head(rows), own, reduction="none")
        return losses.new_zeros(labels.shape).masked_scatter(mask, losses)


def batch(B: int, T: int, seed: int, empty: tuple[int, ...] = ()) -> Tensor:
    """Ids and labels, of which samples ``empty`` have none."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (B, T), generator=rng)
    labels = ids.masked_fill(torch.rand(B, T, generator=rng) < 0.5, -100)
    labels[:, 0] = ids[:, 0]
    labels[[*empty]] = -100
    return torch.stack([ids, labels], 1)


def losses(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(*x.unbind(1)).sum(1)
    return found


BATCHES = [batch(5, 7, 1), batch(5, 7, 2, (0,)), batch(4, 7, 3, (1, 3)), batch(5, 9, 4)]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_a_head_on_masked_tokens(norm: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = MaskedLM(norm, tied)
    every = {name for name, _ in model.named_parameters()}
    for found in over_batches(model, BATCHES, 0, losses):
        assert found == every


@pytest.mark.parametrize("options", [{"is_fused": True}, {"again": True}], ids=str)
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_fused_and_checkpointed(norm: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = MaskedLM(norm, tied=False, **options)
    every = {name for name, _ in model.named_parameters()}
    for found in over_batches(model, BATCHES, 0, losses):
        assert found == every


def test_no_token_has_a_label() -> None:
    torch.manual_seed(0)
    model = MaskedLM("layer", tied=True)
    over_batches(model, [batch(5, 7, 1), batch(5, 7, 2, (0, 1, 2, 3, 4))], 0, losses)


class EveryToken(MaskedLM):
    """The same losses from a head that gets all tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.transform(self.table(ids)))
        return F.cross_entropy(logits.mT, labels, reduction="none")


NOISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": ({"groups": ["a", "b"]}, {"groups": ["a", "b", "b", "a", "b", "a"]}),
    "clusters": ({}, {"clusters": 2}),
}
"""What is measured beside the norms: arguments of the estimator and of each micro-batch."""


def numbers(found: Any) -> list[float]:
    """All numbers of a result."""
    if dataclasses.is_dataclass(found):
        return numbers(vars(found))
    if isinstance(found, Mapping):
        return [x for key in sorted(found) for x in numbers(found[key])]
    return [float(found)] if isinstance(found, (int, float)) else []


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("measure", NOISE)
def test_what_is_measured_beside_the_norms(measure: str, tied: bool) -> None:
    """It is that of a head on all tokens."""
    options, each = NOISE[measure]
    found = []
    for kind in (MaskedLM, EveryToken):
        torch.manual_seed(0)
        model = kind("layer", tied)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        gns = gnsfast.GradientNoiseScale(model, **options)
        for seed in range(3):
            with gns.update(6, **each):
                losses(model, batch(6, 7, seed, (seed,))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(numbers(gns.compute()))
    chosen, every = found
    assert len(every) > 20
    assert chosen == pytest.approx(every, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_packed_documents(norm: str, tied: bool) -> None:
    """Their norms are those of the documents as samples."""
    torch.manual_seed(0)
    model = MaskedLM(norm, tied)
    ids, labels = batch(6, 5, 3, (2,)).unbind(1)
    with gnsfast.per_sample_sqnorms(model, 6) as every:
        model(ids, labels).sum().backward()
    model = copy.deepcopy(model)
    starts = torch.arange(0, 31, 5, dtype=torch.int32)
    with gnsfast.per_sample_sqnorms(model, 6, cu_seqlens=starts) as own:
        model(ids.reshape(1, 30), labels.reshape(1, 30)).sum().backward()
    assert {*own} == {*every} == {name for name, _ in model.named_parameters()}
    for name in every:
        torch.testing.assert_close(own[name], every[name], rtol=1e-4, atol=1e-6)
