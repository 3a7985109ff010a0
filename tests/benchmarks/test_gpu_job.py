# SPDX-License-Identifier: Apache-2.0
"""What is left of a call of ``make gpu`` at any moment: its archive and its log."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks.machine import job as gpu_job  # noqa: E402
from benchmarks.machine.job import Job  # noqa: E402

RECORD = "records/2026-01-02-gpu-ops.json"


def job_in(folder: Path, results: str = "results") -> Job:
    return Job(folder / "out", folder / results, 60, folder)


def packed(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "out" / "gpu.tar.gz") as archive:
        return {f.name: archive.extractfile(f).read().decode() for f in archive}  # type: ignore[union-attr]


def test_the_log_is_packed_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends when the archive has its line; no record says anything meanwhile."""
    monkeypatch.setattr(gpu_job, "LOOK", 0.01)
    monkeypatch.setattr(gpu_job, "LOG_SECONDS", 0.05)
    job, archive = job_in(tmp_path), str(tmp_path / "out" / "gpu.tar.gz")
    waits = (
        "import os, sys, tarfile, time\n"
        "print('a li' + 'ne')\n"
        "for _ in range(60):\n"
        "    time.sleep(0.05)\n"
        "    if os.path.exists(sys.argv[1]):\n"
        "        with tarfile.open(sys.argv[1]) as a:\n"
        "            if any(b'a line' in a.extractfile(m).read() for m in a): sys.exit(3)\n"
    )
    assert job.run([sys.executable, "-c", waits, archive], 30) == 3
    (name,) = packed(tmp_path)
    text = (tmp_path / "results" / name).read_text()
    assert text == (tmp_path / "out" / "gpu.log").read_text() == "a line\n"


def test_a_record_that_is_replaced_while_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has one of the two, whole."""
    job = job_in(tmp_path)
    path = tmp_path / "results" / RECORD
    of = tarfile.TarFile.gettarinfo

    def then_replaced(archive: Any, name: Any, *rest: Any) -> Any:
        found = of(archive, name, *rest)
        if Path(name) == path:
            path.write_text(news.pop())
        return found

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", then_replaced)
    news = ["[1]", "[1, 2, 3]"]
    for old in ("[1]", "[1, 2, 3]"):
        path.write_text(old)
        job.pack()
        assert json.loads(packed(tmp_path)[RECORD]) in ([1], [1, 2, 3])


def test_an_archive_of_a_former_call_is_taken_up(tmp_path: Path) -> None:
    """Instead of being overwritten, unless the folder of results has records of its own."""
    job = job_in(tmp_path)
    (tmp_path / "results" / RECORD).write_text("[1]")
    job.pack()
    fresh = job_in(tmp_path, "fresh")
    fresh.take_up()
    fresh.pack()
    assert json.loads(packed(tmp_path)[RECORD]) == [1]
    (tmp_path / "results" / RECORD).write_text("[2]")
    again = job_in(tmp_path)
    again.take_up()
    assert (tmp_path / "results" / RECORD).read_text() == "[2]"
    job.archive.write_bytes(b"half of it")
    with pytest.raises(SystemExit, match="gpu.tar.gz: not a gzip file: move it away"):
        job_in(tmp_path, "another").take_up()
    assert job.archive.read_bytes() == b"half of it"


def test_two_calls_at_once(tmp_path: Path) -> None:
    """The second says why it does not run, until the first has ended."""
    with gpu_job.alone(tmp_path / "results"):
        with pytest.raises(SystemExit, match="another call works in .*results: wait"):
            with gpu_job.alone(tmp_path / "results"):
                raise AssertionError("two at once")
    with gpu_job.alone(tmp_path / "results"):
        pass
