# SPDX-License-Identifier: Apache-2.0
"""What ``unit="micro_batch"`` refuses, by name and with a remedy, and what it carries on from."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from noise_cases import through_a_file
from torch import Tensor, nn

from gnsfast import GradientNoiseScale, ObservationError

by_micro_batches = partial(GradientNoiseScale, unit="micro_batch")


def make() -> tuple[nn.Module, GradientNoiseScale]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, by_micro_batches(model)


def loss(model: nn.Module) -> Tensor:
    value: Tensor = model(torch.randn(3, 4)).square().sum(1).mean() / 2
    return value


def update(model: nn.Module, gns: Any, count: int = 2) -> None:
    with gns.update():
        for _ in range(count):
            with gns.microbatch(3, scale=0.5):
                loss(model).backward()
    model.zero_grad()


def test_one_micro_batch() -> None:
    model, gns = make()
    with pytest.raises(ObservationError, match="this update had 1 on 1 process. Use 2 or more"):
        update(model, gns, 1)
    model.zero_grad()
    update(model, gns)
    assert gns.compute().updates == 1


def test_gradients_that_are_not_those_of_the_passes() -> None:
    model, gns = make()
    loss(model).backward()
    update(model, gns)
    with pytest.raises(ObservationError, match="not zero when an update began"):
        gns.compute()
    gns.reset()
    model.zero_grad()
    with pytest.raises(ObservationError, match="zero_grad.. after the block"):
        with gns.update():
            for _ in range(2):
                with gns.microbatch(3, scale=0.5):
                    loss(model).backward()
            model.zero_grad()
    with gns.update():
        for _ in range(2):
            with gns.microbatch(3, scale=0.5):
                loss(model).backward()
        for p in model.parameters():
            p.grad.mul_(3.0)
    with pytest.raises(ObservationError, match="multiplied inside the block"):
        gns.compute()
    gns.reset()
    model.zero_grad()
    update(model, gns)
    assert gns.compute().updates == 1


def test_passes() -> None:
    model, gns = make()
    with pytest.raises(ObservationError, match="No backward pass went through the model"):
        with gns.update(3):
            loss(model)
    with pytest.raises(ObservationError, match="got its gradient in several parts"):
        with gns.update(3):
            loss(model).backward()
            loss(model).backward()
    model.zero_grad()
    with pytest.raises(ObservationError, match="without a micro-batch"):
        with gns.update():
            loss(model).backward()
    with pytest.raises(ObservationError, match="already open"):
        with gns.update(3), gns.microbatch(3):
            pass
    with pytest.raises(KeyError):
        with gns.update(3):
            raise KeyError
    assert not any(p._backward_hooks for p in model.parameters())
    model.zero_grad()
    update(model, gns)
    assert gns.compute().updates == 1


def test_a_gradient_that_autograd_did_not_bring() -> None:
    """As of kernels that add to ``.grad`` themselves."""
    model, gns = make()
    outside = nn.Parameter(torch.zeros(3))
    model.register_parameter("outside", outside)
    gns.reset()
    with gns.update():
        for _ in range(2):
            with gns.microbatch(3, scale=0.5):
                value = loss(model)
                value.register_hook(lambda _: setattr(outside, "grad", torch.ones(3)))
                value.backward()
    with pytest.raises(ObservationError, match="outside got a gradient, but no function"):
        gns.compute()


def test_what_units_allow() -> None:
    """A hook may rewrite a gradient, and only some micro-batches may count tokens."""
    model, gns = make()
    x = torch.randn(4, 3, 4)
    for factor in (1.0, 0.5):
        gns.reset()
        handle = model[0].weight.register_hook(lambda grad, by=factor: by * grad)  # type: ignore[operator]
        with gns.update():
            for k in range(4):
                with gns.microbatch(3, scale=0.25, tokens=None if k % 2 else 3):
                    (model(x[k]).square().sum(1).mean() / 4).backward()
        model.zero_grad()
        handle.remove()
        found = gns.compute().per_module["0"].trace
        if factor == 1.0:
            want = found
    assert found < want


def test_frozen_later() -> None:
    model, gns = make()
    update(model, gns)
    model[0].requires_grad_(False)
    with pytest.raises(ObservationError, match="frozen, unfrozen or replaced .* gns.reset"):
        update(model, gns)
    gns.reset()
    update(model, gns)
    assert {*gns.compute().per_module} == {"2"}
    with pytest.raises(ValueError, match="Linear has no trainable parameter"):
        by_micro_batches(nn.Linear(2, 2).requires_grad_(False))


def test_a_model_that_is_moved_before_the_first_pass() -> None:
    """As by ``model.to(...)`` after the estimator was made."""
    model, gns = make()
    model.to("meta").to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    update(model, gns)
    assert gns.compute().updates == 1


def test_arguments() -> None:
    model, gns = make()
    for options, match in (
        ({"window": 0}, "window"),
        ({"decay": 2.0}, "decay must be above 0"),
        ({"loss_reduction": "max"}, "loss_reduction must be"),
    ):
        with pytest.raises(ValueError, match=match):
            by_micro_batches(model, **options)
    with pytest.raises(ValueError, match="num_samples"):
        with gns.update(0):
            pass
    assert str(gns.compute()).startswith("noise scale not measured yet")


def test_what_needs_single_samples_is_refused() -> None:
    model = nn.Linear(4, 2)
    for options in ({"source": "local"}, {"groups": ["a", "b"]}, {"keep_largest": 4}):
        with pytest.raises(ValueError, match="unit='micro_batch' .* no single sample"):
            GradientNoiseScale(model, unit="micro_batch", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit must be"):
        GradientNoiseScale(model, unit="batch")


def test_states_of_another_unit() -> None:
    model, two = make()
    update(model, two)
    one = GradientNoiseScale(model)
    update(model, one)
    with pytest.raises(ValueError, match="made with unit='micro_batch'"):
        one.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="made with unit='sample'"):
        two.load_state_dict(one.state_dict())
    assert two.compute().updates == 1


def test_every_window_and_state() -> None:
    """Half of the updates, and the same bits after a save; another model's state is refused."""
    model = nn.Linear(4, 2)
    one, two = (by_micro_batches(model, window=5, every=2) for _ in range(2))
    for _ in range(13):
        update(model, one)
    two.load_state_dict(through_a_file(one.state_dict()))
    assert two.compute() == one.compute() and one.compute().updates == 5
    for gns in (one, two):
        torch.manual_seed(1)
        for _ in range(5):
            update(model, gns)
    assert two.compute() == one.compute()
    with pytest.raises(ValueError, match="another model: its list of parameters differs in"):
        make()[1].load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="made with window=5"):
        by_micro_batches(model, every=2).load_state_dict(one.state_dict())


def test_an_overflow_is_skipped() -> None:
    model, gns = make()
    update(model, gns)
    with gns.update():
        for factor in (math.inf, 1.0):
            with gns.microbatch(3, scale=0.5):
                (loss(model) * factor).backward()
    model.zero_grad()
    update(model, gns)
    found = gns.compute()
    assert (found.updates, found.skipped, found.passes) == (2, 1, 4)
