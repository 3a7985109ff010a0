# SPDX-License-Identifier: Apache-2.0
"""``Attempts``: decides which process does a piece of work in a folder that several machines share.

It relies on two properties of the disk. If several processes create a file exclusively, one of them
succeeds. A process that opens a file reads what was written to it before (NFS: close-to-open). It
relies on nothing else: a listing may be old, a file from another machine may appear late, and
clocks may differ. ``flock`` may be missing. Where it works, it shows at once that a process of the
same machine has died.
"""

import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import IO, Any

from gnsfast.errors import BranchError
from gnsfast.parallel import first, is_first

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BEAT = 10.0
"""Seconds between two signs of life."""

EXPIRY = 120.0
"""A process of another machine counts as dead after so many seconds without one."""

SIZE = 1024  # bytes: each write replaces the whole file, so that no reader finds a part


def machine() -> str:
    """A name for this machine since its last start. Its processes see each other's locks."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.is_file() else ''}".strip()


class Attempts:
    """The attempts at one piece of work, numbered from 1. Each is a file that its process created.

    Args:
        stem: the path of these files without their endings.
    """

    def __init__(self, stem: Path) -> None:
        self.stem = stem
        self._seen: tuple[int, dict[str, Any], float] = (0, {}, 0.0)

    def path(self, number: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}.attempt-{number}")

    def read(self, number: int) -> dict[str, Any]:
        """What an attempt said last; empty before its first word."""
        try:
            said: dict[str, Any] = json.loads(self.path(number).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return said

    def newest(self) -> int:
        """The newest attempt that this machine can see; 0 where there is none."""
        number = 0
        while self.path(number + 1).exists():
            number += 1
        return number

    def over(self) -> int | None:
        """The newest attempt once it is over; None while its process works.

        A process of another machine, or on a disk without locks, counts as dead once it has been
        silent for ``EXPIRY`` s by this process's clock. Repeated calls of the same object find out.
        """
        if not (number := self.newest()):
            return 0
        said, now = self.read(number), time.monotonic()
        if said.get("over") or (said.get("locked") and said["machine"] == machine()):
            return number if said.get("over") or not _is_locked(self.path(number)) else None
        if self._seen[:2] != (number, said):
            self._seen = number, said, now
        return number if now - self._seen[2] > EXPIRY else None

    def take(self, after: int) -> "Attempt | None":
        """Begin the attempt that follows ``after``, which is over, for all processes of a run.

        None where another process has begun it: however old this machine's listing is, creating
        the file shows it.
        """
        return Attempt(self, after + 1) if first(lambda: _create(self.path(after + 1))) else None

    def wait(self) -> "Attempt":
        """Begin the next attempt, after the one at work."""
        while True:
            over = first(self.over)
            if over is not None and (attempt := self.take(over)) is not None:
                return attempt
            time.sleep(0.1)


class Attempt:
    """Held until it is closed, or its process dies. A thread gives a sign of life every ``BEAT`` s.

    In processes other than the first of a run it does nothing.
    """

    def __init__(self, attempts: Attempts, number: int) -> None:
        self._path, self._next = attempts.path(number), attempts.path(number + 1)
        self.previous = first(lambda: attempts.read(number - 1)) if number > 1 else {}
        """What the attempt before it said last."""
        self._closed, self._writing = threading.Event(), threading.Lock()
        self._file: IO[bytes] | None = None
        if is_first():
            self._file = self._path.open("r+b", buffering=0)
            here = {"machine": machine(), "pid": os.getpid(), "locked": _lock(self._file)}
            self._said = self.previous | here | {"beat": 0, "over": False}
            self.say()
            threading.Thread(target=self._beat, daemon=True).start()

    def say(self, **facts: Any) -> None:
        """Add to what the attempt says; it is on the disk when this returns."""
        with self._writing:
            if self._file is None:
                return
            self._said |= facts | {"beat": self._said["beat"] + 1}
            self._file.seek(0)
            self._file.write(json.dumps(self._said).ljust(SIZE).encode())
            os.fsync(self._file.fileno())

    def check(self) -> None:
        """Raise BranchError where another process has begun the next attempt."""
        if self._file is not None and self._next.exists():
            raise BranchError(
                f"this process was silent for more than {EXPIRY:g} s ({self._path}), so another "
                "process has taken over its branch"
            )

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self.say()
            except OSError:  # the disk may be back at the next beat; after EXPIRY others go on
                continue

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self.say(over=True)
        with self._writing:
            if self._file is not None:
                self._file.close()
            self._file = None


def _create(path: Path) -> bool:
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed or the process dies; whether its disk has locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    assert fcntl is not None
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
