# SPDX-License-Identifier: Apache-2.0
"""The folder of a branch measurement, which stays usable when a process is killed at any moment.

Whatever several processes may write is written under a name of its own, then renamed. Whoever
comes first wins, and the others throw theirs away. So the only promise that a shared disk must keep
is that a rename is atomic. Its listings may be late.
"""

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from gnsfast.arguments import check_format
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, own_settings
from gnsfast.critical_batch.branches.measurement import RESULT, Branch
from gnsfast.errors import BranchError
from gnsfast.parallel import first, is_first, meet, process_count

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KIND, FORMAT = "branch settings", 1
SETTINGS, NOISE, CHECKPOINT, PARTIAL = "settings.json", "noise_scale.json", "checkpoint", ".partial"
STEPS, DONE = "branch_steps.jsonl", "done"
LOCK, LOGS, ERROR = "lock", "logs", ".error"
"""``LOGS`` is for the files of an executor."""

PATIENCE = 120.0
"""Seconds that a file may take to appear after another machine has written it."""


class BranchFolder:
    """Reads and writes the folder of a measurement.

    It holds ``settings.json``, ``checkpoint/``, ``noise_scale.json`` and the result. Each branch
    has ``branch-k.json`` and ``branch-k.jsonl``, its steps, once it finished. Until then
    ``branch-k-at-TOKENS/`` is the run saved after TOKENS tokens of the branch, ``branch-k.saves``
    lists what was saved, and a ``branch-k.steps-*.partial`` has the steps of a process so far.
    ``branch-k.error`` and ``checkpoint.error`` say why the last call failed that trained the
    branch or saved the checkpoint.

    Where a run has several processes, all of them call the methods that take it, and the first one
    writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def claim(self) -> None:
        """Create the folder, or check that an existing one is that of a measurement.

        Raises:
            ValueError: where the path is a file or a folder of something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"the folder of a measurement cannot be {self.path}, which is a file")
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / SETTINGS).is_file() and not all(map(_is_own, self.path.iterdir())):
            raise ValueError(
                f"{self.path} holds other files and no branch measurement: name a new folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from measuring in the folder.

        The operating system releases the lock of a killed process. Windows and some disks have no
        such lock, and other machines may not see it. There, two measurements may train the same
        branches.

        Raises:
            BranchError: where another process holds the lock.
        """
        with ExitStack() as stack:
            first(lambda: self._lock(stack))
            yield

    def _lock(self, stack: ExitStack) -> None:
        if fcntl is None:
            return
        lock = stack.enter_context((self.path / LOCK).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BranchError(
                f"another process is measuring in {self.path}: wait until it ends, or name a new "
                "folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise

    def prepare(self, settings: Mapping[str, Any], run: BranchRun) -> None:
        """Write settings and checkpoint, or restore ``run`` to the checkpoint that is there.

        Raises:
            ValueError: where the folder has another format or other settings (the message names
                them).
        """
        first(lambda: self._open(settings))
        if first(self.checkpoint.is_dir) or not self._save(run, self.checkpoint):
            run.restore(self.checkpoint)

    def _open(self, settings: Mapping[str, Any]) -> None:
        saved = self.path / SETTINGS
        saved.touch()  # finds that of another machine, however late listed
        if saved.stat().st_size:
            self._check_settings(settings)
        else:
            write(saved, {"kind": KIND, "format": FORMAT, **settings})

    def refuse_other(self, run: Any) -> None:
        """Raise ValueError for a run whose own settings are not those of the folder."""
        if settings := own_settings(run):
            shown(self.path / SETTINGS)
            self._check_settings(settings)

    def settings(self) -> dict[str, Any]:
        """What ``prepare`` wrote, perhaps on another machine."""
        return _read_object(shown(self.path / SETTINGS))

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        there = _read_object(saved := self.path / SETTINGS)
        check_format(saved, there, KIND, FORMAT, ": name a new folder")
        other = [
            f"{name}={there[name]!r}, not {value!r}" if name in there else f"no {name} noted"
            for name, value in settings.items()
            if name not in there or there[name] != value
        ]
        if other:
            raise ValueError(
                f"{self.path} holds branches with {', '.join(other)}: pass the same settings to "
                "continue that measurement, or name a new folder"
            )

    def noise_scale(self, expected: bool = False) -> dict[str, Any] | None:
        """The record of the noise scale at the checkpoint; None before it was measured.

        Args:
            expected: it was measured, perhaps by another machine.
        """
        path = self.path / NOISE
        if expected:
            shown(path)
        return _read_object(path) if path.is_file() else None

    def write_noise_scale(self, record: Mapping[str, Any]) -> None:
        write(self.path / NOISE, record)

    def write_result(self, record: Mapping[str, Any]) -> None:
        write(self.path / RESULT, record)
        for branch in self.branches():
            self._clean(branch.k)  # a kill may have left it
        for saved in self.path.glob(f"{CHECKPOINT}.*{PARTIAL}"):
            shutil.rmtree(saved, ignore_errors=True)

    def branches(self) -> list[Branch]:
        """All finished branches, by ascending k."""
        return sorted(map(_branch, self.path.glob("branch-*.json")), key=lambda branch: branch.k)

    def finished(self, k: float) -> Branch | None:
        """The branch of k; None before any process has finished it."""
        path = self._branch_path(k, ".json")
        if DONE in self._noted(k):
            shown(path)
        return _branch(path) if path.is_file() else None

    def finish(self, branch: Branch, steps: list[dict[str, Any]]) -> Branch:
        """Write a branch, unless another process has finished it: its branch then counts."""
        if self.finished(branch.k) is None:
            path = self._branch_path(branch.k, ".json")
            write(path, {**branch.record(), "trained": steps})  # together: never those of another
            self._note(branch.k, DONE)
        self._clean(branch.k)
        return _branch(self._branch_path(branch.k, ".json"))

    def _clean(self, k: float) -> None:
        """Delete what a finished branch needs no more. Another process may be deleting it too."""
        for saved in self._glob(k, "-at-*"):
            shutil.rmtree(saved, ignore_errors=True)
        for steps in self._glob(k, f".steps-*{PARTIAL}"):
            steps.unlink(missing_ok=True)

    def outcome(self, branch: Branch, failed: str | None) -> Branch:
        """What became of a branch whose call has ended, or ``failed`` for this reason.

        Another process may have finished the branch of a call that failed.
        """
        name, path = branch_name(branch.k), self._branch_path(branch.k, ".json")
        if failed and not path.is_file():
            return replace(branch, reason=self.failure(name) or failed)
        self.forget_failure(name)
        return _branch(shown(path))

    def fail(self, name: str, reason: str, trace: str) -> None:
        """Note why a call failed: the reason in one line, then the traceback.

        Where several processes fail together, the first one says why, and the others fail for the
        lost connection.
        """
        path = self.path / f"{name}{ERROR}"
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(f"{reason}\n{trace}")

    def failure(self, name: str) -> str:
        """The noted reason; empty without one."""
        path = self.path / f"{name}{ERROR}"
        return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""

    def forget_failure(self, name: str) -> None:
        (self.path / f"{name}{ERROR}").unlink(missing_ok=True)

    def resume(self, run: BranchRun, k: float) -> list[dict[str, Any]]:
        """Restore ``run`` to the newest save of the branch, or to the checkpoint without one.

        Returns:
            The steps of the branch until then.
        """
        saved = first(lambda: self._newest(k))
        try:
            run.restore(shown(saved or self.checkpoint))
            own = saved / STEPS if saved else Path(os.devnull)
            return [json.loads(line) for line in own.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:  # another process has just saved this branch, and deleted that
            if process_count() > 1 or self._newest(k) == saved:
                raise
            return self.resume(run, k)

    def _newest(self, k: float) -> Path | None:
        """The newest save, by what was noted: a listing may not know it yet."""
        newest = max((int(each) for each in self._noted(k) if each != DONE), default=0)
        return self._branch_path(k, f"-at-{newest}") if newest else None

    def save(self, run: BranchRun, k: float, steps: list[dict[str, Any]]) -> None:
        """Save the run within a branch, with its steps. Then delete the older saves."""
        tokens = steps[-1]["tokens"]
        self._save(run, self._branch_path(k, f"-at-{tokens}"), *steps)
        if is_first():
            older = [each for each in self._noted(k) if each != DONE and int(each) < tokens]
            self._note(k, tokens)
            for each in older:
                shutil.rmtree(self._branch_path(k, f"-at-{each}"), ignore_errors=True)

    def _save(self, run: BranchRun, to: Path, *steps: dict[str, Any]) -> bool:
        """Save under a name of its own, then rename; False where another process came first."""
        partial = to.with_name(f"{to.name}.{first(_unique)}{PARTIAL}")
        first(partial.mkdir)
        run.save(partial)
        meet()
        return first(lambda: _commit(partial, to, steps))

    @contextmanager
    def steps(self, k: float, *steps: dict[str, Any]) -> Iterator[TextIO]:
        """A file for the steps of this process, from ``steps`` on, to look at; nothing reads it."""
        own = self._branch_path(k, f".steps-{_unique()}{PARTIAL}")
        with (own if is_first() else Path(os.devnull)).open("w", buffering=1) as file:
            file.writelines(map(line_of, steps))
            yield file

    def _note(self, k: float, what: int | str) -> None:
        with self._branch_path(k, ".saves").open("a") as file:
            file.write(f"{what}\n")
            file.flush()
            os.fsync(file.fileno())

    def _noted(self, k: float) -> list[str]:
        """What was saved. Opening a file so that it may be created finds it, however late listed,
        and reads what was written before (NFS: close-to-open).
        """
        with self._branch_path(k, ".saves").open("a+") as file:
            file.seek(0)
            return file.read().split("\n")[:-1]

    def _branch_path(self, k: float, ending: str) -> Path:
        return self.path / f"{branch_name(k)}{ending}"

    def _glob(self, k: float, ending: str) -> list[Path]:
        return [*self.path.glob(f"{branch_name(k)}{ending}")]


def branch_name(k: float) -> str:
    """The name of a branch and the beginning of its files': branch-0.5, branch-2."""
    return f"branch-{repr(float(k)).removesuffix('.0')}"


def line_of(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def write(path: Path, *records: Mapping[str, Any]) -> None:
    """Write lines of JSON; a kill leaves the old file or the new one, never a part."""
    partial = path.with_name(f"{path.name}.{_unique()}{PARTIAL}")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(map(line_of, records))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _commit(partial: Path, to: Path, steps: tuple[dict[str, Any], ...]) -> bool:
    if steps:
        write(partial / STEPS, *steps)
    try:
        partial.rename(to)
    except OSError as error:  # a folder is never renamed onto one that holds files
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not to.is_dir():
            raise
        shutil.rmtree(partial)
        return False
    return True


def _branch(path: Path) -> Branch:
    """A finished branch. Its steps become a file of their own, unless a kill has left them so."""
    record = _read_object(path)
    steps, own = record.pop("trained", []), path.with_suffix(".jsonl")
    if steps and not own.is_file():
        write(own, *steps)
    return Branch.from_record(record)


def _read_object(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _is_own(path: Path) -> bool:
    """Whether the file is one that a measurement leaves when it is killed early."""
    return path.name in (LOCK, LOGS) or path.name.endswith((PARTIAL, ERROR))


def _unique() -> str:
    return uuid.uuid4().hex


def shown(path: Path) -> Path:
    """Wait for a file that another machine may have written. A listing may not show it yet."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise BranchError(
                f"{path} did not appear within {PATIENCE:g} s. Either it was deleted, or this "
                "machine does not share the folder with the others"
            )
        time.sleep(0.1)
    return path
