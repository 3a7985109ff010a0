# SPDX-License-Identifier: Apache-2.0
"""Measurements of one checkpoint with other data each time, and their average."""

import math
from pathlib import Path

import pytest
from branch_runs import ScriptedRun, trained

from gnsfast.critical_batch.branches import (
    CriticalBatch,
    Plan,
    averaged,
    critical_batch_in,
    measure_critical_batch,
    train_branch,
)

HOW = {"k": (1, 2), "delta_tokens": 960, "tolerance": 9.0}


@pytest.mark.second
def test_data_that_no_branch_trained(tmp_path: Path) -> None:
    """As by hand: the same weights, later data, the mean of both; the run is where it was."""
    run = trained()
    found = measure_critical_batch(run, folder=tmp_path / "a", repeats=2, **HOW)
    place, steps = str(run.stream.state_dict()), [run.step().loss for _ in range(3)]
    assert steps == [step.loss for step in trained().train(240)]
    truth = trained()
    first = measure_critical_batch(truth, folder=tmp_path / "b", **HOW)
    at = str(truth.stream.state_dict())
    truth.skip(960 + 160)
    second = measure_critical_batch(truth, folder=tmp_path / "c", noise_scale=False, **HOW)
    assert found == averaged([first, second]) == CriticalBatch.load(tmp_path / "a")
    assert all(b.loss_std > 0 and math.isfinite(b.loss_std) for b in found.branches)
    assert found.noise_scale == first.noise_scale is not None
    assert place == at and truth.tokens == 400


def test_continued_and_added_to(tmp_path: Path) -> None:
    """What is finished is not trained again; a third one joins."""
    seen: list[float] = []
    measure_critical_batch(trained(), folder=tmp_path, repeats=2, **HOW)
    two = CriticalBatch.load(tmp_path)
    run = trained()
    run.train = lambda *a, **b: pytest.fail("trained again")  # type: ignore[method-assign]
    assert measure_critical_batch(run, folder=tmp_path, repeats=2, **HOW) == two
    more = {**HOW, "on_branch": lambda branch: seen.append(branch.loss)}
    three = measure_critical_batch(trained(), folder=tmp_path, repeats=3, **more)
    assert len(seen) == len(set(seen)) == 6  # three times other data
    assert three.branches != two.branches


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ScriptedRun has no skip.tokens."):
        measure_critical_batch(ScriptedRun(), folder=tmp_path, repeats=2, **HOW)
    with pytest.raises(ValueError, match="repeats must be a whole number of at least 1"):
        measure_critical_batch(trained(), folder=tmp_path, repeats=2.0, **HOW)
    assert not list(tmp_path.iterdir())
    (tmp_path / "repeat-1").mkdir()
    with pytest.raises(ValueError, match="holds repeated measurements.*pass repeats again"):
        measure_critical_batch(trained(), folder=tmp_path, **HOW)


@pytest.mark.second
def test_branch_by_branch(tmp_path: Path) -> None:
    """Each by a run of its own, in any order: as one measurement."""
    here = measure_critical_batch(trained(), folder=tmp_path / "here", repeats=3, **HOW)
    plan = Plan(**HOW, repeats=3)
    for k in (2.0, 1.0):
        run = trained()
        last = train_branch(run, k, tmp_path / "cbs", plan)
        assert last.k == k
    assert critical_batch_in(tmp_path / "cbs") == here == CriticalBatch.load(tmp_path / "cbs")
    for number in (1, 2):
        name = f"repeat-{number}/branch-2x/steps.jsonl"
        assert (tmp_path / "cbs" / name).read_text() == (tmp_path / "here" / name).read_text()
