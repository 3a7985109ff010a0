# SPDX-License-Identifier: Apache-2.0
"""A controller that is saved and resumed decides as one that was not; factors travel as files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from controller_cases import CHECK, TOTAL, UNKNOWN, at_least, feed, make, noise, warm

from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.critical_batch.control import BatchSizeController

# Growth, a warning that ends and comes again, drift both ways, no measurement, the cap.
SCRIPT = [
    *(UNKNOWN, noise(30.0), noise(16.0), noise(16.5, drift=True), at_least(20.0)),
    *([noise(1.0)] * 4 + [UNKNOWN, noise(30.0), noise(31.0, drift=True), noise(30.0)]),
    *([noise(1.0)] * 3 + [noise(9.0, drift=True), noise(8.0, drift=True)]),
    *([noise(32.0)] * 3 + [noise(64.0)] * 3 + [noise(2.0)] * 4),
]


def run(controller: BatchSizeController, start: int, stop: int) -> list[Any]:
    """What each of the checks ``start`` to ``stop`` gave, and the state after it."""
    found = []
    for k in range(start, stop):
        decision = controller.update((k + 1) * CHECK, SCRIPT[k])
        state = controller.batch_size, controller.phase, controller.lr_factor, controller.metrics()
        found.append((None if decision is None else decision.record(), *state))
    return found


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return loaded


def test_resumed_at_any_check() -> None:
    expected = run(make(), 0, len(SCRIPT))
    kinds = [(r["old"], r["new"], r["phase"], r["warning"]) for r, *_ in expected if r is not None]
    assert kinds == [
        (16, 16, "warm up", False),
        (16, 32, "warm up", False),
        (32, 32, "warm up", True),
        (32, 32, "warm up", True),
        (32, 64, "warm up", False),
        (64, 64, "monitor", False),
        (64, 64, "monitor", True),
    ]
    for cut in range(len(SCRIPT) + 1):
        first, second = make(), make()
        run(first, 0, cut)
        second.load_state_dict(through_json(first.state_dict()))
        assert repr(second.decisions) == repr(first.decisions)
        assert second.state_dict() == first.state_dict() and second.metrics() == first.metrics()
        assert run(second, cut, len(SCRIPT)) == expected[cut:], cut


def test_resumed_between_two_checks() -> None:
    first, second = make(tokens_per_sample=1), make(tokens_per_sample=1)
    first.update(1900, UNKNOWN)
    second.load_state_dict(through_json(first.state_dict()))
    assert second.update(1999, lambda: pytest.fail("no check is due")) is None
    second.update(2000, noise(10.0))
    assert second.metrics()["cbs/estimate_lo"] == 20.0


@pytest.mark.parametrize(
    "change, name",
    [
        ({"factor": 3.0}, "factor"),
        ({"max_batch_size": 128}, "max_batch_size"),
        ({"min_batch_size": 8}, "min_batch_size"),
        ({"total_tokens": 50_000}, "total_tokens"),
        ({"calibrate": 0.005}, "calibrate"),
        ({"warm_up_until": 0.8}, "warm_up_until"),
        ({"growth": 4}, "growth"),
        ({"patience": 2}, "patience"),
        ({"check_every": 500}, "check_every"),
        ({"over": 1.5}, "over"),
        ({"batch_size": 32}, "batch_size"),
        ({"tokens_per_sample": 20}, "tokens_per_sample"),
        ({"lr": "linear"}, "lr"),
        ({"betas": "half_life"}, "betas"),
        ({"weight_decay": "timescale"}, "weight_decay"),
    ],
)
def test_other_settings_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    state = make().state_dict()
    other = make(**change)
    with pytest.raises(ValueError, match=f"saved with {name}=.*, but this controller has {name}="):
        other.load_state_dict(state)
    if name in ("batch_size", "tokens_per_sample", "lr", "betas", "weight_decay"):
        with pytest.raises(ValueError, match=f"cannot change {name}"):
            other.load_state_dict(state, change=[name])
    else:
        with pytest.raises(ValueError, match=rf"change=\['{name}'\]"):
            other.load_state_dict(state)
        other.load_state_dict(state, change=[name])
    with pytest.raises(ValueError, match="change names unknown settings: patients"):
        make().load_state_dict(state, change=["patients"])


def test_metrics_of_factors_are_not_exchanged() -> None:
    with pytest.raises(ValueError, match="the state was saved with factor=.*'metric': 'euclidean'"):
        make(metric="adam").load_state_dict(make().state_dict())


def test_a_larger_maximum_lifts_the_cap() -> None:
    capped = make(max_batch_size=32)
    run(capped, 0, 21)
    assert capped.batch_size == 32 and capped.phase == "monitor"
    higher = make(max_batch_size=64)
    higher.load_state_dict(capped.state_dict(), change=["max_batch_size"])
    again = higher.update(capped.tokens + CHECK, noise(32.0))
    assert again is not None and again.phase == "warm up" and "may grow again" in again.reason
    decisions = [higher.update(higher.tokens + CHECK, noise(32.0)) for _ in range(3)]
    assert decisions[2] is not None and decisions[2].new == 64


@pytest.mark.parametrize("change", [{"total_tokens": 10 * TOTAL}, {"calibrate": 0.5}])
def test_a_longer_run_may_calibrate_again(change: dict[str, Any]) -> None:
    first, longer = warm(), make(**change)
    feed(first, [noise(32.0)] * 3)
    longer.load_state_dict(first.state_dict(), change=list(change))
    [again] = feed(longer, [noise(64.0)] * 4)
    assert (again.phase, again.old, again.new) == ("calibrate", 32, 32)
    assert "calibration begins again" in again.reason


def test_rows_of_another_factor_do_not_count() -> None:
    first, second = warm(), make(factor=8.0)
    feed(first, [noise(16.0)] * 2)
    second.load_state_dict(first.state_dict(), change=["factor"])
    assert feed(second, [noise(16.0)] * 2) == []
    [grown] = feed(second, [noise(16.0)])
    assert grown.new == 32


def test_another_machine() -> None:
    grown = make()
    run(grown, 0, 6)
    assert grown.batch_size == 32 and grown.accumulation == 4
    state = grown.state_dict()
    wider = make(data_parallel=4, micro_batch=2)
    wider.load_state_dict(state)
    assert wider.batch_size == 32 and wider.accumulation == 4 and wider.lr_factor == math.sqrt(2)
    alone = make(data_parallel=1, micro_batch=16)
    alone.load_state_dict(state)
    assert alone.accumulation == 2
    state["batch_size"] = 40
    with pytest.raises(ValueError, match="40 cannot be split into micro-batches of 16"):
        alone.load_state_dict(state)
    assert alone.batch_size == 32
    state["batch_size"] = 128
    with pytest.raises(ValueError, match="128 is above max_batch_size=64"):
        alone.load_state_dict(state)


@pytest.mark.parametrize("change", [{"format": 1}, {"format": 2}, {"kind": "schedule"}])
def test_another_format_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reads a 'batch size controller' of format 3"):
        make().load_state_dict(make().state_dict() | change)


@pytest.mark.parametrize("upper", [12.0, math.inf])
def test_factor_as_a_file(tmp_path: Path, upper: float) -> None:
    factor = CriticalBatchFactor(8.0, 5.0, upper, "adam", "160M at 2.1B tokens")
    path = tmp_path / "factor.json"
    factor.save(path)
    assert CriticalBatchFactor.load(path) == factor
    kept = json.loads(path.read_text())
    assert (kept["kind"], kept["format"]) == ("critical batch factor", 1)
    for change, message in (
        (
            {"format": 2},
            "factor.json is a 'critical batch factor' of format 2, but this",
        ),
        (
            {"kind": "decision"},
            "is a 'decision' of .* reads a 'critical batch factor' of",
        ),
        ({"value": None}, "factor.json is damaged"),
        ({"metric": "l1"}, "factor.json is damaged: metric must be"),
    ):
        path.write_text(json.dumps(kept | change))
        with pytest.raises(ValueError, match=message):
            CriticalBatchFactor.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="factor.json is not JSON"):
        CriticalBatchFactor.load(path)


@pytest.mark.parametrize(
    "numbers", [(0.0, 0.0, 1.0), (math.nan, 0.0, 1.0), (2.0, 3.0, 4.0), (2.0, 1.0, math.nan)]
)
def test_factor_that_cannot_be(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive, finite and inside"):
        CriticalBatchFactor(*numbers, "adam", "")
