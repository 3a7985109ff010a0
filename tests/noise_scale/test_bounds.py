# SPDX-License-Identifier: Apache-2.0
"""What is said where a window gives only one end of the interval, and of samples that are alike."""

import math

import pytest
import torch
from noise_cases import one_update
from torch import nn

import gnsfast
from gnsfast.integrations.trackers import metrics
from gnsfast.noise_scale import Estimate, NoiseScale
from gnsfast.noise_scale.statistics import RESOLUTION, drifted

PRESENT = Estimate(40.0, 25.0, 70.0)


def result(lower: float, upper: float, present: Estimate = PRESENT) -> NoiseScale:
    return NoiseScale(30.0, lower, upper, 3.0, 0.1, False, 40, 0, 320, {}, present=present)


@pytest.mark.parametrize(
    ("lower", "upper", "said", "logged"),
    [
        (15.0, 60.0, "noise scale 30 samples (95 %: 15 to 60)", {"": 30.0, "_lo": 15, "_hi": 60}),
        (15.0, math.inf, "noise scale at least 15 samples (95 %)", {"_lo": 15}),
        (0.0, 60.0, "noise scale at most 60 samples (95 %)", {"_lo": 0, "_hi": 60}),
        (0.0, math.inf, "noise scale not resolved: it may have any size", {"_lo": 0}),
    ],
)
def test_one_end(lower: float, upper: float, said: str, logged: dict[str, float]) -> None:
    """``print`` and logs agree; a value is shown with both its ends or not at all."""
    found = result(lower, upper)
    assert str(found).startswith(f"{said}, ") and found.resolved == ("" in logged)
    names = {f"gns/b_simple{end}": value for end, value in logged.items()}
    assert {k: v for k, v in metrics(found).items() if k.startswith("gns/b_")} == names
    assert ("at most 60" in found.interval.ends("{:.3g}".format)) == ("at most" in said)


def test_present_is_logged_with_its_ends() -> None:
    names = ("gns/present", "gns/present_lo", "gns/present_hi")
    logged = metrics(result(15.0, 60.0))
    assert [logged[name] for name in names] == [40.0, 25.0, 70.0]
    logged = metrics(result(15.0, 60.0, Estimate(40.0, 25.0, math.inf)))
    assert logged["gns/present_lo"] == 25.0 and not {names[0], names[2]} & {*logged}
    logged = metrics(result(15.0, 60.0, Estimate(math.nan, 0.0, math.inf)))
    assert not {*names} & {*logged}


def test_samples_that_are_all_alike() -> None:
    """Their noise scale is 0 but for rounding, which neither is a value nor drifts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    gns = gnsfast.GradientNoiseScale(model)
    for _ in range(64):
        x = torch.randn(1, 20).expand(8, 20)
        with one_update(gns, 8):
            model(x).square().sum(1).mean().backward()
    found = gns.compute()
    assert (found.lower, found.upper) == (0.0, RESOLUTION) and not found.drift
    assert str(found).startswith("noise scale at most 1e-05 samples (95 %), over the last 64")
    assert not found.resolved and math.isnan(found.present.noise_scale)


def test_rounding_that_follows_a_line_is_no_drift() -> None:
    """As that of a norm which grows: 1e-7 of |G|², and larger from update to update."""
    rising, ones = torch.linspace(1, 2, 64, dtype=torch.float64), torch.ones(64).double()
    assert drifted(rising, ones, ones)
    assert not drifted(1e-7 * rising, ones, ones)


def test_one_update_that_holds_most_of_the_noise() -> None:
    """One sample in 320 whose noise is a hundred times as large: the window only says "at most"."""
    torch.manual_seed(0)
    model = nn.Linear(20, 1, bias=False).double()
    gns = gnsfast.GradientNoiseScale(model)
    for k in range(40):
        x = 5 + 0.01 * torch.randn(8, 20).double()
        x[0] += torch.randn(20) if k == 20 else 0
        with one_update(gns, 8):
            model(x).mean().backward()
    found = gns.compute()
    assert str(found).startswith(f"noise scale at most {found.upper:,.4g} samples (95 %)")
    assert RESOLUTION < found.noise_scale < found.upper < 1 and not found.resolved
