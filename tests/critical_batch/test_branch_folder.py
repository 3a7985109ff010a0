# SPDX-License-Identifier: Apache-2.0
"""A folder of branches: one process at a time, and what was measured stays."""

import json
import os
from pathlib import Path

import pytest
from branch_runs import MeasuredRun, small_run

from gnsfast.critical_batch.branches import BranchFolder, measure_critical_batch
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
