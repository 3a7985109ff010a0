# SPDX-License-Identifier: Apache-2.0
"""The controller grows on evidence alone, once at a time, within its bounds; it warns once."""

import json
import math
from typing import Any

import pytest
import torch
from controller_cases import CHECK, UNKNOWN, at_least, feed, make, noise, warm

import gnsfast
from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.critical_batch.control import cosine

ENOUGH, LITTLE = noise(16.0), noise(15.99, 100.0, 300.0)


def test_phases_change_at_their_tokens() -> None:
    controller = make(warm_up_until=0.5, tokens_per_sample=1)
    seen = {}
    for tokens in (0, 1, 999, 1000, 1001, 49_999, 50_000, 99_999, 100_000, 120_000):
        decision = controller.update(tokens, UNKNOWN)
        seen[tokens] = controller.phase, decision is not None
        assert decision is None or (decision.old, decision.new, decision.lr_factor) == (16, 16, 1.0)
    assert seen == {
        0: ("calibrate", False),
        1: ("calibrate", False),
        999: ("calibrate", False),
        1000: ("warm up", True),
        1001: ("warm up", False),
        49_999: ("warm up", False),
        50_000: ("monitor", True),
        99_999: ("monitor", False),
        100_000: ("monitor", False),
        120_000: ("monitor", False),
    }
    assert [d.tokens for d in controller.decisions] == [1000, 50_000]
    assert "1 % of the tokens" in controller.decisions[0].reason
    assert make(calibrate=0.0).phase == "warm up"
    assert make(calibrate=0.0, warm_up_until=0.0).phase == "monitor"


def test_a_step_over_two_phases_enters_the_last() -> None:
    controller = make(warm_up_until=0.5)
    decision = controller.update(60_000, UNKNOWN)
    assert decision is not None and decision.phase == "monitor"
    assert len(controller.decisions) == 1


def test_grows_at_the_last_of_patience_checks() -> None:
    controller = warm()
    assert feed(controller, [ENOUGH, ENOUGH]) == []
    [grown] = feed(controller, [ENOUGH])
    assert (grown.tokens, grown.phase, grown.old, grown.new) == (4000, "warm up", 16, 32)
    assert grown.lr_factor == math.sqrt(2) and not grown.warning
    assert (grown.estimate, grown.lower, grown.upper) == (48.0, 32.0, 96.0)
    assert "at least 32 at 3 checks in a row, which allows 32" in grown.reason
    assert controller.batch_size == 32 and controller.accumulation == 4
    assert controller.batch_tokens == 320
    assert feed(controller, [ENOUGH] * 5) == []  # for 64 it would have to be 32
    assert feed(controller, [noise(32.0)] * 2) == []
    [again] = feed(controller, [noise(32.0)])  # the row began anew
    assert (again.old, again.new) == (32, 64) and controller.lr_factor == 2.0


@pytest.mark.parametrize(
    "breaks",
    [LITTLE, UNKNOWN, noise(0.0, 40.0, math.inf), at_least(15.0), noise(17.0, 20.0, drift=True)],
    ids=["too low", "not measured", "any is possible", "at least too little", "drifting down"],
)
def test_the_row_is_broken_by(breaks: Any) -> None:
    controller = warm()
    assert feed(controller, [ENOUGH, ENOUGH, breaks, ENOUGH, ENOUGH]) == []
    assert len(feed(controller, [ENOUGH])) == 1


def test_one_sided_interval_is_evidence() -> None:
    controller = warm()
    [grown] = feed(controller, [at_least(16.0)] * 3)
    assert grown.new == 32 and grown.estimate == grown.upper == math.inf
    record = json.loads(json.dumps(grown.record(), allow_nan=False))
    assert record["kind"] == "decision" and record["lower"] == 32.0
    assert record["estimate"] is None and record["upper"] is None


def test_drift_counts_for_the_direction_it_lags_behind() -> None:
    controller = warm()  # whose estimate is not known, so there is no direction yet
    rising = [noise(16.0 + k, drift=True) for k in range(4)]
    [grown] = feed(controller, rising)
    assert grown.tokens == CHECK * 5
    falling = [noise(90.0 - k, drift=True) for k in range(9)]
    assert feed(warm(), falling) == []
    controller = warm()
    assert feed(controller, [noise(1.0 + k / 10, drift=True) for k in range(9)]) == []
    [warned] = feed(controller, [noise(1.0 - k / 10, drift=True) for k in range(3)])
    assert warned.warning


def test_calibration_only_observes() -> None:
    controller = make(calibrate=0.05)
    [entered] = feed(controller, [ENOUGH] * 5)  # the check of the boundary is calibration's
    assert entered.phase == "warm up" and (entered.old, entered.new) == (16, 16)
    assert entered.lower == 32.0
    assert feed(controller, [ENOUGH] * 2) == [] and len(feed(controller, [ENOUGH])) == 1
    assert feed(make(calibrate=0.05), [noise(1.0)] * 4) == []


def test_monitor_never_grows_but_warns() -> None:
    controller = make(calibrate=0.0, warm_up_until=0.02)
    decisions = feed(controller, [ENOUGH] * 9)
    assert [d.phase for d in decisions] == ["monitor"] and controller.batch_size == 16
    [warned] = feed(controller, [noise(1.0)] * 3)
    assert warned.warning and warned.phase == "monitor"


def test_a_change_of_phase_goes_before_a_growth() -> None:
    controller = make(calibrate=0.0, warm_up_until=0.03)
    [entered] = feed(controller, [ENOUGH] * 3)
    assert entered.phase == "monitor" and controller.batch_size == 16


def test_looks_only_when_a_check_is_due() -> None:
    controller = warm()
    asked: list[int] = []

    def measure() -> Any:
        asked.append(controller.tokens)
        return ENOUGH

    for tokens in range(1100, 4000, 100):
        assert controller.update(tokens, measure) is None
    assert len(asked) == 2 and controller.update(4050, measure) is not None
    assert controller.update(4050, measure) is None and len(asked) == 3
    assert controller.update(9999, measure) is None and len(asked) == 4  # one check, not five
    assert make(check_every=None).settings.check_every == 250


def test_a_measurement_that_raises_leaves_the_check_due() -> None:
    controller = warm()

    def fails() -> Any:
        raise RuntimeError("no backward pass")

    with pytest.raises(RuntimeError):
        controller.update(2000, fails)
    assert controller.tokens == 1000
    assert controller.update(2000, ENOUGH) is None and controller.metrics()["cbs/estimate"] == 48


def test_cap_says_so_once() -> None:
    controller = warm(max_batch_size=40)
    decisions = feed(controller, [noise(1000.0)] * 20)
    assert [(d.old, d.new, d.phase) for d in decisions] == [
        (16, 32, "warm up"),
        (32, 32, "monitor"),
    ]
    capped = decisions[-1]
    assert "max_batch_size=40 does not" in capped.reason and capped.lr_factor == 1.0
    assert not capped.warning
    assert controller.batch_size == 32 and controller.phase == "monitor"


@pytest.mark.parametrize(
    "lr, step, total", [("sqrt", math.sqrt(3), 3.0), ("linear", 3.0, 9.0), ("none", 1.0, 1.0)]
)
def test_learning_rate(lr: str, step: float, total: float) -> None:
    controller = warm(growth=3, max_batch_size=200, lr=lr, betas="half_life")
    decisions = feed(controller, [noise(1000.0)] * 6)
    assert [d.new for d in decisions] == [48, 144] and controller.lr_factor == total
    assert all(d.lr_factor == step for d in decisions)


def test_warns_once_an_episode() -> None:
    controller = warm()
    over, fits = (noise(low, upper=7.9) for low in (4.44, 4.45))  # times 1.5, 2: 13.32 and 13.35
    assert feed(controller, [over, over, fits, over, over, UNKNOWN, over, over]) == []
    [warned] = feed(controller, [over])
    assert warned.warning and warned.old == warned.new == 16 and warned.lr_factor == 1.0
    assert "16 is more than 1.2 times the estimated critical batch size of 13.32" in warned.reason
    assert warned.record()["warning"] is True
    assert feed(controller, [over] * 5 + [fits, fits, UNKNOWN, over, over, over]) == []
    assert feed(controller, [fits] * 3 + [over, over]) == []
    assert [d.warning for d in feed(controller, [over] * 4)] == [True]
    assert feed(controller, [at_least(8.0)] * 3) == []  # at least 16 is recovered
    assert [d.warning for d in feed(controller, [over] * 4)] == [True]
    assert feed(controller, [at_least(7.9)] * 3 + [over] * 4) == []  # at least 15.8 is not


def test_no_warning_where_the_interval_holds_the_batch_size() -> None:
    """The estimate alone is far below the batch size of 16; ``flag`` calls it unresolved."""
    controller = warm()
    unresolved, too_large = noise(0.5, 2.0, 20.0), noise(0.5, 2.0, 7.9)
    assert gnsfast.flag(16, unresolved, 2.0).verdict == "unresolved"
    assert feed(controller, [unresolved] * 9 + [noise(0.5, 2.0, 8.0)] * 9) == []  # its end is 16
    assert gnsfast.flag(16, too_large, 2.0).verdict == "too large"
    assert feed(controller, [too_large, too_large, unresolved, too_large, too_large]) == []
    [warned] = feed(controller, [too_large])
    assert warned.warning and warned.reason.endswith("size of 4, which is at most 15.8")


def test_what_is_not_a_number_is_no_evidence() -> None:
    controller = warm()
    assert feed(controller, [noise(50.0, math.nan)] * 5) == []
    assert feed(controller, [noise(0.0, math.nan, 1.0)] * 5) == []
    assert controller.metrics() == {"batch/size": 16.0, "batch/phase": 1.0}


def test_no_warning_by_a_value_without_bounds() -> None:
    controller = warm()
    assert feed(controller, [noise(0.0, 1.0, math.inf)] * 9) == []
    [warned] = feed(controller, [noise(0.0, -0.1, 1.0)] * 9)  # a tr Σ that came out below zero
    assert warned.warning and "cbs/ratio" not in controller.metrics()


def test_interval_of_a_measured_factor() -> None:
    measured = CriticalBatchFactor(2.0, 1.5, math.inf, "euclidean", "a checkpoint")
    controller = warm(factor=measured)
    assert feed(controller, [ENOUGH] * 9) == []  # the lower end is 16 * 1.5
    [grown] = feed(controller, [noise(22.0)] * 3)
    assert (grown.estimate, grown.lower, grown.upper) == (66.0, 33.0, math.inf)
    with pytest.raises(ValueError, match="measured with metric='euclidean' .a checkpoint."):
        make(factor=measured, metric="adam")
    with pytest.raises(ValueError, match="begins at 0"):
        make(factor=CriticalBatchFactor(2.0, 0.0, 3.0, "euclidean", ""))


@pytest.mark.parametrize("metric", ["adam", "sign", "spectral"])
def test_other_metrics(metric: str) -> None:
    """The noise scale in the factor's metric alone decides; the window's drift holds for it too."""
    controller = make(metric=metric)
    others = dict.fromkeys({"adam", "sign", "spectral"} - {metric}, ENOUGH)
    with pytest.raises(ValueError, match=f"GradientNoiseScale.model, metric='{metric}'"):
        controller.update(CHECK, noise(16.0, **others))
    feed(controller, [noise(16.0, **others, **{metric: UNKNOWN})])
    assert "cbs/estimate" not in controller.metrics()
    [grown] = feed(controller, [noise(1.0, **{metric: ENOUGH})] * 3)
    assert grown.new == 32 and grown.estimate == 48.0
    falling = [noise(1.0, drift=True, **{metric: noise(40.0 - k)}) for k in range(4)]
    assert feed(controller, falling) == []
    [grown] = feed(controller, [noise(1.0, drift=True, **{metric: noise(40.0)})] * 3)
    assert grown.new == 64


def test_metrics() -> None:
    controller = make()
    assert controller.metrics() == {"batch/size": 16.0, "batch/phase": 0.0}
    feed(controller, [noise(20.0)])
    assert controller.metrics() == {
        "batch/size": 16.0,
        "batch/phase": 1.0,
        "cbs/estimate": 60.0,
        "cbs/estimate_lo": 40.0,
        "cbs/estimate_hi": 120.0,
        "cbs/ratio": 16 / 60,
    }
    feed(controller, [noise(5.0, 20.0, math.inf)])  # a mean that the window does not resolve
    assert controller.metrics() == {
        "batch/size": 16.0,
        "batch/phase": 1.0,
        "cbs/estimate_lo": 10.0,
    }


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def test_apply() -> None:
    controller = warm(betas="half_life")
    groups = [{"params": parameter(), "lr": torch.tensor(0.5)}, {"params": parameter(), "lr": 2.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    controller.apply(controller.decisions[0], optimizer)  # a change of phase changes nothing
    assert optimizer.param_groups[1]["lr"] == 2.0 and rate.item() == 0.5
    [grown] = feed(controller, [ENOUGH] * 3)
    controller.apply(grown, optimizer)
    first, second = optimizer.param_groups
    assert first["lr"] is rate and rate.item() == pytest.approx(0.5 * math.sqrt(2))
    assert second["lr"] == pytest.approx(2.0 * math.sqrt(2))
    assert first["betas"] == second["betas"] == (0.9, 0.99**2)
    controller.lr_lambda(cosine(1000))  # now the learning rate is the scheduler's
    controller.apply(grown, optimizer)
    assert second["lr"] == pytest.approx(2.0 * math.sqrt(2))
    assert second["betas"] == (0.9, pytest.approx(0.99**4))


def test_apply_beside_a_scheduler() -> None:
    """One that is not the controller's would undo the growth at its next step."""
    optimizer = torch.optim.AdamW(parameter(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    controller = warm(betas="half_life")
    [grown] = feed(controller, [ENOUGH] * 3)
    controller.apply(controller.decisions[0], optimizer)  # nothing to undo
    with pytest.raises(ValueError, match="use LambdaLR.optimizer, controller.lr_lambda"):
        controller.apply(grown, optimizer)
    controller.apply(grown, optimizer, lr=False)
    assert optimizer.param_groups[0]["betas"] == (0.9, pytest.approx(0.999**2))
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_optimizer_that_could_not_follow_to_the_end() -> None:
    """Two growths are left: 1 - 4 * 0.3 is negative."""
    optimizer = torch.optim.AdamW(parameter(), betas=(0.7, 0.99))
    with pytest.raises(
        ValueError, match="4 times as large with .0.7, 0.99., where 1 - k .1 - beta"
    ):
        make(betas="sde").check_optimizer(optimizer)
    make(betas="sde", max_batch_size=63).check_optimizer(optimizer)
    controller = warm(betas="sde")
    feed(controller, [ENOUGH] * 3)
    controller.check_optimizer(optimizer)  # one is left


def test_apply_without_betas() -> None:
    optimizer = torch.optim.SGD(parameter(), lr=1.0)
    for betas in ("half_life", "keep"):
        controller = warm(betas=betas, lr="linear")
        [grown] = feed(controller, [ENOUGH] * 3)
        if betas == "half_life":
            with pytest.raises(ValueError, match="SGD has no betas.*betas='keep'"):
                controller.apply(grown, optimizer)
            assert optimizer.param_groups[0]["lr"] == 1.0
    controller.apply(grown, optimizer)
    assert optimizer.param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": 20}, "20 cannot be split into micro-batches of 4 .* multiple of 8"),
        ({"data_parallel": 3}, "a multiple of 12"),
        ({"data_parallel": 3, "micro_batch": None}, "must be a multiple of data_parallel=3"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"factor": 0}, "factor must be positive, not 0"),
        ({"factor": -1.0}, "factor must be a number of at least 0, not -1"),
        ({"factor": math.nan}, "factor must be a number"),
        ({"factor": math.inf}, "factor must be a number"),
        ({"factor": True}, "factor must be a number"),
        ({"factor": "8.json"}, "factor=CriticalBatchFactor.load.'8.json'"),
        ({"metric": "l1"}, "metric must be 'euclidean', 'adam', 'sign' or 'spectral'"),
        ({"tokens_per_sample": 1.5}, "tokens_per_sample"),
        ({"total_tokens": 0}, "total_tokens"),
        ({"max_batch_size": 8}, "max_batch_size=8 must be at least the batch size of 16"),
        ({"calibrate": 1.5}, "calibrate"),
        ({"calibrate": -0.1}, "calibrate"),
        ({"warm_up_until": 0.001}, "warm_up_until must be a number of at least 0.01"),
        ({"growth": 1}, "growth must be a whole number of at least 2"),
        ({"growth": 1.5}, "growth must be a whole number"),
        ({"lr": "log"}, "lr must be"),
        ({"betas": "half"}, "betas must be"),
        ({"weight_decay": "half"}, "weight_decay must be"),
        ({"patience": 0}, "patience"),
        ({"check_every": 0}, "check_every"),
        ({"over": 0.9}, "over"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_tokens_that_cannot_be() -> None:
    controller = make()
    for tokens in (-1, 1.5, math.nan, True):
        with pytest.raises(ValueError, match="tokens must be a whole number of at least 0"):
            controller.update(tokens, UNKNOWN)  # type: ignore[arg-type]
    controller.update(3000, UNKNOWN)
    for wrong in (1, 9):  # steps, or samples: less than one sample's tokens
        with pytest.raises(
            ValueError, match="pass the tokens trained so far to update.., not steps"
        ):
            controller.update(3000 + wrong, UNKNOWN)
    with pytest.raises(ValueError, match="tokens went back from 3,000 to 2,999"):
        controller.update(2999, UNKNOWN)
    with pytest.raises(TypeError, match="must be gns.compute.. or gns.compute itself"):
        controller.update(4000, 31.0)  # type: ignore[arg-type]
    controller.update(3000, UNKNOWN)
