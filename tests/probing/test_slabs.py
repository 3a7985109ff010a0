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
from gnsfast.probing import Slabs


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


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
    gnsfast.configure(model, exclude=["2"])


def fold(model: nn.Sequential) -> None:


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


def test_gradients_may_be_zeroed_inside_a_block() -> None:
    """Of a module, too, that this pass does not use."""
    model = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
    sum(layer(torch.randn(6, 5)).sum() for layer in model).backward()
    for set_to_none in (False, True):
        with gnsfast.per_sample_sqnorms(model, 6) as norms:
            model.zero_grad(set_to_none=set_to_none)
            model[0](torch.randn(6, 5)).sum().backward()
        assert norms["0.bias"].all() and not norms["1.bias"].any()


def test_clipping_inside_a_block_is_no_gradient() -> None:
    """Of a module that this pass does not use, and that has a gradient of an earlier one."""
    model = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
    for layer in model:
        with gnsfast.per_sample_sqnorms(model, 6) as norms:
            layer(torch.randn(6, 5)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norms["1.bias"].all() and not norms["0.bias"].any()


def test_a_gradient_that_is_gone_was_there() -> None:
    """A weight that is used as a tensor is found, though the block sets its gradient to None."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4, bias=False))
    norms_of(model)
    x = torch.randn(6, 5)
    with (
        pytest.raises(gnsfast.ObservationError, match=r"1\.weight got a gradient"),
        gnsfast.per_sample_sqnorms(model, 6),
    ):
        nn.functional.linear(model[0](x), model[1].weight).sum().backward()
        model.zero_grad()


def test_a_graph_of_an_earlier_block_is_refused() -> None:
    """Its samples are not those of this block."""
    model, x = make(), torch.randn(6, 5)
    with pytest.raises(KeyError), gnsfast.per_sample_sqnorms(model, 6):
        loss = model(x).square().sum()
        raise KeyError
    with (
        pytest.raises(gnsfast.ObservationError, match="its forward ran before"),
        gnsfast.per_sample_sqnorms(model, 6),
    ):
        loss.backward()


def test_a_block_that_cannot_open_leaves_the_model_closed() -> None:
    model = make()
    block = gnsfast.per_sample_sqnorms(model, 6)
    model[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="require gradient"), block:
        pass
    assert norms_of(model).keys() == {"0.weight", "2.weight", "2.bias"}


def test_default_dtypes_do_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        norms_of(make())
    finally:
        torch.set_default_dtype(torch.float32)
