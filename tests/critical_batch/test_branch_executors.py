# SPDX-License-Identifier: Apache-2.0
"""Branches on executors: as here, also after workers were lost, and nothing twice in silence."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from branch_runs import Logged, MeasuredRun, ScriptedRun

from gnsfast.critical_batch.branches import (
    Branch,
    CriticalBatch,
    TorchRun,
    measure_critical_batch,
)
from gnsfast.errors import BranchError

FORK = multiprocessing.get_context("fork")
GRID = {"k": (0.5, 1, 2), "delta_tokens": 960}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    return tmp_path / "steps"


def measure(run: Any, folder: Path, **options: Any) -> CriticalBatch:
    return measure_critical_batch(run, folder=folder / "cbs", **{**GRID, **options})


def steps(folder: Path) -> dict[str, list[str]]:
    found = (folder / "cbs").glob("branch-*x/steps.jsonl")
    return {path.parent.name: path.read_text().splitlines() for path in found}


def test_on_processes(tmp_path: Path) -> None:
    """Also without a run in this one; a worker that dies leaves what is finished."""
    here = measure(MeasuredRun(), tmp_path / "here")
    told: list[Branch] = []
    with ProcessPoolExecutor(2, FORK) as pool:
        how = {"executor": pool, "make_run": MeasuredRun, "on_branch": told.append}
        assert (
            measure(MeasuredRun(), tmp_path / "a", **how) == here == measure(None, tmp_path, **how)
        )
        assert told == 2 * [*here.branches] and steps(tmp_path) == steps(tmp_path / "here")
        with pytest.raises(ValueError, match="holds branches with .*tolerance=0.01, not 0.5"):
            measure(None, tmp_path, tolerance=0.5, **how)
        with pytest.raises(ZeroDivisionError):
            measure(None, tmp_path / "other", **how | {"make_run": divide})
    with ProcessPoolExecutor(1, FORK) as pool:
        how = {"executor": pool, "make_run": branch_runs.killed}
        found = measure(ScriptedRun(), tmp_path / "killed", **how)
    assert "BrokenProcessPool" in found.missing[2.0] and [b.k for b in found.branches] == [0.5, 1]
    again = measure(ScriptedRun(), tmp_path / "killed")
    assert again == measure(ScriptedRun(), tmp_path / "whole")


def divide() -> ScriptedRun:
    raise ZeroDivisionError("division by zero")


@pytest.mark.second
def test_on_threads(tmp_path: Path) -> None:
    """Each has a process of its own, because threads share the random numbers of theirs."""
    here = measure_critical_batch(branch_runs.trained(), folder=tmp_path / "here" / "cbs", **GRID)
    with ThreadPoolExecutor(3) as pool:
        how = {"executor": pool, "make_run": branch_runs.trained}
        found = measure(branch_runs.trained(), tmp_path, **how)
        assert found == here and steps(tmp_path) == steps(tmp_path / "here")
        how["make_run"] = branch_runs.killed
        lost = measure(None, tmp_path / "killed", **how, k=(1, 2)).missing
        assert lost == {2.0: "BranchError: its process ended with exit code -9"}
        how["make_run"] = divide
        with pytest.raises(BranchError, match="^ZeroDivisionError: division by zero$"):
            measure(None, tmp_path / "other", **how)


class OwnFuture:
    """No future of ``concurrent.futures``, as submitit's is none."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result, self.ended = work, False

    def done(self) -> bool:
        return self.ended

    def cancel(self) -> None:
        self.ended = True


class Own:
    def __init__(self) -> None:
        self.futures: list[OwnFuture] = []

    def submit(self, fn: Callable[..., Any], *args: Any) -> OwnFuture:
        self.futures.append(OwnFuture(lambda: fn(*args)))
        return self.futures[-1]


def test_on_anything_that_submits(tmp_path: Path) -> None:
    here = measure(ScriptedRun(), tmp_path / "here")
    assert measure(ScriptedRun(), tmp_path, executor=Own(), make_run=ScriptedRun) == here


def diverging() -> ScriptedRun:
    return ScriptedRun({4: 2.0, 8: float("nan"), 16: 2.0})


def test_the_end_of_a_measurement_cancels_what_waits(tmp_path: Path) -> None:
    own = Own()
    with pytest.raises(BranchError, match="k = 1 diverged"):
        measure(ScriptedRun(), tmp_path, executor=own, make_run=diverging)
    assert all(future.ended for future in own.futures)
    assert [line.name for line in (tmp_path / "cbs" / "branch-2x").iterdir()] == []


def test_processes_that_die_after_their_work(tmp_path: Path) -> None:
    """What they left in the folder counts."""

    class Dying:
        def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
            fn(*args)
            future: Future[Any] = Future()
            future.set_exception(OSError("no such node\nin detail"))
            return future

    class Dead:
        def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
            return Dying().submit(lambda: None)

    here = measure(ScriptedRun(), tmp_path / "here")
    assert measure(ScriptedRun(), tmp_path, executor=Dying(), make_run=ScriptedRun) == here
    with pytest.raises(BranchError, match=r"k = 1 failed \(OSError: no such node\)"):
        measure(ScriptedRun(), tmp_path / "other", executor=Dead(), make_run=ScriptedRun)
    assert measure(ScriptedRun(), tmp_path / "other") == here


@pytest.mark.second
@pytest.mark.parametrize("kill", [False, True])
def test_two_that_measure_in_one_folder(kill: bool, tmp_path: Path, log: Path) -> None:
    """They train the same branches, and their files are those of one."""
    here = measure(ScriptedRun(), tmp_path / "here")

    def work() -> None:
        assert measure(Logged(), tmp_path, save_every_tokens=120) == here

    machines = [FORK.Process(target=work) for _ in range(2)]
    for each in machines:
        each.start()
    if kill:
        while not log.exists() or not log.read_text():
            pass
        os.kill(int(log.read_text().split()[0]), 9)
    for each in machines:
        each.join()
    codes = sorted(each.exitcode for each in machines)
    assert codes == ([-9, 0] if kill else [0, 0])
    assert steps(tmp_path) == steps(tmp_path / "here")
    taken = Counter(tuple(line.split()[1:]) for line in log.read_text().splitlines())
    assert max(taken.values()) <= 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executor": Own()}, "executor needs make_run"),
        ({"run": None}, "run=None needs executor"),
        ({"run": None, "executor": Own()}, "executor needs make_run"),
        (
            {"run": None, "executor": Own(), "make_run": MeasuredRun, "repeats": 2},
            "run=None has none: pass the run",
        ),
    ],
)
def test_ways_that_cannot_be(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        measure(options.pop("run", ScriptedRun()), tmp_path, **options)
    assert not (tmp_path / "cbs").exists()


def clipped_run() -> TorchRun:
    run = branch_runs.small_run()
    run.clip = 0.05
    return run


@pytest.mark.second
def test_a_run_made_with_other_settings(tmp_path: Path) -> None:
    """Branches of another run than the one that is measured would be compared in silence."""
    how = {"executor": Own(), "make_run": clipped_run, "k": (1, 2)}
    with pytest.raises(BranchError, match=r"run\.clip=1\.0, not 0\.05"):
        measure(branch_runs.small_run(), tmp_path, **how)
    assert measure(clipped_run(), tmp_path / "same", **how).branches
