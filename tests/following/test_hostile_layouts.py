# SPDX-License-Identifier: Apache-2.0
"""Batches and uses in which the samples may lie in several ways: as many tokens, points, copies or
features as samples, pairs, lists. Each parameter is right or left out by name.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hostile import D, Model, linear, per_sample, right_or_named
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


def test_uses_outside_of_the_model() -> None:
    """Without an example only one dimension of as many entries as samples shows them."""

    def tied(model: Any, x: Tensor) -> Tensor:
        return F.linear(model(x), model.a.weight).square().sum((0, 2))

    model = Made(lambda s, x: s.b(x.transpose(0, 1)), a=linear(), b=linear())
    assert "b.weight" in right_or_named(model, torch.randn(6, 6, D), 6, tied) or True
    names = right_or_named(model, torch.randn(4, 6, D), 4, tied)
    assert names <= {"b.weight", "b.bias"}

    def masked(model: Any, x: Tensor) -> Tensor:
        h = model(x)
        mask = torch.zeros(h.shape[:2], dtype=torch.bool)
        mask[0, :2] = mask[1, :2] = True
        own = F.linear(h[mask], model.head).square().sum(1)
        return torch.zeros(len(x)).index_add(0, mask.nonzero()[:, 0], own)

    model = Made(lambda s, x: s.b(x), b=linear(), head=torch.randn(D, D))
    assert right_or_named(model, torch.randn(4, 6, D), 4, masked) == {"b.weight", "b.bias", "head"}

    def parts(model: Any, x: Tensor) -> Tensor:
        return model["last"](model["first"](x).transpose(0, 1)).square().sum((0, 2))

    for T in (8, 6):
        model = nn.ModuleDict({"first": linear(), "last": linear()})
        right_or_named(model, torch.randn(8, T, D), 8, parts)


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
    model = Made(graphs, a=linear(), b=linear())
    with (
        pytest.raises((gnsfast.ObservationError, gnsfast.SampleShapeError)),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        per_sample(model(x)).sum().backward()


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

    tables = {"words": nn.Embedding(9, D), "positions": nn.Embedding(9, D)}
    model = Made(run, a=linear(), q=linear(), **tables)
    hidden = torch.ones(6, 6).triu(1) > 0
    for B, mask in ((6, ~hidden), (4, ~hidden), (6, torch.zeros(6, 6).masked_fill(hidden, -1e9))):
        x = torch.randint(0, 9, (B, 6)), torch.arange(6).view(shape), mask
        assert len(right_or_named(model, x, B)) == 6


def of_lists(m: Any, x: Any) -> Tensor:
    h, lengths, scales = x
    mask = torch.arange(h.shape[1]) < torch.tensor(lengths)[:, None]
    y: Tensor = m.a(h * mask[..., None]) * torch.tensor(scales)[:, None, None]
    return y


def test_lists_of_numbers_beside_a_batch() -> None:
    """Each number belongs to a sample, and is compared with it."""
    model = Made(of_lists, a=linear())
    for B in (5, 4):
        x = torch.randn(B, 6, D), [1 + k % 6 for k in range(B)], [0.5 + k for k in range(B)]
        assert len(right_or_named(model, x, B)) == 2
        assert not gnsfast.coverage(model).proof


def test_a_list_that_is_as_long_as_the_batch() -> None:
    """It has the two sizes of an image."""
    model = Made(lambda m, x: m.a(x[0].view(len(x[0]), *x[1], D)), a=linear())
    assert len(right_or_named(model, (torch.randn(2, 6, D), [2, 3]), 2)) == 2
    assert not gnsfast.coverage(model).proof


def test_a_batch_that_is_a_list_of_samples() -> None:
    model = Made(lambda m, x: m.a(torch.stack(x)), a=linear())
    for B in (4, 5):
        assert len(right_or_named(model, [torch.randn(6, D) for _ in range(B)], B)) == 2
        assert not gnsfast.coverage(model).proof


def test_channels_in_another_order() -> None:
    """There are as many as samples of the first batch that are looked at."""
    model = Made(lambda s, x: s.conv(x[:, [2, 1, 0]]), conv=nn.Conv2d(3, D, 3))
    for B in (4, 5, 3):
        assert len(right_or_named(model, torch.randn(B, 3, 6, 6), B)) == 2


class Sequences(nn.Module):
    """Time first, as torch's recurrent layers are by default."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, D), nn.LSTM(D, D), linear()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.table(ids))[0])
        return y


def time_first(m: Any, x: Any) -> Tensor:
    return per_sample(m(x).transpose(0, 1))


TWO_WAYS = "may lie in two ways.*dimension 0.*dimension 1"


def test_as_many_time_steps_as_sequences() -> None:
    """Torch's LSTM itself would crash where the sequences of its states are others."""
    model, ids = Sequences(), torch.randint(0, 9, (4, 4))
    assert right_or_named(model, ids, 4, time_first) == set()
    gnsfast.configure(model, example=torch.randint(0, 9, (5, 4)), num_samples=4)
    for T in (5, 4, 3):
        assert len(right_or_named(model, torch.randint(0, 9, (T, 4)), 4, time_first)) == 7


@pytest.mark.parametrize("T", [3, 4])
def test_as_many_tokens_as_samples_of_a_model_that_sees_one_by_one(T: int) -> None:
    """Samples are taken to come first. That tokens might be them is no secret."""
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    assert len(right_or_named(model, torch.randn(4, T, D), 4)) == 4
    assert (re.search(TWO_WAYS, gnsfast.coverage(model).proof) is None) == (T != 4)


def encoded_pairs(m: Any, x: Tensor) -> Tensor:
    return per_sample(torch.cat([*m(x).chunk(2)], -1))


@pytest.mark.parametrize("is_part", [False, True])
def test_pairs_in_two_halves_of_a_batch(is_part: bool) -> None:
    """Rows b and B + b are sample b, as of a siamese network. Nothing shows it."""
    encoder = nn.Sequential(linear(), nn.Tanh(), linear())
    model: nn.Module = Made(lambda m, x: m.encoder(x), encoder=encoder) if is_part else encoder

    def loss(m: Any, x: Any) -> Tensor:
        return encoded_pairs(m.encoder if is_part else m, x)

    with (
        pytest.raises(gnsfast.SampleShapeError, match="4 samples"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        loss(model, torch.randn(8, 3, D)).sum().backward()


def loss_of_pairs(m: Any, x: Any) -> Tensor:
    return encoded_pairs(m.encoder, x[0]).mean() + 0 * x[1].sum()


def test_a_loss_of_pairs() -> None:
    """The labels have the number of the samples. Of the rows either way might be right."""
    model = Made(loss_of_pairs, encoder=nn.Sequential(linear(), nn.Tanh(), linear()))
    with (
        pytest.raises(gnsfast.ObservationError, match="encoder.0.weight.*rows that are apart"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        model((torch.randn(8, 3, D), torch.randn(4))).backward()


def attends(m: Any, x: Tensor) -> Tensor:
    h = m.q(x)
    y: Tensor = m.o(F.scaled_dot_product_attention(h, x, x)).mean(1)
    return y


def sees_tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(m.q(x).tanh())
    return y


@pytest.mark.parametrize("run, is_right", [(attends, True), (sees_tokens, False)])
@pytest.mark.parametrize("more", [{}, {"labels": torch.zeros(4)}, {"labels": torch.zeros(8)}])
def test_pairs_of_as_many_tokens_as_samples(
    run: Model, is_right: bool, more: dict[str, Tensor]
) -> None:
    """A model that attends is left out. Another one does not show that its samples are no tokens,
    which is no secret.
    """
    model = Made(lambda m, x, labels=None: run(m, x), q=linear(), o=linear())
    x = torch.randn(8, 4, D)

    def loss(m: Any, x: Any) -> Tensor:
        return per_sample(torch.cat([*m(x, **more).chunk(2)], -1))

    if is_right:
        assert right_or_named(model, x, 4, loss) == set()
    else:
        with gnsfast.per_sample_sqnorms(model, 4):
            loss(model, x).sum().backward()
    proof = gnsfast.coverage(model).proof
    assert re.search("may lie in two ways.*as is usual, or in dimension 0 in several rows", proof)


@pytest.mark.parametrize("run", [attends, sees_tokens])
@pytest.mark.parametrize("T", [4, 5])
def test_real_and_made_samples_of_a_part(run: Model, T: int) -> None:
    """A discriminator that is called by itself gets two rows of each sample."""
    disc = Made(run, q=linear(), o=linear())
    model = nn.ModuleDict({"gen": linear(), "disc": disc})

    def loss(m: Any, x: Tensor) -> Tensor:
        y = m["disc"](torch.cat([x, m["gen"](x.flip(-1))]))
        return per_sample(torch.cat([*y.chunk(2)], -1))

    for B in (4, 6):
        found = right_or_named(model, torch.randn(B, T, D), B, loss)
        assert not any(name.startswith("disc") for name in found)


def scores(m: Any, x: Tensor, names: Tensor, labels: Tensor | None = None) -> Tensor:
    """Of images, for each of some classes."""
    y = m.image(x) @ m.table(names).mean(1).T
    return y if labels is None else F.cross_entropy(y, labels, reduction="none")


@pytest.mark.parametrize("B", [2, 3, 5])
def test_as_many_classes_as_samples(B: int) -> None:
    """Names of classes look like samples there, but not beside labels of more than a few images."""
    model = Made(scores, image=linear(), table=nn.Embedding(9, D))
    names = torch.randint(9, (B, 3))

    def loss(m: Any, x: Tensor) -> Tensor:
        return per_sample(m(x, names))

    assert right_or_named(model, torch.randn(B, D), B, loss) == set()
    gnsfast.configure(model, example=(torch.randn(7, D), names))
    for n in (B, 7, B):
        assert len(right_or_named(model, torch.randn(n, D), n, loss)) == 3


def test_as_many_classes_as_samples_with_labels() -> None:
    model = Made(scores, image=linear(), table=nn.Embedding(9, D))
    loss = lambda m, x: m(*x)
    for n in (5, 4):
        x = torch.randn(n, D), torch.randint(9, (5, 3)), torch.randint(5, (n,))
        assert len(right_or_named(model, x, n, loss)) == 3


def test_scores_beside_what_belongs_to_samples() -> None:
    """What these results show is no proof of a loss of the scores, which is no secret."""
    model = Made(lambda m, x, names: (scores(m, x, names), m.image(x)), image=linear())
    model.table = nn.Embedding(9, D)
    with gnsfast.per_sample_sqnorms(model, 5):
        sum(t.sum() for t in model(torch.randn(5, D), torch.randint(9, (5, 3)))).backward()
    assert "an entry for each two samples" in gnsfast.coverage(model).proof_of_loss


def clouds(m: Any, x: Any) -> Tensor:
    """Each sample is a cloud of points."""
    y: Tensor = m.b(torch.stack(m.a(torch.cat(x)).tanh().split([*map(len, x)])).amax(1))
    return y


@pytest.mark.parametrize("points", [3, 4, 5])
def test_as_many_points_as_clouds(points: int) -> None:
    model = Made(clouds, a=linear(), b=linear())
    found = right_or_named(model, [torch.randn(points, D) for _ in range(4)], 4)
    assert len(found) == (0 if points == 4 else 4)


class Scale(nn.Module):
    """A gain that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).tanh()


def of_tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.flatten(0, 1)).view_as(x)
    return y


def of_some_tokens(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0, :3] = False
    return x.masked_scatter(mask[..., None], m["scale"](x[mask]))


def of_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x[:, 0].T).T
    return y


def of_more_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.permute(2, 1, 0)).permute(2, 1, 0)
    return y


@pytest.mark.parametrize("scale", [Scale, nn.PReLU])
@pytest.mark.parametrize("run", [of_tokens, of_some_tokens, of_features, of_more_features])
def test_a_number_for_all_features_of_a_part(run: Model, scale: type[nn.Module]) -> None:
    """There are as many features as samples, so that a part alone does not show which they are."""
    for T in (4, 6, D):
        model = nn.ModuleDict({"a": linear(), "scale": scale()})

        def loss(m: Any, x: Tensor) -> Tensor:
            return per_sample(run(m, m["a"](x)))

        found = right_or_named(model, torch.randn(D, T, D), D, loss)
        assert not any(name.startswith("scale") for name in found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.scale = linear(), linear(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(F.scaled_dot_product_attention(self.q(x), x, self.scale(x)))
        return y


def test_what_a_part_does_shows_where_its_samples_are() -> None:
    """It joins the features of a sample, or its tokens, of which there are as many as samples."""

    def loss(m: Any, x: Tensor) -> Tensor:
        return per_sample(m["last"](m["first"](x)))

    for first, shape in ((Attends(), (D, D, D)), (nn.Sequential(linear(), Scale()), (D, D))):
        model = nn.ModuleDict({"first": first, "last": nn.Sequential(Scale(), linear())})
        found = right_or_named(model, torch.randn(shape), D, loss)
        assert {n for n, _ in model["first"].named_parameters(prefix="first")} <= found
        assert ("last.0.gain" in found) == (len(shape) == 2)


def distances(m: Any, x: Tensor) -> Tensor:
    return torch.cdist(m(x), m.centers)


def of_distances(m: Any, x: Tensor) -> Tensor:
    return per_sample(distances(m, x))


def test_a_first_batch_that_is_as_large_as_a_layer_is_wide() -> None:
    """A function outside of the model then has two such dimensions; the error says what to do."""
    model = Made(lambda s, x: s.a(x), a=linear(), centers=torch.randn(5, D))
    with (
        pytest.raises(gnsfast.ObservationError, match=r"centers: .*example=batch, run=step"),
        gnsfast.per_sample_sqnorms(model, D),
    ):
        of_distances(model, torch.randn(D, D)).sum().backward()
    model.zero_grad()
    gnsfast.configure(model, example=torch.randn(16, D), run=partial(distances, model))
    for B in (16, 7, D):
        assert len(right_or_named(model, torch.randn(B, D), B, of_distances)) == 3


def test_a_last_batch_that_is_as_large_as_a_layer_is_wide() -> None:
    """The batches before it have shown which dimension holds the samples."""
    model = Made(lambda s, x: s.a(x), a=linear(), centers=torch.randn(5, D))
    for B in (16, 16, D, 7, 5):
        assert len(right_or_named(model, torch.randn(B, D), B, of_distances)) == 3


@pytest.mark.parametrize("turned_first", [True, False])
def test_what_no_batch_has_shown_without_an_error(turned_first: bool) -> None:
    """The samples lie first in one use, and last in the other, in a batch with an error too."""

    def loss(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        if turned_first:
            return per_sample((y.T * m.w).T) + per_sample(y * m.w)
        return per_sample(y * m.w) + per_sample((y.T * m.w).T)

    model = Made(lambda s, x: s.a(x), a=linear(), w=torch.rand(1))
    for B in (16, D, 16, D):
        right_or_named(model, torch.randn(B, D), B, loss)
