# SPDX-License-Identifier: Apache-2.0
"""Models whose layers hold their samples in several ways, and what a batch may be."""

import dataclasses
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import B, D, Flattened, NanoGPT, T, assert_right, by_token, ids, squares
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


def sequence_first(m: Any, x_TBD: Tensor) -> Tensor:
    x = torch.tanh(m.up(x_TBD)).permute(1, 2, 0)
    y: Tensor = m.down(m.mix(x).permute(2, 0, 1))
    return y


def functional_head() -> nn.Module:
    of = lambda m, ids_BT: F.linear(torch.tanh(m.up(m.tokens(ids_BT))), m.tokens.weight)
    return Made(of, tokens=nn.Embedding(11, D), up=nn.Linear(D, D))


class Offset(nn.Embedding):
    """Bart's positions: the module gets token ids, and makes its own index of them."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        return super().forward(2 + torch.arange(ids_BT.shape[1]))


def offset_model() -> nn.Module:
    of = lambda m, ids_BT: m.tokens(ids_BT) * m.positions(ids_BT)
    return Made(of, tokens=nn.Embedding(11, D), positions=Offset(2 + T, D))


@pytest.mark.parametrize("length", [T, B])
@pytest.mark.parametrize(
    "make",
    [NanoGPT, Flattened, lambda: Flattened(interleaved=True), functional_head, offset_model],
)
def test_where_samples_lie(make: Any, length: int) -> None:
    model = make().eval()
    assert_right(model, ids()[:, :length])
    if make is not offset_model:  # its table is as long as T
        assert_right(model, torch.cat([ids(), ids()], 1)[:, : 2 * length])
    assert gnsfast.coverage(model).covered_fraction == 1


@pytest.mark.parametrize("length", [T, B + 1])
def test_sequence_first(length: int) -> None:
    conv = nn.Conv1d(D, D, 3, padding=1)
    model = Made(sequence_first, up=nn.Linear(D, D), mix=conv, down=nn.Linear(D, 2))
    assert_right(model, torch.randn(length, B, D), by_token, batch_dim=1)


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict"])
def test_kinds_of_batch(how: str) -> None:
    model, x = Flattened(), ids()
    batch = {"tensor": x, "tuple": (x,), "dict": {"ids_BT": x}}[how]
    table = gnsfast.learn(model, batch)
    assert not table.left_out
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        squares(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, squares, x, B))


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


def batched(m: Any, batch: Any) -> Tensor:
    y: Tensor = m.head(torch.tanh(m.up(batch.x))) * batch.mask[..., None]
    return y


@pytest.mark.parametrize("kind", [Frozen, Named, Encoding, Plain, SimpleNamespace])
def test_batches_that_are_one_object(kind: Callable[..., Any]) -> None:
    model = Made(batched, up=nn.Linear(D, D), head=nn.Linear(D, 2))
    x, mask_BT = torch.randn(B, T, D), torch.rand(B, T)
    batch = kind(x=x, mask=mask_BT)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(batch).square().sum().backward()
    assert batch.x is x and batch.mask is mask_BT
    loss = lambda m, b: m(Named(*b)).square().sum()  # noqa: E731
    assert_norms(norms, loop_sqnorms(model, loss, (x, mask_BT), B))
    assert gnsfast.coverage(model).proof == ""


def test_a_models_own_error_is_shown_as_it_is() -> None:
    with pytest.raises(IndexError, match="out of range"):
        with gnsfast.per_sample_sqnorms(Flattened(), B):
            squares(Flattened(), ids() + 99)


@pytest.mark.parametrize("parts", [False, True])
def test_a_batch_that_the_model_does_not_take(parts: bool) -> None:
    """A tuple is a list of arguments. The error of the model tells."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    run = (lambda batch: model(batch[0]) * batch[1]) if parts else None
    with pytest.raises((gnsfast.ObservationError, TypeError), match="were given|KeyError"):
        gnsfast.learn(model, (x, x) if not parts else {"x": x}, run=run)
    assert gnsfast.learn(model, (x, x) if parts else (x,), run=run).proofs
