# SPDX-License-Identifier: Apache-2.0
"""A batch size against the critical batch size that a noise scale gives: four verdicts."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from controller_cases import UNKNOWN, at_least, noise

import gnsfast
from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.integrations.measuring import Flags
from gnsfast.noise_scale import Estimate


@pytest.mark.parametrize(
    ("lower", "value", "upper", "verdict"),
    [
        (16.0, 20.0, 24.0, "too small"),  # times 4: at least 64
        (15.99, 20.0, 24.0, "fair"),
        (8.0, 12.0, 15.99, "fair"),
        (8.0, 12.0, 100.0, "fair"),
        (4.0, 6.0, 8.0, "fair"),
        (4.0, 6.0, 7.99, "too large"),
        (7.99, 9.0, 15.99, "fair"),
        (7.99, 9.0, 16.0, "unresolved"),
        (0.0, 9.0, math.inf, "unresolved"),
        (8.0, 9.0, math.inf, "fair"),
        (16.0, math.inf, math.inf, "too small"),
        (0.0, -0.1, 1.0, "too large"),  # a tr Σ that came out below zero
    ],
)
def test_verdicts(lower: float, value: float, upper: float, verdict: str) -> None:
    found = gnsfast.flag(32, noise(lower, value, upper), 4.0)
    assert found.verdict == verdict and str(found).startswith(f"{verdict}: the critical batch")
    assert (found.lower, found.estimate, found.upper) == (4 * lower, 4 * value, 4 * upper)


def test_words() -> None:
    said = [
        str(gnsfast.flag(256, scale, 2.0))
        for scale in (
            noise(400.0, 500.0, 700.0),
            noise(5.0, 8.7, 12.0),
            noise(100.0, 150.0, 200.0),
            noise(100.0, 150.0, 900.0),
            at_least(130.0),
            noise(0.0, 150.0, 900.0),
            UNKNOWN,
        )
    ]
    assert said == [
        "too small: the critical batch size is at least 800, 3.12 times the batch size of 256",
        "too large: the critical batch size is at most 24, less than the batch size of 256, which "
        "is 14.7 times the estimate",
        "fair: the critical batch size is 300 (200 to 400), which the batch size of 256 fits",
        "unresolved: the critical batch size is 300 (200 to 1,800), which does not tell whether "
        "the batch size of 256 fits",
        "fair: the critical batch size is at least 260, which the batch size of 256 fits",
        "unresolved: the critical batch size is at most 1,800, which does not tell whether the "
        "batch size of 256 fits",
        "unresolved: the noise scale is not measured yet",
    ]


def test_a_drifting_window_is_judged_by_its_end() -> None:
    """Its mean says that 32 is too large; by now the critical batch size has risen."""
    lags = noise(2.0, 3.0, 4.0, drift=True)
    assert gnsfast.flag(32, lags, 4.0).verdict == "unresolved"
    assert "whose mean lags behind" in gnsfast.flag(32, lags, 4.0).reason
    now = replace(lags, present=Estimate(20.0, 17.0, 25.0))
    found = gnsfast.flag(32, now, 4.0)
    assert found.verdict == "too small" and "the present critical batch size" in found.reason
    assert gnsfast.flag(32, replace(now, drift=False), 4.0).verdict == "too large"
    adam = replace(now, adam=noise(2.0, 3.0, 4.0, adam=noise(2.0, 3.0, 4.0)).adam)
    assert gnsfast.flag(32, adam, 4.0, metric="adam").verdict == "unresolved"


def test_measured_factors() -> None:
    factor = CriticalBatchFactor(4.0, 3.0, math.inf, "adam", "a checkpoint")
    result = noise(1.0, adam=noise(16.0, 20.0, 24.0))
    found = gnsfast.flag(24, result, factor)
    assert (found.lower, found.estimate, found.upper) == (48.0, 80.0, math.inf)
    assert found.verdict == "too small"
    with pytest.raises(ValueError, match="measured for metric='adam', and not for 'sign'"):
        gnsfast.flag(24, result, factor, metric="sign")
    with pytest.raises(ValueError, match="noise scale under Adam's metric: make it with"):
        gnsfast.flag(24, noise(1.0), factor)


@pytest.mark.parametrize(
    ("batch_size", "factor", "said"),
    [
        (0, 1.0, "batch_size must be positive, not 0"),
        (-3, 1.0, "batch_size must be a number of at least 0, not -3"),
        (math.nan, 1.0, "batch_size must be a number"),
        (32, 0, "factor must be positive, not 0"),
        (32, -1.0, "factor must be a number of at least 0"),
        (32, "cbs/factor.json", r"CriticalBatchFactor.load\('cbs/factor.json'\)"),
        (32, Path("cbs/factor.json"), r"CriticalBatchFactor.load\('cbs/factor.json'\)"),
        (32, True, "factor must be a number"),
        (32, None, "factor must be a number of at least 0, not None"),
        (32, torch.ones(2), "factor must be a number of at least 0, not tensor"),
        (32, torch.tensor(True), "factor must be a number"),
        (32, torch.tensor(0.0), "factor must be positive, not 0"),
    ],
)
def test_what_cannot_be(batch_size: Any, factor: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gnsfast.flag(batch_size, noise(1.0), factor)


def test_numbers_of_other_libraries() -> None:
    truth = gnsfast.flag(32, noise(4.0, 6.0, 7.0), 4.0)
    for factor in (4, np.float32(4), np.int64(4), np.array(4.0), torch.tensor(4.0)):
        assert gnsfast.flag(32, noise(4.0, 6.0, 7.0), factor) == truth
        assert Flags(factor, None).metrics(noise(40.0), {}, log=False)["batch/flag"] == -1.0


def test_metrics() -> None:
    found = gnsfast.flag(32, noise(4.0, 6.0, 7.0), 4.0).metrics()
    assert found == {
        "cbs/estimate_lo": 16.0,
        "cbs/estimate": 24.0,
        "cbs/estimate_hi": 28.0,
        "cbs/ratio": 32 / 24,
        "batch/flag": 1.0,
    }
    assert gnsfast.flag(32, UNKNOWN, 4.0).metrics() == {}
    assert gnsfast.flag(32, noise(0.0, 6.0, 7.0), 4.0).metrics() == {
        "cbs/estimate_lo": 0.0,
        "cbs/estimate_hi": 28.0,
        "batch/flag": 1.0,
    }
    assert gnsfast.flag(32, at_least(4.0), 4.0).metrics() == {"cbs/estimate_lo": 16.0}
    assert gnsfast.flag(32, at_least(16.0), 4.0).metrics()["batch/flag"] == -1.0


def test_the_log_has_the_news_alone(caplog: pytest.LogCaptureFixture) -> None:
    flags = Flags(1.0, None)
    caplog.set_level(logging.INFO, "gnsfast")
    small, fair, unknown = noise(40.0), noise(12.0, 16.0, 30.0), noise(1.0, 16.0, 90.0)
    large = [noise(16 / k / 1.5, 16 / k, 15.99 / k * 1.2) for k in (1.3, 2.5, 2.7, 5.0, 5.5)]
    for scale in (small, small, unknown, small, fair, fair, unknown, fair, *large, unknown):
        flags.metrics(scale, {}, log=True)  # of 320 samples in 20 updates
    said = [(r.levelname, r.getMessage().split(":")[0][-9:]) for r in caplog.records]
    assert said == [
        ("WARNING", "too small"),
        ("INFO", "e is fair"),
        ("WARNING", "too large"),
        ("WARNING", "too large"),
        ("WARNING", "too large"),
    ]
    caplog.clear()
    assert (
        Flags(1.0, None).metrics(small, {}, log=False)["batch/flag"] == -1.0 and not caplog.records
    )
    assert Flags(1.0, None).metrics(replace(small, updates=0), {}, log=True) == {}


def test_an_infinite_excess_is_news_once(caplog: pytest.LogCaptureFixture) -> None:
    flags, below_zero = Flags(1.0, None), noise(-2.0, -0.1, 1.0)
    for scale in (noise(4.0, 5.0, 6.0), below_zero, below_zero, below_zero):
        assert flags.metrics(scale, {}, log=True)["batch/flag"] == 1.0
    assert [r.getMessage().split(":")[0][-9:] for r in caplog.records] == ["too large"] * 2


def test_beside_a_controller() -> None:
    """The present batch is judged, and a controller's own ``cbs/*`` stay as they are."""
    flags, scale = Flags(1.0, None), noise(12.0, 16.0, 30.0)  # of 320 samples in 20 updates
    assert flags.metrics(scale, {}, log=False)["batch/flag"] == 0.0
    found = flags.metrics(scale, {"batch/size": 64.0}, log=False)
    assert found["batch/flag"] == 1.0 and found["cbs/ratio"] == 4.0
    also = {"batch/size": 4.0, "batch/phase": 1.0, "cbs/estimate_lo": 400.0}
    assert flags.metrics(scale, also, log=False) == {"batch/flag": -1.0}


def test_a_factor_of_a_metric_that_is_not_measured() -> None:
    factor = CriticalBatchFactor(4.0, 3.0, 5.0, "adam", "a checkpoint")
    with pytest.raises(ValueError, match="measure it by metric='adam'"):
        Flags(factor, ["sign"])
    Flags(factor, "adam")
