# SPDX-License-Identifier: Apache-2.0
"""The folder of a branch measurement, which stays usable when the process is killed."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gnsfast.arguments import finite_or_none
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.measurement import RESULT, Branch, null_to_nan
from gnsfast.errors import BranchError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KIND, FORMAT = "branch settings", 1
SETTINGS, NOISE, CHECKPOINT, PARTIAL = "settings.json", "noise_scale.json", "checkpoint", ".partial"
LOCK = "lock"


class BranchFolder:
    """Reads and writes the folder of a measurement.

    It holds ``settings.json``, ``checkpoint/``, ``noise_scale.json`` and the result. Each branch
    has ``branch-k.jsonl`` with its steps, ``branch-k.json`` once it finished, ``branch-k.error``
    once it failed, and ``branch-k-at-TOKENS/``, the run saved after TOKENS tokens of the branch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def open(self, settings: Mapping[str, Any]) -> None:
        """Create the folder, or check that an existing one has the same settings.

        Raises:
            ValueError: where the path is a file or a folder of something else, or the folder has
                another format or other settings (the message names them).
        """
        saved = self.path / SETTINGS
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: name a folder")
        if saved.is_file():
            self._check_settings(saved, settings)
        elif self.path.is_dir() and any(not p.name.endswith(PARTIAL) for p in self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no branch measurement: name a new folder"
            )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write(saved, {"kind": KIND, "format": FORMAT, **settings})

    def _check_settings(self, saved: Path, settings: Mapping[str, Any]) -> None:
        there = _read_object(saved)
        if there.get("kind") != KIND or there.get("format") != FORMAT:
            raise ValueError(
                f"{saved} has format {there.get('format')!r}, and this version of gnsfast reads "
                f"{FORMAT}: name a new folder"
            )
        other = [
            f"{name}={there.get(name)!r}, not {value!r}"
            for name, value in settings.items()
            if there.get(name) != value
        ]
        if other:
            raise ValueError(
                f"{self.path} holds branches with {', '.join(other)}: use the same settings to "
                "continue it, or a new folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from measuring in the folder.

        The operating system releases the lock of a killed process. On Windows there is no lock.

        Raises:
            BranchError: where another process holds the lock.
        """
        if fcntl is None:
            yield
            return
        with (self.path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BranchError(
                    f"another process measures in {self.path}: wait for it, or name a new folder"
                ) from None
            yield

    def save_checkpoint(self, run: BranchRun) -> bool:
        """Save the run as the checkpoint; False where the folder has a checkpoint already."""
        if self.checkpoint.is_dir():
            return False
        self._save(run, self.checkpoint)
        return True

    def _save(self, run: BranchRun, to: Path) -> None:
        """Save under a temporary name, then rename: a killed save never looks complete."""
        partial = to.with_name(to.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        run.save(partial)
        os.replace(partial, to)

    def noise_scale(self) -> dict[str, Any] | None:
        """The record of the noise scale at the checkpoint; None before it was measured."""
        path = self.path / NOISE
        return _read_object(path) if path.is_file() else None

    def write_noise_scale(self, record: Mapping[str, Any]) -> None:
        write(self.path / NOISE, record)

    def write_result(self, record: Mapping[str, Any]) -> None:
        write(self.path / RESULT, record)

    def branch(self, k: float) -> Branch | None:
        """The branch of k; None before it finished."""
        path = self._branch_path(k, ".json")
        return Branch.from_record(_read_object(path)) if path.is_file() else None

    def branches(self) -> list[Branch]:
        """All finished branches, by ascending k."""
        found = map(_read_object, self.path.glob("branch-*.json"))
        return sorted(map(Branch.from_record, found), key=lambda branch: branch.k)

    def finish(self, branch: Branch) -> None:
        write(self._branch_path(branch.k, ".json"), branch.record())
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

    def restore(self, run: BranchRun, k: float) -> tuple[int, list[float]]:
        """Restore ``run`` to the newest save of the branch, or to the checkpoint without one.

        Returns:
            The tokens that the branch had trained at that point, and the losses of its steps.
        """
        saves = self._saves(k)
        tokens = _tokens(saves[-1]) if saves else 0
        run.restore(saves[-1] if saves else self.checkpoint)
        path = self._branch_path(k, ".jsonl")
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        steps = [step for step in map(json.loads, lines) if step["tokens"] <= tokens]
        if tokens and (not steps or steps[-1]["tokens"] != tokens):
            raise BranchError(f"{path} does not hold the steps before {saves[-1].name}")
        write(path, *steps)
        return tokens, [null_to_nan(step["loss"]) for step in steps]

    def save(self, run: BranchRun, k: float, tokens: int) -> None:
        """Save the run within a branch, then delete the branch's older save."""
        older = self._saves(k)
        self._save(run, self._branch_path(k, f"-at-{tokens}"))
        for save in older:
            shutil.rmtree(save)

    @contextmanager
    def steps(self, k: float) -> Iterator[TextIO]:
        """The file of a branch's steps, open for appending; each line is written at once."""
        with self._branch_path(k, ".jsonl").open("a", buffering=1, encoding="utf-8") as file:
            yield file

    def _branch_path(self, k: float, ending: str) -> Path:
        return self.path / f"branch-{k_in_name(k)}{ending}"

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
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_object(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path} is not a JSON object")
    return record


def _tokens(save: Path) -> int:
    return int(save.name.rpartition("-")[2])
