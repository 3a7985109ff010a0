# SPDX-License-Identifier: Apache-2.0
"""Schedules in tokens against PyTorch's in steps, at one token a step; under a growing batch."""

import math
from typing import Any

import pytest
import torch
from controller_cases import feed, noise, warm
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

from gnsfast.critical_batch.control import by_tokens, constant, cosine, linear, wsd

WARM, SPAN, DECAY = 8, 24, 10


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)


def torchs(parts: list[Any], milestones: list[int], steps: int) -> list[float]:
    """Multipliers of PyTorch's schedulers one after another."""
    optimizer = sgd()
    scheduler: LRScheduler = SequentialLR(optimizer, [p(optimizer) for p in parts], milestones)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / 0.25)
        optimizer.step()
        scheduler.step()
    return found


def rise(o: Any) -> LRScheduler:
    return LinearLR(o, start_factor=1e-12, total_iters=WARM)


def keep(o: Any) -> LRScheduler:
    return ConstantLR(o, factor=1.0)


def fall(o: Any, steps: int) -> LRScheduler:
    return LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=steps)


@pytest.mark.parametrize(
    "shape, parts, milestones",
    [
        (constant(warm_up=WARM), [rise, keep], [WARM]),
        (linear(WARM + SPAN, warm_up=WARM, final=0.1), [rise, lambda o: fall(o, SPAN)], [WARM]),
        (
            wsd(WARM + SPAN, warm_up=WARM, decay=DECAY, final=0.1),
            [rise, keep, lambda o: fall(o, DECAY)],
            [WARM, WARM + SPAN - DECAY],
        ),
        (
            cosine(WARM + SPAN, warm_up=WARM, final=0.1),
            [rise, lambda o: CosineAnnealingLR(o, SPAN, eta_min=0.025)],
            [WARM],
        ),
    ],
    ids=["constant", "linear", "wsd", "cosine"],
)
def test_like_torch(shape: Any, parts: list[Any], milestones: list[int]) -> None:
    end = WARM + SPAN
    ours = [shape(tokens) for tokens in range(end + 1)]
    assert ours == pytest.approx(torchs(parts, milestones, end + 1), rel=1e-9, abs=1e-9)
    assert [shape(end + k) for k in (1, 7, 1000)] == [shape(end)] * 3


def test_without_warm_up_and_to_the_end() -> None:
    assert [s(0) for s in (constant(), linear(9), cosine(9), wsd(9, decay=9))] == [1.0] * 4
    assert [s(9) for s in (linear(9), cosine(9), wsd(9, decay=9))] == [0.0] * 3
    assert wsd(10, warm_up=4, decay=6)(4) == 1.0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: constant(warm_up=-1), "warm_up must be a whole number of at least 0, not -1"),
        (lambda: linear(0), "total_tokens"),
        (lambda: cosine(1.5), "total_tokens must be a whole number of at least 1, not 1.5"),
        (lambda: cosine(10, warm_up=10), "warm_up=10 must be less than total_tokens=10"),
        (lambda: cosine(10, final=1.1), "final must be a number of at least 0 and at most 1"),
        (lambda: linear(10, final=math.nan), "final"),
        (lambda: wsd(10, decay=0), "decay"),
        (
            lambda: wsd(10, warm_up=4, decay=7),
            "warm_up=4 and decay=7 together exceed total_tokens=10",
        ),
        (lambda: linear(10)(-1), "tokens trained so far must be .* not -1"),
        (lambda: cosine(10)(math.nan), "at least 0, not nan"),
    ],
)
def test_arguments_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_tokens_and_not_steps() -> None:
    trained, optimizer = [0], sgd()
    scheduler = LambdaLR(optimizer, by_tokens(linear(100), lambda: trained[0]))
    for trained[0], lr in ((20, 0.2), (20, 0.2), (60, 0.1), (100, 0.0)):
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_under_a_growing_batch_and_resumed() -> None:
    """Equal tokens, equal learning rate times the factor; the state of a LambdaLR goes through
    torch.save without a function in it.
    """
    shape = cosine(20_000, warm_up=2000, final=0.1)
    controller, optimizer = warm(), sgd()
    scheduler = LambdaLR(optimizer, controller.lr_lambda(shape))
    for lower in [16.0] * 3 + [1.0] * 6:
        grown = controller.batch_size
        feed(controller, [noise(lower)])
        optimizer.step()
        scheduler.step()
        expected = 0.25 * shape(controller.tokens) * math.sqrt(controller.batch_size / 16)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
    assert grown == 32 and controller.tokens == 10_000
    assert scheduler.state_dict()["lr_lambdas"] == [None]

    resumed, other = warm(), sgd()
    again = LambdaLR(other, resumed.lr_lambda(shape))
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(scheduler.state_dict())
    resumed.load_state_dict(controller.state_dict())
    for _ in range(4):
        for c, o, s in ((controller, optimizer, scheduler), (resumed, other, again)):
            feed(c, [noise(2.0)])
            o.step()
            s.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0
        assert again.get_last_lr() == scheduler.get_last_lr()
