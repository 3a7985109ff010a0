# SPDX-License-Identifier: Apache-2.0
"""Slabs are kept while a model stays the same, and made again after any change."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import gnsfast
from gnsfast.probing import Slabs, checks


def make() -> nn.Sequential:
    return gnsfast.convert(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def norms_of(model: nn.Module, B: int = 6) -> dict[str, Tensor]:
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(torch.randn(B, 5)).square().sum().backward()
    return dict(norms)


def slab_of(model: nn.Module, B: int = 6) -> object:
    norms_of(model, B)
    return Slabs.of(model).slab(model, B)


def test_a_slab_is_kept_for_each_number_of_samples() -> None:
    model = make()
    first, other = slab_of(model), slab_of(model, 3)
    assert slab_of(model) is first is not other is slab_of(model, 3)
    for B in range(7, 20):
        slab_of(model, B)
    assert slab_of(model) is not first, "only the newest are kept"


def freeze(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(4, 5))


def replace_module(model: nn.Sequential) -> None:
    model[2] = gnsfast.Linear(4, 3)


def add_module(model: nn.Sequential) -> None:
    model.append(gnsfast.Linear(3, 2))


def exclude(model: nn.Sequential) -> None:
    gnsfast.convert(model, exclude=["2"])


def fold(model: nn.Sequential) -> None:
    gnsfast.convert(model, fold=["0"])


@pytest.mark.parametrize(
    "change", [freeze, replace_parameter, replace_module, add_module, exclude, fold]
)
def test_any_change_makes_a_new_slab(change: object) -> None:
    model = make()
    first = slab_of(model)
    change(model)  # type: ignore[operator]
    assert slab_of(model) is not first
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    left_out = {"2.weight", "2.bias"} if change is exclude else set()
    assert norms_of(model).keys() == trained - left_out


def test_norms_outlive_the_next_pass() -> None:
    model = make()
    first = norms_of(model)
    before = {name: norm.clone() for name, norm in first.items()}
    norms_of(model)
    assert all(first[name].equal(norm) for name, norm in before.items())


def test_copies_share_no_slab() -> None:
    model = make()
    norms_of(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert Slabs.of(twin) is not Slabs.of(model)
        assert norms_of(twin).keys() == norms_of(model).keys()
    assert model.state_dict().keys() == make().state_dict().keys()


def test_a_model_is_freed() -> None:
    model = make()
    norms_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_arrivals() -> None:
    """A new gradient at an old one's address arrives; one that was only set to zero or to None does
    not.
    """
    p = nn.Parameter(torch.ones(3))
    p.sum().backward()
    for change, arrives, of_numbers in (
        (lambda: None, False, False),
        (lambda: p.sum().backward(), True, True),
        (lambda: p.grad.zero_(), True, False),
        (lambda: setattr(p, "grad", None), False, False),
        (lambda: p.sum().backward(), True, True),
    ):
        arrival = checks.Arrival(p)
        change()
        assert (bool(arrival), arrival.of_numbers()) == (arrives, of_numbers)
    for _ in range(20):
        arrival = checks.Arrival(p)
        p.grad = None
        p.sum().backward()
        assert arrival


def test_gradients_may_be_zeroed_inside_a_block() -> None:
    """Of a module, too, that this pass does not use."""
    model = gnsfast.convert(nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)]))
    sum(layer(torch.randn(6, 5)).sum() for layer in model).backward()
    for set_to_none in (False, True):
        with gnsfast.per_sample_sqnorms(model, 6) as norms:
            model.zero_grad(set_to_none=set_to_none)
            model[0](torch.randn(6, 5)).sum().backward()
        assert norms["0.bias"].all() and not norms["1.bias"].any()
