# SPDX-License-Identifier: Apache-2.0
"""Every law against its paper's own numbers; the trade-off; power laws through measurements."""

import math

import pytest
import torch

from gnsfast.critical_batch import laws
from gnsfast.critical_batch.laws import (
    Interval,
    fit_power_law,
    from_twenty_percent,
    steps_share,
    student_t,
    tokens_share,
    trade_off,
    twenty_percent,
)


@pytest.mark.parametrize(
    ("tokens", "batch", "beyond"),
    [(20e9, 1.23e6, 1.0), (100e9, 2.63e6, 4.2), (500e9, 5.6e6, 21), (2e12, 10.7e6, 83)],
)
def test_zhang_in_tokens(tokens: float, batch: float, beyond: float) -> None:
    assert laws.ZHANG_TOKENS.batch_tokens(tokens) == pytest.approx(batch, rel=0.005)
    assert laws.ZHANG_TOKENS.extrapolated(tokens) == pytest.approx(beyond, rel=0.02)
    assert laws.ZHANG_TOKENS.quantity == laws.CRITICAL_20


def test_zhang_laws_meet_at_151m() -> None:
    params = 151e6
    samples = [
        law.batch_tokens(value) / 512
        for law, value in (
            (laws.ZHANG_PARAMS, params),
            (laws.ZHANG_TOKENS, 20 * params),
            (laws.ZHANG_FIXED_DATA, params),
        )
    ]
    assert [round(s) for s in samples] == [985, 990, 961]


@pytest.mark.parametrize("params", [85e6, 302e6, 604e6, 1.2e9])
def test_zhang_laws_agree_at_chinchilla(params: float) -> None:
    by_tokens = laws.ZHANG_TOKENS.batch_tokens(laws.chinchilla_tokens(params))
    by_params = laws.ZHANG_PARAMS.batch_tokens(params)
    assert by_tokens == pytest.approx(by_params, rel=0.005)
    assert by_tokens / 512 > 1.2 * 256  # B* is above 1.2 B_opt by its definition


def test_step_law() -> None:
    assert laws.STEP_LAW.batch_tokens(100e9) == pytest.approx(1.107e6, rel=0.002)
    assert laws.STEP_LAW.batch_tokens(40e9) == pytest.approx(0.656e6, rel=0.002)
    assert laws.STEP_LAW.extrapolated(100e9) == 1.0
    assert laws.STEP_LAW.extrapolated(1e9) == 2.0


@pytest.mark.parametrize(
    ("layers", "width", "used"), [(30, 4096, 2304 * 4096), (95, 8192, 4608 * 4096)]
)
def test_deepseek_7b_and_67b(layers: int, width: int, used: float) -> None:
    """The batch sizes that the paper trained with on 2T tokens, by its own C."""
    compute = (72 * layers * width**2 + 12 * layers * width * 4096) * 2e12
    assert laws.DEEPSEEK.batch_tokens(compute) == pytest.approx(used, rel=0.1)
    assert laws.DEEPSEEK.quantity == laws.OPTIMAL


def test_kaplan() -> None:
    assert 1e6 < laws.KAPLAN.batch_tokens(3.0) < 2e6  # "roughly 1-2 million tokens"
    half = laws.KAPLAN.batch_tokens(3.0) / laws.KAPLAN.batch_tokens(3.0 * 0.87)
    assert half == pytest.approx(0.5, rel=0.04)  # "doubles for every 13 % decrease in loss"
    assert laws.KAPLAN.extrapolated(3.0) is None and laws.KAPLAN.quantity == laws.CRITICAL


def test_minicpm() -> None:
    """Batches of 3.93M tokens, with which it trained, are those of a C4 loss of 2.5."""
    assert laws.MINICPM.batch_tokens(1.0) == 1.21e9
    assert laws.MINICPM.batch_tokens(2.505) == pytest.approx(3.93e6, rel=0.01)


def test_ling_experts() -> None:
    """Within the batches of 2^18 to 2^21 tokens that were tried for it."""
    assert 2**18 < laws.LING_EXPERTS.batch_tokens(3e18) < 2**20
    assert laws.LING_EXPERTS.batch_tokens(3e20) == pytest.approx(2.0e6, rel=0.01)
    assert laws.LING_EXPERTS.extrapolated(3e21) == pytest.approx(10)
    dense = {p.law.name for p in laws.predictions(20e9, params=1e9)}
    experts = {p.law.name for p in laws.predictions(20e9, params=1e9, experts=True)}
    assert dense - experts == {"DeepSeek"} and experts - dense == {"Ling, experts"}


def test_power_lines_go_through_their_point() -> None:
    for through, exponent, quantity in (
        (laws.power_lines_optimal, 0.383, laws.OPTIMAL),
        (laws.power_lines_critical, 0.462, laws.CRITICAL),
    ):
        law = through(3e9, 1e6)
        assert law.quantity == quantity and "your measurement" in law.source
        assert law.batch_tokens(3e9) == 1e6
        assert law.batch_tokens(30e9) == pytest.approx(1e6 * 10**exponent)
        assert law.extrapolated(30e9) == pytest.approx(10) and law.extrapolated(3e9) == 1.0
        with pytest.raises(ValueError, match="tokens must be positive and finite, not 0"):
            through(0, 1e6)
    assert laws.power_lines_timescale(1e9, 1e9) == pytest.approx(1.084)
    fall = laws.power_lines_timescale(200e9, 1e9) / laws.power_lines_timescale(20e9, 1e9)
    assert fall == pytest.approx(10**-0.527)


def test_predictions_and_their_ranges() -> None:
    found = {p.law.name: p for p in laws.predictions(20e9, params=1e9, loss=3.0)}
    assert set(found) == {law.name for law in laws.LAWS}
    assert found["DeepSeek"].value == 6 * 20e9 * 1e9
    ranges = laws.ranges(found.values())
    assert set(ranges) == {laws.CRITICAL, laws.CRITICAL_20, laws.OPTIMAL}
    low, high = ranges[laws.OPTIMAL]
    assert low == found["Step Law"].batch_tokens < high == found["MiniCPM"].batch_tokens
    names = {p.law.name for p in laws.predictions(500e9, params=1e9)}
    assert "Zhang, parameters" not in names and "Kaplan" not in names
    for bad in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tokens must be positive"):
            laws.predictions(bad)


@pytest.mark.parametrize("batch", [1, 100, 4096, 100_000])
def test_trade_off_identity(batch: int) -> None:
    s, e = steps_share(batch, 4096), tokens_share(batch, 4096)
    assert (s - 1) * (e - 1) == pytest.approx(1)
    assert s / e == pytest.approx(4096 / batch)
    assert steps_share(4096, 4096) == tokens_share(4096, 4096) == 2


def test_twenty_percent_rule_is_its_definition() -> None:
    a, b, optimal = 1000.0, 3e6, 256.0
    star = twenty_percent(b / a, optimal)
    assert a + b / star == pytest.approx(1.2 * (a + b / optimal) * optimal / star)
    assert from_twenty_percent(star, optimal) == pytest.approx(b / a)
    with pytest.raises(ValueError, match="above 1.2 B_opt"):
        from_twenty_percent(300, 256)


def test_costs() -> None:
    critical = Interval(1024, 512, math.inf)
    options = {"tokens": 1e9, "tokens_per_sample": 1000, "batch_size": 256}
    time = {"gpus": 8, "tokens_per_second": 1e4, "gpu_hour_price": 2.0}
    small, planned, large = trade_off(critical, [128, 256, 1024], **options, **time)
    assert planned.tokens == Interval(1e9, 1e9, 1e9) and planned.gpus == 8
    assert large.tokens.value == pytest.approx(1e9 * 2 / 1.25)
    assert large.tokens.lower == 1e9  # at an infinite B_crit nothing is lost
    assert large.tokens.upper == pytest.approx(1e9 * 3 / 1.5)
    assert small.tokens.lower < small.tokens.value < small.tokens.upper == 1e9
    assert large.steps.value == pytest.approx(1562.5) and large.gpus == 32
    hours = 1.6e9 / 1e4 / 3600
    assert large.gpu_hours is not None and large.gpu_hours.value == pytest.approx(hours)
    assert large.money is not None and large.money.value == pytest.approx(2 * hours)
    assert large.days is not None and large.days.value == pytest.approx(hours / 32 / 24)
    least = trade_off(critical, [1024], tokens=1e9, tokens_per_sample=1000)[0]
    assert least.tokens.value == 2e9 and least.days is None  # tokens are E_min without a batch
    for wrong, said in (
        ({"gpus": 8}, "GPU-hours also need tokens_per_second"),
        ({"gpu_hour_price": 2.0}, "gpu_hour_price also needs"),
        ({**time, "gpu_hour_price": -1.0}, "gpu_hour_price must be positive and finite, not -1"),
    ):
        with pytest.raises(ValueError, match=said):
            trade_off(critical, [256], **options, **wrong)
    with pytest.raises(ValueError, match="outside of its interval"):
        trade_off(Interval(5, 6, 7), [256], **options)


def test_student_t_is_the_table() -> None:
    """Percentage points as printed in tables of the distribution."""
    tables = {
        0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980},
        0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 10: 3.169, 30: 2.750, 120: 2.617},
        0.5: {1: 1.000, 2: 0.816, 3: 0.765},
    }
    for confidence, rows in tables.items():
        for freedom, quantile in rows.items():
            assert student_t(confidence, freedom) == pytest.approx(quantile, abs=6e-4)


def test_fit_is_the_formula() -> None:
    """An ordinary regression of four points, worked out by its normal equations."""
    x, y = [1.0, 2.0, 4.0, 8.0], [3.0, 5.0, 9.5, 15.0]
    design = torch.tensor([[1.0, math.log(v)] for v in x], dtype=torch.float64)
    logs = torch.tensor(y, dtype=torch.float64).log()
    inverse = torch.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ logs
    variance = (logs - design @ beta).square().sum() / 2
    law = fit_power_law(x, y)
    assert law.exponent.value == pytest.approx(beta[1].item())
    assert law.prefactor.value == pytest.approx(beta[0].exp().item())
    half = 4.302653 * (variance * inverse.diagonal()).sqrt()
    assert law.exponent.upper - law.exponent.value == pytest.approx(half[1].item(), rel=1e-6)
    assert law.prefactor.lower == pytest.approx((beta[0] - half[0]).exp().item(), rel=1e-6)
    at = torch.tensor([1.0, math.log(20.0)], dtype=torch.float64)
    spread = 4.302653 * (variance * (1 + at @ inverse @ at)).sqrt()
    assert law.predict(20.0).upper == pytest.approx((at @ beta + spread).exp().item(), rel=1e-6)
    assert law.extrapolated(20.0) == 2.5 and law.extrapolated(3.0) == 1.0
    assert law.extrapolated(0.5) == 2.0


def test_intervals_cover_the_truth() -> None:
    """95 % of 1,000 simulated fits of five points: 950 ± 7."""
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([1e9, 3e9, 1e10, 3e10, 1e11], dtype=torch.float64)
    noise = torch.randn(1000, 6, generator=generator, dtype=torch.float64) * 0.3
    true = torch.cat([x, x.new_tensor([5e11])]).pow(0.47) * 0.02
    hits = [0, 0, 0]
    for row in (true * noise.exp()).tolist():
        law = fit_power_law(x.tolist(), row[:5])
        found = (law.exponent, 0.47), (law.prefactor, 0.02), (law.predict(5e11), row[5])
        for k, (interval, value) in enumerate(found):
            hits[k] += interval.lower <= value <= interval.upper
    assert all(925 <= h <= 975 for h in hits), hits


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        ([1, 2], [1, 2], "at least 3"),
        ([1, 2, 3], [1, 2], "one length, not 3 and 2"),
        ([1, 2, 0], [1, 2, 3], "x holds 0"),
        ([1, 2, 3], [1, -2, 3], "y holds -2"),
        ([1, 2, 3], [1, math.nan, 3], "y holds nan"),
        ([1, 2, math.inf], [1, 2, 3], "x holds inf"),
        ([5, 5, 5], [1, 2, 3], "every x is 5"),
    ],
)
def test_bad_measurements(x: list[float], y: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_power_law(x, y)


def test_three_points_say_how_little_they_know() -> None:
    law = fit_power_law([1e9, 2e9, 4e9], [100, 210, 380])
    assert law.predict(1e12).upper > 10 * law.predict(1e12).value
    exact = fit_power_law([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert exact.exponent.value == pytest.approx(1) and exact.predict(5.0).value == pytest.approx(
        10
    )
    with pytest.raises(ValueError, match="x must be positive and finite, not 0"):
        exact.predict(0)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, not 95"):
        fit_power_law([1, 2, 3], [1, 2, 3], confidence=95)
