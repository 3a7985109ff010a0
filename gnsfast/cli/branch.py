# SPDX-License-Identifier: Apache-2.0
"""``gnsfast branch``: a critical batch size for a run that a file or a module makes. One branch is
one command.
"""

import gc
import importlib
import importlib.util
import multiprocessing
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from typer import Argument

from gnsfast.cli.options import Count
from gnsfast.critical_batch import branches
from gnsfast.parallel import process_count

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
        if process_count() < (started := int(os.environ.get("WORLD_SIZE", 1))):
            raise TargetError(
                f"{started} processes were started, but {self.entry_point}() returned a run of "
                f"{process_count()}: call torch.distributed.init_process_group() in it"
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
    """``"1/4,0.5,1,2x"`` as numbers."""
    try:
        return tuple(float(Fraction(k.strip().removesuffix("x"))) for k in text.split(","))
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
        noise_scale: Measure the noise scale at the checkpoint.
        repeats: Measurements to average, each on other data.
        factor: Write OUT/factor.json: critical batch size / this noise scale (euclidean, adam, sign
            or spectral).
        list: Print a command for each branch, and train none.
        only: Train one branch, such as 4x. Then apply the rule by gnsfast branch result OUT.
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
    workers: int = field(default=0, metadata={"min": 0})
    noise_scale: bool = True
    repeats: int = field(default=1, metadata={"min": 1})
    factor: str | None = None
    list: bool = False
    only: Annotated[tuple[float, ...] | None, grid] = None

    def plan(self) -> branches.Plan:
        rule = self.tolerance, self.alpha, self.lr, self.loss
        how = self.save_every, self.noise_scale, self.factor, self.repeats
        return branches.Plan(self.tokens, self.k, *rule, *how)

    def make_run(self) -> Target:
        where = None if self.checkpoint is None else self.checkpoint.absolute()
        return Target(absolute(self.target), where)


@dataclass(frozen=True)
class ResultOptions:
    """A folder of branches.

    Args:
        folder: Folder of the branches (--out).
        factor: Write FOLDER/factor.json, as gnsfast branch does.
    """

    folder: Annotated[Path, Argument]
    factor: str | None = None


def commands(options: Options) -> list[str]:
    """The command of each branch, as a shell reads it."""
    words = ["gnsfast", "branch", options.target]
    for each in fields(options):
        value, name = getattr(options, each.name), "--" + each.name.replace("_", "-")
        if value == each.default or each.name in ("target", "list", "workers"):
            continue
        if isinstance(value, tuple):
            value = ",".join(map(repr, value))
        words += ["--no" + name[1:]] if value is False else [name, str(value)]
    return [shlex.join([*words, "--only", branches.multiple(k)]) for k in options.plan().k]


def train(options: Options) -> branches.Branch:
    """Train the branch that ``--only`` names."""
    plan = options.plan()
    if len(options.only or ()) != 1 or not {*(options.only or ())} <= {*plan.k}:
        listed = ", ".join(map(branches.multiple, plan.k))
        raise ValueError(f"--only must be one of --k, which are {listed}")
    [k] = options.only or ()
    return branches.train_branch(options.make_run()(), k, options.out, plan)


def measure(
    options: Options, on_branch: Callable[[branches.Branch], None] | None
) -> branches.CriticalBatch:
    """Train branches of the run, once or as often as ``--repeats`` says."""
    how: dict[str, Any] = asdict(options.plan()) | {"on_branch": on_branch}
    make_run, workers = options.make_run(), options.workers
    if not workers:
        return branches.measure_critical_batch(make_run(), folder=options.out, **how)
    spawn, threads = multiprocessing.get_context("spawn"), torch.get_num_threads() // workers
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (max(1, threads),)) as pool:
        how |= {"executor": pool, "make_run": make_run}
        return branches.measure_critical_batch(make_run(), folder=options.out, **how)


def leave_group() -> None:
    """End the process group that the run has begun."""
    gc.collect()  # a model in a cycle holds process groups, whose threads may abort the exit
    if dist.is_initialized():
        dist.destroy_process_group()


def branch_line(branch: branches.Branch) -> str:
    """A finished branch in one line."""
    start = f"k = {branch.k:<6g} batch {branch.batch_size:>8,}"
    if branch.state == "failed":
        return f"{start}  failed: {branch.reason}"
    loss = "diverged" if branch.state == "diverged" else f"loss {branch.loss:.4f}"
    return f"{start}  {loss} after {branch.steps:,} steps"
