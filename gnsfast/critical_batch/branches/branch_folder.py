# SPDX-License-Identifier: Apache-2.0
"""The folder of a branch measurement, which stays usable when the process is killed."""

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from gnsfast.arguments import finite_or_none
from gnsfast.critical_batch.branches.branch_attempt import Attempt, Attempts
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.measurement import RESULT, Branch, null_to_nan
from gnsfast.errors import BranchError
from gnsfast.parallel import first, is_first, meet

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KIND, FORMAT = "branch settings", 1
SETTINGS, NOISE, CHECKPOINT, PARTIAL = "settings.json", "noise_scale.json", "checkpoint", ".partial"
LOCK, LOGS = "lock", "logs"
"""``LOGS`` is for the files of an executor."""

PATIENCE = 120.0
"""Seconds that a file may take to appear after another machine has written it."""


class BranchFolder:
    """Reads and writes the folder of a measurement.

    It holds ``settings.json``, ``checkpoint/``, ``noise_scale.json`` and the result. Each branch
    has ``branch-k.jsonl`` with its steps, ``branch-k.json`` once it finished, ``branch-k.error``
    once it failed, and ``branch-k-at-TOKENS/``, the run saved after TOKENS tokens of the branch.
    ``branch-k.attempt-N`` says which process trains or trained it.

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

    def open(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the branches, or check that they are the same.

        Raises:
            ValueError: where the folder has another format or other settings (the message names
                them).
        """
        saved = self.path / SETTINGS
        if saved.is_file():
            self._check_settings(saved, settings)
        else:
            write(saved, {"kind": KIND, "format": FORMAT, **settings})

    def refuse_other(self, run: Any) -> None:
        """Raise ValueError for a run whose own settings are not those of the folder."""
        own = getattr(run, "branch_settings", None)
        if settings := {f"run.{name}": each for name, each in (own() if own else {}).items()}:
            saved = self.path / SETTINGS
            shown(saved.is_file, saved)
            self._check_settings(saved, settings)

    def _check_settings(self, saved: Path, settings: Mapping[str, Any]) -> None:
        there = _read_object(saved)
        if there.get("kind") != KIND or there.get("format") != FORMAT:
            raise ValueError(
                f"{saved} has format {there.get('format')!r}, but this version of gnsfast reads "
                f"format {FORMAT}: name a new folder"
            )
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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from measuring in the folder.

        The operating system releases the lock of a killed process. Windows and some disks have no
        such lock, and other machines may not see it. There, two measurements share the branches of
        a folder.

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

    @contextmanager
    def prepared(
        self, settings: Mapping[str, Any], run: BranchRun, noise_scale: bool
    ) -> Iterator[None]:
        """Save settings and checkpoint, or restore ``run`` to it; the block measures there.

        One process at a time does it, where anything is missing, with the noise scale if asked for.
        """
        saved = [self.path / SETTINGS, self.checkpoint]
        needed = [*saved, self.path / NOISE] if noise_scale else saved
        with ExitStack() as stack:
            if not first(lambda: all(path.exists() for path in needed)):
                attempt = stack.enter_context(Attempts(self.checkpoint).wait())
                for path in saved if attempt.previous.get("done") else ():
                    shown(path.exists, path)
            first(lambda: self.open(settings))
            if first(self.checkpoint.is_dir):
                run.restore(self.checkpoint)
            else:
                self._save(run, self.checkpoint, attempt.check)
                attempt.say(done=True)
            yield

    def _save(self, run: BranchRun, to: Path, check: Callable[[], None]) -> None:
        """Save under a temporary name, then rename: a killed save never looks complete."""
        partial = to.with_name(to.name + PARTIAL)
        first(lambda: _make_empty(partial))
        run.save(partial)
        meet()
        check()
        first(lambda: os.replace(partial, to))

    def noise_scale(self, expected: bool = False) -> dict[str, Any] | None:
        """The record of the noise scale at the checkpoint; None before it was measured.

        Args:
            expected: it was measured, perhaps by another machine.
        """
        path = self.path / NOISE
        if expected:
            shown(path.is_file, path)
        return _read_object(path) if path.is_file() else None

    def write_noise_scale(self, record: Mapping[str, Any]) -> None:
        write(self.path / NOISE, record)

    def write_result(self, record: Mapping[str, Any]) -> None:
        write(self.path / RESULT, record)

    def attempts(self, k: float) -> Attempts:
        return Attempts(self._branch_path(k, ""))

    def branch(self, k: float) -> Branch | None:
        """The branch of k; None before it finished."""
        path = self._branch_path(k, ".json")
        return Branch.from_record(_read_object(path)) if path.is_file() else None

    def branches(self) -> list[Branch]:
        """All finished branches, by ascending k."""
        found = map(_read_object, self.path.glob("branch-*.json"))
        return sorted(map(Branch.from_record, found), key=lambda branch: branch.k)

    def finished(self, k: float, attempt: Attempt) -> Branch | None:
        """The branch of k, where the attempt before ``attempt`` finished it."""
        path = self._branch_path(k, ".json")
        if attempt.previous.get("done"):
            shown(path.is_file, path)
        return first(lambda: self.branch(k))

    def finish(self, branch: Branch, attempt: Attempt) -> None:
        attempt.check()
        first(lambda: self._finish(branch, attempt))

    def _finish(self, branch: Branch, attempt: Attempt) -> None:
        write(self._branch_path(branch.k, ".json"), branch.record())
        attempt.say(done=True)
        for save in self._saves(branch.k):
            shutil.rmtree(save)

    def fail(self, k: float, reason: str, trace: str) -> None:
        """Write why a branch failed: the reason in one line, then the traceback."""
        self._branch_path(k, ".error").write_text(f"{reason}\n{trace}", encoding="utf-8")

    def failure(self, k: float) -> str | None:
        path = self._branch_path(k, ".error")
        return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else None

    def forget_failure(self, k: float) -> None:
        self._branch_path(k, ".error").unlink(missing_ok=True)

    def restore(self, run: BranchRun, k: float, attempt: Attempt) -> tuple[int, list[float]]:
        """Restore ``run`` to the newest save of the branch, or to the checkpoint without one.

        Returns:
            The tokens that the branch had trained at that point, and the losses of its steps.
        """
        saved: int = attempt.previous.get("saved", 0)
        tokens, losses = first(lambda: self._resume(k, saved))
        at = self._save_path(k, tokens) if tokens else self.checkpoint
        shown(at.is_dir, at)
        run.restore(at)
        return tokens, losses

    def _resume(self, k: float, saved: int) -> tuple[int, list[float]]:
        """The newest save, of at least ``saved`` tokens, and the steps before it."""
        shown(lambda: not saved or self._newest(k) >= saved, self._save_path(k, saved))
        tokens, path = self._newest(k), self._branch_path(k, ".jsonl")
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        steps = [step for step in map(json.loads, lines) if step["tokens"] <= tokens]
        if tokens and (not steps or steps[-1]["tokens"] != tokens):
            raise BranchError(
                f"{path} lacks steps of the first {tokens:,} tokens, which the save of this branch "
                "includes: name a new folder"
            )
        write(path, *steps)
        return tokens, [null_to_nan(step["loss"]) for step in steps]

    def save(self, run: BranchRun, k: float, tokens: int, attempt: Attempt) -> None:
        """Save the run within a branch, then delete the branch's older save."""
        to = self._save_path(k, tokens)
        self._save(run, to, attempt.check)
        attempt.say(saved=tokens)
        if is_first():
            for save in self._saves(k):
                if save != to:
                    shutil.rmtree(save)

    @contextmanager
    def steps(self, k: float) -> Iterator[TextIO]:
        """The file of a branch's steps, open for appending; each line is written at once."""
        path = self._branch_path(k, ".jsonl") if is_first() else Path(os.devnull)
        with path.open("a", buffering=1, encoding="utf-8") as file:
            yield file

    def _branch_path(self, k: float, ending: str) -> Path:
        return self.path / f"branch-{k_in_name(k)}{ending}"

    def _save_path(self, k: float, tokens: int) -> Path:
        return self._branch_path(k, f"-at-{tokens}")

    def _newest(self, k: float) -> int:
        """The tokens of the newest save; 0 without one."""
        saves = self._saves(k)
        return _tokens(saves[-1]) if saves else 0

    def _saves(self, k: float) -> list[Path]:
        found = self.path.glob(f"branch-{k_in_name(k)}-at-*")
        return sorted((p for p in found if not p.name.endswith(PARTIAL)), key=_tokens)


def k_in_name(k: float) -> str:
    """k as file names have it: 0.5, and 2 instead of 2.0."""
    return repr(float(k)).removesuffix(".0")


def step_line(k: float, step: int, tokens: int, loss: float) -> str:
    """A line of ``branch-k.jsonl``; ``tokens`` counts those of the branch so far."""
    place = {"kind": "branch step", "k": k, "step": step, "tokens": tokens}
    return json.dumps(place | {"loss": finite_or_none(loss)}) + "\n"


def write(path: Path, *records: Mapping[str, Any]) -> None:
    """Write lines of JSON; a kill leaves the old file or the new one, never a part."""
    # Another process may write the same file, so each has a partial one of its own.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_object(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return record


def _is_own(path: Path) -> bool:
    """Whether the file is one that a measurement leaves when it is killed early."""
    return path.name in (LOCK, LOGS) or path.name.endswith(PARTIAL) or ".attempt-" in path.name


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def shown(there: Callable[[], bool], path: Path) -> None:
    """Wait for a file that another machine may have written. A listing may not show it yet."""
    deadline = time.monotonic() + PATIENCE
    while not there():
        if time.monotonic() > deadline:
            raise BranchError(
                f"{path} did not appear within {PATIENCE:g} s. Either it was deleted, or this "
                "machine does not share the folder with the others"
            )
        time.sleep(0.1)


def _tokens(save: Path) -> int:
    return int(save.name.rpartition("-")[2])
