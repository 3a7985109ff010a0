# SPDX-License-Identifier: Apache-2.0
"""The demo's model: its critical batch sizes by branches, and a run whose batch size a controller
grows beside runs of a fixed one, at equal tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gnsfast
from benchmarks import record
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import Rate, Training, span, spread, train
from gnsfast.cli import tiny_gpt
from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.critical_batch.branches import (
    CriticalBatch,
    TorchRun,
    measure_critical_batch,
    pooled_factor,
)
from gnsfast.critical_batch.control import BatchSizeController
from gnsfast.integrations.trackers import JSONLTracker, metrics

SMALL, LARGE = 8, 64
STEPS = 2400
"""Of the small batch; every run trains as many tokens."""
SEEDS = 3
POINTS = (0.05, 0.25, 0.6)
"""Where branches leave the small run of the first seed, as shares of its tokens."""
GRID = (0.25, 0.5, 1, 2, 4, 8, 16)
DELTA = 128
"""A branch trains the tokens of this many steps of the small batch."""
LOG_EVERY = 20
"""Steps of the small batch between two lines of a log."""


class Demo(Training):
    """Training of the demo's model, over the tokens of ``steps`` small batches."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.small_tokens = SMALL * tiny_gpt.CONTEXT
        super().__init__(folder, SMALL, steps * self.small_tokens)

    def run(self, seed: int, rate: Rate) -> TorchRun:
        torch.manual_seed(seed)
        model = tiny_gpt.TinyGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        gns = gnsfast.GradientNoiseScale(model)
        return self.of(model, optimizer, rate, seed, gns=gns)

    def branches(self) -> list[CriticalBatch]:
        """The critical batch size at each of ``POINTS`` of the small run of seed 0."""
        run, found = self.run(0, self.shape), []
        for point in POINTS:
            while run.tokens < point * self.tokens:
                run.step()
            measured = measure_critical_batch(
                run,
                folder=self.folder / f"branches-{point:g}",
                k=GRID,
                delta_tokens=DELTA * self.small_tokens,
                loss="evaluate",
            )
            print(measured, flush=True)
            found.append(measured)
        return found

    def fixed(self, name: str, seed: int, batch_size: int) -> dict[str, Any]:
        return self._train(name, self.constant(partial(self.run, seed), "sqrt", batch_size), None)

    def controlled(self, name: str, seed: int, factor: CriticalBatchFactor) -> dict[str, Any]:
        """The small batch at first, which grows to the noise scale times ``factor.value``."""
        controller = self.controller(LARGE, factor=factor.value, metric=factor.metric)
        return self._train(name, self.run(seed, controller.lr_lambda(self.shape)), controller)

    def _train(
        self, name: str, run: TorchRun, controller: BatchSizeController | None
    ) -> dict[str, Any]:
        tracker = JSONLTracker(self.folder / name / "metrics.jsonl", run={"name": name})
        gns, evaluate = run.gns, run.evaluate
        assert gns is not None and evaluate is not None
        logged, losses = 0, []

        def done(steps: int, loss: float, decision: Any) -> None:
            nonlocal logged, losses
            losses.append(loss)
            if decision:
                tracker.record(decision.record())
            if run.tokens >= logged + LOG_EVERY * self.small_tokens:
                found = metrics(gns.compute(), tokens=run.tokens, per_module=True)
                found["batch/size"] = float(run.batch_size)
                found |= controller.metrics() if controller else {}
                tracker.log({"loss": statistics.fmean(losses), **found}, steps)
                logged, losses = run.tokens, []

        found = train(run, self.tokens, controller, done)
        tracker.close()
        return {"steps": found["steps"], "loss": evaluate(), "grown": found["grown"]}


def batch_size(steps: int, seeds: int, folder: Path) -> Tables:
    """Tables of branches and of runs."""
    demo = Demo(steps, folder)
    measured = demo.branches()
    factors = {
        "pooled factor": pooled_factor(measured),
        "last factor": pooled_factor(measured[-1:]),
    }
    contestants: dict[str, Callable[[str, int], dict[str, Any]]] = {
        f"fixed at {SMALL}": lambda name, seed: demo.fixed(name, seed, SMALL),
        f"fixed at {LARGE}": lambda name, seed: demo.fixed(name, seed, LARGE),
    }
    for kind, factor in factors.items():
        contestants[f"controlled, {kind} {factor.value:.2g}"] = lambda name, seed, factor=factor: (
            demo.controlled(name, seed, factor)
        )
    rows: Rows = []
    for seed in range(seeds):
        for name, runs_it in contestants.items():
            rows.append({"batch size": name, "seed": seed})
            rows[-1] |= runs_it(f"{name}, seed {seed}".replace(", ", "-").replace(" ", "-"), seed)
            print(rows[-1], flush=True)
    branched = f"{DELTA * demo.small_tokens:,} tokens"
    return {
        f"Critical batch size by branches of {branched}": _points(measured),
        "Losses of these branches": _losses(measured),
        f"Runs of {demo.tokens:,} tokens, evaluation loss at the end: means over seeds": [
            _mean(name, [row for row in rows if row["batch size"] == name]) for name in contestants
        ],
        "Each run": [row | {"loss": f"{row['loss']:.4f}"} for row in rows],
    }


def _points(measured: list[CriticalBatch]) -> Rows:
    rows = []
    for m in measured:
        assert m.noise_scale is not None and m.adam is not None
        rows.append(
            {
                "tokens": f"{m.tokens:,}",
                "critical batch size, samples": f"{m.lower:g} to {m.upper:g}",
                "noise scale": span(*m.noise_scale.interval).removeprefix("nan "),
                "CBS / noise scale": span(*m.ratio()).removeprefix("nan "),
                "noise scale, Adam's metric": span(*m.adam.interval).removeprefix("nan "),
                "CBS / that": span(*m.ratio("adam")).removeprefix("nan "),
            }
        )
    return rows


def _losses(measured: list[CriticalBatch]) -> Rows:
    return [
        {"tokens": f"{m.tokens:,}", **{f"k = {b.k:g}": f"{b.loss:.4f}" for b in m.branches}}
        for m in measured
    ]


def _mean(name: str, rows: Rows) -> dict[str, Any]:
    return {
        "batch size": name,
        "steps": f"{statistics.fmean(row['steps'] for row in rows):,.0f}",
        "loss, mean ± standard deviation": spread([row["loss"] for row in rows], ".4f"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help="of the small batch")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--runs", type=Path, required=True, help="folder for logs and branches")
    record.add_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    command = f"python -m benchmarks batch-size --steps {options.steps} --seeds {options.seeds}"
    tables = batch_size(options.steps, options.seeds, options.runs)
    record.publish("cpu-batch-size", command, tables, options.record)
