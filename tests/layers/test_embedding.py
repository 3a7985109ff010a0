# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.Embedding``, and a head that shares its weight."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from layers import assert_as_loop, assert_layer
from made import Made
from torch import Tensor, nn

import gnsfast


def ids(*shape: int, below: int = 6) -> Tensor:
    """Few ids, so that most appear several times in a sample."""
    return torch.randint(0, below, shape)


SHAPES = {
    "one id a sample": (5,),
    "three dimensions": (3, 2, 7),
    "a sequence": (4, 9),
    "one sample": (1, 9),
    "no sample": (0, 9),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_layer(gnsfast.Embedding(6, 5), ids(*shape), shape[0])


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
def test_padding(padding_idx: int) -> None:
    assert_layer(gnsfast.Embedding(6, 5, padding_idx=padding_idx), ids(4, 9), 4)


def test_int32_ids() -> None:
    assert_layer(gnsfast.Embedding(6, 5), ids(4, 9).int(), 4)


def test_expanded_ids() -> None:
    assert_layer(gnsfast.Embedding(6, 5), ids(1, 9).expand(4, -1), 4)


def test_max_norm() -> None:
    layer = gnsfast.Embedding(6, 5, max_norm=0.5)
    assert_layer(layer, ids(4, 9), 4)
    assert layer.weight.norm(dim=1).max() <= 0.5 + 1e-6


def test_large_table() -> None:
    assert_layer(gnsfast.Embedding(50_000, 32), ids(4, 64, below=50_000), 4)


def test_sequence_first() -> None:
    layer = nn.Embedding(6, 5)
    assert_layer(layer, ids(9, 4), 4, batch_dim=1)


class Positions(nn.Module):
    """GPT-2's way: position ids [1, T] beside token ids [B, T]."""

    def __init__(self, batch: bool, step: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions, self.batch = nn.Embedding(6, 5), nn.Embedding(19, 5), batch
        self.step = step

    def forward(self, ids_BT: Tensor) -> Tensor:
        index = self.step * torch.arange(ids_BT.shape[1])
        return self.tokens(ids_BT) * self.positions(index[None] if self.batch else index)


def test_frequencies_of_the_batch_tie_samples() -> None:
    model = looked_up(scale_grad_by_freq=True)
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        squares(model, ids(4, 9)).backward()
    (row,) = (r for r in gnsfast.coverage(model).rows if r.parameter == "table.weight")
    assert set(norms) == {"head.weight", "head.bias"} and "scale_grad_by_freq" in row.reason


def looked_up(**options: bool) -> nn.Module:
    table = nn.Embedding(6, 5, **options)
    return Made(lambda m, ids: m.head(m.table(ids)), table=table, head=nn.Linear(5, 3))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


class Tied(nn.Module):
    """``uses`` embeddings and a head over one weight; the head sees tokens from ``start`` on."""

    def __init__(self, uses: int = 1, start: int = 0, scale: float = 1.0, **options: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(6, 5, **options) for _ in range(uses))
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 6, bias=False)
        self.start, self.scale = start, scale
        for table in self.tables:
            table.weight = self.head.weight

    def forward(self, *ids_BT: Tensor) -> Tensor:
        h = sum(table(i).cumsum(1) for table, i in zip(self.tables, ids_BT))
        return self.head(self.scale * torch.tanh(self.mix(h))[:, self.start :])


TIES = {
    "embedding and head": Tied(),
    "head on a slice": Tied(start=6),
    "scaled head": Tied(scale=0.3),
    "padding": Tied(padding_idx=2),
    "three-way": Tied(uses=2),
    "four-way": Tied(uses=3),
}


@pytest.mark.parametrize("model", TIES.values(), ids=TIES.keys())
@pytest.mark.parametrize("steps", [1, 3])
def test_ties_are_exact(model: Tied, steps: int) -> None:
    """Cross terms included: without them these norms are off by up to half."""
    for _ in range(steps):
        model.zero_grad()
        batch = (*(ids(4, 9) for _ in model.tables), torch.randn(4, 9 - model.start, 6))
        assert_as_loop(model, batch, 4)  # its block's end also compares the sums with .grad


def test_tied_head_without_its_embedding() -> None:
    """As with ``inputs_embeds``: the embedding takes no part, the head's norm is the weight's."""
    model, batch = Tied(), (torch.randn(4, 9, 5), torch.randn(4, 9, 6))
    table = gnsfast.learn(model, ids(4, 9)) | gnsfast.learn(model, batch[0], run=model.head)

    def loss(m: Tied, b: tuple[Tensor, Tensor]) -> Tensor:
        return (m.head(b[0]) * b[1]).sum()

    assert_as_loop(model, batch, 4, loss=loss, table=table)


def test_abandoned_forward_leaves_no_link() -> None:
    """A forward pass without backward must not reach into the next one."""
    model, batch = Tied(), (ids(4, 9), torch.randn(4, 9, 6))
    table = gnsfast.learn(model, batch[0])
    with pytest.raises(gnsfast.ObservationError, match="No backward"):
        with gnsfast.per_sample_sqnorms(model, 4, table=table):
            model.tables[0](batch[0])
    assert_as_loop(model, batch, 4)


def head_first() -> nn.Module:
    """A head, then the embedding again of what it says."""
    table, head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
    table.weight = head.weight
    return Made(lambda m, x_BTD: m.table(m.head(x_BTD).argmax(-1)), table=table, head=head)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(4, 7)
        self.a.weight = self.b.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.e(ids)).cumsum(1)
        y: Tensor = self.a(x) * self.b(x.sin())
        return y


def places() -> nn.Module:
    """The sum of a lookup that all samples share."""
    of = lambda m, x: torch.tanh(x + m.places(torch.arange(5)[None]).sum(0))
    return Made(of, places=nn.Embedding(5, 3))


class HeadTwice(Tied):
    def forward(self, *ids_BT: Tensor) -> Tensor:
        y = super().forward(*ids_BT)
        return y + self.head(y[..., :5])


def one_table_twice() -> Tied:
    model = Tied(uses=2)
    model.tables = nn.ModuleList([model.tables[0], model.tables[0]])
    return model


def linear_twice() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    return model


def words(T: int = 9, width: int = 5, count: int = 1) -> tuple[Tensor, ...]:
    """Ids, ``count`` times, and a weight of every output."""
    return *(ids(4, T) for _ in range(count)), torch.randn(4, T, width)


def numbers(T: int = 9, width: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(4, T, width), torch.randn(4, T, width)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "position ids of one row": (lambda: Positions(batch=True), words),
    "a bare index": (lambda: Positions(batch=False, step=2), words),
    "a bare index that counts to B": (lambda: Positions(batch=False, step=2), partial(words, T=4)),
    "sparse gradients": (lambda: looked_up(sparse=True), partial(words, width=3)),
    "an embedding after its tied head": (head_first, numbers),
    "a tied embedding called twice": (one_table_twice, partial(words, width=6, count=2)),
    "a tied head called twice": (HeadTwice, partial(words, width=6)),
    "two linear layers of one weight": (linear_twice, numbers),
    "two heads of one embedding": (TwoHeads, partial(words, width=7)),
    "a sum of a shared lookup": (places, partial(numbers, T=5, width=3)),
}


@pytest.mark.parametrize(("make", "draw"), MODELS.values(), ids=MODELS.keys())
def test_models(make: Callable[[], nn.Module], draw: Callable[[], tuple[Tensor, ...]]) -> None:
    assert_as_loop(make(), draw(), 4)
