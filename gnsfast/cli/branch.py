# SPDX-License-Identifier: Apache-2.0
"""``gnsfast branch``: a critical batch size for a run that a file or a module makes."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

from typer import Argument

from gnsfast.arguments import check_choice
from gnsfast.cli.executors import opened
from gnsfast.cli.options import Count
from gnsfast.critical_batch import branches
from gnsfast.noise_scale import METRICS

NEEDED = ("batch_size", "tokens_per_sample", "tokens", "save", "restore", "train")


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

    def __call__(self) -> branches.BranchRun:
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
        if lacking := [name for name in NEEDED if not hasattr(run, name)]:
            raise TargetError(
                f"{self.entry_point}() returned a {type(run).__name__}, which lacks "
                f"{', '.join(lacking)}. It must return a gnsfast.critical_batch.BranchRun, such as "
                "a TorchRun"
            )
        if (checkpoint := self.checkpoint) is not None:
            if not checkpoint.is_dir():
                raise TargetError(f"--checkpoint {checkpoint} is not a folder")
            self._guarded(f"restoring {checkpoint}", lambda: run.restore(checkpoint))
        return cast(branches.BranchRun, run)

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


def absolute(entry_point: str) -> str:
    """The entry point with an absolute path, for processes with another working directory."""
    where, _, name = entry_point.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if where.endswith(".py") else entry_point


def grid(text: str, name: str = "--k") -> tuple[float, ...]:
    """``"1/4,0.5,1,2"`` as numbers."""
    try:
        return tuple(float(Fraction(k.strip())) for k in text.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{name} {text!r} is not a list of numbers such as 0.5,1,2,4") from error


@dataclass(frozen=True)
class Options:
    """What ``measure_critical_batch`` is told, and where it trains.

    Args:
        target: file.py:function or module:function that makes the run.
        out: Folder for branches; finished ones are kept.
        tokens: Tokens that each branch trains: 2B, 500K.
        k: Batch sizes, in multiples of the run's.
        checkpoint: Folder to restore the run from before it is measured.
        tolerance: How far a matching loss may lie above that of smaller batches.
        alpha: Weight of the newest step in a branch's smoothed loss.
        lr: How the learning rate grows with k: sqrt, linear, keep.
        loss: Loss to compare: train, or evaluate (what the run evaluates).
        save_every: Tokens between two saves within a branch (no saves).
        workers: Processes that train branches at once; 0 uses this process.
        executor: Train branches as jobs of submitit (Slurm) or dask.
        executor_option: NAME=VALUE for --executor: slurm_partition=gpu. May be repeated.
        launcher: Command that starts a branch: 'torchrun --nproc-per-node 8'.
        noise_scale: Measure the noise scale at the checkpoint.
        repeats: Measurements to average, each on other data.
        factor: Write OUT/factor.json: critical batch size / this noise scale (euclidean, adam, sign
            or spectral).
    """

    target: Annotated[str, Argument]
    out: Path
    tokens: Count
    k: Annotated[tuple[float, ...], grid] = (0.5, 1, 2, 4, 8)
    checkpoint: Path | None = None
    tolerance: float = 0.01
    alpha: float = 0.5
    lr: str = "sqrt"
    loss: str = "train"
    save_every: Count | None = None
    workers: int = 0
    executor: str | None = None
    executor_option: list[str] | None = None
    launcher: str | None = None
    noise_scale: bool = True
    repeats: int = field(default=1, metadata={"min": 1})
    factor: str | None = None


def measure(
    options: Options, on_branch: Callable[[branches.Branch], None] | None
) -> branches.CriticalBatch:
    """Train branches of the run, once or as often as ``--repeats`` says."""
    repeats, out = options.repeats, options.out
    where = None if options.checkpoint is None else options.checkpoint.absolute()
    make_run = Target(absolute(options.target), where)
    if options.factor is not None:
        check_choice("--factor", options.factor, METRICS)
        if not options.noise_scale:
            raise ValueError(
                "--factor needs the noise scale, which --no-noise-scale leaves out: drop "
                "--no-noise-scale"
            )
    if options.launcher is not None and repeats > 1:
        raise ValueError(
            "--repeats does not work with --launcher: this process skips data between repeats, and "
            "the launched processes draw their own. Drop one of the two"
        )
    same = ("k", "tolerance", "alpha", "lr", "loss", "workers", "launcher", "noise_scale", "factor")
    how: dict[str, Any] = {name: getattr(options, name) for name in same}
    how |= {"folder": out, "delta_tokens": options.tokens, "make_run": make_run}
    how |= {"save_every_tokens": options.save_every, "on_branch": on_branch}
    with opened(options.executor, options.executor_option or [], out) as engine:
        if repeats > 1:
            return branches.measure_repeatedly(make_run(), repeats=repeats, executor=engine, **how)
        if (out / "repeat-1").exists():
            raise ValueError(
                f"{out} holds repeated measurements, and a single one would replace their mean: "
                "pass --repeats again, or another --out"
            )
        run = None if options.launcher or options.executor else make_run()
        return branches.measure_critical_batch(run, executor=engine, **how)


def branch_line(branch: branches.Branch) -> str:
    """A finished branch in one line."""
    start = f"k = {branch.k:<6g} batch {branch.batch_size:>8,}"
    if branch.state == "failed":
        return f"{start}  failed: {branch.reason}"
    loss = "diverged" if branch.state == "diverged" else f"loss {branch.loss:.4f}"
    return f"{start}  {loss} after {branch.steps:,} steps"
