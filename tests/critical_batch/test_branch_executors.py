# SPDX-License-Identifier: Apache-2.0
"""Branches on executors: as here, also after workers and machines are lost, and nothing twice."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from branch_runs import Logged, ScriptedRun

from gnsfast.critical_batch.branches import (
    Branch,
    BranchFolder,
    CriticalBatch,
    TorchRun,
    branch_folder,
    measure_critical_batch,
)
from gnsfast.critical_batch.branches.branch_executors import LocalProcesses, noted, told
from gnsfast.critical_batch.branches.branch_process import Plan, train_branch
from gnsfast.errors import BranchError

FORK = multiprocessing.get_context("fork")
GRID = {"k": (0.5, 1, 2), "delta_tokens": 960}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    return tmp_path / "steps"


@pytest.fixture
def forks() -> Iterator[LocalProcesses]:
    """New processes that need not import torch again, for seconds each."""
    with LocalProcesses(2) as pool:
        pool._context = FORK
        yield pool


def measure(run: Any, folder: Path, **options: Any) -> CriticalBatch:
    return measure_critical_batch(run, folder=folder / "cbs", **{**GRID, **options})


def steps(folder: Path) -> dict[str, list[str]]:
    found = (folder / "cbs").glob("branch-*.jsonl")
    return {path.name: path.read_text().splitlines() for path in found}


@pytest.mark.second
def test_on_threads(tmp_path: Path) -> None:
    """They would share one generator of random numbers, so each branch has a process of its own."""
    here = measure(ScriptedRun(), tmp_path / "here", k=(1, 2))
    told: list[Branch] = []
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(
            BranchError, match="make_run must be a function at the top level of a module"
        ):
            measure(
                ScriptedRun(), tmp_path / "other", executor=pool, make_run=lambda: ScriptedRun()
            )
        options = {"executor": pool, "make_run": ScriptedRun, "on_branch": told.append, "k": (1, 2)}
        assert measure(ScriptedRun(), tmp_path, **options) == here
    assert sorted(told, key=lambda b: b.k) == list(here.branches)
    assert steps(tmp_path) == steps(tmp_path / "here")


def test_without_a_run_of_its_own(tmp_path: Path, forks: LocalProcesses) -> None:
    here = measure(branch_runs.MeasuredRun(), tmp_path / "here")
    how = {"executor": forks, "make_run": branch_runs.MeasuredRun}
    found = measure(None, tmp_path, **how)
    assert found == here and found.noise_scale is not None
    assert measure(None, tmp_path, **how) == here
    with pytest.raises(BranchError, match="holds branches with .*tolerance=0.01, not 0.5"):
        measure(None, tmp_path, tolerance=0.5, **how)
    with pytest.raises(BranchError, match="^ZeroDivisionError: division by zero$"):
        measure(None, tmp_path / "other", **how | {"make_run": divide})


@pytest.mark.second
@pytest.mark.parametrize("work", [branch_runs.wait_forever, branch_runs.hold])
def test_closing_ends_calls_at_work(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that would never end, or that read no pipe, without waiting for them."""
    says = tmp_path / "pid"
    monkeypatch.setenv("WAITING", str(says))
    with LocalProcesses(1) as pool:
        call, waiting = pool.submit(work), pool.submit(work)
        while not says.exists() or not says.read_text():
            time.sleep(0.02)
        before = time.monotonic()
    assert time.monotonic() - before < 5
    assert waiting.cancelled()
    with pytest.raises(BranchError, match="its process ended with exit code -15"):
        call.result(timeout=0)


def divide() -> ScriptedRun:
    raise ZeroDivisionError("division by zero")


def test_a_process_says_why_it_failed(tmp_path: Path) -> None:
    folder, plan = BranchFolder(tmp_path), Plan((2.0,), 960, 0.1, 0.5, "keep", "train", None, False)
    ScriptedRun().save(make(folder.checkpoint))
    work = (train_branch, branch_runs.out_of_memory, folder, plan, *plan.branches(8))
    assert told(noted, folder, "branch-2", *work) == "RuntimeError: no memory"
    reason, *trace = (tmp_path / "branch-2.error").read_text().splitlines()
    assert reason == "RuntimeError: no memory" and "train" in "".join(trace)
    assert folder.finished(2.0) is None


def dies(work: Callable[[], Any]) -> Future[Any]:
    """Does the work in a process that dies before it says so."""
    work()
    future: Future[Any] = Future()
    future.set_exception(OSError("no such node"))
    return future


def test_processes_that_die_after_their_work(tmp_path: Path) -> None:
    """What they left in the folder counts."""

    class Dying:
        def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
            return dies(lambda: fn(*args))

    class Dead:
        def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
            return dies(lambda: None)

    make_run = branch_runs.MeasuredRun
    here = measure(make_run(), tmp_path / "here")
    assert measure(None, tmp_path, executor=Dying(), make_run=make_run) == here
    with pytest.raises(BranchError, match="saves the checkpoint was lost: OSError: no such node"):
        measure(None, tmp_path / "other", executor=Dead(), make_run=make_run)


class OwnFuture:
    """No future of ``concurrent.futures``, as submitit's is none."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.looks = work, 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def result(self) -> Any:
        return self.work()

    def cancel(self) -> None:
        raise AssertionError("nothing is left to cancel")


class Own:
    def submit(self, fn: Callable[..., Any], *args: Any) -> OwnFuture:
        return OwnFuture(lambda: fn(*args))


def test_on_anything_that_submits(tmp_path: Path) -> None:
    here = measure(ScriptedRun(), tmp_path / "here")
    assert measure(ScriptedRun(), tmp_path, executor=Own(), make_run=ScriptedRun) == here


def test_an_executor_that_fails(tmp_path: Path) -> None:
    class Broken:
        def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(OSError("no such node\nin detail"))
            return future

    run = ScriptedRun()
    with pytest.raises(BranchError, match=r"k = 1 failed \(OSError: no such node\)"):
        measure(run, tmp_path, executor=Broken(), make_run=ScriptedRun)
    assert measure(run, tmp_path).lower == 16


@pytest.mark.second
@pytest.mark.parametrize("seed", range(3))
def test_workers_killed_at_random(
    seed: int, tmp_path: Path, log: Path, forks: LocalProcesses
) -> None:
    """Three times; what was saved is never trained again, and the records are those of no kill."""
    here = measure(ScriptedRun(), tmp_path / "here")
    chance = random.Random(seed)
    options = {"executor": forks, "make_run": Logged, "save_every_tokens": 40}

    victims: list[int] = []

    def kill(steps: int, over: threading.Event) -> None:
        while len(log.read_text().split("\n")) < steps:
            if over.wait(0.001):
                return  # a busy machine trained on before the last kill came
        pids = [int(line.split()[0]) for line in log.read_text().splitlines()[-2:]]
        with suppress(ProcessLookupError):
            os.kill(pid := chance.choice(pids), signal.SIGKILL)
            victims.append(pid)

    log.touch()
    for _ in range(3):
        at = len(log.read_text().split("\n")) + chance.randint(1, 9)
        over = threading.Event()
        killer = threading.Thread(target=kill, args=(at, over))
        killer.start()
        try:
            found = measure(ScriptedRun(), tmp_path, **options)
            assert found.missing.keys() <= {0.5, 2.0}
        except BranchError as error:
            assert "k = 1 failed (its process ended with exit code -9)" in str(error)
        over.set()
        killer.join()
    assert victims and measure(ScriptedRun(), tmp_path, **options) == here
    assert steps(tmp_path) == steps(tmp_path / "here")
    assert_trained(log, again=len(victims))


def assert_trained(log: Path, again: int) -> None:
    """Every step once, but for the one that each kill took."""
    taken = Counter(tuple(line.split()[1:]) for line in log.read_text().splitlines())
    per_branch = {4: 24, 8: 12, 16: 6}
    assert len(taken) == sum(per_branch.values())
    assert sum(taken.values()) <= len(taken) + again, taken


@pytest.mark.second
@pytest.mark.parametrize("kill", [False, True])
def test_two_machines(kill: bool, tmp_path: Path, log: Path, monkeypatch: Any) -> None:
    """That see no lock of each other train the same branches, and their files are those of one."""
    here = measure(ScriptedRun(), tmp_path / "here")
    monkeypatch.setattr(branch_folder, "fcntl", None)

    def work() -> None:
        found = measure(Logged(), tmp_path, save_every_tokens=40)
        assert found == here, [p.read_text() for p in (tmp_path / "cbs").glob("*.error")]

    machines = [FORK.Process(target=work) for _ in range(2)]
    for each in machines:
        each.start()
    if kill:
        while not log.exists():
            time.sleep(0.005)
        pid = int(log.read_text().split()[0])
        os.kill(pid, 9)
    for each in machines:
        each.join()
    assert sorted(each.exitcode for each in machines) == ([-9, 0] if kill else [0, 0])
    assert steps(tmp_path) == steps(tmp_path / "here")
    taken = Counter(tuple(line.split()[1:]) for line in log.read_text().splitlines())
    assert max(taken.values()) <= 2


def test_files_that_appear_late(tmp_path: Path, log: Path, monkeypatch: Any) -> None:
    """Another machine finished a branch; its file is waited for, and nothing is trained again."""
    here = measure(Logged(), tmp_path)
    before = log.read_text()
    finished = tmp_path / "cbs" / "branch-2.json"
    hidden = finished.rename(tmp_path / "late")
    timer = threading.Timer(0.5, lambda: hidden.rename(finished))
    timer.start()
    assert measure(Logged(), tmp_path) == here and log.read_text() == before
    finished.rename(hidden)
    monkeypatch.setattr(branch_folder, "PATIENCE", 0.2)
    found = measure(Logged(), tmp_path)
    assert "branch-2.json did not appear within 0.2 s" in found.missing[2.0]
    assert log.read_text() == before


def test_saves_that_appear_late(tmp_path: Path) -> None:
    folder = BranchFolder(tmp_path)
    ScriptedRun().save(make(folder.checkpoint))
    run, step = ScriptedRun(), {"k": 2, "tokens": 160, "loss": 1.5}
    assert folder.resume(run, 2) == []
    folder.save(run, 2, [step])
    hidden = (tmp_path / "branch-2-at-160").rename(tmp_path / "late")
    timer = threading.Timer(0.3, lambda: hidden.rename(tmp_path / "branch-2-at-160"))
    timer.start()
    assert folder.resume(run, 2) == [step]


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executor": Own()}, "need make_run"),
        ({"executor": Own(), "workers": 2, "make_run": ScriptedRun}, "pass one of them"),
        ({"launcher": "torchrun", "make_run": ScriptedRun}, "needs run=None"),
        ({"run": None}, "need make_run"),
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
