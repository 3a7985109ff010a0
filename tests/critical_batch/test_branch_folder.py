# SPDX-License-Identifier: Apache-2.0
"""A folder of branches: one process at a time, and what was measured stays."""

import json
import os
from pathlib import Path

import pytest
from branch_runs import MeasuredRun, ScriptedRun, small_run

from gnsfast.critical_batch.branches import Branch, BranchFolder, measure_critical_batch
from gnsfast.critical_batch.branches.branch_folder import write
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError

GRID = {"k": (0.5, 1, 2), "delta_tokens": 960}


def test_one_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with BranchFolder(tmp_path).locked():
        with pytest.raises(BranchError, match="another process is measuring in"):
            with BranchFolder(tmp_path).locked():
                pass
    measure_critical_batch(MeasuredRun(), folder=tmp_path / "branches", **GRID)
    with BranchFolder(tmp_path / "branches").locked():  # let go of, in the end
        with pytest.raises(BranchError, match="wait until it ends"):
            measure_critical_batch(MeasuredRun(), folder=tmp_path / "branches", **GRID)


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


def test_two_processes_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One while the other writes: the file is whole, and neither fails."""

    def meanwhile(file: int) -> None:
        monkeypatch.undo()
        write(tmp_path / "file", {"by": "another"})

    monkeypatch.setattr(os, "fsync", meanwhile)
    write(tmp_path / "file", {"by": "one"})
    assert json.loads((tmp_path / "file").read_text()) == {"by": "one"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def branch(loss: float) -> Branch:
    return Branch(2.0, 16, 1.0, loss, 0.1, steps=2, tokens=320)


def two_steps(loss: float) -> list[dict[str, float]]:
    return [{"k": 2, "tokens": tokens, "loss": loss} for tokens in (160, 320)]


def test_who_finishes_first_wins(tmp_path: Path) -> None:
    """The second one gets the branch of the first, and nothing of its own is left."""
    folder, run = BranchFolder(tmp_path), ScriptedRun()
    with folder.steps(2):
        folder.save(run, 2, two_steps(5.0)[:1])
    assert folder.finish(branch(3.0), two_steps(3.0)) == branch(3.0)
    folder.save(run, 2, two_steps(5.0)[:1])  # the second one goes on until it sees that
    assert folder.finish(branch(5.0), two_steps(5.0)) == branch(3.0) == folder.finished(2)
    lines = (tmp_path / "branch-2.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == two_steps(3.0)
    left = [path.name for path in sorted(tmp_path.iterdir())]
    assert left == ["branch-2.json", "branch-2.jsonl", "branch-2.saves"]


@pytest.mark.parametrize("at", ["branch-2.jsonl", "branch-2.saves"])
def test_killed_after_the_rename(at: str, tmp_path: Path) -> None:
    """The branch is whole: its steps, and that it is done, follow from the one file."""
    folder = BranchFolder(tmp_path)
    folder.finish(branch(3.0), two_steps(3.0))
    (tmp_path / at).unlink()
    assert folder.branches() == [branch(3.0)] == [folder.finish(branch(5.0), two_steps(5.0))]
    assert len((tmp_path / "branch-2.jsonl").read_text().splitlines()) == 2


def test_two_save_one_branch(tmp_path: Path) -> None:
    """Each save is whole and of one process; the slower one deletes no newer save."""
    folder, run, other = BranchFolder(tmp_path), ScriptedRun(), ScriptedRun()
    first, second = two_steps(3.0), two_steps(5.0)
    folder.save(run, 2, first[:1])
    other.random.seed(5)
    folder.save(other, 2, second[:1])  # of the same place
    resumed = ScriptedRun()
    assert folder.resume(resumed, 2) == first[:1] and resumed.state() == run.state()
    folder.save(run, 2, first)
    folder.save(other, 2, second[:1])
    assert folder.resume(resumed, 2) == first and resumed.state() == run.state()
    with pytest.MonkeyPatch.context() as patch:  # the save that came first is gone at once
        patch.setattr(Path, "is_dir", lambda path: False)
        folder.save(other, 2, second)


def test_a_save_that_another_process_deletes_meanwhile(tmp_path: Path) -> None:
    """It has saved the branch again, and that save is the one to resume from."""
    folder, run = BranchFolder(tmp_path), ScriptedRun()
    folder.save(run, 2, two_steps(3.0)[:1])

    class Slow(ScriptedRun):
        def restore(self, at: Path) -> None:
            if at.name.endswith("160"):
                folder.save(run, 2, two_steps(3.0))
            super().restore(at)

    assert folder.resume(Slow(), 2) == two_steps(3.0)


def test_a_checkpoint_that_is_listed_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two machines that begin at once goes on from the checkpoint of the first."""
    run, other, settings = ScriptedRun(), ScriptedRun(), {"tolerance": 0.1}
    folder = BranchFolder(tmp_path)
    folder.prepare(settings, run)
    other.random.seed(5)
    for is_there in ("is_dir", "is_file", "exists"):
        monkeypatch.setattr(Path, is_there, lambda path: False)
    folder.prepare(settings, other)
    assert other.state() == run.state()
    with pytest.raises(ValueError, match="tolerance=0.1, not 0.2"):
        folder.prepare({"tolerance": 0.2}, other)
    monkeypatch.undo()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint", "settings.json"]


def test_what_a_kill_has_left(tmp_path: Path) -> None:
    """Between the rename of a branch and the deletion of its saves, or while a save was written."""
    found = measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID)
    whole = {path.name for path in tmp_path.iterdir()}
    for name in ("branch-2-at-160", "branch-0.5-at-40.a.partial", "checkpoint.b.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    (tmp_path / "branch-1.steps-c.partial").touch()
    assert measure_critical_batch(MeasuredRun(), folder=tmp_path, **GRID) == found
    assert {path.name for path in tmp_path.iterdir()} == whole
