# SPDX-License-Identifier: Apache-2.0
"""Processes that a stage of ``make gpu`` starts: none outlives it, nor who started it."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import runs, soon

pytest.importorskip("benchmarks")  # a wheel has none
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are seen in /proc")

from benchmarks.machine import job as gpu_job  # noqa: E402
from benchmarks.machine.job import Job  # noqa: E402

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
GRANDCHILD = f"""\
import subprocess, sys, time
child = subprocess.Popen({SLEEPS}, start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["stopped", "ended"])
def test_a_process_with_a_group_of_its_own(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ninja gives each compiler: a signal to the stage's group does not reach it."""
    monkeypatch.setattr(gpu_job, "LOOK", 0.01)
    job = Job(tmp_path / "out", tmp_path / "results", 60, tmp_path)
    told = tmp_path / "pid"
    with subprocess.Popen(SLEEPS) as other:
        seconds = "60" if how == "stopped" else "0"
        status = job.run([sys.executable, "-c", GRANDCHILD, str(told), seconds], 1)
        assert status == (gpu_job.TIMED_OUT if how == "stopped" else 0)
        spared = other.poll() is None  # which this process had before
        other.kill()
    assert spared and not runs(told.read_text())
    assert f"stopped: process {told.read_text()}" in job.log.read_text()


def test_a_program_of_a_part_ends_with_it(tmp_path: Path) -> None:
    """However the part ends."""
    told, root = tmp_path / "pid", Path(__file__).parents[2]
    child = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    run = [sys.executable, "-c", child]
    part = f"from benchmarks.gpu import parts; parts.outcome('a', {run}, 'status')"
    with subprocess.Popen([sys.executable, "-c", part], cwd=root) as process:
        assert soon(lambda: told.exists() and bool(told.read_text()))
        process.kill()
    assert soon(lambda: not runs(told.read_text()))
