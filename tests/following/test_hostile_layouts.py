# SPDX-License-Identifier: Apache-2.0
"""Batches and uses in which the samples may lie in several ways: as many tokens, points, copies or
features as samples, pairs, lists. Each parameter is right, or left out by name, or an error says
what to show.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hostile import (
    D,
    Loss,
    Model,
    assert_refused,
    linear,
    over_batches,
    per_sample,
    right_or_named,
)
from made import Made
from torch import Tensor, nn

import gnsfast


def layers_of_states(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.cells(x, m.h.expand(2, len(x), D).contiguous())[0]
    return y


def mask_tokens(m: Any, x: Tensor) -> Tensor:
    h = x.transpose(0, 1)
    even = torch.arange(len(h))[:, None, None] % 2 == 0
    y: Tensor = m.a(torch.where(even, h, m.token.expand(h.shape[0], h.shape[1], D)))
    return y.transpose(0, 1)


def test_as_many_copies_as_samples_along_another_dimension() -> None:
    """The example has shown which dimension of the copies holds the samples."""
    gru = nn.GRU(D, D, 2, batch_first=True)
    model = Made(layers_of_states, cells=gru, h=torch.randn(1, 1, D))
    for B in (4, 2):
        assert "h" in right_or_named(model, torch.randn(B, 6, D), B)
    model = Made(mask_tokens, a=linear(), token=torch.randn(1, 1, D))
    for B in (4, 6):
        assert "token" in right_or_named(model, torch.randn(B, 6, D), B)


def tied(model: Any, x: Tensor) -> Tensor:
    return F.linear(model(x), model.a.weight).transpose(0, 1)


def masked(model: Any, x: Tensor) -> Tensor:
    h = model(x)
    mask = x[..., 0] > 0
    rows = F.linear(h[mask], model.a.weight)
    return torch.zeros_like(h).masked_scatter(mask[..., None], rows)


def in_parts(model: Any, x: Tensor) -> Tensor:
    return model.a(model.b(x).tanh())


def distances(model: Any, x: Tensor) -> Tensor:
    return torch.cdist(model(x), model.a.weight)


OUTSIDE = tied, masked, in_parts, distances


@pytest.mark.parametrize("run", OUTSIDE)
@pytest.mark.parametrize("T", [D, 6])
def test_uses_outside_of_the_model(run: Model, T: int) -> None:
    """They are in no table that the model alone has shown, but in that of ``run``."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return per_sample(run(model, x))

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(x.transpose(0, 1) if run is tied else x)

    model = Made(forward, a=nn.Linear(D, D, bias=run is in_parts), b=linear())
    if run is in_parts:
        assert_refused(model, torch.randn(D, T, D), D, "run=step", loss)
    else:
        assert right_or_named(model, torch.randn(D, T, D), D, loss) <= {"b.weight", "b.bias"}
    table = gnsfast.learn(model, torch.randn(5, T, D), run=lambda x: run(model, x))
    batches = [torch.randn(B, T, D) for B in (D, 4, T)]
    assert over_batches(model, batches, 0, loss, table) == [{*dict(model.named_parameters())}] * 3


def graphs(m: Any, x: Any) -> Tensor:
    """A batch of graphs in the form of PyG: all nodes, the graph of each, and edges."""
    nodes, graph, edges = x
    h = m.a(nodes).tanh()
    h = m.b(h.index_add(0, edges[1], h[edges[0]]))
    return torch.zeros(int(graph.max()) + 1, D).index_add(0, graph, h)


@pytest.mark.parametrize("B", [4, D])
def test_a_batch_of_graphs_is_refused_by_name(B: int) -> None:
    n = torch.arange(B * 6)
    x = torch.randn(B * 6, D), n // 6, torch.stack([n, n // 6 * 6 + (n + 1) % 6])
    assert_refused(Made(graphs, a=linear(), b=linear()), x, B, "take=")


def characters(m: Any, x: Tensor) -> Tensor:
    """A recurrent layer reads each of T words of a sample."""
    B, T = x.shape[:2]
    h = m.cells(x.reshape(B * T, D, 1))[1]
    y: Tensor = m.a(h[0].view(B, T, D))
    return y


def test_recurrent_layers_whose_sequences_are_parts_of_samples() -> None:
    model = Made(characters, a=linear(), cells=nn.GRU(1, D, batch_first=True))
    for B, T in ((4, 6), (5, 3)):
        assert len(right_or_named(model, torch.randn(B, T, D), B)) == 6


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_as_many_positions_as_samples(shape: tuple[int, ...]) -> None:
    """They are the same for all samples, as is the mask that hides later tokens."""

    def run(m: Any, x: Any) -> Tensor:
        h = m.words(x[0]) + m.positions(x[1])
        y: Tensor = m.a(F.scaled_dot_product_attention(m.q(h), h, h, attn_mask=x[2]))
        return y

    def batch(B: int, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.randint(0, 9, (B, 6)), torch.arange(6).view(shape), mask

    tables = {"words": nn.Embedding(9, D), "positions": nn.Embedding(9, D)}
    model = Made(run, a=linear(), q=linear(), **tables)
    hidden = torch.ones(6, 6).triu(1) > 0
    floats = torch.zeros(6, 6).masked_fill(hidden, -1e9)
    assert_refused(model, batch(6, ~hidden), 6, "take=")
    for B, mask in ((4, ~hidden), (6, ~hidden), (6, floats)):
        assert len(right_or_named(model, batch(B, mask), B)) == 6


def of_lists(m: Any, x: Any) -> Tensor:
    h, lengths, scales = x
    mask = torch.arange(h.shape[1]) < torch.tensor(lengths)[:, None]
    y: Tensor = m.a(h * mask[..., None]) * torch.tensor(scales)[:, None, None]
    return y


def clouds(m: Any, x: Any) -> Tensor:
    """Each sample is a cloud of points."""
    y: Tensor = m.a(torch.stack(m.b(torch.cat(x)).tanh().split([*map(len, x)])).amax(1))
    return y


def scores(m: Any, x: Any) -> Tensor:
    """Of images, for each of some classes, of which the names are given."""
    y = m.a(x[0]) @ m.table(x[1]).mean(1).T
    return y if len(x) == 2 else F.cross_entropy(y, x[2], reduction="none")[:, None]


def with_times(m: Any, x: Any) -> Tensor:
    """They are the same for all samples."""
    y: Tensor = m.a((m.b(x[0]) + m.of_time(x[1][:, None])).tanh())
    return y


def of_list(x: Any, samples: list[int]) -> Any:
    return [x[b] for b in samples]


def rows_of_first(x: Any, samples: list[int]) -> Any:
    return x[0][samples], *x[1:]


TAKEN: dict[str, tuple[Model, Callable[[int], Any], Callable[[Any, list[int]], Any]]] = {
    "lists of numbers": (
        of_lists,
        lambda B: (
            torch.randn(B, 6, D),
            [1 + k % 6 for k in range(B)],
            [0.5 + k for k in range(B)],
        ),
        lambda x, samples: (x[0][samples], of_list(x[1], samples), of_list(x[2], samples)),
    ),
    "a list of samples": (
        lambda m, x: m.a(torch.stack(x)),
        lambda B: [torch.randn(6, D) for _ in range(B)],
        of_list,
    ),
    **{
        f"clouds of {n} points": (
            clouds,
            lambda B, n=n: [torch.randn(n, D) for _ in range(B)],  # type: ignore[misc]
            of_list,
        )
        for n in (3, 4, 5)
    },
    "as many classes": (
        scores,
        lambda B: (torch.randn(B, D), torch.randint(9, (4, 3))),
        rows_of_first,
    ),
    "as many classes, with labels": (
        scores,
        lambda B: (torch.randn(B, D), torch.randint(9, (4, 3)), torch.randint(4, (B,))),
        lambda x, samples: (x[0][samples], x[1], x[2][samples]),
    ),
    "as many times": (with_times, lambda B: (torch.randn(B, 4, D), torch.rand(4)), rows_of_first),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_batches_of_which_the_user_takes_samples(kind: str) -> None:
    """Without ``take`` they are refused, or what it would show is left out by name."""
    run, draw, take = TAKEN[kind]
    parts = {"a": linear(), "b": linear(), "of_time": nn.Linear(1, D), "table": nn.Embedding(9, D)}
    used = set(run.__code__.co_names) & parts.keys() if hasattr(run, "__code__") else parts
    model = Made(run, **{name: parts[name] for name in used})
    every = {name for name, _ in model.named_parameters()}
    if kind == "as many classes, with labels":
        assert right_or_named(model, draw(4), 4) < every
    else:
        assert_refused(model, draw(4), 4, "take=|No parameter of Made")
    table = gnsfast.learn(
        model, (draw(4),), take=lambda b, samples: (take(b[0], samples),), num_samples=4
    )
    for B in (4, 6, 3):
        assert right_or_named(model, draw(B), B, table=table) == every


def test_a_list_that_is_as_long_as_the_batch() -> None:
    """It has the two sizes of an image."""
    model = Made(lambda m, x: m.a(x[0].view(len(x[0]), *x[1], D)), a=linear())
    assert len(right_or_named(model, (torch.randn(2, 6, D), [2, 3]), 2)) == 2


def test_channels_in_another_order() -> None:
    """There are as many as samples of the first batch that are looked at."""
    model = Made(lambda s, x: s.conv(x[:, [2, 1, 0]]), conv=nn.Conv2d(3, D, 3))
    for B in (4, 5, 3):
        assert len(right_or_named(model, torch.randn(B, 3, 6, 6), B)) == 2


def time_first(m: Any, x: Any) -> Tensor:
    return per_sample(m(x).transpose(0, 1))


def test_as_many_time_steps_as_sequences() -> None:
    """Samples are taken to come first, but they meet there."""
    parts = {"table": nn.Embedding(9, D), "layer": nn.LSTM(D, D), "head": linear()}
    model = Made(lambda m, ids: m.head(m.layer(m.table(ids))[0]), **parts)
    ids = torch.randint(0, 9, (4, 4))
    assert_refused(model, ids, 4, "take=", time_first)
    table = gnsfast.learn(model, ids, take=lambda ids, samples: ids[:, samples])
    for T in (5, 4, 3):
        x = torch.randint(0, 9, (T, 4))
        assert len(right_or_named(model, x, 4, time_first, table)) == 7


@pytest.mark.parametrize("T", [3, 4])
def test_as_many_tokens_as_samples_of_a_model_that_sees_one_by_one(T: int) -> None:
    """Samples are taken to come first."""
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    assert len(right_or_named(model, torch.randn(4, T, D), 4)) == 4


def attends(m: Any, x: Tensor) -> Tensor:
    h = m.q(x)
    y: Tensor = m.o(F.scaled_dot_product_attention(h, x, x)).mean(1)
    return y


def sees_tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(m.q(x).tanh())
    return y


HALVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[int]], list[int]]]] = {
    "halves": (
        lambda y: torch.cat([*y.chunk(2)], -1),
        lambda samples: [*samples, *(4 + b for b in samples)],
    ),
    "beside each other": (
        lambda y: y.unflatten(0, (-1, 2)).flatten(1),
        lambda samples: [2 * b + k for b in samples for k in (0, 1)],
    ),
}


@pytest.mark.parametrize("order", HALVES)
@pytest.mark.parametrize("T", [3, 4])
def test_pairs(order: str, T: int) -> None:
    """A sample has two rows of the batch, as of a siamese network, which ``take`` tells."""
    joined, rows = HALVES[order]
    model = Made(attends, q=linear(), o=linear())

    def loss(m: Any, x: Any) -> Tensor:
        return per_sample(joined(m(x)))

    x = torch.randn(8, T, D)
    assert_refused(model, x, 4, "take=" if T == 3 else "No parameter of Made", loss)
    table = gnsfast.learn(
        model,
        x,
        run=lambda x: joined(model(x)),
        take=lambda x, samples: x[rows(samples)],
        num_samples=4,
    )
    for B in (4, 6):
        assert len(right_or_named(model, torch.randn(2 * B, T, D), B, loss, table)) == 4


@pytest.mark.parametrize("run", [attends, sees_tokens])
@pytest.mark.parametrize("T", [4, 5])
def test_real_and_made_samples_of_a_part(run: Model, T: int) -> None:
    """A discriminator that is called by itself gets two rows of each sample."""
    disc = Made(run, q=linear(), o=linear())
    model = nn.ModuleDict({"gen": linear(), "disc": disc})

    def step(x: Tensor) -> Tensor:
        y = model["disc"](torch.cat([x, model["gen"](x.flip(-1))]))
        return torch.cat([*y.chunk(2)], -1)

    loss: Loss = lambda _, x: per_sample(step(x))  # noqa: E731
    assert_refused(model, torch.randn(4, T, D), 4, "run=step", loss)
    table = gnsfast.learn(model, torch.randn(4, T, D), run=step)
    batches = [torch.randn(B, T, D) for B in (4, 6)]
    assert [*map(len, over_batches(model, batches, 0, loss, table))] == [6, 6]


def gain() -> nn.Module:
    """One number."""
    return Made(lambda m, x: (x * m.gain).tanh(), gain=torch.tensor(1.5))


def of_tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.flatten(0, 1)).view_as(x)
    return y


def of_some_tokens(m: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > -0.5
    return x.masked_scatter(mask[..., None], m["scale"](x[mask]))


def of_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x[:, 0].T).T
    return y


def of_more_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.permute(2, 1, 0)).permute(2, 1, 0)
    return y


@pytest.mark.parametrize("scale", [gain, nn.PReLU])
@pytest.mark.parametrize("run", [of_tokens, of_some_tokens, of_features, of_more_features])
def test_a_number_for_all_features_of_a_part(run: Model, scale: Callable[[], nn.Module]) -> None:
    """There are as many features as samples."""
    for T in (4, D):
        model = nn.ModuleDict({"a": linear(), "scale": scale()})
        loss: Loss = lambda m, x: per_sample(run(m, m["a"](x)))  # noqa: E731
        x = torch.randn(D, T, D)
        assert_refused(model, x, D, "run=step", loss)
        table = gnsfast.learn(model, x, run=lambda x: run(model, model["a"](x)))  # noqa: B023
        found = right_or_named(model, x, D, loss, table)
        is_lost = run is of_some_tokens and scale is nn.PReLU  # with T == D in doubt all of them
        assert len(found) == 3 or (is_lost and "scale.weight" not in found)


@pytest.mark.parametrize("turned_first", [True, False])
def test_a_number_that_is_used_in_two_ways(turned_first: bool) -> None:
    """The samples lie first in one use, and last in the other."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        if turned_first:
            return (y.T * m.w).T + (y * m.w).tanh()  # type: ignore[no-any-return]
        return (y * m.w).tanh() + (y.T * m.w).T  # type: ignore[no-any-return]

    model = Made(run, a=linear(), w=torch.rand(1))
    for B in (16, D, 4):
        assert len(right_or_named(model, torch.randn(B, D), B)) == 3
