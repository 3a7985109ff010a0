# SPDX-License-Identifier: Apache-2.0
"""The folder of a branch measurement: what is in it is whole, whenever the process is killed."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gnsfast.arguments import finite
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.measurement import RESULT, Branch, number
from gnsfast.errors import BranchError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KIND, FORMAT = "branch settings", 1
SETTINGS, NOISE, CHECKPOINT, PARTIAL = "settings.json", "noise_scale.json", "checkpoint", ".partial"
LOCK = "lock"


class BranchFolder:
    """Its files: ``settings.json``, ``checkpoint/``, ``noise_scale.json`` and the result; of each
    branch ``branch-k.jsonl`` (its steps), ``branch-k.json`` once it is finished,
    ``branch-k.error`` once it failed and ``branch-k-at-TOKENS/``, a save inside of it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def open(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or go on with one of the same settings.

        Raises:
            ValueError: for a file, a folder of something else, another format or other settings,
                by name.
        """
        known = self.path / SETTINGS
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: name a folder")
        if known.is_file():
            self._compare(known, settings)
        elif self.path.is_dir() and any(not p.name.endswith(PARTIAL) for p in self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no branch measurement: name a new folder"
            )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write(known, {"kind": KIND, "format": FORMAT, **settings})

    def _compare(self, known: Path, settings: Mapping[str, Any]) -> None:
        there = _record(known)
        if there.get("kind") != KIND or there.get("format") != FORMAT:
            raise ValueError(
                f"{known} has format {there.get('format')!r}, and this version of gnsfast reads "
                f"{FORMAT}: name a new folder"
            )
        other = [
            f"{name}={there.get(name)!r}, not {value!r}"
            for name, value in settings.items()
            if there.get(name) != value
        ]
        if other:
            raise ValueError(
                f"{self.path} holds branches with {', '.join(other)}: take the same settings to go "
                "on with it, or a new folder"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process measures in the folder meanwhile. The system lets go of the lock of a
        process that was killed; Windows has none.

        Raises:
            BranchError: where one does.
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
        """Save where the branches start, unless that was done; whether it was saved now."""
        if self.checkpoint.is_dir():
            return False
        self._save(run, self.checkpoint)
        return True

    def _save(self, run: BranchRun, to: Path) -> None:
        """A folder under its own name is a whole one: a killed save leaves another name."""
        partial = to.with_name(to.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        run.save(partial)
        os.replace(partial, to)

    def noise_scale(self) -> dict[str, Any] | None:
        """What was measured at the checkpoint, if it was."""
        path = self.path / NOISE
        return _record(path) if path.is_file() else None

    def write_noise_scale(self, record: Mapping[str, Any]) -> None:
        write(self.path / NOISE, record)

    def write_result(self, record: Mapping[str, Any]) -> None:
        write(self.path / RESULT, record)

    def branch(self, k: float) -> Branch | None:
        """A branch that is finished."""
        path = self._of(k, ".json")
        return Branch.of(_record(path)) if path.is_file() else None

    def branches(self) -> list[Branch]:
        """All that are finished, by ascending k."""
        found = map(_record, self.path.glob("branch-*.json"))
        return sorted(map(Branch.of, found), key=lambda branch: branch.k)

    def finish(self, branch: Branch) -> None:
        write(self._of(branch.k, ".json"), branch.record())
        for state in self._states(branch.k):
            shutil.rmtree(state)

    def fail(self, k: float, reason: str, trace: str) -> None:
        """Keep why a branch failed: one line, and the whole of it."""
        self._of(k, ".error").write_text(f"{reason}\n{trace}", encoding="utf-8")

    def failure(self, k: float) -> str | None:
        path = self._of(k, ".error")
        return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else None

    def forget_failure(self, k: float) -> None:
        self._of(k, ".error").unlink(missing_ok=True)

    def restore(self, run: BranchRun, k: float) -> tuple[int, list[float]]:
        """Put ``run`` to the newest save of a branch, or else to the checkpoint: the tokens that
        the branch has trained by then, and the losses of its steps.
        """
        states = self._states(k)
        tokens = _tokens(states[-1]) if states else 0
        run.restore(states[-1] if states else self.checkpoint)
        path = self._of(k, ".jsonl")
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        steps = [step for step in map(json.loads, lines) if step["tokens"] <= tokens]
        if tokens and (not steps or steps[-1]["tokens"] != tokens):
            raise BranchError(f"{path} does not hold the steps before {states[-1].name}")
        write(path, *steps)
        return tokens, [number(step["loss"]) for step in steps]

    def save(self, run: BranchRun, k: float, tokens: int) -> None:
        """Save inside of a branch; the one before it is dropped once this one is whole."""
        before = self._states(k)
        self._save(run, self._of(k, f"-at-{tokens}"))
        for state in before:
            shutil.rmtree(state)

    @contextmanager
    def steps(self, k: float) -> Iterator[TextIO]:
        """The file of a branch's steps, written line by line."""
        with self._of(k, ".jsonl").open("a", buffering=1, encoding="utf-8") as file:
            yield file

    def _of(self, k: float, ending: str) -> Path:
        return self.path / f"branch-{name_of(k)}{ending}"

    def _states(self, k: float) -> list[Path]:
        found = self.path.glob(f"branch-{name_of(k)}-at-*")
        return sorted((p for p in found if not p.name.endswith(PARTIAL)), key=_tokens)


def name_of(k: float) -> str:
    """k without a needless point: 0.5, 2."""
    return repr(float(k)).removesuffix(".0")


def step_line(k: float, step: int, tokens: int, loss: float) -> str:
    """A line of ``branch-k.jsonl``; ``tokens`` are those of the branch so far."""
    record = {"kind": "branch step", "k": k, "step": step, "tokens": tokens, "loss": finite(loss)}
    return json.dumps(record) + "\n"


def write(path: Path, *records: Mapping[str, Any]) -> None:
    """Lines of JSON, there whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _record(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object")
    return record


def _tokens(state: Path) -> int:
    return int(state.name.rpartition("-")[2])
