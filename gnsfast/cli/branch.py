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

from gnsfast.critical_batch.branches import Branch, BranchRun

OFFERS = ("batch_size", "tokens_per_sample", "tokens", "save", "restore", "train")


class TargetError(ValueError):
    """What was named does not make a run."""


@dataclass(frozen=True)
class Target:
    """Makes the run that ``file.py:function`` or ``module:function`` names, in any process.

    Args:
        said: file or module, a colon, a function without arguments.
        checkpoint: a folder that the run is restored from.

    Raises:
        TargetError: where there is no such thing, where it raises, where it makes no run.
    """

    said: str
    checkpoint: Path | None = None

    def __call__(self) -> BranchRun:
        where, _, name = self.said.rpartition(":")
        if not where or not name:
            raise TargetError(f"{self.said!r} is not file.py:function or module:function")
        module = self._guarded(f"importing {where}", lambda: _load(where))
        make = getattr(module, name, None)
        if not callable(make):
            raise TargetError(f"{where} has no function {name!r}")
        run = self._guarded(f"{self.said}()", make)
        if lacks := [each for each in OFFERS if not hasattr(run, each)]:
            raise TargetError(
                f"{self.said}() made a {type(run).__name__} without {', '.join(lacks)}: a run to "
                "branch has them (gnsfast.critical_batch.BranchRun)"
            )
        if (checkpoint := self.checkpoint) is not None:
            if not checkpoint.is_dir():
                raise TargetError(f"--checkpoint {checkpoint} is no folder")
            self._guarded(f"restoring {checkpoint}", lambda: run.restore(checkpoint))
        return cast(BranchRun, run)

    def _guarded(self, doing: str, work: Callable[[], Any]) -> Any:
        """Work of the user's, whose error is told in one line with its place."""
        try:
            return work()
        except TargetError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split()) or "no message"
            where = f"{at.filename}, line {at.lineno}"
            raise TargetError(f"{doing}: {type(error).__name__}: {said} ({where})") from error


def _load(where: str) -> ModuleType:
    """A module by its name, or from its file; what lies beside it can be imported."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise TargetError(f"{where} is no file")
    sys.path.insert(0, str(path.parent))
    name = f"gnsfast_target_{path.stem}"  # a file may be called as a module that others import
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grid(said: str) -> tuple[float, ...]:
    """``"1/4,0.5,1,2"`` as numbers."""
    try:
        return tuple(float(Fraction(k.strip())) for k in said.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"--k {said!r} is not a list of numbers such as 0.5,1,2,4") from error


def line_of(branch: Branch) -> str:
    """A branch as it ends."""
    start = f"k = {branch.k:<6g} batch {branch.batch_size:>8,}"
    if branch.state == "failed":
        return f"{start}  failed: {branch.reason}"
    loss = "diverged" if branch.state == "diverged" else f"loss {branch.loss:.4f}"
    return f"{start}  {loss} after {branch.steps:,} steps"
