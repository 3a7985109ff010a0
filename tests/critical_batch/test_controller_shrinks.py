# SPDX-License-Identifier: Apache-2.0
"""The controller shrinks where it may, warns again when the excess doubles, and monitors alone."""

import json
import math
from typing import Any

import numpy
import pytest
import torch
from controller_cases import CHECK, TOTAL, UNKNOWN, at_least, feed, make, noise, warm

from gnsfast.critical_batch import BatchSizeSchedule, CriticalBatchFactor
from gnsfast.critical_batch.control import BatchSizeController

BELOW, ABOVE = noise(6.0, 7.0, 7.99), noise(6.0, 7.0, 8.0)  # times 2: at most 15.98, and 16


def shrinking(**changes: Any) -> BatchSizeController:
    return warm(min_batch_size=8, **changes)


def test_shrinks_at_the_last_of_patience_checks() -> None:
    controller = shrinking()
    assert feed(controller, [BELOW, BELOW, ABOVE, BELOW, BELOW]) == []
    [shrunk] = feed(controller, [BELOW])
    assert (shrunk.old, shrunk.new, shrunk.warning) == (16, 8, False)
    assert shrunk.lr_factor == math.sqrt(0.5) == controller.lr_factor
    assert "at most 15.98 at 3 checks in a row, less than the batch size of 16" in shrunk.reason
    assert controller.batch_size == 8 and controller.accumulation == 1
    assert feed(controller, [noise(0.1)] * 2) == []
    [warned] = feed(controller, [noise(0.1)] * 20)  # below the smallest there is no batch
    assert warned.warning and controller.batch_size == 8


@pytest.mark.parametrize(
    "no_reason",
    [UNKNOWN, at_least(1.0), noise(0.0, 40.0, math.inf), noise(6.0, 7.5, 7.99, drift=True)],
    ids=["not measured", "at least", "any is possible", "drifting up"],
)
def test_the_row_is_broken_by(no_reason: Any) -> None:
    controller = shrinking()
    assert feed(controller, [BELOW, BELOW, no_reason, BELOW, BELOW]) == []
    assert len(feed(controller, [BELOW])) == 1


def test_grows_and_shrinks_with_hysteresis() -> None:
    """Between "at least 32" and "below 32" nothing happens, at either size."""
    controller = shrinking()
    feed(controller, [noise(16.0)] * 3)
    assert controller.batch_size == 32
    between = noise(10.0, 14.0, 16.0)  # the estimate is 20 to 32, around 28
    assert feed(controller, [between] * 9) == [] and controller.batch_size == 32
    feed(controller, [noise(10.0, 13.0, 15.9)] * 3)
    assert controller.batch_size == 16
    assert feed(controller, [between] * 9) == [] and controller.batch_size == 16
    feed(controller, [noise(16.0)] * 3)
    assert controller.batch_size == 32 and controller.lr_factor == math.sqrt(2)


def test_noise_alone_does_not_move_it() -> None:
    """1,000 independent checks of a critical batch size at the border of 32, within 30 %. Without
    the interval three in a row would move the batch size to and fro at each 14th check.
    """
    random = numpy.random.default_rng(0)
    values = 16.0 * numpy.exp(0.15 * random.standard_normal(1000))
    controller = make(min_batch_size=8, total_tokens=10**9, calibrate=0.0)
    decisions = feed(controller, [noise(v / 1.34, v, v * 1.34) for v in values])
    assert sum(d.new != d.old for d in decisions) == 0
    large, row, changes = False, 0, 0
    for value in values:
        row = row + 1 if (value >= 16) != large else 0
        if row == 3:
            large, row, changes = not large, 0, changes + 1
    assert changes > 60


def test_an_infinite_factor_never_shrinks() -> None:
    factor = CriticalBatchFactor(2.0, 1.5, math.inf, "euclidean", "a checkpoint")
    controller = shrinking(factor=factor)
    assert feed(controller, [noise(1.0)] * 9) == []  # nor warns


def test_hyperparameters_move_back() -> None:
    controller = shrinking(betas="half_life", weight_decay="timescale")
    group = {"params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": 0.3}
    optimizer = torch.optim.AdamW([group], lr=0.01, betas=(0.9, 0.99))
    controller.check_optimizer(optimizer)
    sizes = []
    for decision in feed(controller, [noise(16.0)] * 3 + [noise(1.0)] * 6):
        controller.apply(decision, optimizer)
        found = optimizer.param_groups[0]
        sizes.append((decision.new, found["lr"], found["betas"][1], found["weight_decay"]))
    root = math.sqrt(2)
    assert [s[0] for s in sizes] == [32, 16, 8]
    assert sizes[0] == pytest.approx((32, 0.01 * root, 0.99**2, 0.3 * root))
    assert sizes[1] == pytest.approx((16, 0.01, 0.99, 0.3))
    assert sizes[2] == pytest.approx((8, 0.01 / root, 0.99**0.5, 0.3 / root))


def test_shrinking_from_the_cap_lifts_it() -> None:
    controller = shrinking(max_batch_size=32)
    feed(controller, [noise(64.0)] * 6)
    assert (controller.batch_size, controller.phase) == (32, "monitor")
    shrunk, again = feed(controller, [noise(5.0, 6.0, 15.0)] * 4)
    assert (shrunk.new, again.phase) == (16, "warm up") and "may grow again" in again.reason
    [grown] = feed(controller, [noise(16.0)] * 3)
    assert grown.new == 32


def test_shrinks_after_the_warm_up_too() -> None:
    controller = shrinking(warm_up_until=0.02)
    [entered, shrunk] = feed(controller, [noise(1.0)] * 4)
    assert entered.phase == "monitor" and "the batch size may shrink" in entered.reason
    assert shrunk.new == 8
    assert feed(controller, [noise(100.0)] * 9) == []  # and does not grow back


def test_a_log_of_it_is_a_schedule() -> None:
    controller = shrinking()
    feed(controller, [noise(16.0)] * 3 + [noise(2.0)] * 3)
    options = {"total_tokens": TOTAL, "tokens_per_sample": 10}
    schedule = BatchSizeSchedule.from_decisions(controller.decisions, **options)
    assert schedule.thresholds == ((0, 16), (4 * CHECK, 32), (7 * CHECK, 16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"min_batch_size": 0}, "min_batch_size must be a whole number of at least 1"),
        ({"min_batch_size": 4}, "4 cannot be split into micro-batches of 4"),
        ({"min_batch_size": 12}, "min_batch_size=12 is not what the batch size of 16 comes to"),
        ({"min_batch_size": 32}, "min_batch_size=32 is not what"),
        ({"min_batch_size": 8, "growth": 3}, "by dividing by growth=3"),
    ],
)
def test_smallest_sizes_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_resumed_at_any_check() -> None:
    script = [noise(16.0)] * 3 + [noise(3.0)] * 7 + [noise(0.5)] * 9 + [noise(16.0)] * 4
    whole = shrinking()
    expected = [d.record() for d in feed(whole, script)]
    assert len(expected) == 5 and len({(d["old"], d["new"]) for d in expected}) == 5
    for cut in range(len(script) + 1):
        first, second = shrinking(), make(min_batch_size=8)
        begun = feed(first, script[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        found = begun + feed(second, script[cut:])
        assert [d.record() for d in found] == expected, cut
        assert second.state_dict() == whole.state_dict()


def test_warns_again_when_the_excess_doubles() -> None:
    """A batch that went from 1.3 to 14.7 times over had one warning."""
    controller = warm()
    excess = [1.3, 1.5, 2.0, 2.55, 2.65, 4.0, 5.1, 5.4, 8.0, 10.9, 14.7]
    script = [noise(8 / times / 1.5, 8 / times, 7.9) for times in excess for _ in range(3)]
    warned = [d for d in feed(controller, script) if d.warning]
    assert [round(16 / d.estimate, 2) for d in warned] == [1.3, 2.65, 5.4, 10.9]
    assert [d.reason.partition(" times")[0][-4:].strip() for d in warned] == [
        "1.2",
        "2.6",
        "5.3",
        "10.8",
    ]
    one_check = [noise(0.1, 8 / 30), *[noise(0.1, 8 / 14)] * 5]
    assert feed(controller, one_check) == []  # not by a single check
    feed(controller, [noise(8.0)] * 3)  # recovered: from the beginning
    assert [d.warning for d in feed(controller, [noise(4.0, 8 / 1.3, 7.9)] * 3)] == [True]


def test_the_count_begins_anew_after_a_warning() -> None:
    controller = warm()
    [warned] = feed(controller, [noise(4.0, 8 / 1.3, 7.9)] * 3)
    assert warned.warning and feed(controller, [noise(1.0, 8 / 14)] * 2) == []
    assert len(feed(controller, [noise(1.0, 8 / 14)])) == 1


def test_a_size_without_an_estimate_warns_once() -> None:
    """A tr Σ below zero: the excess is infinite, and cannot double."""
    controller = warm()
    assert len(feed(controller, [noise(0.0, -0.1, 1.0)] * 12)) == 1
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    again = make()
    again.load_state_dict(state)
    assert feed(again, [noise(0.0, -0.1, 1.0)] * 6) == []


def test_monitors_alone_without_sizes_to_take() -> None:
    """Neither a largest nor a smallest batch size: nothing changes, and everything is said."""
    controller = make(max_batch_size=None)
    assert controller.settings.sizes == (16,)
    [entered] = feed(controller, [UNKNOWN])
    assert entered.phase == "monitor"
    assert entered.reason.startswith("calibration ends at 1 % of the tokens: the batch size stays")
    [small] = feed(controller, [noise(40.0)] * 9)
    assert small.warning and small.reason == (
        "the critical batch size is at least 80 at 3 checks in a row, which allows 32: the batch "
        "size of 16 is too small, and this controller does not make it larger"
    )
    [large] = feed(controller, [noise(1.0)] * 3)
    assert large.warning and controller.batch_size == 16


def test_reaches_monitor_by_default() -> None:
    settings: dict[str, Any] = {"tokens_per_sample": 1, "total_tokens": TOTAL}
    controller = BatchSizeController(16, factor=2.0, max_batch_size=64, **settings)
    assert controller.update(89_999, UNKNOWN) is not None and controller.phase == "warm up"
    assert controller.update(90_000, UNKNOWN) is not None and controller.phase == "monitor"
