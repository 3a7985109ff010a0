# SPDX-License-Identifier: Apache-2.0
"""One branch is one command: by xargs, Dask, submitit and torchrun the bits of one process, also
after three SIGKILLs.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from branch_runs import mortal, trained
from processes import spawn

from gnsfast.critical_batch.branches import CriticalBatch, measure_critical_batch
from gnsfast.errors import BranchError

GRID = {"k": (0.5, 1, 2), "delta_tokens": 800, "tolerance": 0.3, "save_every_tokens": 80}
OPTIONS = "--k 0.5,1,2 --tokens 800 --tolerance 0.3 --save-every 80".split()
COMMAND = str(Path(sys.executable).with_name("gnsfast"))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Jobs import the module of a run, which lies beside the tests, and find the commands."""
    paths = [str(Path(branch_runs.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    monkeypatch.chdir(tmp_path)


def run(*words: Any, code: int = 0, **how: Any) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **how)
    assert done.returncode == code, done.stderr
    return done.stdout


def by_xargs(out: Path, calls: int) -> CriticalBatch:
    """Each call starts the commands that are left after a kill: xargs stops at one."""
    how = ["branch", "branch_runs:mortal", "--out", out, *OPTIONS]
    lines = run(COMMAND, *how, "--list")
    words = ["xargs", "-P", "2", "-d", "\n", "-n", "1", "sh", "-c"]
    while (code := subprocess.run(words, input=lines, text=True).returncode) and calls:
        calls -= 1
    assert code == 0
    run(COMMAND, "branch", "result", out)
    return CriticalBatch.load(out)


def by_executor(executor: Any, out: Path, calls: int) -> CriticalBatch:
    while calls:
        calls -= 1
        try:
            how = {"folder": out, "executor": executor, "make_run": mortal, **GRID}
            if not (found := measure_critical_batch(trained(), **how)).missing:
                break
        except BranchError as error:
            assert "k = 1 failed (" in str(error)
    return found


def by_dask(out: Path, calls: int) -> CriticalBatch:
    distributed = pytest.importorskip("distributed")
    how = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(**how) as client:
        return by_executor(client.get_executor(pure=False), out, calls)


def by_submitit(out: Path, calls: int) -> CriticalBatch:
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor("logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    return by_executor(executor, out, calls)


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_xargs, by_dask, by_submitit])
def test_three_kills(way: Any, tmp_path: Path) -> None:
    """Each branch goes on from its last save: only the step in which it was killed is repeated."""
    here = measure_critical_batch(trained(), folder=tmp_path / "here", **GRID)
    assert way(tmp_path / "cbs", 4) == here
    assert len(list(tmp_path.glob("died-*"))) == 3
    for k in ("0.5", "1", "2"):
        files = [tmp_path / of / f"branch-{k}x" / "steps.jsonl" for of in ("cbs", "here")]
        assert files[0].read_bytes() == files[1].read_bytes()
    taken = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    twice = {step: n for step, n in Counter((b, t) for _, b, t in taken).items() if n > 1}
    assert twice == {("4", "840"): 2, ("8", "800"): 2, ("16", "880"): 2}
    assert len(taken) == 20 + 10 + 5 + 3 and len({pid for pid, *_ in taken}) >= 4


def in_processes_of_the_test(rank: int, path: str) -> None:
    run = branch_runs.sharded_run("fsdp")
    list(run.train(400))
    measure_critical_batch(run, folder=Path(path), **GRID)


@pytest.mark.slow
@pytest.mark.dist
def test_torchrun(tmp_path: Path) -> None:
    """Each branch by two processes: the bits of two that train all branches."""
    how = ["branch", "branch_runs:launched_run", "--out", tmp_path / "cbs", *OPTIONS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--no-python"]
    printed = [run(*torchrun, *line.split()) for line in run(COMMAND, *how, "--list").splitlines()]
    assert [text.count("k = ") for text in printed] == [1, 1, 1]  # by one of the processes
    assert "critical batch size" in run(COMMAND, "branch", "result", tmp_path / "cbs")
    spawn(in_processes_of_the_test, 2, (str(tmp_path / "here"),))
    found = CriticalBatch.load(tmp_path / "cbs")
    assert found == CriticalBatch.load(tmp_path / "here") and found.noise_scale is not None


@pytest.mark.slow
def test_workers(tmp_path: Path) -> None:
    """Two processes of one command; a run that starts no process group is refused by name."""
    how = ["branch", "branch_runs:trained", *OPTIONS, "--out"]
    run(COMMAND, *how, tmp_path / "a", "--workers", 2)
    here = measure_critical_batch(trained(), folder=tmp_path / "here", **GRID)
    assert CriticalBatch.load(tmp_path / "a") == here
    two = {**os.environ, "WORLD_SIZE": "2"}
    said = subprocess.run([COMMAND, *how, "b"], capture_output=True, text=True, env=two).stderr
    assert "2 processes were started, but branch_runs:trained() returned a run of 1" in said
