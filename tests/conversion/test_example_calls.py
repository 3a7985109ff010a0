# SPDX-License-Identifier: Apache-2.0
"""What an example may be called with, how many rows it may have, and what it draws."""

import copy
import dataclasses
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from examples_of_models import B, D, T, assert_right, said
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.up(x)))
        return y


class Precise(Heads):
    """Mixes samples, but not in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        assert torch.get_autocast_dtype("cpu") == torch.float16
        y = self.up(x)
        y = y if y.dtype == torch.float16 else y - y.mean(0)
        return super().forward(y.to(x.dtype))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_function_that_casts(enabled: bool) -> None:
    """The passes cast as the function does, whatever is cast around ``convert``."""
    model, x = Precise(), torch.randn(B, D)

    def run() -> None:
        with torch.autocast("cpu", torch.float16, enabled):
            model(x)

    with torch.autocast("cpu", torch.bfloat16, not enabled):
        if enabled:
            gnsfast.convert(model, example=run)
            return
        with pytest.raises(ValueError, match="ties the samples"):
            gnsfast.convert(model, example=run)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    mask: Tensor
    length: int = dataclasses.field(default=T, init=False)


class Named(NamedTuple):
    x: Tensor
    mask: Tensor


class Encoding(UserDict[str, Tensor]):
    """As ``transformers.BatchEncoding`` is one."""

    def __getattr__(self, name: str) -> Tensor:
        return self.data[name]


class Plain(dict[str, Tensor]):
    __getattr__ = dict.__getitem__


class Batched(Heads):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.x) * batch.mask[..., None]


@pytest.mark.parametrize("kind", [Frozen, Named, Encoding, Plain])
def test_batches_that_are_one_object(kind: Callable[..., Any]) -> None:
    model, x, mask_BT = Batched(), torch.randn(B, T, D), torch.rand(B, T)
    batch = kind(x=x, mask=mask_BT)
    gnsfast.convert(model, example=(batch,))
    assert batch.x is x and batch.mask is mask_BT
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(batch).square().sum().backward()
    loss = lambda m, b: m(Named(*b)).square().sum()  # noqa: E731
    assert_norms(norms, loop_sqnorms(model, loss, (x, mask_BT), B))
    assert gnsfast.verify(model, lambda m, b: m(b).square().sum(), batch, loss_reduction="sum").ok


class Pairs(Heads):
    """Two rows are one sample: side by side, or in the two halves of the batch."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        a, b = z.chunk(2) if self.halves else z.unflatten(0, (-1, 2)).unbind(1)
        return (a - b).square()


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rows", [4, 12])
def test_rows_in_pairs_are_refused_by_name(halves: bool, rows: int) -> None:
    with pytest.raises(ValueError, match=rf"{rows} rows of the example become \[{rows // 2}, 2\]"):
        gnsfast.convert(Pairs(halves), example=torch.randn(rows, D))


def test_pairs_that_are_folded_by_hand() -> None:
    model, x = gnsfast.convert(Pairs(halves=False), fold=["*"]), torch.randn(B, 2, D)
    assert_right(model, x, lambda m, x: m(x.flatten(0, 1)).square().sum())


class Groups(Heads):
    """Takes a number of rows that is even, and gives as many."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(0, (-1, 2)).flatten(0, 1))


def test_a_model_that_does_not_take_any_number_of_rows() -> None:
    model = gnsfast.convert(Groups(), example=torch.randn(14, D))
    assert said(model, "up.weight").static


ORDERS: dict[str, Callable[[Any, int], Any]] = {
    "numpy": lambda self, n: numpy.random.permutation(n),
    "python": lambda self, n: random.sample(range(n), n),
    "own numpy": lambda self, n: self.draws.permutation(n),
    "old numpy": lambda self, n: self.draws.permutation(n),
    "own python": lambda self, n: self.draws.sample(range(n), n),
    "own torch": lambda self, n: torch.rand(n, generator=self.draws).argsort(),
}
DRAWS: dict[str, Callable[[], Any]] = {
    "own numpy": lambda: numpy.random.default_rng(3),
    "old numpy": lambda: numpy.random.RandomState(3),
    "own python": lambda: random.Random(3),
    "own torch": lambda: torch.Generator().manual_seed(3),
}


class Mixed(Heads):
    """Mixes samples in training, in an order that no operator of torch draws."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.draws = how, DRAWS.get(how, lambda: None)()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            order = torch.as_tensor(ORDERS[self.how](self, len(x)))
            x = 0.7 * x + 0.3 * x[order]
        return super().forward(x)


@pytest.mark.parametrize("how", [how for how in ORDERS if how != "own torch"])
def test_what_only_training_draws_is_said(how: str) -> None:
    torch.manual_seed(0)
    model = gnsfast.convert(Mixed(how), example=torch.randn(B, D))
    assert "found in evaluation mode" in said(model, "up.weight").reason


@pytest.mark.parametrize("how", ORDERS)
def test_every_generator_is_put_back(how: str) -> None:
    random.seed(0)
    numpy.random.seed(0)
    model = Mixed(how)
    draws = copy.deepcopy(model.draws) if how != "own torch" else model.draws.clone_state()
    states = random.getstate(), numpy.random.get_state()[1].copy()
    try:
        gnsfast.convert(model, example=torch.randn(B, D))
    except ValueError as error:
        assert "ties the samples" in str(error) and how == "own torch"
    gnsfast.verify(gnsfast.convert(model), lambda m, x: m(x).mean(), torch.randn(B, D))
    assert random.getstate() == states[0] and (numpy.random.get_state()[1] == states[1]).all()
    if how in DRAWS:
        then = Mixed(how)
        then.draws = draws
        assert [*ORDERS[how](then, 99)] == [*ORDERS[how](model, 99)]


class Vectorised(Heads):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x_BTD: Tensor) -> Tensor:
        up = torch.func.vmap(self.up, in_dims=self.dim, out_dims=self.dim)(x_BTD)
        y: Tensor = self.head(up)
        return y


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [T, B])
def test_a_layer_under_vmap(dim: int, length: int) -> None:
    """No kernel sees its samples, so the module around it is replayed."""
    model, x = Vectorised(dim), torch.randn(B, length, D)
    gnsfast.convert(model, example=x)
    assert said(model, "up.weight").route == "replay"
    assert_right(model, x)


def test_a_layer_under_vmap_in_a_large_model_is_named() -> None:
    model = Vectorised(0)
    model.head = nn.Linear(D, 99)
    gnsfast.convert(model, example=torch.randn(B, T, D))
    row = said(model, "up.weight")
    assert not row.static and "vmap hides" in row.reason
    assert said(model, "head.weight").static


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda z, y: nn.functional.cross_entropy(z, y[:, 0]),
    "sum": lambda z, y: nn.functional.cross_entropy(z, y[:, 0], reduction="sum"),
    "of tokens": lambda z, y: nn.functional.cross_entropy(
        z[..., None].expand(-1, -1, T), y, ignore_index=1
    ),
    "contrastive": lambda z, y: nn.functional.cross_entropy(z @ z.T, torch.arange(len(z))),
    "variance": lambda z, y: z.std(0, correction=0).mean(),
}


class WithLoss(Heads):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = LOSSES[loss]

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = super().forward(x)
        return self.loss(z, y), z


@pytest.mark.parametrize("rows", [2, B])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_the_model_that_ties_samples_is_said(loss: str, rows: int) -> None:
    torch.manual_seed(0)
    y = torch.randint(0, 2, (rows, T))
    y[:, 0] = 0
    model = gnsfast.convert(WithLoss(loss), example=(torch.randn(rows, D), y))
    tied = loss in ("contrastive", "variance")
    assert ("neither the sum" in said(model, "up.weight").reason) == tied
