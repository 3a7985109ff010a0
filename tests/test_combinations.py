# SPDX-License-Identifier: Apache-2.0
"""The table of what goes together: every pair of features that it allows is right for every kind of
function, against a float64 loop over single samples.
"""

import copy
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import experts
import pytest
import torch
import torch.nn.functional as F
from made import Made
from one_layer import D, T, V, bags, conv, form, gains, scale
from torch import Tensor, nn

import gnsfast
from gnsfast import combinations as table
from gnsfast.combinations import (
    DOCUMENTS,
    GROUPS,
    TENSOR_PARALLEL,
    TIED,
    reason,
)
from gnsfast.following import Facts
from gnsfast.functional import Groups, ragged_of
from gnsfast.probing import ProbeSlab

B = 3
REPEATED = table.REPEATED
STARTS = torch.tensor([0, 3, 8, 12])  # three documents in the three rows of four tokens
MEMBERS = (torch.tensor([2, 0]), torch.tensor([1]))


class Tied(nn.Module):
    """An embedding and a head of one weight; ``calls`` of the head, or of its own loss."""

    def __init__(self, cross_entropy: bool = False) -> None:
        super().__init__()
        self.calls = 1
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        self.cross_entropy = cross_entropy

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids).sin()
        return sum(self.call(each) for each in (h, h.exp())[: self.calls])

    def call(self, h: Tensor) -> Tensor:
        return row_losses(self.head, h, self.cross_entropy) if self.cross_entropy else self.head(h)


def head() -> nn.Module:
    return Made(lambda m, x: row_losses(m.head, x, True), head=nn.Linear(D, V))


def row_losses(head: Any, h: Tensor, cross_entropy: bool) -> Tensor:
    """[B, T, 1]: each token's cross entropy of one fixed label."""
    labels = torch.arange(T).expand(len(h), T) % V
    if hasattr(head, "cross_entropy"):
        return head.cross_entropy(h, labels, reduction="none")[..., None]
    return F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), reduction="none").view(-1, T, 1)


class Attention(nn.Module):
    """Attention of torch's within the two documents of a row; its output projection alone is
    trained where ``frozen``.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.attention.in_proj_weight.requires_grad_(not frozen)
        self.attention.in_proj_bias.requires_grad_(not frozen)
        self.attention.out_proj.requires_grad_(frozen)

    def forward(self, x: Tensor) -> Tensor:
        document = torch.arange(T) >= 3
        hidden = (document[:, None] != document).expand(2 * len(x), T, T)
        return self.attention(x, x, x, attn_mask=hidden)[0]


def twice(model: nn.Module) -> nn.Module:
    """A model that is called twice."""
    other = lambda x: x.sin() if x.is_floating_point() else (x + 1) % V
    return Made(lambda m, x: m.model(x) + m.model(other(x)), model=model)


def block(trained: str) -> nn.Module:
    """A mixture of experts, whose router or experts alone are trained."""
    mixture = experts.make("mixtral", 2)
    for name, p in mixture.named_parameters():
        p.requires_grad_(name.startswith("gate.") == (trained == "router"))
    return mixture


def floats(width: int = D) -> Tensor:
    return torch.randn(B, T, width)


def ids() -> Tensor:
    return torch.randint(0, V, (B, T))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(D, 5)), floats),
    "embedding": (lambda: nn.Sequential(nn.Embedding(V, D)), ids),
    "embedding_bag": (bags, ids),
    "bilinear": (form, floats),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(D)), floats),
    "rms_norm": (lambda: nn.Sequential(nn.RMSNorm(D)), floats),
    "channel_norm": (lambda: nn.Sequential(nn.GroupNorm(2, T)), floats),
    "linear_cross_entropy": (head, floats),
    "conv": (conv, floats),
    "in_projection": (lambda: Attention(frozen=False), floats),
    "out_projection": (lambda: Attention(frozen=True), floats),
    "experts": (
        lambda: nn.Sequential(nn.Linear(experts.H, experts.H), block("experts")),
        lambda: floats(experts.H),
    ),
    "router": (lambda: block("router"), lambda: floats(experts.H)),
    "replay": (lambda: nn.Sequential(scale()), floats),
    "copies": (gains, floats),
}
TIED_MODELS = {
    "linear": (Tied, ids),
    "embedding": (Tied, ids),
    "linear_cross_entropy": (lambda: Tied(cross_entropy=True), ids),
}
MEASURED = (REPEATED, DOCUMENTS, GROUPS, TIED)
ASKED = [(), *((f,) for f in MEASURED), *combinations(MEASURED, 2)]
TOGETHER = [features for features in ASKED if not reason(features)]


class Case(NamedTuple):
    """A model, its input, and the weights of its outputs."""

    model: nn.Module
    x: Tensor
    r: Tensor


def draw(route: str, features: tuple[str, ...]) -> Case:
    make, inputs = (TIED_MODELS if TIED in features else MODELS)[route]
    model, x = make(), inputs()
    if REPEATED in features and isinstance(model, Tied):
        model.calls = 2
    elif REPEATED in features:
        model = twice(model)
    with torch.no_grad():
        r = torch.randn_like(model(x))
    return Case(model, x, r)


def single_grads(case: Case, documents: bool) -> dict[str, Tensor]:
    """Parameter name -> [samples, ...]: the gradient of each sample's own term of the loss."""
    model, x = copy.deepcopy(case.model).double(), case.x
    x = x.double() if x.is_floating_point() else x
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    row = torch.arange(B * T).view(B, T, 1)
    of_sample = torch.bucketize(row, STARTS[1:-1], right=True) if documents else row // T
    terms = model(x) * case.r.double()
    grads = [
        torch.autograd.grad(
            (terms * (of_sample == b)).sum(), list(named.values()), retain_graph=True
        )
        for b in range(B)
    ]
    return {n: torch.stack(each) for n, each in zip(named, zip(*grads))}


def measured(case: Case, features: tuple[str, ...]) -> dict[str, Tensor]:
    """Parameter name -> its probe rows after one pass with these features."""
    model = case.model
    if DOCUMENTS not in features:  # else a block of documents shows it
        with gnsfast.per_sample_sqnorms(model, B):
            (model(case.x) * case.r).sum().backward()
    slab = ProbeSlab(model)
    documents = ragged_of(STARTS, None, B) if DOCUMENTS in features else None
    groups = Groups.of(*MEMBERS) if GROUPS in features else None
    facts = {n: Facts(groups) for n, p in model.named_parameters() if p.requires_grad}
    slab.open(B, documents, facts)
    try:
        (model(case.x) * case.r).sum().backward()
        slab.read()
        return {leaf.name: rows for leaf, rows in slab.rows.items()}
    finally:
        slab.close()


def assert_right(rows: dict[str, Tensor], case: Case, features: tuple[str, ...]) -> None:
    for name, g in single_grads(case, DOCUMENTS in features).items():
        own = rows[name].double()
        want = torch.cat([g, g.sum(0)[None]]).flatten(1).square().sum(1)
        torch.testing.assert_close(own[0, : B + 1], want, rtol=1e-4, atol=1e-8)
        if GROUPS in features:
            want = torch.stack([g[m].sum(0).square().sum() for m in MEMBERS])
            torch.testing.assert_close(own[0, B + 2 :], want, rtol=1e-4, atol=1e-8)


def named(features: tuple[str, ...]) -> str:
    return "+".join(n.split()[0] for n in features) or "plain"


NOT_OF_DOCUMENTS = {"embedding_bag", "channel_norm", "conv", "copies", "replay", "in_projection"}
NOT_OF_DOCUMENTS |= {"bilinear", "out_projection", "experts", "router"}
"""Functions that mix or choose tokens: test_documents.py and test_documents_in_blocks.py."""


@pytest.mark.parametrize("features", TOGETHER, ids=named)
@pytest.mark.parametrize("route", MODELS)
def test_what_goes_together_is_right(route: str, features: tuple[str, ...]) -> None:
    if TIED in features and route not in TIED_MODELS:
        return
    if DOCUMENTS in features and route in NOT_OF_DOCUMENTS:
        return
    case = draw(route, features)
    assert_right(measured(case, features), case, features)


def test_the_table_is_whole() -> None:
    for pair in table.APART:
        assert pair <= {*table.FEATURES}


def test_the_guide_shows_the_table() -> None:
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()

    def cell(row: str, column: str) -> str:
        why = table.APART.get(frozenset((row, column)))
        return "yes" if why is None else "-"

    rows = (DOCUMENTS, GROUPS, TIED, REPEATED, table.MICRO_BATCHES)
    names = ["documents", "groups", "shared weight", "several uses", "Adam's, sign, spectral"]
    columns = (*rows[:4], TENSOR_PARALLEL, table.SHARDED, table.COMPILED)
    for name, row in zip(names, rows, strict=True):
        cells = ("" if row == column else cell(row, column) for column in columns)
        line = f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")
        assert line in guide, line
