# SPDX-License-Identifier: Apache-2.0
"""What is known of a model is kept while it stays the same, and learnt anew after any change."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import unseen
from made import Made
from noise_cases import one_update
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.following import Followed


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def norms_of(model: nn.Module, B: int = 6) -> dict[str, Tensor]:
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(torch.randn(B, 5)).square().sum().backward()
    return dict(norms)


def probes_of(model: nn.Module, B: int = 6) -> object:
    norms_of(model, B)
    return Followed.of(model).passes.probes[0]


def test_probes_are_kept_for_each_number_of_samples() -> None:
    model = make()
    first, other = probes_of(model), probes_of(model, 3)
    assert probes_of(model) is first is not other is probes_of(model, 3)
    for B in range(7, 20):
        probes_of(model, B)
    newest = probes_of(model)
    assert newest is not first, "only some are kept"
    for B in range(7, 20):
        probes_of(model, B)
        assert probes_of(model) is newest, "among them those that were used last"


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


def assign(model: nn.Sequential) -> None:
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def add_lora(model: nn.Sequential) -> None:
    a, b = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)
    base = model[0].requires_grad_(False)
    model[0] = Made(lambda m, x: m.base(x) + m.b(m.a(x)), base=base, a=a, b=b)


CHANGES = [freeze, replace_parameter, replace_module, add_module, exclude, assign, add_lora]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_begins_anew(change: Callable[[nn.Module], None]) -> None:
    """Also where an estimator is told to."""
    model = make()
    gns = gnsfast.GradientNoiseScale(model)

    def step() -> None:
        with one_update(gns, 6):
            model(torch.randn(6, 5)).square().sum(1).mean().backward()

    norms_of(model)
    model.zero_grad()
    step()
    first = Followed.of(model)
    change(model)
    assert Followed.of(model) is not first
    with pytest.raises(gnsfast.ObservationError, match="Call gns.reset"):
        step()
    gns.reset()
    step()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left_out = {"2.weight", "2.bias"} if change is exclude else set()
    loss = lambda m, x: m(x).square().sum()
    x = torch.randn(6, 5)
    loop = loop_sqnorms(model, loss, x, 6)
    with gnsfast.per_sample_sqnorms(model, 6) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop, names=trained.keys() - left_out)


def test_norms_outlive_the_next_pass() -> None:
    model = make()
    first = norms_of(model)
    before = {name: norm.clone() for name, norm in first.items()}
    norms_of(model)
    assert all(first[name].equal(norm) for name, norm in before.items())


def test_no_hook_of_a_parameter_runs_while_the_model_is_looked_at() -> None:
    model, calls = make(), []
    model[0].weight.register_hook(lambda g: calls.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    norms_of(model)
    assert calls == ["gradient", "accumulated"]


def test_blocks_of_an_estimator_and_of_norms_on_one_model() -> None:
    """One after the other, not at once."""
    model, x = make(), torch.randn(6, 5)
    estimators = [gnsfast.GradientNoiseScale(model) for _ in range(2)]
    for gns in estimators:
        for other in (gns, *estimators):
            with pytest.raises(gnsfast.ObservationError, match="open|inside a"):
                with gns.update(6), other.update(6):
                    pass
            gns.discard()
        with pytest.raises(gnsfast.ObservationError, match="open on this model"):
            with gns.update(6), gnsfast.per_sample_sqnorms(model, 6):
                pass
        with one_update(gns, 6):
            model(x).square().sum(1).mean().backward()
        norms_of(model)
        model.zero_grad()
    first, second = (gns.compute() for gns in estimators)
    assert first.trace == second.trace and first.updates == 1


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
    table = gnsfast.learn(model, torch.randn(6, 5), run=lambda x: [layer(x) for layer in model])
    sum(layer(torch.randn(6, 5)).sum() for layer in model).backward()
    for set_to_none in (False, True):
        with gnsfast.per_sample_sqnorms(model, 6, table=table) as norms:
            model.zero_grad(set_to_none=set_to_none)
            model[0](torch.randn(6, 5)).sum().backward()
        assert norms["0.bias"].all() and not norms["1.bias"].any()


def test_clipping_inside_a_block_is_no_gradient() -> None:
    """Of a module that this pass does not use, and that has a gradient of an earlier one."""
    model = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
    table = gnsfast.learn(model, torch.randn(6, 5), run=lambda x: [layer(x) for layer in model])
    for layer in model:
        with gnsfast.per_sample_sqnorms(model, 6, table=table) as norms:
            layer(torch.randn(6, 5)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norms["1.bias"].all() and not norms["0.bias"].any()


def test_a_gradient_that_is_gone_was_there() -> None:
    """A weight that only a kernel takes is found, though the block sets its gradient to None."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4, bias=False))
    norms_of(model)
    x = torch.randn(6, 5)
    with (
        pytest.raises(gnsfast.ObservationError, match=r"1\.weight got a gradient"),
        gnsfast.per_sample_sqnorms(model, 6),
    ):
        unseen.linear(model[0](x), model[1].weight).sum().backward()
        model.zero_grad()


def test_a_graph_of_an_earlier_block_is_refused() -> None:
    """Its samples are not those of this block."""
    model, x = make(), torch.randn(6, 5)
    with pytest.raises(KeyError), gnsfast.per_sample_sqnorms(model, 6):
        loss = model(x).square().sum()
        raise KeyError
    with (
        pytest.raises(gnsfast.ObservationError, match="forward pass ran before"),
        gnsfast.per_sample_sqnorms(model, 6),
    ):
        loss.backward()


def test_a_parameter_that_is_frozen_before_the_block() -> None:
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
