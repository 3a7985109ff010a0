# SPDX-License-Identifier: Apache-2.0
"""Branches as jobs of submitit and Dask: the bits of this process, also after a job was killed."""

import os
from collections import Counter
from pathlib import Path

import branch_runs
import pytest
from branch_runs import mortal, trained

from gnsfast.cli import executors
from gnsfast.critical_batch.branches import measure_critical_batch

GRID = {"k": (1, 2), "delta_tokens": 800, "tolerance": 0.3, "save_every_tokens": 80}

OPTIONS = {
    "submitit": ["cluster=local", "timeout_min=5"],
    "dask": ["n_workers=2", "threads_per_worker=1", "dashboard_address=null"],
}

KILLED = {"submitit": "UncompletedJobError: Job", "dask": "python ended with exit code -9"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Jobs import the module of a run, which lies beside the tests."""
    paths = [str(Path(branch_runs.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", OPTIONS)
def test_engines(engine: str, tmp_path: Path) -> None:
    """A job that is killed is named. The same call trains that branch on, and no other."""
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    here = measure_critical_batch(trained(), folder=tmp_path / "here", **GRID)
    out = tmp_path / "cbs"
    with executors.opened(engine, OPTIONS[engine], out) as executor:
        how = {"executor": executor, "make_run": mortal, "folder": out, **GRID}
        found = measure_critical_batch(trained(), **how)
        assert [b.k for b in found.branches] == [1] and KILLED[engine] in found.missing[2.0]
        assert measure_critical_batch(trained(), **how) == here
    for name in ("branch-1.jsonl", "branch-2.jsonl"):
        assert (out / name).read_text() == (tmp_path / "here" / name).read_text()
    taken = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    twice = {step: n for step, n in Counter((b, t) for _, b, t in taken).items() if n > 1}
    assert twice == {("16", "880"): 2} and len(taken) == 10 + 5 + 1
    assert len({pid for pid, *_ in taken}) == 3  # a process for each branch, and the killed one


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("slurm", [], "must be submitit or dask, not 'slurm'"),
        (None, ["a=1"], "a=1 needs an executor"),
        ("submitit", ["timeout_min"], "'timeout_min' is not NAME=VALUE"),
        ("submitit", ["cluster=local"], "timeout_min=MINUTES"),
        ("submitit", ["cluster=local", "timeout_min=5", "partitoin=gpu"], "partitoin"),
        ("submitit", ["timeout_min=5", "slurm_partition=gpu"], "this machine has no srun"),
    ],
)
def test_engines_that_cannot_be(
    name: str | None, options: list[str], said: str, tmp_path: Path
) -> None:
    if name == "submitit" and said != "'timeout_min' is not NAME=VALUE":
        pytest.importorskip("submitit")
    with pytest.raises(ValueError, match=said):
        with executors.opened(name, options, tmp_path):
            pass


@pytest.mark.parametrize("engine", OPTIONS)
def test_engines_that_are_missing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("submitit", "distributed"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=rf"not installed .*pip install 'gnsfast\[{engine}\]'"):
        with executors.opened(engine, OPTIONS[engine], tmp_path):
            pass
