# SPDX-License-Identifier: Apache-2.0
"""Attempts: one process at a time, whether it has died, on disks with and without locks."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gnsfast.critical_batch.branches import branch_attempt
from gnsfast.critical_batch.branches.branch_attempt import Attempts
from gnsfast.errors import BranchError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_attempt, "BEAT", 0.05)
    monkeypatch.setattr(branch_attempt, "EXPIRY", 0.5)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_attempt, "fcntl", None)


def hold(stem: Path) -> None:
    with Attempts(stem).wait():
        time.sleep(60)


def held(stem: Path) -> Any:
    """A process at work, once it has said so."""
    process = FORK.Process(target=hold, args=(stem,))
    process.start()
    until(lambda: Attempts(stem).read(1).get("pid") == process.pid)
    return process


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_takes_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: Attempts(tmp_path / "work").take(0), range(8)))
    [attempt] = [each for each in taken if each is not None]
    assert Attempts(tmp_path / "work").over() is None
    with attempt:
        attempt.say(saved=5)
    assert Attempts(tmp_path / "work").over() == 1
    with Attempts(tmp_path / "work").wait() as second:
        assert second.previous["saved"] == 5 and second.previous["over"]
        assert Attempts(tmp_path / "work").read(2)["saved"] == 5
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["work.attempt-1", "work.attempt-2"]


def test_an_old_listing_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose machine does not see the file of another yet: creating it shows it."""
    with Attempts(tmp_path / "work").wait():
        monkeypatch.setattr(Path, "exists", lambda path: False)
        attempts = Attempts(tmp_path / "work")
        assert attempts.over() == 0 and attempts.take(0) is None


def test_a_killed_process_of_this_machine_is_over_at_once(tmp_path: Path) -> None:
    process = held(tmp_path / "work")
    attempts = Attempts(tmp_path / "work")
    assert attempts.over() is None
    os.kill(process.pid, signal.SIGSTOP)  # it may go on
    assert attempts.over() is None
    process.kill()
    process.join()
    assert attempts.over() == 1


@pytest.mark.second
@pytest.mark.usefixtures("hasty", "without_locks")
def test_without_locks_silence_is_the_end(tmp_path: Path) -> None:
    process = held(tmp_path / "work")
    attempts, seen = Attempts(tmp_path / "work"), time.monotonic()
    while time.monotonic() < seen + 1:  # longer than the expiry: its signs of life count
        assert attempts.over() is None
        time.sleep(0.05)
    process.kill()
    process.join()
    died = time.monotonic()
    until(lambda: attempts.over() == 1)
    assert time.monotonic() - died > 0.4
    assert Attempts(tmp_path / "work").over() is None  # which has watched for no time yet


@pytest.mark.second
@pytest.mark.usefixtures("hasty")
def test_another_machine_is_not_judged_by_the_locks_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a disk's locks hold within one machine only, they are all free elsewhere."""
    process = held(tmp_path / "work")
    monkeypatch.setattr(branch_attempt, "machine", lambda: "another")
    monkeypatch.setattr(branch_attempt, "_is_locked", lambda path: False)
    attempts = Attempts(tmp_path / "work")
    for _ in range(20):
        assert attempts.over() is None
        time.sleep(0.05)
    process.kill()
    process.join()
    until(lambda: attempts.over() == 1)


@pytest.mark.usefixtures("hasty", "without_locks")
def test_who_was_silent_too_long_writes_no_more(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "work")
    with attempts.wait() as stopped:
        stopped.check()
        stopped._closed.set()  # as if its machine were frozen
        with Attempts(tmp_path / "work").wait() as other:
            with pytest.raises(BranchError, match="was silent .*work.attempt-1.*has taken over"):
                stopped.check()
            other.check()


@pytest.mark.usefixtures("hasty", "without_locks")
def test_a_process_that_died_before_its_first_word(tmp_path: Path) -> None:
    (tmp_path / "work.attempt-1").touch()
    with Attempts(tmp_path / "work").wait() as attempt:
        assert attempt.previous == {}
