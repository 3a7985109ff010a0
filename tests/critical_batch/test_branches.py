# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: what it finds, what it leaves behind, and what it survives."""

import json
import math
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from branch_runs import LEVELS, MeasuredRun, ScriptedRun

from gnsfast.critical_batch.branches import (
    Branch,
    BranchStep,
    CriticalBatch,
    measure_critical_batch,
)
from gnsfast.errors import BranchError

GRID = {"k": (0.5, 1, 2, 4), "delta_tokens": 960}


def measure(run: Any, folder: Path, **options: Any) -> CriticalBatch:
    return measure_critical_batch(run, folder=folder / "cbs", **{**GRID, **options})


def steps_of(folder: Path, k: str) -> list[dict[str, Any]]:
    lines = (folder / "cbs" / f"branch-{k}x" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_measures(tmp_path: Path) -> None:
    run = ScriptedRun()
    before = run.state()
    told: list[Branch] = []
    found = measure(run, tmp_path, on_branch=told.append)
    assert (found.lower, found.upper) == (16, 32) and found.resolved
    assert found.value == pytest.approx(math.sqrt(16 * 32))
    assert told == list(found.branches) and run.state() == before
    assert run.trained == [(4, math.sqrt(0.5)), (8, 1.0), (16, math.sqrt(2)), (32, 2.0)]
    assert [(b.k, b.steps, b.tokens) for b in found.branches] == [
        (0.5, 24, 960),
        (1, 12, 960),
        (2, 6, 960),
        (4, 3, 960),
    ]
    assert not found.noisy and not found.missing
    lines = steps_of(tmp_path, "2")
    assert [line["tokens"] for line in lines] == [160 * n for n in range(1, 7)]
    average = lines[0]["loss"]
    for line in lines[1:]:
        average = (average + line["loss"]) / 2
    assert found.branches[2].loss == pytest.approx(average, rel=1e-12)
    assert CriticalBatch.load(tmp_path / "cbs") == found


def test_branches_start_from_one_checkpoint(tmp_path: Path) -> None:
    """Also from its random numbers: first steps of one level have one loss."""
    measure(ScriptedRun(), tmp_path)
    first = [steps_of(tmp_path, k)[0]["loss"] for k in ("0.5", "1")]
    assert first[0] == first[1]


def test_finished_branches_never_run_again(tmp_path: Path) -> None:
    found = measure(ScriptedRun(), tmp_path)
    run = ScriptedRun()
    run.random.seed(5)  # what counts is the folder's checkpoint
    told: list[Branch] = []
    assert measure(run, tmp_path, on_branch=told.append) == found
    assert run.trained == [] and told == list(found.branches)
    assert run.random.getstate() == ScriptedRun().random.getstate()


def test_a_grid_may_grow(tmp_path: Path) -> None:
    levels = {**LEVELS, 32: 2.0, 64: 2.5}
    at_least = measure(ScriptedRun(levels), tmp_path, delta_tokens=1920)
    assert at_least.lower == 32 and at_least.upper == math.inf and not at_least.resolved
    assert "at least 32 samples (for an upper bound, measure a larger k too)" in str(at_least)
    run = ScriptedRun(levels)
    found = measure(run, tmp_path, k=(1, 2, 4, 8), delta_tokens=1920)
    assert (found.lower, found.upper) == (32, 64) and run.trained == [(64, math.sqrt(8))]
    assert [b.k for b in found.branches] == [0.5, 1, 2, 4, 8]  # also those of the first grid alone


def test_learning_rates_and_average(tmp_path: Path) -> None:
    run = ScriptedRun()
    found = measure(run, tmp_path, lr="linear", alpha=1.0)
    assert [lr for _, lr in run.trained] == [0.5, 1, 2, 4]
    assert found.branches[0].loss == steps_of(tmp_path, "0.5")[-1]["loss"]
    assert "learning rate linear" in str(found)


def test_at_most(tmp_path: Path) -> None:
    found = measure(ScriptedRun({4: 2.0, 8: 2.2, 16: 2.3, 32: 2.4}), tmp_path)
    assert (found.lower, found.upper) == (0, 8) and math.isnan(found.value)
    assert "at most 8 samples (for a lower bound, measure a smaller k too)" in str(found)
    record = found.record()
    assert record["value"] is None and record["lower"] == 0 and not record["resolved"]


def test_noise_above_the_tolerance_is_said(tmp_path: Path) -> None:
    found = measure(ScriptedRun(noise=0.1), tmp_path)
    assert 0.5 in found.noisy and found.record()["noisy"] == list(found.noisy)
    assert "doubtful: " in str(found)


def test_evaluation_instead_of_the_average(tmp_path: Path) -> None:
    found = measure(MeasuredRun(noise=0.1), tmp_path, loss="evaluate")
    assert [b.loss for b in found.branches] == [1.00176] * 4
    assert not found.noisy and found.record()["loss"] == "evaluate"
    assert "evaluation loss" in str(found)
    with pytest.raises(ValueError, match=r"evaluate\(\)"):
        measure(ScriptedRun(), tmp_path / "other", loss="evaluate")


def test_diverged(tmp_path: Path) -> None:
    found = measure(ScriptedRun({**LEVELS, 16: math.nan, 32: math.inf}), tmp_path)
    assert [b.state for b in found.branches] == ["finished"] * 2 + ["diverged"] * 2
    assert [b.steps for b in found.branches] == [24, 12, 1, 1]
    assert (found.lower, found.upper) == (8, 16)
    assert found.record()["branches"][2]["loss"] is None
    assert "diverged" in str(found)
    assert CriticalBatch.load(tmp_path / "cbs").branches[2].loss == math.inf


class Rising(MeasuredRun):
    """Batches of 16 train to a loss above that of the start; others stay at it, or rise less."""

    less = 0.0

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Any:
        for n, step in enumerate(super().train(tokens, batch_size=batch_size, lr_factor=lr_factor)):
            rise = 0.1 if batch_size == 16 else self.less
            yield step._replace(loss=step.loss + rise * n * batch_size / 16)

    def evaluate(self) -> float:
        size = self.trained[-1][0] if self.tokens > 800 else 0
        return 2.0 + (0.03 if size == 16 else self.less if size else 0.0)


FLAT = {4: 2.0, 8: 2.0, 16: 2.0, 32: 2.0}


@pytest.mark.parametrize("loss", ["train", "evaluate"])
def test_a_loss_above_that_of_its_start_has_diverged(loss: str, tmp_path: Path) -> None:
    """It is worse, and its loss is known."""
    found = measure(Rising(FLAT), tmp_path, loss=loss)
    branch = found.branches[2]
    assert branch.start == pytest.approx(2.0, abs=2e-3)
    assert branch.loss == pytest.approx(2.03 if loss == "evaluate" else 2.4, abs=5e-3)
    assert [b.state for b in found.branches] == ["finished"] * 2 + ["diverged", "finished"]
    assert (found.lower, found.upper) == (32, math.inf)
    assert str(found).splitlines()[3].endswith("diverged")
    assert CriticalBatch.load(tmp_path / "cbs") == found
    assert found.record()["branches"][2]["state"] == "diverged"


def test_a_loss_that_is_no_worse_has_not_diverged(tmp_path: Path) -> None:
    """Where all branches rise, as at the floor that the noise of the run allows, those that match
    match; and a rise within the noise is none.
    """
    run = Rising(FLAT)
    run.less = 0.03
    found = measure(run, tmp_path, loss="evaluate")
    assert {b.state for b in found.branches} == {"finished"} and found.lower == 32
    for noise, state in ((0.02, "finished"), (0.005, "diverged")):
        branches = [replace(b, loss_std=noise) for b in found.branches[:2]]
        branches[1] = replace(branches[1], loss=2.08)
        assert replace(found, branches=tuple(branches)).branches[1].state == state
    unknown = [*found.branches[:1], replace(found.branches[1], loss=2.08, start=math.nan)]
    assert replace(found, branches=tuple(unknown)).branches[1].state == "finished"


def test_the_start_of_a_killed_branch(tmp_path: Path) -> None:
    """What was evaluated at the checkpoint is saved with the branch."""
    how = {"loss": "evaluate", "save_every_tokens": 300}
    expected = measure(MeasuredRun(), tmp_path / "whole", **how)
    killed(tmp_path, "step 16 640", run=MeasuredRun, **how)
    assert list((tmp_path / "cbs").glob("branch-2x-at-*"))
    found = measure(MeasuredRun(), tmp_path, **how)
    assert found == expected and {b.start for b in found.branches} == {1.0008}


@pytest.mark.parametrize("size", [4, 8])
def test_divergence_of_the_base_ends_it(size: int, tmp_path: Path) -> None:
    run = ScriptedRun({**LEVELS, size: math.nan})
    before = run.state()
    with pytest.raises(BranchError, match=f"k = {size / 8:g} diverged"):
        measure(run, tmp_path)
    assert run.state() == before
    assert run.trained[-1][0] == size  # nothing was spent on larger ones


def test_a_crashed_branch_is_named_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    levels = {**LEVELS, 16: RuntimeError("out of memory\nin detail")}
    run = ScriptedRun(levels)
    before = run.state()
    found = measure(run, tmp_path)
    assert run.state() == before
    assert found.missing == {2.0: "RuntimeError: out of memory"}
    assert (found.lower, found.upper) == (8, 32)  # the next one that is finished
    assert "k = 2 is missing: RuntimeError: out of memory" in str(found)
    assert found.record()["missing"] == [{"k": 2.0, "reason": "RuntimeError: out of memory"}]
    assert "in train" in caplog.text and "k = 2 failed" in caplog.text
    assert CriticalBatch.load(tmp_path / "cbs") == found

    again = ScriptedRun()
    found = measure(again, tmp_path)
    assert (found.lower, again.trained) == (16, [(16, math.sqrt(2))])
    assert [b.k for b in found.branches] == [0.5, 1, 2, 4]


def test_a_crashed_base_says_how_to_go_on(tmp_path: Path) -> None:
    run = ScriptedRun({**LEVELS, 8: RuntimeError("gone")})
    with pytest.raises(BranchError, match="k = 1 failed .*gone.*same folder"):
        measure(run, tmp_path)
    assert len(run.trained) == 4  # the others went on
    again = ScriptedRun()
    assert measure(again, tmp_path).lower == 16 and again.trained == [(8, 1.0)]


def test_interrupted(tmp_path: Path) -> None:
    run = ScriptedRun({**LEVELS, 16: KeyboardInterrupt()})
    before = run.state()
    with pytest.raises(KeyboardInterrupt):
        measure(run, tmp_path)
    assert run.state() == before
    again = ScriptedRun()
    assert measure(again, tmp_path).lower == 16 and len(again.trained) == 2


class Wrong(ScriptedRun):
    """Trains another batch, ends early or late, or has a short step at an epoch's end."""

    how = ""

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Any:
        size = 8 if self.how == "batch" else batch_size
        if self.how == "epoch":
            yield BranchStep(10, 2.0)
            tokens -= 10
        tokens = {"early": tokens // 2, "late": 2 * tokens, "never": 0}.get(self.how, tokens)
        yield from super().train(tokens, batch_size=size, lr_factor=lr_factor)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("batch", "took a step of 80 tokens"),
        ("early", "ended after 480 of 960 tokens"),
        ("never", "ended after 0 of 960 tokens"),
        ("late", "until the branch has 960"),
    ],
)
def test_runs_that_train_something_else(how: str, said: str, tmp_path: Path) -> None:
    run = Wrong()
    run.how = how
    if how == "batch":
        found = measure(run, tmp_path, k=(1, 2))
        assert said in found.missing[2.0]
    else:
        with pytest.raises(BranchError, match=said):
            measure(run, tmp_path)


def test_short_steps_that_stand_alone(tmp_path: Path) -> None:
    run = Wrong()
    run.how = "epoch"
    found = measure(run, tmp_path, k=(1, 2))
    assert [(b.steps, b.tokens) for b in found.branches] == [(13, 970), (7, 970)]


def killed(folder: Path, die: str, run: Any = ScriptedRun, **options: Any) -> None:
    """A measurement whose process is killed where ``die`` says."""

    def work() -> None:
        mortal = run()
        mortal.die = die
        measure(mortal, folder, **options)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -9


@pytest.mark.parametrize(
    ("die", "trained"),
    [
        ("save checkpoint", [4, 8, 16, 32]),
        ("step 4 0", [4, 8, 16, 32]),
        ("step 16 320", [16, 32]),
        ("step 32 640", [32]),
    ],
)
def test_a_killed_measurement_goes_on(die: str, trained: list[int], tmp_path: Path) -> None:
    expected = measure(ScriptedRun(), tmp_path / "whole")
    killed(tmp_path, die)
    run = ScriptedRun()
    assert measure(run, tmp_path) == expected
    assert [size for size, _ in run.trained] == trained
    for k in ("0.5", "1", "2", "4"):
        assert steps_of(tmp_path, k) == steps_of(tmp_path / "whole", k)


@pytest.mark.parametrize(
    ("die", "tokens"),
    [("step 8 720", 640), ("save branch-1x-at-640", 320), ("save branch-1x-at-320", 0)],
)
def test_a_killed_branch_goes_on_inside(die: str, tokens: int, tmp_path: Path) -> None:
    expected = measure(ScriptedRun(), tmp_path / "whole")
    killed(tmp_path, die, save_every_tokens=300)
    folder = tmp_path / "cbs"
    whole = [p for p in folder.glob("branch-1x-at-*") if not p.name.endswith(".partial")]
    assert [p.name for p in whole] == ([f"branch-1x-at-{tokens}"] if tokens else [])
    if tokens == 640:  # killed while the save before was being dropped
        (folder / "branch-1x-at-320").mkdir()
    asked: list[int] = []

    class Asked(ScriptedRun):
        def train(self, tokens: int, **how: Any) -> Any:
            asked.append(tokens)
            return super().train(tokens, **how)

    assert measure(Asked(), tmp_path, save_every_tokens=300) == expected
    assert asked[0] == 960 - tokens
    assert steps_of(tmp_path, "1") == steps_of(tmp_path / "whole", "1")
    assert not list(folder.glob("*-at-*")) and not list(folder.glob("*.partial"))


@pytest.mark.second
def test_a_real_run_is_back_at_its_checkpoint(tmp_path: Path) -> None:
    """Bit for bit, also after an exception: it trains on as the run that was never branched."""
    unbranched = [step.loss for step in branch_runs.trained().train(400)]
    run = branch_runs.trained()
    found = measure(run, tmp_path, tolerance=0.3)
    assert [step.loss for step in run.train(400)] == unbranched
    assert [step["loss"] for step in steps_of(tmp_path, "1")[:5]] == unbranched
    assert found.noise_scale is not None and found.noise_scale.noise_scale > 0
    assert found.adam is not None and found.adam.noise_scale > 0
    run = branch_runs.trained()
    run.lr = lambda tokens: 1 / 0 if tokens > 700 else branch_runs.halving(tokens)
    with pytest.raises(BranchError, match="ZeroDivisionError"):
        measure(run, tmp_path / "other", tolerance=0.3)
    run.lr = branch_runs.halving
    assert [step.loss for step in run.train(400)] == unbranched


def test_settings_of_another_measurement(tmp_path: Path) -> None:
    measure(ScriptedRun(), tmp_path)
    changed = {"delta_tokens": 1920, "tolerance": 0.02, "alpha": 0.25, "lr": "linear"}
    for name, value in {**changed, "loss": "evaluate"}.items():
        with pytest.raises(ValueError, match=f"holds branches with {name}="):
            measure(MeasuredRun(), tmp_path, **{name: value})
    for name, value in {"tokens": 880, "batch_size": 16, "tokens_per_sample": 5}.items():
        run = ScriptedRun()
        setattr(run, name, value)
        with pytest.raises(ValueError, match=f"holds branches with .*{name}="):
            measure(run, tmp_path, k=(0.5, 1, 2))
        assert run.trained == []
    saved = tmp_path / "cbs" / "checkpoint" / "branch_settings.json"
    older = {name: value for name, value in json.loads(saved.read_text()).items() if name != "lr"}
    saved.write_text(json.dumps(older))
    with pytest.raises(ValueError, match="holds branches with no lr noted: pass the same"):
        measure(ScriptedRun(), tmp_path)


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "cbs").mkdir()
    (tmp_path / "cbs" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="holds other files"):
        measure(ScriptedRun(), tmp_path)
    (tmp_path / "cbs" / "checkpoint").mkdir()
    own = tmp_path / "cbs" / "checkpoint" / "branch_settings.json"
    own.write_text('{"kind": "branch settings", "format": 1}')
    with pytest.raises(
        ValueError,
        match="format 1, but this version of gnsfast reads a 'branch settings' of format 2: name",
    ):
        measure(ScriptedRun(), tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        measure_critical_batch(ScriptedRun(), folder=tmp_path / "cbs" / "metrics.jsonl", **GRID)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": (2, 4)}, "must include 1"),
        ({"delta_tokens": -5}, "delta_tokens"),
        ({"delta_tokens": 959}, "at least 3 steps, which are 960 tokens"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"alpha": 0.0}, "alpha"),
        ({"lr": "cubic"}, "'sqrt', 'linear', 'keep' or 'none', not 'cubic'"),
        ({"loss": "best"}, "'train' or 'evaluate'"),
        ({"save_every_tokens": 0}, "save_every_tokens"),
        ({"repeats": 0}, "repeats"),
        ({"repeats": 2}, "ScriptedRun has no skip.tokens."),
        ({"factor": "l1"}, "factor must be 'euclidean', 'adam'"),
        ({"factor": "adam", "noise_scale": False}, "factor needs the noise scale"),
        ({"executor": ThreadPoolExecutor(1)}, "executor needs make_run"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        measure(ScriptedRun(), tmp_path, **options)
    assert not (tmp_path / "cbs").exists()


def test_batches_that_the_run_cannot_make(tmp_path: Path) -> None:
    run = ScriptedRun()
    run.batch_multiple = 8
    with pytest.raises(
        ValueError, match="k = 0.5 times the batch .* gives 4 samples.*multiple of 8"
    ):
        measure(run, tmp_path)
