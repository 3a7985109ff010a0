# SPDX-License-Identifier: Apache-2.0
"""One call of ``gpu_machine.py``: runs programs up to a time limit, shows and logs what they
print, and packs the results, which are whole at any moment. Needs the standard library alone.
"""

import contextlib
import datetime
import fcntl
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine.processes import following, none_left

LOOK = 0.1
"""Seconds between two looks at a program's output and records."""
LOG_SECONDS = 5
"""Between two archives where the log alone grows."""
MOST = 16 << 20
"""Most bytes of a file that can be fetched from such a machine."""
TIMED_OUT = 124
KEPT = ("records/*.json", "records/*.md", "extension/*/*", "logs/*.log")
"""Files of the results that go into the archive."""


class Job:
    """``results``: an unpacked archive of former calls, to which this one adds."""

    def __init__(self, out: Path, results: Path, limit: float, root: Path) -> None:
        self.end = time.monotonic() + limit
        self.root, self.results, self.records = root, results, results / "records"
        for folder in (out, self.records, results / "logs", results / "extension"):
            folder.mkdir(parents=True, exist_ok=True)
        self.archive, self.copy = out / "gpu.tar.gz", out / "gpu.log"
        now = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
        self.log = results / "logs" / f"{now}-{os.getpid()}.log"
        for log in (self.log, self.copy):
            log.write_bytes(b"")
        self.shown = 0  # bytes of the log
        self.packed: dict[Path, int] = {}
        self.packed_at, self.packed_log = time.monotonic(), 0
        self.warned: set[str] = set()
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}

    def take_up(self) -> None:
        """Unpack the archive of a former call in ``out`` if the results have no record: packing
        them would overwrite it.
        """
        if not self.archive.exists() or any(self.records.glob("*.json")):
            return
        try:
            with tarfile.open(self.archive, "r:gz") as archive:
                archive.extractall(self.results, filter="data")
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise SystemExit(f"{self.archive}: {error}: move it away") from None
        self.say(f"taken up: {self.archive}")

    def left(self) -> float:
        """Seconds until the limit."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        with self.log.open("ab") as log:
            log.write(f"== {text}\n".encode())
        self.show()

    def show(self) -> None:
        """Print what is new in the log, and add it to the copy."""
        with self.log.open("rb") as log:
            log.seek(self.shown)
            new = log.read()
        self.shown += len(new)
        with self.copy.open("ab") as copy:
            copy.write(new)
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()

    def run(self, command: list[str], seconds: float, **environment: str) -> int:
        """Run a program; its exit status. Its output goes to the log, and finished records are
        packed while it runs. After ``seconds`` its process group is killed; at its end, whatever it
        left behind.
        """
        with none_left(self.say) as stage:
            status = self._run_group(command, seconds, environment | stage)
        self.show()
        self.pack()
        return status

    def _run_group(self, command: list[str], seconds: float, environment: dict[str, str]) -> int:
        """As ``run``, but without killing what is left behind."""
        end, follow = time.monotonic() + seconds, following()
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: (os.setpgrp(), follow()),
            )
        while (status := process.poll()) is None:
            time.sleep(LOOK)
            self.show()
            self.pack_changes()
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.say(f"stopped after {seconds:.0f} s: {' '.join(command)}")
                return TIMED_OUT
        return status

    def pack_changes(self) -> None:
        """Pack if a record changed or, after a while, the log. A record that is just being replaced
        is packed next time.
        """
        due = self.shown > self.packed_log and time.monotonic() > self.packed_at + LOG_SECONDS
        with contextlib.suppress(FileNotFoundError):
            if due or self.stamps() != self.packed:
                self.pack()

    def stamps(self) -> dict[Path, int]:
        files = (p for pattern in KEPT[:-1] for p in self.results.glob(pattern))
        return {path: path.stat().st_mtime_ns for path in files}

    def pack(self) -> None:
        """Replace the archive."""
        stamps, self.packed_log = self.stamps(), self.shown
        packed = self.tarred(KEPT)
        if len(packed) > MOST:
            self.warn("gpu.tar.gz would be too large: it is packed without the built extension")
            packed = self.tarred(tuple(each for each in KEPT if not each.startswith("extension")))
        partial = self.archive.with_name("gpu.tar.gz.partial")
        partial.write_bytes(packed)
        partial.replace(self.archive)
        self.packed, self.packed_at = stamps, time.monotonic()
        for path in (self.archive, self.copy):
            if path.stat().st_size > MOST:
                self.warn(f"{path.name} is larger than {MOST >> 20} MiB, which may not come back")

    def tarred(self, patterns: tuple[str, ...]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for pattern in patterns:
                for path in sorted(self.results.glob(pattern)):
                    member = archive.gettarinfo(path, str(path.relative_to(self.results)))
                    content = path.read_bytes()  # the file may have been replaced since
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return packed.getvalue()

    def warn(self, text: str) -> None:
        """Say it the first time only."""
        if text not in self.warned:
            self.warned.add(text)
            self.say(text)


@contextlib.contextmanager
def alone(results: Path) -> Iterator[None]:
    """Lock the folder: a former call still runs if only its shell was killed."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for its end, or stop it"
            raise SystemExit(f"another call works in {results}: {remedy}") from None
        yield
