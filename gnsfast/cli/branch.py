# SPDX-License-Identifier: Apache-2.0
"""``gnsfast branch``: a critical batch size for a run that a file or a module makes."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gnsfast.critical_batch.branches import (
    Branch,
    BranchRun,
    CriticalBatch,
    measure_critical_batch,
    measure_repeatedly,
)

REQUIRED = ("batch_size", "tokens_per_sample", "tokens", "save", "restore", "train")


class TargetError(ValueError):
    """The target that the user named does not make a run."""


@dataclass(frozen=True)
class Target:
    """Makes the run that ``file.py:function`` or ``module:function`` names, in any process.

    Args:
        entry_point: a file or module, a colon, and a function without arguments.
        checkpoint: a folder that the run is restored from.

    Raises:
        TargetError: if there is no such function, if it raises, or if it makes no run.
    """

    entry_point: str
    checkpoint: Path | None = None

    def __call__(self) -> BranchRun:
        where, _, name = self.entry_point.rpartition(":")
        if not where or not name:
            raise TargetError(
                f"{self.entry_point!r} names no function: write file.py:function or module:function"
            )
        module = self._guarded(f"importing {where}", lambda: _load(where))
        make = getattr(module, name, None)
        if not callable(make):
            raise TargetError(f"{where} has no function {name!r}")
        run = self._guarded(f"{self.entry_point}()", make)
        if lacking := [name for name in REQUIRED if not hasattr(run, name)]:
            raise TargetError(
                f"{self.entry_point}() returned a {type(run).__name__}, which lacks "
                f"{', '.join(lacking)}. It must return a gnsfast.critical_batch.BranchRun, such as "
                "a TorchRun"
            )
        if (checkpoint := self.checkpoint) is not None:
            if not checkpoint.is_dir():
                raise TargetError(f"--checkpoint {checkpoint} is not a folder")
            self._guarded(f"restoring {checkpoint}", lambda: run.restore(checkpoint))
        return cast(BranchRun, run)

    def _guarded(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run the user's code; its error becomes one line with the place in it."""
        try:
            return work()
        except TargetError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            message = " ".join(str(error).split()) or "no message"
            where = f"{at.filename}, line {at.lineno}"
            raise TargetError(f"{doing}: {type(error).__name__}: {message} ({where})") from error


def _load(where: str) -> ModuleType:
    """Import a module by name or from its file, which may import its neighbours."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise TargetError(f"there is no file {where}")
    sys.path.insert(0, str(path.parent))
    name = f"gnsfast_target_{path.stem}"  # the file may share its name with another module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(repeats: int, run: BranchRun | None, **how: Any) -> CriticalBatch:
    """Measure once, or as often as ``--repeats`` says."""
    if repeats == 1 and (how["folder"] / "repeat-1").exists():
        raise ValueError(
            f"{how['folder']} holds repeated measurements, and a single one would replace their "
            "mean: pass --repeats again, or another --out"
        )
    if repeats == 1 or run is None:
        return measure_critical_batch(run, **how)
    return measure_repeatedly(run, repeats=repeats, **how)


def absolute(entry_point: str) -> str:
    """The entry point with an absolute path, for processes with another working directory."""
    where, _, name = entry_point.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if where.endswith(".py") else entry_point


def grid(text: str) -> tuple[float, ...]:
    """``"1/4,0.5,1,2"`` as numbers."""
    try:
        return tuple(float(Fraction(k.strip())) for k in text.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"--k {text!r} is not a list of numbers such as 0.5,1,2,4") from error


def branch_line(branch: Branch) -> str:
    """A finished branch in one line."""
    start = f"k = {branch.k:<6g} batch {branch.batch_size:>8,}"
    if branch.state == "failed":
        return f"{start}  failed: {branch.reason}"
    loss = "diverged" if branch.state == "diverged" else f"loss {branch.loss:.4f}"
    return f"{start}  {loss} after {branch.steps:,} steps"
