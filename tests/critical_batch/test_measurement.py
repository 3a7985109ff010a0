# SPDX-License-Identifier: Apache-2.0
"""What a measurement says, and the factor that it leaves."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from branch_runs import MeasuredRun, ScriptedRun

import gnsfast
from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.critical_batch.branches import (
    Branch,
    CriticalBatch,
    averaged,
    measure_critical_batch,
    pooled_factor,
)
from gnsfast.critical_batch.branches.measurement import noise_scale_records
from gnsfast.errors import BranchError
from gnsfast.noise_scale import DualNormEstimate, ModuleNoiseScale

SCALE = ModuleNoiseScale(20.0, 10.0, 40.0, 2.0, 0.1)
ADAM = ModuleNoiseScale(50.0, 40.0, math.inf, 2.0, 0.04)
SIGN = DualNormEstimate(25.0, 20.0, 32.0, 5.0, 0.9, 1.1)
SPECTRAL = DualNormEstimate(math.inf, 8.0, math.inf, 5.0, -0.1, 1.1)
DUAL = {"sign": SIGN, "spectral": SPECTRAL}


def branches(*losses: float) -> tuple[Branch, ...]:
    ks = (0.5, 1.0, 2.0, 4.0)
    return tuple(Branch(k, int(32 * k), k**0.5, x, 1e-3, 9, 9000) for k, x in zip(ks, losses))


def measurement(*losses: float) -> CriticalBatch:
    own = {"tokens": 5000, "batch_size": 32, "tokens_per_sample": 10, "delta_tokens": 9000}
    rule = {"tolerance": 0.01, "alpha": 0.5, "lr": "sqrt", "loss": "train"}
    scales = {"noise_scale": SCALE, "adam": ADAM, **DUAL}
    return CriticalBatch(**own, **rule, branches=branches(*losses), **scales)


FOUND = measurement(2.0, 2.0, 2.0, 3.0)
AT_LEAST = measurement(2.0, 2.0, 2.0, 2.0)
AT_MOST = measurement(2.0, 3.0, 3.0, 3.0)


def test_sizes() -> None:
    assert (FOUND.lower, FOUND.upper, FOUND.value) == (64, 128, math.sqrt(64 * 128))
    assert (AT_LEAST.lower, AT_LEAST.upper, AT_LEAST.resolved) == (128, math.inf, False)
    assert (AT_MOST.lower, AT_MOST.upper, AT_MOST.resolved) == (0, 32, False)
    with pytest.raises(BranchError, match="k = 1"):
        replace(FOUND, branches=FOUND.branches[2:])


def test_factor_has_both_intervals() -> None:
    factor = FOUND.factor()
    assert factor.value == pytest.approx(math.sqrt(64 * 128) / 20)
    assert (factor.lower, factor.upper, factor.metric) == (64 / 40, 128 / 10, "euclidean")
    adam = FOUND.factor("adam")
    assert adam.value == pytest.approx(math.sqrt(64 * 128) / 50)
    assert (adam.lower, adam.upper, adam.metric) == (0, 128 / 40, "adam")
    sign = FOUND.factor("sign")
    assert sign.value == pytest.approx(math.sqrt(64 * 128) / 25)
    assert (sign.lower, sign.upper, sign.metric) == (64 / 32, 128 / 20, "sign")
    assert math.isnan(FOUND.ratio("spectral")[0]) and FOUND.ratio("spectral")[1:] == (0, 128 / 8)
    assert "5,000 tokens" in factor.source


def test_ratio_of_what_is_not_resolved() -> None:
    assert math.isnan(AT_LEAST.ratio()[0]) and AT_LEAST.ratio()[1:] == (128 / 40, math.inf)
    assert math.isnan(AT_MOST.ratio()[0]) and AT_MOST.ratio()[1:] == (0, 32 / 10)
    unbounded = replace(FOUND, noise_scale=ModuleNoiseScale(math.inf, 0.0, math.inf, 2.0, -0.1))
    assert math.isnan(unbounded.ratio()[0]) and unbounded.ratio()[1:] == (0, math.inf)
    for each, said in (
        (AT_LEAST, "at least 3.2"),
        (AT_MOST, "at most 3.2"),
        (unbounded, "an unknown multiple"),
    ):
        assert said in str(each)
        with pytest.raises(ValueError, match=f"do not give a factor: {said}"):
            each.factor()


def test_factor_without_a_noise_scale() -> None:
    with pytest.raises(ValueError, match="the adam noise scale was not measured.*no gnsfast layer"):
        replace(FOUND, adam=None, noise_scale_reason="no gnsfast layer").factor("adam")
    with pytest.raises(
        ValueError, match="the sign noise scale was not measured at this checkpoint$"
    ):
        replace(FOUND, sign=None).factor("sign")
    with pytest.raises(ValueError, match="'euclidean', 'adam', 'sign' or 'spectral'"):
        FOUND.factor("signum")


def test_pooled_factor(tmp_path: Path) -> None:
    twice = replace(FOUND, noise_scale=ModuleNoiseScale(10.0, 8.0, 16.0, 1.0, 0.1), tokens=9000)
    pooled = pooled_factor([FOUND, twice])
    assert pooled.value == pytest.approx(math.sqrt(64 * 128) / math.sqrt(200))
    assert (pooled.lower, pooled.upper) == (64 / 40, 128 / 8)
    turned = pooled_factor([twice, FOUND])
    assert (turned.lower, turned.upper) == (pooled.lower, pooled.upper)
    assert "4.53 at 5,000 tokens, 9.05 at 9,000 tokens" in pooled.source
    open_above = pooled_factor([FOUND, AT_LEAST])
    assert "a bound at" in open_above.source and "nan" not in open_above.source
    assert open_above.value == pytest.approx(FOUND.ratio()[0]) and open_above.upper == math.inf
    with pytest.raises(ValueError, match="at least 3.2 times that at 5,000 tokens"):
        pooled_factor([AT_LEAST])
    with pytest.raises(ValueError, match="no measurement"):
        pooled_factor([])
    open_above.save(tmp_path / "factor.json")
    assert CriticalBatchFactor.load(tmp_path / "factor.json") == open_above


def test_noise_scales_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Measured once, at the weights in the folder, whatever run goes on with it."""
    how = {"folder": tmp_path / "cbs", "k": (1, 2), "delta_tokens": 480}
    without = measure_critical_batch(MeasuredRun(), noise_scale=False, **how)
    assert without.noise_scale is None and without.noise_scale_reason == ""
    run, seen = MeasuredRun(), []
    measured = run.noise_scale()
    run.random.seed(5)
    run.noise_scale = lambda: seen.append(run.state()) or measured
    found = [measure_critical_batch(run, **how) for _ in range(2)]
    assert seen == [MeasuredRun().state()] and found[0] == found[1]
    assert found[0].noise_scale == ModuleNoiseScale(10.0, 8.0, 12.5, 1.0, 0.1)
    assert found[0].adam is not None and found[0].adam.upper == 80
    assert found[0].sign == DualNormEstimate(6.0, 4.0, 9.0, 3.0, 1.0, 1.5)
    assert found[0].spectral is None
    noted = json.loads((tmp_path / "cbs" / "noise_scale.json").read_text())
    assert noted["sign"]["noise"] == 3.0 and noted["spectral"] is None

    run.noise_scale, run.noise_scale_reason = lambda: None, "too small"
    none = measure_critical_batch(run, **{**how, "folder": tmp_path / "none"})
    assert none.noise_scale is None and "noise scale was not measured: too small" in str(none)
    missing = measure_critical_batch(ScriptedRun(), **{**how, "folder": tmp_path / "missing"})
    assert missing.noise_scale_reason == "the run has no method noise_scale()"


def test_record_comes_back() -> None:
    diverged = replace(FOUND.branches[3], loss=math.inf, loss_std=math.nan, state="diverged")
    some = replace(FOUND, branches=(*FOUND.branches[:3], diverged), missing={8.0: "gone"})
    none = replace(FOUND, noise_scale=None, adam=None, sign=None, spectral=None)
    for each in (some, AT_LEAST, AT_MOST, none):
        record = json.loads(json.dumps(each.record(), allow_nan=False))
        again = CriticalBatch.from_record(record)
        assert again.record() == record and str(again) == str(each)
        assert (again.lower, again.upper, again.missing) == (each.lower, each.upper, each.missing)
        assert (again.sign, again.spectral) == (each.sign, each.spectral)
    assert record["kind"] == "critical batch" and record["format"] == 1
    with pytest.raises(ValueError, match="format 1"):
        CriticalBatch.from_record({**record, "format": 2})


def test_a_folder_without_a_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished measurement"):
        CriticalBatch.load(tmp_path)
    for text in ("{", "[]", '{"kind": "critical batch", "format": 1}'):
        (tmp_path / "critical_batch.jsonl").write_text(text)
        with pytest.raises(ValueError, match="critical_batch.jsonl is damaged"):
            CriticalBatch.load(tmp_path)


def test_what_is_not_to_be_trusted(tmp_path: Path) -> None:
    """It makes no factor, unless it is asked for."""
    uneven = measurement(2.0, 2.02, 2.005, 3.0)
    noisy = replace(
        FOUND, branches=(replace(FOUND.branches[0], loss_std=0.02), *FOUND.branches[1:])
    )
    assert not FOUND.doubts
    for doubtful, why in (
        (uneven, "k = 1 does not match"),
        (noisy, "exceeds the tolerance of 0.01 for k = 0.5"),
    ):
        [doubt] = doubtful.record()["doubts"]
        assert "average" in doubt or "smaller alpha" in doubt
        assert why in doubt
        for make in (doubtful.factor, lambda d=doubtful: pooled_factor([FOUND, d])):
            with pytest.raises(ValueError, match="is doubtful: .*despite_doubts=True"):
                make()
        assert doubtful.factor(despite_doubts=True).value == doubtful.ratio()[0]
    own = [replace(b, loss_std=math.nan) for b in FOUND.branches]
    single = replace(FOUND, loss="evaluate", branches=tuple(own))
    assert not single.doubts and "the noise of the losses is unknown" in single.summary()


def test_average_over_data() -> None:
    """A verdict that three seeds of the data do not share falls to their mean losses."""
    parts = [measurement(2.0, 2.004, x, 3.0) for x in (2.006, 2.03, 2.03)]
    assert [m.upper for m in parts] == [128, 64, 64]
    found = averaged(parts)
    assert (found.lower, found.upper) == (32, 64)
    assert [b.loss for b in found.branches] == pytest.approx([2.0, 2.004, 2.022, 3.0])
    error = statistics.stdev([2.006, 2.03, 2.03]) / math.sqrt(3)
    assert [b.loss_std for b in found.branches] == pytest.approx([0, 0, error, 0], abs=1e-12)
    assert found.branches[2].steps == parts[0].branches[2].steps
    assert found.noise_scale == parts[0].noise_scale and not found.doubts
    wide = replace(averaged([measurement(2.0, x, 3.0, 3.0) for x in (2.0, 2.05)]), loss="evaluate")
    assert "average more measurements" in wide.doubts[0]


def test_average_of_what_was_trained() -> None:
    lost = replace(FOUND, branches=FOUND.branches[:3])
    found = averaged([FOUND, lost])
    assert [b.k for b in found.branches] == [0.5, 1, 2] and list(found.missing) == [4]
    diverged = replace(FOUND.branches[3], loss=math.inf, state="diverged")
    found = averaged([FOUND, replace(FOUND, branches=(*FOUND.branches[:3], diverged))])
    assert found.branches[3].state == "diverged" and found.upper == 128
    assert (
        CriticalBatch.from_record(json.loads(json.dumps(found.record()))).record() == found.record()
    )
    with pytest.raises(ValueError, match="differ in tokens: 5000 and 6000"):
        averaged([FOUND, replace(FOUND, tokens=6000)])
    with pytest.raises(ValueError, match="at least two"):
        averaged([FOUND])


def test_table() -> None:
    lines = str(measurement(2.0, 2.02, 2.005, 3.0)).splitlines()
    assert lines[0].split() == ["k", "batch", "lr", "x", "steps", "loss", "noise", "above", "least"]
    assert lines[2].split() == ["1", "32", "1", "9", "2.0200", "0.0010", "0.0200", *NO.split()]
    assert lines[3].split()[-2:] == ["0.0050", "matches"]  # above the least of the smaller ones
    assert "critical batch size 64 to 128 samples (about 90.5)" in lines[5]
    assert "doubtful: k = 1 does not match, but the larger k = 2 does" in lines[7]
    assert "noise scale 20 samples (95 %: 10 to 40): the critical batch size is 4.53" in lines[8]
    assert lines[10].startswith("in sign descent's norm: noise scale 25 samples (95 %: 20 to 32)")
    assert lines[11].endswith(
        "at least 8 samples (95 %): the critical batch size is at most 16 times that"
    )
    large = replace(FOUND, batch_size=2**20)
    assert f"{large.lower:,.0f} to {large.upper:,.0f} samples (about {large.value:,.0f})" in str(
        large
    )
    assert "at least 128 samples" in str(AT_LEAST) and "at most 32 samples" in str(AT_MOST)


NO = "does not match"


def test_a_noise_scale_without_an_estimate_is_not_measured() -> None:
    """Its numbers are NaN, which JSON would hold as null, and null is infinity there."""
    nothing = gnsfast.GradientNoiseScale(torch.nn.Linear(5, 2)).compute()
    assert set(noise_scale_records(nothing).values()) == {None}
