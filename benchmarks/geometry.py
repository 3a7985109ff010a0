# SPDX-License-Identifier: Apache-2.0
"""Which noise scale follows the critical batch size: Euclidean, Adam's, sign or spectral, for
byte-level models of several widths that SGD, AdamW, Signum and Muon train. Each is measured at
frozen checkpoints, beside branches on several seeds of the data; then each controls a batch size.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gnsfast
from benchmarks import geometry_controlled, geometry_figure, geometry_tables, record
from benchmarks.geometry_runs import BATCH, OPTIMIZERS, Study, cached
from benchmarks.geometry_tables import Point
from gnsfast.cli import tiny_gpt
from gnsfast.critical_batch.branches import (
    CriticalBatch,
    TorchRun,
    averaged,
    measure_critical_batch,
)
from gnsfast.critical_batch.branches.measurement import (
    RESULT,
    noise_scale_records,
    noise_scales_from_record,
)
from gnsfast.critical_batch.control import SampleStream

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
"""By which a branch may miss the best loss; the mean over the seeds is known to about as much."""
BATCHES, SAMPLES = 64, 64
"""Of the window at a frozen checkpoint."""
SWEPT, SWEEP = (1 / 3, 1.0, 3.0), 500
"""Factors of the learning rate, each tried for this many steps."""


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
            folders = {seed: each for seed, each in folders.items() if (each / RESULT).is_file()}
        if len(folders) < LEAST_SEEDS:
            continue
        trained(run, study, step, folders)
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
        make = lambda: noise_scale_records(noise_scale(study, name, run))
        scales = noise_scales_from_record(cached(path, make))
        yield point(name, study.width, step, measured, scales)


def trained(run: TorchRun, study: Study, step: int, folders: dict[int, Path]) -> None:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--seeds", type=int, default=4, help="of the branches' data")
    parser.add_argument("--controlled", choices=[*OPTIMIZERS], nargs="*", default=[*OPTIMIZERS])
    parser.add_argument("--controlled-width", type=int, default=32, help="of the controlled runs")
    parser.add_argument("--only", choices=[*OPTIMIZERS], nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs, to resume")
    parser.add_argument("--finished", action="store_true", help="only what lies in --runs")
    parser.add_argument("--record", type=Path, help="folder for the record, else only printed")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.seeds < LEAST_SEEDS:
        raise SystemExit(f"--seeds {options.seeds}: {LEAST_SEEDS} or more")
    found: list[Point] = []
    swept: list[dict[str, Any]] = []
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
        tables |= geometry_controlled.tables(study, options.controlled, found)
    tables["Learning rates: evaluation loss after 500 steps"] = swept
    for title, rows in tables.items():
        print(f"\n{title}\n\n" + "\n".join(record.markdown(rows)))
    if options.record:
        words = ["--width", *options.width, "--seeds", options.seeds]
        words += ["--controlled", *options.controlled]
        words += ["--controlled-width", options.controlled_width] if options.controlled else []
        words += ["--finished"] if options.finished else []
        words += [] if options.only == [*OPTIMIZERS] else ["--only", *options.only]
        command = " ".join(map(str, ["python -m benchmarks geometry", *words]))
        written = record.write("cpu-geometry", command, tables, options.record)
        drawn = geometry_figure.write(record.read(written.with_suffix(".json")))
        print(f"\nwritten: {written}, {drawn}")
