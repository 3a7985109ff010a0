# SPDX-License-Identifier: Apache-2.0
"""The folder of a branch measurement, which stays usable when a process is killed at any moment.

Whatever several processes may write is filled under a name of its own, then renamed: whoever
renames first wins, and the others throw theirs away.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_format
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.measurement import RESULT, Branch
from gnsfast.parallel import first, meet

KIND, FORMAT = "branch settings", 2
CHECKPOINT, SETTINGS, NOISE = "checkpoint", "branch_settings.json", "noise_scale.json"
BRANCH, STEPS, PARTIAL = "branch.json", "steps.jsonl", ".partial"


class BranchFolder:
    """Reads and writes the folder of a measurement.

    It holds ``checkpoint/`` with the settings, ``noise_scale.json`` and the result. Each branch
    that was asked for has a folder ``branch-2x/``, which is empty until it finished. Until then
    ``branch-2x-at-TOKENS/`` is the run saved after TOKENS tokens of the branch.

    Where a run has several processes, all of them call the methods that take it, and the first one
    writes. The methods without it are called by ``first``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.checkpoint = self.path / CHECKPOINT

    def claim(self) -> None:
        """Create the folder, or check that an existing one is that of a measurement.

        Raises:
            ValueError: where the path is a file or a folder of something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"the folder of a measurement cannot be {self.path}, which is a file")
        self.path.mkdir(parents=True, exist_ok=True)
        others = [path for path in self.path.iterdir() if not path.name.endswith(PARTIAL)]
        if others and not self.checkpoint.is_dir():
            raise ValueError(
                f"{self.path} holds other files and no branch measurement: name a new folder"
            )

    def prepare(self, settings: Mapping[str, Any], ks: Iterable[float], run: BranchRun) -> None:
        """Write settings and checkpoint, or restore ``run`` to the checkpoint that is there.

        Raises:
            ValueError: where the folder has another format or other settings (the message names
                them).
        """

        def fill(partial: Path) -> None:
            run.save(partial)
            first(lambda: write(partial / SETTINGS, {"kind": KIND, "format": FORMAT, **settings}))

        first(self.claim)
        if first(self.checkpoint.is_dir) or not commit(self.checkpoint, fill):
            first(lambda: self.check(settings))
            run.restore(self.checkpoint)
        first(lambda: self._begin(ks))

    def _begin(self, ks: Iterable[float]) -> None:
        for k in ks:
            self._branch(k).mkdir(exist_ok=True)

    def settings(self) -> dict[str, Any]:
        return _read(self.checkpoint / SETTINGS)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings that are not those of the folder."""
        check_format(self.path, there := self.settings(), KIND, FORMAT, ": name a new folder")
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

    def noise_scale(self) -> dict[str, Any]:
        """The record of the noise scale at the checkpoint; empty before it was measured."""
        return _read(path) if (path := self.path / NOISE).is_file() else {}

    def write_noise_scale(self, record: Mapping[str, Any]) -> None:
        self._replace(NOISE, record)

    def write_result(self, record: Mapping[str, Any]) -> None:
        """Write the result, and delete what kills have left of the branches and the checkpoint."""
        self._replace(RESULT, record)
        _delete(self.path.glob(f"{CHECKPOINT}.*{PARTIAL}"))
        left = (*self.path.glob("branch-*x-at-*"), *self.path.glob(f"branch-*x.*{PARTIAL}"))
        _delete(path for path in left if self.branch(_k(path)) is not None)

    def branch(self, k: float) -> Branch | None:
        """The branch of k; None before any process has finished it."""
        path = self._branch(k) / BRANCH
        return Branch.from_record(_read(path)) if path.is_file() else None

    def branches(self) -> dict[float, Branch | None]:
        """Every branch that was asked for, by ascending k."""
        ks = sorted(map(_k, self.path.glob("branch-*x")))
        return {k: self.branch(k) for k in ks}

    def finish(self, branch: Branch, steps: list[dict[str, Any]]) -> Branch:
        """Write a branch, unless another process has finished it: its branch then counts."""

        def fill(partial: Path) -> None:
            write(partial / STEPS, *steps)
            write(partial / BRANCH, branch.record())

        commit(self._branch(branch.k), lambda partial: first(lambda: fill(partial)))
        first(lambda: _delete(self._saves(branch.k)))
        finished = first(lambda: self.branch(branch.k))
        assert finished is not None
        return finished

    def resume(self, run: BranchRun, k: float) -> list[dict[str, Any]]:
        """Restore ``run`` to the newest save of the branch, or to the checkpoint without one.

        Returns:
            The steps of the branch until then.
        """
        saved = first(lambda: self._saves(k))
        run.restore(newest := max(saved, key=_at, default=self.checkpoint))
        lines = (newest / STEPS).read_text(encoding="utf-8").splitlines() if saved else []
        return [json.loads(line) for line in lines]

    def save(self, run: BranchRun, k: float, steps: list[dict[str, Any]]) -> None:
        """Save the run within a branch, with its steps. Then delete the older saves."""

        def fill(partial: Path) -> None:
            run.save(partial)
            first(lambda: write(partial / STEPS, *steps))

        own = self._branch(k)
        commit(own.with_name(f"{own.name}-at-{(now := steps[-1]['tokens'])}"), fill)
        first(lambda: _delete(p for p in self._saves(k) if _at(p) < now))

    def _saves(self, k: float) -> list[Path]:
        saves = self.path.glob(f"{self._branch(k).name}-at-*")
        return [path for path in saves if path.name.rpartition("-")[2].isdigit()]

    def _branch(self, k: float) -> Path:
        return self.path / f"branch-{multiple(k)}"

    def _replace(self, name: str, record: Mapping[str, Any]) -> None:
        partial = self.path / f"{name}.{uuid.uuid4().hex}{PARTIAL}"
        write(partial, record)
        partial.replace(self.path / name)


def multiple(k: float) -> str:
    """A multiple of the batch size, as in ``--only`` and in the names of branches: 0.5x, 4x."""
    return repr(float(k)).removesuffix(".0") + "x"


def write(path: Path, *records: Mapping[str, Any]) -> None:
    """Write lines of JSON."""
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def commit(to: Path, fill: Callable[[Path], None]) -> bool:
    """Fill a folder under a name of its own, then rename it; False where another came first."""
    partial = to.with_name(f"{to.name}.{first(lambda: uuid.uuid4().hex)}{PARTIAL}")
    first(partial.mkdir)
    fill(partial)
    meet()
    return first(lambda: _renamed(partial, to))


def _renamed(partial: Path, to: Path) -> bool:
    with suppress(OSError):
        to.rmdir()  # the empty folder of a branch, onto which Windows renames nothing
    try:
        partial.rename(to)
    except OSError:  # no folder is renamed onto one that holds files
        if not to.is_dir():
            raise
        _delete([partial])
        return False
    return True


def _delete(folders: Iterable[Path]) -> None:
    """Another process may be deleting them too."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _k(path: Path) -> float:
    return float(path.name.removeprefix("branch-").partition("x")[0])


def _at(save: Path) -> int:
    return int(save.name.rpartition("-")[2])
