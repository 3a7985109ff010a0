# SPDX-License-Identifier: Apache-2.0
"""Branches as jobs of submitit and of Dask: the bits of this process, also after a worker died."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from branch_runs import trained

from gnsfast.critical_batch.branches import CriticalBatch, measure_critical_batch

submitit = pytest.importorskip("submitit")
distributed = pytest.importorskip("distributed")

GRID = {"k": (1, 2), "delta_tokens": 960}
REAL = {"tolerance": 0.3, "delta_tokens": 800}


def measure(run: Any, folder: Path, **options: Any) -> CriticalBatch:
    return measure_critical_batch(run, folder=folder / "cbs", **{**GRID, **options})


def steps(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "cbs").glob("branch-*.jsonl")}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Jobs import the module of a run, which lies beside the tests."""
    paths = [str(Path(branch_runs.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    return executor


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    """Two worker processes, that may start those of a DataLoader."""
    import dask

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with dask.config.set({"distributed.worker.daemon": False}):
        with distributed.Client(**options) as client:
            client.run(os.environ.update, {"OMP_NUM_THREADS": "1"})
            yield client


def test_on_submitit(tmp_path: Path, jobs: Any) -> None:
    """A job that is killed is named; the same call trains it further, and no other."""
    here = measure(trained(), tmp_path / "here", **REAL)
    found = measure(None, tmp_path, executor=jobs, make_run=trained, **REAL)
    assert found == here and steps(tmp_path) == steps(tmp_path / "here")


def test_on_dask(tmp_path: Path, dask: Any) -> None:
    here = measure(trained(), tmp_path / "here", **REAL)
    found = measure(None, tmp_path, executor=dask.get_executor(), make_run=trained, **REAL)
    assert found == here and steps(tmp_path) == steps(tmp_path / "here")
