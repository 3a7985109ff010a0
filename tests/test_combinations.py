# SPDX-License-Identifier: Apache-2.0
"""The table of what goes together: every pair of features of every layer is either right, against a
float64 loop over single samples, or refused by the words of the table.
"""

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import experts
import pytest
import torch
import torch.nn.functional as F
from one_layer import Bags, Conv, D, Form, Gains, Scale, T, V
from torch import Tensor, nn

import gnsfast
from gnsfast import combinations as table
from gnsfast.combinations import (
    COMPILED,
    DOCUMENTS,
    GROUPS,
    METRIC,
    SIGN,
    SPECTRAL,
    TENSOR_PARALLEL,
    TIED,
    reason,
)
from gnsfast.functional import Grams, Squares, document_slots
from gnsfast.probing import ProbeSlab, Sides

B = 3
REPEATED = table.REPEATED
STARTS = torch.tensor([0, 3, 8, 12])  # three documents in the three rows of four tokens
MEMBERS = (torch.tensor([2, 0]), torch.tensor([1]))
S, EPS = 1.5, 0.1


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


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return row_losses(self.head, x, True)


def row_losses(head: Any, h: Tensor, cross_entropy: bool) -> Tensor:
    """[B, T, 1]: each token's cross entropy of one fixed label."""
    labels = torch.arange(B * T).view(B, T)[: len(h)] % V
    if hasattr(head, "cross_entropy"):
        return head.cross_entropy(h, labels, reduction="none")[..., None]
    return F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), reduction="none").view(B, T, 1)


class Attention(nn.Module):
    """Attention of torch's within the documents of each row; its output projection alone is
    trained where ``frozen``.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.attention.in_proj_weight.requires_grad_(not frozen)
        self.attention.in_proj_bias.requires_grad_(not frozen)
        self.attention.out_proj.requires_grad_(frozen)

    def forward(self, x: Tensor) -> Tensor:
        document = torch.bucketize(torch.arange(B * T), STARTS[1:-1], right=True).view(B, T)
        hidden = document[:, :, None] != document[:, None, :]
        return self.attention(x, x, x, attn_mask=hidden.repeat_interleave(2, dim=0))[0]


class Twice(nn.Module):
    """A model that is called twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.model(x.sin() if x.is_floating_point() else (x + 1) % V)


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
    "embedding_bag": (Bags, ids),
    "bilinear": (Form, floats),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(D)), floats),
    "rms_norm": (lambda: nn.Sequential(nn.RMSNorm(D)), floats),
    "channel_norm": (lambda: nn.Sequential(nn.GroupNorm(2, T)), floats),
    "linear_cross_entropy": (Head, floats),
    "conv": (Conv, floats),
    "in_projection": (lambda: Attention(frozen=False), floats),
    "out_projection": (lambda: Attention(frozen=True), floats),
    "experts": (
        lambda: nn.Sequential(nn.Linear(experts.H, experts.H), block("experts")),
        lambda: floats(experts.H),
    ),
    "router": (lambda: block("router"), lambda: floats(experts.H)),
    "replay": (lambda: nn.Sequential(Scale()), floats),
    "copies": (Gains, floats),
}
TIED_MODELS = {
    "linear": (Tied, ids),
    "embedding": (Tied, ids),
    "linear_cross_entropy": (lambda: Tied(cross_entropy=True), ids),
}
PARTS = {"out_projection": "*out_proj", "experts": "*experts", "router": "*gate"}
"""Route -> its module, where others of the model have routes of their own; else all modules."""

MEASURED = (REPEATED, DOCUMENTS, METRIC, SIGN, SPECTRAL, GROUPS, TIED, COMPILED)
SIDES = (METRIC, SIGN, SPECTRAL, GROUPS)
ASKED = [(), *((f,) for f in MEASURED), *combinations(MEASURED, 2)]


class Case(NamedTuple):
    """A model, its input, and the weights of its outputs."""

    model: nn.Module
    x: Tensor
    r: Tensor
    sums: dict[tuple[str, str], Tensor]


def sums_of(p: Tensor, feature: str) -> Tensor:
    """Zeros for the second moments of a parameter."""
    return torch.zeros(p.shape if feature == SIGN else (min(p.shape),) * 2)


def draw(route: str, features: tuple[str, ...]) -> Case:
    make, inputs = (TIED_MODELS if TIED in features else MODELS)[route]
    model, x = make(), inputs()
    if REPEATED in features and isinstance(model, Tied):
        model.calls = 2
    elif REPEATED in features:
        model = Twice(model)
    with torch.no_grad():
        r = torch.randn_like(model(x))
    return Case(model, x, r, {})


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(p.shape, generator=generator) for n, p in model.named_parameters()}


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


def converted(case: Case, **options: Any) -> nn.Module:
    """The model by its routes; only an example shows how a model uses its own parameters."""
    alone = any(isinstance(m, Gains) for m in case.model.modules())
    return gnsfast.configure(case.model, example=case.x if alone else None, **options)


def measured(case: Case, features: tuple[str, ...], part: str = "*") -> ProbeSlab:
    """The slab after one pass with these features; whatever the table refuses raises."""
    model = converted(case, repeated=[part] if REPEATED in features else None)
    first = ProbeSlab(model, B)
    takes = {f: first.taking(f) if f in features else frozenset() for f in SIDES}
    groups = MEMBERS if GROUPS in features else ()
    slab = ProbeSlab(model, B, Sides(takes[METRIC], takes[GROUPS], len(groups)))
    names, v = {id(p): n for n, p in model.named_parameters()}, moments_of(model)
    for constants in slab.constants.values():
        constants[:] = torch.tensor([S, EPS])
    moments = {
        path: [v[names[id(p)]] for p in slab.modules[path].probed_parameters().values()]
        for path in takes[METRIC]
    }
    case.sums.update(
        {(f, n): sums_of(p, f) for f in (SIGN, SPECTRAL) for n, p in model.named_parameters()}
    )
    second = {path: () for path in first.modules}
    for path in takes[SIGN]:
        own = [
            case.sums[SIGN, names[id(p)]] for p in slab.modules[path].probed_parameters().values()
        ]
        second[path] += (Squares(partial(list, own)),)
    for path in takes[SPECTRAL]:
        weight = slab.modules[path].probed_parameters()["weight"]
        second[path] += (Grams(partial(list, [case.sums[SPECTRAL, names[id(weight)]]])),)
    documents = document_slots(STARTS, B, B) if DOCUMENTS in features else None
    run: Any = model
    if COMPILED in features:
        run = torch.compile(model, backend="eager")
    slab.open(documents, groups, moments, second=second)
    try:
        (run(case.x) * case.r).sum().backward()
    finally:
        slab.close()
    return slab


def rows_of(slab: ProbeSlab, case: Case, name: str, measure: int) -> list[Tensor]:
    """A parameter's rows in all probes, with the columns of groups: plain, or under a metric."""
    parameter, found = case.model.get_parameter(name), []
    for path in dict.fromkeys(path for path, _, _ in slab.rows[name]):
        own = list(slab.modules[path].probed_parameters().values())
        k = next(k for k, p in enumerate(own) if p is parameter)
        found.append(slab.rows_of(path)[measure * len(own) + k])
    return found


def assert_right(slab: ProbeSlab, case: Case, features: tuple[str, ...]) -> None:
    v = moments_of(case.model)
    for name, g in single_grads(case, DOCUMENTS in features).items():
        rows = [slab.grad[device][row] for _, device, row in slab.rows[name]]
        want = torch.cat([g, g.sum(0)[None]]).flatten(1).square().sum(1)
        assert all(row[B + 1] == 1.0 for row in rows)
        torch.testing.assert_close(
            sum(row[: B + 1] for row in rows).double(), want, rtol=1e-4, atol=1e-8
        )
        if GROUPS in features:
            want = torch.stack([g[m].sum(0).square().sum() for m in MEMBERS])
            found = sum(row[B + 2 :] for row in rows_of(slab, case, name, 0)).double()
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-8)
        if SIGN in features:
            found = case.sums[SIGN, name].double()
            torch.testing.assert_close(found, g.square().sum(0), rtol=1e-4, atol=1e-7)
        if SPECTRAL in features and g.ndim == 3:
            g = g if g.shape[1] <= g.shape[2] else g.mT
            found = case.sums[SPECTRAL, name].double()
            torch.testing.assert_close(found, (g @ g.mT).sum(0), rtol=1e-4, atol=1e-6)
        if METRIC in features:
            P = 1 / (v[name].double().sqrt() * S + EPS)
            want = (torch.cat([g, g.sum(0)[None]]).square() * P).flatten(1).sum(1)
            weighed = rows_of(slab, case, name, 1)
            found = sum(row[: B + 1] for row in weighed).double()
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-8)


def pairs() -> Iterator[Any]:
    """Dynamo traces a model anew for each test: linear layers, and each feature that a compiled
    layer has alone, stand for the other pairs of compiled layers, which take 20 s.
    """
    for route, features in product(MODELS, ASKED):
        dear = COMPILED in features and len(features) > 1 and route != "linear"
        name = "+".join(n.split()[0] for n in features) or "plain"
        marks = pytest.mark.slow if dear else ()
        yield pytest.param(route, features, id=f"{route}-{name}", marks=marks)


@pytest.mark.parametrize(("route", "features"), pairs())
def test_pairs(route: str, features: tuple[str, ...]) -> None:
    why = reason(route, features)
    if TIED in features and route not in TIED_MODELS:
        assert f"{route} has no norms for" in why
        return
    case = draw(route, features)
    if not why:
        assert_right(measured(case, features), case, features)
        return
    slab = ProbeSlab(converted(case), B)
    # The estimator goes without, and names the parameters.
    if any(f in features and not slab.taking(f) for f in SIDES):
        assert slab.left_out(frozenset()) == tuple(slab.rows)
        return
    with pytest.raises(Exception, match=re.escape(why)):
        measured(case, features, PARTS.get(route, "*"))


@pytest.mark.parametrize("measure", [DOCUMENTS, METRIC, GROUPS])
def test_a_tied_head_called_twice(measure: str) -> None:
    """The links have the rows of one call: joined documents have others."""
    features = (REPEATED, measure, TIED)
    case, why = draw("linear", features), reason("linear", features)
    if measure != DOCUMENTS:
        assert_right(measured(case, features), case, features)
        return
    with pytest.raises(NotImplementedError, match=re.escape(why)):
        measured(case, features)


def test_the_table_is_whole() -> None:
    kinds = (m for m in vars(gnsfast.layers).values() if isinstance(m, type))
    routes = {m.gnsfast.route for m in kinds if hasattr(m, "gnsfast")}
    assert routes - {""} <= table.LAYERS.keys()
    assert {*MODELS, "attention"} == {*table.LAYERS}  # that of functional: test_attention.py
    for pair in table.APART:
        assert pair <= {*table.FEATURES}


def test_the_guide_shows_the_tables() -> None:
    columns = (DOCUMENTS, METRIC, SIGN, SPECTRAL, GROUPS, TIED, REPEATED, TENSOR_PARALLEL)
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    for layer in table.LAYERS:
        cells = ("-" if reason(layer, [feature]) else "yes" for feature in columns)
        assert f"| {layer} | {' | '.join(cells)} |" in guide

    def cell(row: str, column: str) -> str:
        why = table.APART.get(frozenset((row, column)))
        return "eager" if why == table.OUTSIDE else "yes" if why is None else "-"

    names = ["documents", "Adam's metric", "sign", "spectral", "groups", "shared weight"]
    names += ["several calls", "sign and spectral from micro-batches"]
    columns = (*columns, table.PIPELINE, table.SHARDED, table.COMPILED)
    for name, row in zip(names, (*columns[:7], table.MICRO_BATCHES), strict=True):
        cells = ("" if row == column else cell(row, column) for column in columns)
        line = f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")
        assert line in guide, line


def test_coverage_reads_the_table() -> None:
    model = nn.Sequential(nn.Linear(D, D), Conv())
    found = gnsfast.coverage(model)
    measures = {r.parameter: r.measures for r in found.rows}
    assert measures["0.weight"] == (DOCUMENTS, METRIC, SIGN, SPECTRAL, GROUPS)
    assert measures["0.bias"] == (DOCUMENTS, METRIC, SIGN, GROUPS)
    share = (D * D + D) / sum(p.numel() for p in model.parameters())
    assert [found.measured_fraction(f) for f in (METRIC, GROUPS)] == pytest.approx([share, share])
    assert f"  with {METRIC}: {share:.1%}" in str(found)
    assert gnsfast.coverage(Tied()).measured_fraction(SPECTRAL) == 0.0
