# SPDX-License-Identifier: Apache-2.0
"""Branches that are runs of several processes themselves, started by torchrun and by srun."""

import multiprocessing
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import branch_runs
import pytest
import torch.distributed as dist
from branch_runs import launched_run
from processes import spawn

from gnsfast.critical_batch.branches import BranchFolder, CriticalBatch, measure_critical_batch
from gnsfast.critical_batch.branches.branch_executors import LocalProcesses, launch
from gnsfast.errors import BranchError
from gnsfast.parallel import first, is_first

pytestmark = pytest.mark.dist

TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
GRID = {"k": (1, 2), "delta_tokens": 960, "tolerance": 0.5}

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
step = {{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}}
step["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
tasks = []
for task in "01":
    environment = os.environ | step | {{"SLURM_PROCID": task, "SLURM_LOCALID": task}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=environment))
codes = [task.wait() for task in tasks]
sys.exit(max(map(abs, codes)))
"""


@pytest.fixture
def forks() -> Iterator[LocalProcesses]:
    """New processes that need not import torch again, for seconds each."""
    with LocalProcesses(2) as pool:
        pool._context = multiprocessing.get_context("fork")
        yield pool


@pytest.fixture
def srun(tmp_path: Path) -> str:
    """Starts two tasks as Slurm does."""
    path = tmp_path / "srun"
    path.write_text(SRUN)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def in_processes_of_the_test(rank: int, path: str) -> None:
    run = branch_runs.sharded_run("fsdp")
    list(run.train(400))
    measure_critical_batch(run, folder=Path(path), **GRID)


@pytest.mark.slow
def test_torchrun(tmp_path: Path, forks: LocalProcesses) -> None:
    """Each branch by two processes: the bits of a measurement in which all are branches of one."""
    options = {"executor": forks, "launcher": TORCHRUN, "make_run": launched_run}
    found = measure_critical_batch(None, folder=tmp_path / "cbs", **options, **GRID)
    spawn(in_processes_of_the_test, 2, (str(tmp_path / "here"),))
    assert found == CriticalBatch.load(tmp_path / "here") and found.noise_scale is not None
    for name in ("branch-1.jsonl", "branch-2.jsonl"):
        assert (tmp_path / "cbs" / name).read_text() == (tmp_path / "here" / name).read_text()
    assert not list((tmp_path / "cbs").glob("*.error"))


class Late:
    """Makes a run without a process group, then one with it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 2:
            dist.init_process_group("gloo")
        return self


def two_calls(make_run: Any, answer: Path) -> None:
    with pytest.raises(BranchError, match="2 processes were launched, .*init_process_group"):
        make_run()
    found = [make_run().calls, first(os.getpid) != os.getpid(), is_first()]
    if is_first():
        answer.write_text(str(found))


def test_srun(tmp_path: Path, srun: str) -> None:
    """What it says of a step is what a process group needs."""
    launch(srun, BranchFolder(tmp_path), "calls", two_calls, Late(), tmp_path / "answer")
    assert (tmp_path / "answer").read_text() == "[2, False, True]"


def divide(make_run: Any) -> float:
    return 1 / 0


def test_launches_that_fail(tmp_path: Path) -> None:
    """What a process noted says more than the exit code of the command."""
    folder = BranchFolder(tmp_path)
    with pytest.raises(BranchError, match="env ended with exit code 1"):
        launch("env", folder, "one", divide, Late())
    assert folder.failure("one") == "ZeroDivisionError: division by zero"
    with pytest.raises(BranchError, match="false ended with exit code 1"):
        launch("false", folder, "two", divide, Late())
    assert folder.failure("two") == ""
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        launch("no-such-command", folder, "three", divide, Late())


def of_the_script() -> None:
    raise AssertionError("never called")


def test_what_other_processes_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_the_script, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_the_script", of_the_script, raising=False)
    for make_run, said in (
        (lambda: 0, "at the top level of a module"),
        (of_the_script, "the script that"),
    ):
        with pytest.raises(ValueError, match=said):
            launch("false", BranchFolder(tmp_path), "one", divide, make_run)
