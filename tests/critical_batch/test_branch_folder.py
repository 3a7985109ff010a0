# SPDX-License-Identifier: Apache-2.0
"""A folder of branches: whoever renames first wins, and what was measured stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from branch_runs import MeasuredRun, ScriptedRun, small_run

from gnsfast.critical_batch.branches import (
    Branch,
    BranchFolder,
    CriticalBatch,
    Plan,
    critical_batch_in,
    measure_critical_batch,
    train_branch,
)
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError

GRID = {"k": (0.5, 1, 2), "delta_tokens": 960}


def test_another_run_is_refused(tmp_path: Path) -> None:
    """By what it says of itself."""
    run = small_run()
    list(run.train(160))
    measure_critical_batch(run, folder=tmp_path, **GRID, noise_scale=False, tolerance=9)
    run.rules = Rules("none", "half_life")
    with pytest.raises(ValueError, match="run.betas='keep', not 'half_life'"):
        measure_critical_batch(run, folder=tmp_path, **GRID, noise_scale=False, tolerance=9)


def test_noise_scales_of_the_folder_stay(tmp_path: Path) -> None:
    first = measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID, noise_scale=True)
    again = measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID, noise_scale=False)
    assert first.noise_scale is not None and again == first


def test_two_processes_write_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One while the other writes: the file is whole, and neither fails."""
    folder, text = BranchFolder(tmp_path), Path.write_text

    def slowly(path: Path, *args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        text(path, "half of it")
        folder.write_result({"by": "another"})
        text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", slowly)
    folder.write_result({"by": "one"})
    [path] = tmp_path.iterdir()
    assert path.name == "critical_batch.jsonl" and json.loads(path.read_text()) == {"by": "one"}


def branch(loss: float) -> Branch:
    return Branch(2.0, 16, 1.0, loss, 0.1, steps=2, tokens=320, start=loss)


def two_steps(loss: float) -> list[dict[str, float]]:
    return [{"k": 2, "tokens": tokens, "loss": loss} for tokens in (80, 320)]


def prepared(path: Path) -> BranchFolder:
    folder = BranchFolder(path)
    folder.prepare({"tolerance": 0.1}, (1.0, 2.0), ScriptedRun())
    return folder


def names(path: Path) -> list[str]:
    return [each.name for each in sorted(path.iterdir())]


EMPTY = ["branch-1x", "branch-2x", "checkpoint"]


def test_who_finishes_first_wins(tmp_path: Path) -> None:
    """The second one gets the branch of the first, and nothing of its own is left."""
    folder, run = prepared(tmp_path), ScriptedRun()
    assert folder.branches() == {1.0: None, 2.0: None} and names(tmp_path) == EMPTY
    folder.save(run, 2, two_steps(5.0)[:1])
    assert folder.finish(branch(3.0), two_steps(3.0)) == branch(3.0)
    folder.save(run, 2, two_steps(5.0)[:1])  # the second one goes on until it sees that
    assert folder.resume(run, 2) == two_steps(5.0)[:1]
    assert folder.finish(branch(5.0), two_steps(5.0)) == branch(3.0) == folder.branch(2)
    lines = (tmp_path / "branch-2x" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == two_steps(3.0)
    assert names(tmp_path) == EMPTY and names(tmp_path / "branch-2x") == [
        "branch.json",
        "steps.jsonl",
    ]


def test_a_folder_that_is_lost_to_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one renames in the very moment before: its files stay, whole."""
    folder, rename = prepared(tmp_path), Path.rename

    def late(path: Path, to: Path) -> Path:
        monkeypatch.undo()
        folder.finish(branch(3.0), two_steps(3.0))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", late)
    assert folder.finish(branch(5.0), two_steps(5.0)) == branch(3.0)
    assert names(tmp_path) == EMPTY

    def full(path: Path, to: Path) -> Path:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="no space left"):
        folder.save(ScriptedRun(), 2, two_steps(3.0))


def test_two_save_one_branch(tmp_path: Path) -> None:
    """Each save is whole and of one process; the slower one deletes no newer save."""
    folder, run, other = prepared(tmp_path), ScriptedRun(), ScriptedRun()
    first, second = two_steps(3.0), two_steps(5.0)
    folder.save(run, 2, first[:1])
    other.random.seed(5)
    folder.save(other, 2, second[:1])  # of the same place
    resumed = ScriptedRun()
    assert folder.resume(resumed, 2) == first[:1] and resumed.state() == run.state()
    folder.save(run, 2, first)
    folder.save(other, 2, second[:1])
    assert folder.resume(resumed, 2) == first and resumed.state() == run.state()
    assert folder.resume(resumed, 1) == [] and resumed.state() == ScriptedRun().state()


def test_branches_whose_names_begin_alike(tmp_path: Path) -> None:
    """k = 2.5 keeps its saves when k = 2 finishes."""
    folder, run = prepared(tmp_path), ScriptedRun()
    folder.save(run, 2.5, two_steps(5.0))
    folder.save(run, 2, two_steps(5.0))
    folder.finish(branch(3.0), two_steps(3.0))
    assert set(names(tmp_path)) == {*EMPTY, "branch-2.5x-at-320"}
    assert folder.resume(run, 2.5) == two_steps(5.0)


def test_the_first_checkpoint_counts(tmp_path: Path) -> None:
    """The second of two processes that begin at once goes on from the checkpoint of the first."""
    run, other, settings = ScriptedRun(), ScriptedRun(), {"tolerance": 0.1}
    other.random.seed(5)
    save = other.save

    def meanwhile(folder: Path) -> None:
        BranchFolder(tmp_path).prepare(settings, (1.0, 2.0), run)
        save(folder)

    other.save = meanwhile
    BranchFolder(tmp_path).prepare(settings, (1.0, 2.0), other)
    assert other.state() == run.state() and names(tmp_path) == EMPTY
    with pytest.raises(ValueError, match="tolerance=0.1, not 0.2"):
        BranchFolder(tmp_path).prepare({"tolerance": 0.2}, (1.0,), other)


def test_what_a_kill_has_left(tmp_path: Path) -> None:
    """Between the rename of a branch and the deletion of its saves, or while a save was written.
    Files of a branch that has not finished stay.
    """
    found = measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID)
    whole = {path.name for path in tmp_path.iterdir()}
    unfinished = {"branch-4x", "branch-4x-at-320", "branch-4x-at-640.a.partial"}
    for name in (
        *("branch-2x-at-160", "branch-0.5x-at-40.a.partial", "checkpoint.b.partial"),
        *("branch-1x.c.partial", *unfinished),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    again = measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID)
    assert again.branches == found.branches and again.missing == {4.0: "it has not finished"}
    assert {path.name for path in tmp_path.iterdir()} == whole | unfinished


def test_the_result_of_a_folder(tmp_path: Path) -> None:
    """Branches that have not finished are named."""
    with pytest.raises(ValueError, match="holds no branch measurement"):
        critical_batch_in(tmp_path)
    plan = Plan(960, (1, 2, 0.5))
    for k, ready in ((2.0, False), (1.0, True), (0.5, True)):
        assert train_branch(MeasuredRun(), k, tmp_path, plan).k == k
        if not ready:
            with pytest.raises(BranchError, match="k = 1 failed .it has not finished.*same folder"):
                critical_batch_in(tmp_path)
        elif k == 1:
            found = critical_batch_in(tmp_path)
            assert found.missing == {0.5: "it has not finished"} and "k = 0.5 is missing" in str(
                found
            )
    whole = measure_critical_batch(MeasuredRun(), folder=tmp_path / "here", **GRID)
    assert critical_batch_in(tmp_path) == whole == CriticalBatch.load(tmp_path)
