# SPDX-License-Identifier: Apache-2.0
"""Which noise scale follows the critical batch size (CBS): Euclidean, Adam's, sign or spectral, for
byte-level models of several widths that SGD, AdamW, Signum and Muon train. Each is measured at
frozen checkpoints, beside branches on several seeds of the data.

Then each controls a batch size, beside constant ones, at equal tokens, with a cosine that the
optimizer's rule scales by the batch size. A noise scale's factor is the geometric mean of the
ratios that branches found for this optimizer at this width, so that all of them mean the same CBS
on average and differ in when they reach it.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gnsfast
from benchmarks import record
from benchmarks.record import Rows, Tables
from benchmarks.studies import geometry_tables
from benchmarks.studies.geometry_tables import Point, geometric_mean, logs
from benchmarks.studies.training import Rate, Training, cached, spread, train
from gnsfast.cli import tiny_gpt
from gnsfast.cli.optimizers import MuonAdamW, Signum
from gnsfast.critical_batch import averaged, measure_critical_batch
from gnsfast.critical_batch.branches import CriticalBatch, TorchRun, measurement
from gnsfast.critical_batch.control import BatchSizeController, SampleStream

BATCH = 8
WARM_UP = 50
"""Steps over which the learning rate rises; it is constant afterwards."""
POINTS = (200, 800, 2000)
"""Steps at which branches leave the run."""
GRID = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
DELTA = 128
"""A branch trains the tokens of this many steps of the run."""
FIRST_SEED = 11
"""Of the data that branches train on."""
LEAST_SEEDS = 3
"""So that a mean without one of them is still a mean."""
TOLERANCE = 0.02
"""By which a branch may miss the best loss, and a controlled run the smallest batch's: the mean
over the seeds is known to about as much."""
BATCHES, SAMPLES = 64, 64
"""Of the window at a frozen checkpoint."""
SWEPT, SWEEP = (1 / 3, 1.0, 3.0), 500
"""Factors of the learning rate, each tried for this many steps."""
STEPS = 2400
"""Of the smallest batch of the controlled runs."""
TOKENS = STEPS * BATCH * tiny_gpt.CONTEXT
CONSTANT = (8, 16, 32, 64)
SEEDS = (1, 2)
"""Of weights and data; the branches come from a run of seed 0."""
EVALUATIONS = 48


class Optimizer(NamedTuple):
    """What makes it of a model and a learning rate, that rate, its rule for another batch size, and
    the noise scales beside the Euclidean one that it has: Adam's needs second moments.
    """

    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    lr: float
    rule: str
    metrics: tuple[str, ...] = ("sign", "spectral")


OPTIMIZERS = {
    "sgd": Optimizer(lambda m, lr: torch.optim.SGD(m.parameters(), lr), 0.3, "linear"),
    "adamw": Optimizer(
        lambda m, lr: torch.optim.AdamW(m.parameters(), lr, weight_decay=0.0),
        *(3e-3, "sqrt", ("adam", "sign", "spectral")),
    ),
    "signum": Optimizer(lambda m, lr: Signum(m.parameters(), lr), 1e-3, "sqrt"),
    "muon": Optimizer(lambda m, lr: MuonAdamW(m, lr, adam_lr=3e-3), 1e-2, "sqrt"),
}
"""Of three learning rates each is the best at every width, or within 0.01 of its loss."""


def warm_up(tokens: int) -> float:
    """The factor of the learning rate in the runs that branches leave."""
    return min(1.0, (tokens + 1) / (WARM_UP * BATCH * tiny_gpt.CONTEXT))


class Study(Training):
    """The runs of all optimizers at one width of the model."""

    def __init__(self, width: int, folder: Path) -> None:
        super().__init__(folder, BATCH, TOKENS)
        self.width = width

    def run(
        self,
        name: str,
        *,
        seed: int = 0,
        lr: float | None = None,
        rate: Rate = warm_up,
    ) -> TorchRun:
        """A run of ``BATCH`` samples; ``seed`` is that of the weights and of the data."""
        torch.manual_seed(seed)
        model = tiny_gpt.TinyGPT(width=self.width, layers=2)
        own = OPTIMIZERS[name]
        optimizer = own.make(model, own.lr if lr is None else lr)
        return self.of(model, optimizer, rate, seed)

    def gns(self, name: str, run: TorchRun, **options: Any) -> gnsfast.GradientNoiseScale:
        """All noise scales that the optimizer has, or those of ``metric``."""
        metric = options.pop("metric", OPTIMIZERS[name].metrics)
        optimizer = run.optimizer if "adam" in metric else None
        return gnsfast.GradientNoiseScale(
            run.model, metric=metric or None, optimizer=optimizer, **options
        )


def points(study: Study, name: str, seeds: int, finished: bool = False) -> Iterator[Point]:
    """At each checkpoint the critical batch size, from the mean losses over ``seeds`` orders of the
    data, and all noise scales. ``finished`` takes the orders whose branches are all there, and
    leaves out a checkpoint with fewer than ``LEAST_SEEDS`` of them.
    """
    run = study.run(name)
    for step in POINTS:
        at = f"{name}-{study.width}-{step}"
        names = range(FIRST_SEED, FIRST_SEED + seeds)
        folders = {seed: study.folder / f"{at}-{seed}" for seed in names}
        if finished:
            there = (seed for seed in names if (folders[seed] / measurement.RESULT).is_file())
            folders = {seed: folders[seed] for seed in there}
        if len(folders) < LEAST_SEEDS:
            continue
        taken_to(run, study, step, folders)
        measured = []
        for seed, folder in folders.items():
            run.stream = SampleStream(study.windows, seed=seed)
            measured.append(
                measure_critical_batch(
                    run,
                    folder=folder,
                    k=GRID,
                    delta_tokens=DELTA * BATCH * tiny_gpt.CONTEXT,
                    tolerance=TOLERANCE,
                    loss="evaluate",
                    lr=OPTIMIZERS[name].rule,
                    noise_scale=False,
                )
            )
        path = study.folder / f"noise-scale-{at}.json"
        make = lambda: measurement.noise_scale_records(noise_scale(study, name, run))
        scales = measurement.noise_scales_from_record(cached(path, make))
        yield point(name, study.width, step, measured, scales)


def taken_to(run: TorchRun, study: Study, step: int, folders: dict[int, Path]) -> None:
    """Train up to ``step``, or restore the checkpoint that an earlier call left with its branches.
    The order of the samples does not depend on the batch size, so tokens tell the position.
    """
    seed, folder = next(iter(folders.items()))
    if (folder / "checkpoint").is_dir():
        run.stream = SampleStream(study.windows, seed=seed)
        return run.restore(folder / "checkpoint")
    run.stream = stream = SampleStream(study.windows, seed=0)
    stream.position = run.tokens // tiny_gpt.CONTEXT
    while run.tokens < step * BATCH * tiny_gpt.CONTEXT:
        run.step()


def point(
    name: str, width: int, step: int, measured: list[CriticalBatch], scales: dict[str, Any]
) -> Point:
    """The mean of all seeds, with the bounds of all means that leave one seed out."""
    mean = replace(averaged(measured), **scales)
    means = [mean, *(averaged([*measured[:i], *measured[i + 1 :]]) for i in range(len(measured)))]
    ends = min(m.lower for m in means), max(m.upper for m in means)
    return Point(name, width, step, mean, *ends, len(measured))


def noise_scale(study: Study, name: str, run: TorchRun) -> gnsfast.NoiseScale:
    """All noise scales at the present weights, on data that no branch trains on in this order."""
    gns = study.gns(name, run, window=BATCHES)
    stream = SampleStream(study.windows, seed=5)
    for _ in range(BATCHES):
        batch = stream.draw(SAMPLES)
        with gns.microbatch(SAMPLES):
            tiny_gpt.loss_of(run.model, batch).backward()
        gns.update()
        run.model.zero_grad()
    return gns.compute()


def sweep(study: Study, name: str) -> list[dict[str, Any]]:
    """Loss after ``SWEEP`` steps with each learning rate around the chosen one."""
    row: dict[str, Any] = {"width": study.width, "optimizer": name, "lr": OPTIMIZERS[name].lr}
    for factor in SWEPT:
        run = study.run(name, lr=factor * OPTIMIZERS[name].lr)
        for _ in range(SWEEP):
            run.step()
        row[f"loss at {factor:.3g} lr"] = f"{study.evaluate(run.model):.4f}"
    return [row]


def constant(study: Study, name: str, seed: int, batch_size: int) -> dict[str, Any]:
    run_of = lambda rate: study.run(name, seed=seed, rate=rate)
    return trained(study.constant(run_of, OPTIMIZERS[name].rule, batch_size))


def controlled(study: Study, name: str, seed: int, metric: str, factor: float) -> dict[str, Any]:
    rule = OPTIMIZERS[name].rule
    controller = study.controller(CONSTANT[-1], factor=factor, metric=metric, lr=rule)
    run = study.run(name, seed=seed, rate=controller.lr_lambda(study.shape))
    run.gns = study.gns(name, run, metric=[m for m in [metric] if m != "euclidean"])
    return trained(run, controller)


def trained(run: TorchRun, controller: BatchSizeController | None = None) -> dict[str, Any]:
    """Evaluation losses over the run with the steps taken so far, and where the batch grew."""
    losses: list[list[float]] = []
    evaluate = run.evaluate
    assert evaluate is not None

    def done(steps: int, *_: Any) -> None:
        if run.tokens >= (len(losses) + 1) * TOKENS / EVALUATIONS:
            losses.append([run.tokens, steps, evaluate()])

    return train(run, TOKENS, controller, done) | {"losses": losses}


def reached(losses: list[list[float]], target: float) -> tuple[float, float]:
    """Tokens and steps at the first evaluation with at most the target's loss; infinite without."""
    at = ((tokens, steps) for tokens, steps, loss in losses if loss <= target)
    return next(at, (math.inf, math.inf))


def factors(name: str, width: int, points: list[Point]) -> dict[str, float]:
    """The factor of each noise scale that branches at this width give for the optimizer."""
    own = [p for p in points if (p.optimizer, p.width) == (name, width)]
    each = {m: logs(own, m) for m in ("euclidean", *OPTIMIZERS[name].metrics)}
    return {m: geometric_mean(pairs) for m, pairs in each.items() if pairs}


def contestants(
    study: Study, name: str, points: list[Point]
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What trains each run of an optimizer with a seed."""
    found: dict[str, Callable[[int], dict[str, Any]]] = {
        f"constant {size}": lambda seed, size=size: constant(study, name, seed, size)
        for size in CONSTANT
    }
    for metric, factor in factors(name, study.width, points).items():
        found[f"{factor:.3g} x {metric}"] = lambda seed, metric=metric, factor=factor: controlled(
            study, name, seed, metric, factor
        )
    return found


def controlled_tables(study: Study, names: list[str], points: list[Point]) -> Tables:
    """Means over the seeds, and each run."""
    rows, each = [], []
    for name in names:
        runs: dict[str, list[dict[str, Any]]] = {}
        for label, runs_it in contestants(study, name, points).items():
            for seed in SEEDS:
                path = f"controlled-{name}-{study.width}-{label.replace(' ', '-')}-{seed}.json"
                done = cached(study.folder / path, lambda run=runs_it, seed=seed: run(seed))
                runs.setdefault(label, []).append(done)
                each.append({"optimizer": name, "batch size": label, "seed": seed, **row(done)})
                print(each[-1], flush=True)
        rows += summary(name, runs)
    title = f"Controlled runs, width {study.width}, {TOKENS:,} tokens"
    return {f"{title}: means over seeds ± standard deviation": rows, f"{title}: each": each}


def row(done: dict[str, Any]) -> dict[str, Any]:
    return {"loss": f"{done['losses'][-1][-1]:.4f}", "steps": done["steps"], "grown": done["grown"]}


def summary(name: str, runs: dict[str, list[dict[str, Any]]]) -> Rows:
    """Each contestant's loss and steps at equal tokens, each difference between runs of one seed:
    to the smallest batch, and to a constant batch of as many steps. Then the share of the smallest
    batch's tokens and steps after which its final loss is reached.
    """
    finals = {label: [d["losses"][-1][-1] for d in done] for label, done in runs.items()}
    base = finals[f"constant {BATCH}"]
    constants = [label for label in runs if label.startswith("constant")]
    rows = []
    for label, done in runs.items():
        front = []
        for i, each in enumerate(done):
            at = [(runs[c][i]["steps"], finals[c][i]) for c in constants]
            front.append(finals[label][i] - interpolated(at, each["steps"]))
        least = [reached(d["losses"], b + TOLERANCE) for d, b in zip(done, base)]
        steps = statistics.fmean(d["steps"] for d in done)
        rows.append(
            {
                "optimizer": name,
                "batch size": label,
                "loss": spread(finals[label], ".4f"),
                f"loss - {BATCH}'s": spread([x - b for x, b in zip(finals[label], base)], "+.4f"),
                "steps": spread([d["steps"] for d in done], ",.0f"),
                "steps saved": f"{1 - steps / STEPS:.0%}",
                "loss - constant of as many steps": spread(front, "+.4f"),
                "tokens to equal loss": share([tokens / TOKENS for tokens, _ in least]),
                "steps to equal loss": share([steps / STEPS for _, steps in least]),
            }
        )
    return rows


def interpolated(at: list[tuple[float, float]], steps: float) -> float:
    """The loss after ``steps`` between those of constant batches, linear in the logarithm."""
    for (x, left), (y, right) in pairwise(sorted(at)):
        if x <= steps <= y:
            return left + (right - left) * math.log(steps / x) / math.log(y / x)
    raise ValueError(f"{steps} steps are not between those of the constant batches, {sorted(at)}")


def share(values: list[float]) -> str:
    """The mean, least and largest over the seeds; how many did not get there."""
    if missing := sum(map(math.isinf, values)):
        return f"not reached by {missing} of {len(values)}"
    return f"{statistics.fmean(values):.0%} ({min(values):.0%} to {max(values):.0%})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--seeds", type=int, default=4, help="of the branches' data")
    parser.add_argument("--controlled", choices=[*OPTIMIZERS], nargs="*", default=[*OPTIMIZERS])
    parser.add_argument("--controlled-width", type=int, default=32, help="of the controlled runs")
    parser.add_argument("--only", choices=[*OPTIMIZERS], nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs, to resume")
    parser.add_argument("--finished", action="store_true", help="only what lies in --runs")
    record.add_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.seeds < LEAST_SEEDS:
        raise SystemExit(f"--seeds {options.seeds}: {LEAST_SEEDS} or more")
    found: list[Point] = []
    swept: Rows = []
    for width in options.width:
        study = Study(width, options.runs)
        for name in options.only:
            make: Callable[[], Any] = lambda study=study, name=name: sweep(study, name)
            path = options.runs / f"sweep-{name}-{width}.json"
            if path.is_file() or not options.finished:
                swept += cached(path, make)
            for each in points(study, name, options.seeds, options.finished):
                found.append(each)
                print(geometry_tables.checkpoints([each]), flush=True)
    tables = geometry_tables.tables(found)
    if options.controlled:
        study = Study(options.controlled_width, options.runs)
        tables |= controlled_tables(study, options.controlled, found)
    tables["Learning rates: evaluation loss after 500 steps"] = swept
    words = ["--width", *options.width, "--seeds", options.seeds]
    words += ["--controlled", *options.controlled]
    words += ["--controlled-width", options.controlled_width] if options.controlled else []
    words += ["--finished"] if options.finished else []
    words += [] if options.only == [*OPTIMIZERS] else ["--only", *options.only]
    command = " ".join(map(str, ["python -m benchmarks geometry", *words]))
    record.publish("cpu-geometry", command, tables, options.record)
