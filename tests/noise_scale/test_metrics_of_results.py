# SPDX-License-Identifier: Apache-2.0
"""The noise scales of one result, by metric."""

import math

import pytest

from gnsfast.noise_scale import METRICS, OTHERS, AdamNoiseScale, DualNoiseScale, NoiseScale

ENDS = (20.0, 10.0, 40.0)
OTHER = {
    "adam": AdamNoiseScale(*ENDS, 2.0, 0.1, updates=5),
    "sign": DualNoiseScale(*ENDS, 2.0, 0.4, 0.5, "sign", 5, (), {}),
    "spectral": DualNoiseScale(math.inf, 3.0, math.inf, 2.0, -0.4, 0.5, "spectral", 5, (), {}),
}


def result(*measured: str) -> NoiseScale:
    others = {metric: OTHER[metric] for metric in measured}
    return NoiseScale(30.0, 15.0, 60.0, 3.0, 0.1, False, 6, 0, 48, {}, **others)


def test_under() -> None:
    found = result("spectral", "adam")
    assert found.under("euclidean") is found
    assert found.under("adam") is OTHER["adam"] and found.under("spectral") is OTHER["spectral"]
    assert found.others == {metric: OTHER[metric] for metric in ("adam", "spectral")}
    assert result().others == {} and list(result(*OTHER).others) == list(OTHERS)
    assert METRICS == ("euclidean", *OTHERS)


@pytest.mark.parametrize(
    "metric, setting",
    [
        ("adam", "metric='adam', optimizer=optimizer"),
        ("sign", "metric='sign'"),
        ("spectral", "metric='spectral'"),
    ],
)
def test_what_is_not_measured(metric: str, setting: str) -> None:
    """The error names the setting, and what the noise scale is, in words."""
    with pytest.raises(ValueError) as error:
        result(*({*OTHERS} - {metric})).under(metric)
    assert str(error.value) == (
        f"this estimator does not measure the noise scale {OTHERS[metric]}: make it with "
        f"GradientNoiseScale(model, {setting})"
    )
    with pytest.raises(ValueError, match="metric must be 'euclidean', .* or 'spectral', not 'l1'"):
        result().under("l1")
