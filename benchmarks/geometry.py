# SPDX-License-Identifier: Apache-2.0
"""Which noise scale follows the critical batch size: Euclidean, sign or spectral, for byte-level
models that SGD, AdamW, Signum and Muon train. Each is measured at frozen checkpoints, beside
branches on several seeds of the data.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gnsfast
from benchmarks import geometry_optimizers, record
from gnsfast.cli import tiny_gpt
from gnsfast.critical_batch.branches import (
    CriticalBatch,
    TorchRun,
    averaged,
    measure_critical_batch,
)
from gnsfast.critical_batch.control import SampleStream
from gnsfast.noise_scale import Estimate


class Optimizer(NamedTuple):
    """An optimizer's learning rate, the best of three or four in runs of 500 steps, and its rule
    for another batch size.
    """

    lr: float
    rule: str


OPTIMIZERS = {
    "sgd": Optimizer(0.3, "linear"),
    "adamw": Optimizer(3e-3, "sqrt"),
    "signum": Optimizer(1e-3, "sqrt"),
    "muon": Optimizer(1e-2, "sqrt"),
}
METRICS = ("euclidean", "sign", "spectral")
WARM_UP = 50
"""Steps over which the learning rate rises; it is constant afterwards."""
POINTS = (200, 800, 2000)
"""Steps at which branches leave the run."""
GRID = (0.125, 0.25, 0.5, 1, 2, 4, 8)
DELTA = 128
"""A branch trains the tokens of this many steps of the run."""
DATA_SEEDS = (11, 12, 13, 14)
TOLERANCE = 0.02
"""By which a branch may miss the best loss; the mean over the seeds is known to about as much."""
BATCHES, SAMPLES = 96, 16
"""Of the window at a frozen checkpoint."""


class Study:
    """The runs of all optimizers at one width of the model."""

    def __init__(self, width: int, batch_size: int, folder: Path) -> None:
        text = tiny_gpt.read_text()
        held_out = len(text) // 20
        self.windows = text[held_out:].unfold(0, tiny_gpt.CONTEXT + 1, 1)
        drawn = torch.Generator().manual_seed(7)
        self.evaluated = tiny_gpt.draw(text[:held_out], 256, drawn)
        self.width, self.batch_size, self.folder = width, batch_size, folder

    def run(self, name: str) -> TorchRun:
        torch.manual_seed(0)
        model = gnsfast.convert(tiny_gpt.TinyGPT(width=self.width, layers=2))
        warm_up = WARM_UP * self.batch_size * tiny_gpt.CONTEXT
        return TorchRun(
            model,
            geometry_optimizers.make(name, model, OPTIMIZERS[name].lr),
            tiny_gpt.loss_of,
            SampleStream(self.windows, seed=0),
            batch_size=self.batch_size,
            tokens_per_sample=tiny_gpt.CONTEXT,
            lr=lambda tokens: min(1.0, (tokens + 1) / warm_up),
            clip=1.0,
            evaluate=self.evaluate,
        )

    def evaluate(self, model: torch.nn.Module) -> float:
        """Loss on text that no run trains on, in nats a byte."""
        losses = [tiny_gpt.loss_of(model, part) for part in self.evaluated.split(64)]
        return torch.stack(losses).mean().item()

    def points(self, name: str) -> Iterator[tuple[CriticalBatch, gnsfast.NoiseScale]]:
        """At each checkpoint the critical batch size, from the mean losses over the seeds of the
        data, and all noise scales.
        """
        run = self.run(name)
        for step in POINTS:
            while run.tokens < step * self.batch_size * tiny_gpt.CONTEXT:
                run.step()
            stream, measured = run.stream, []
            for seed in DATA_SEEDS:
                run.stream = SampleStream(self.windows, seed=seed)
                measured.append(
                    measure_critical_batch(
                        run,
                        folder=self.folder / f"{name}-{self.width}-{step}-{seed}",
                        k=GRID,
                        delta_tokens=DELTA * self.batch_size * tiny_gpt.CONTEXT,
                        tolerance=TOLERANCE,
                        loss="evaluate",
                        lr=OPTIMIZERS[name].rule,
                        noise_scale=False,
                    )
                )
            run.stream = stream
            yield averaged(measured), self.noise_scale(run)

    def noise_scale(self, run: TorchRun) -> gnsfast.NoiseScale:
        """All noise scales at the present weights."""
        gns = gnsfast.GradientNoiseScale(run.model, metric=["sign", "spectral"], window=BATCHES)
        stream = SampleStream(self.windows, seed=5)
        for _ in range(BATCHES):
            batch = stream.draw(SAMPLES)
            with gns.microbatch(SAMPLES):
                tiny_gpt.loss_of(run.model, batch).backward()
            gns.update()
            run.model.zero_grad()
        return gns.compute()


def estimates(found: gnsfast.NoiseScale) -> dict[str, Estimate]:
    assert found.sign is not None and found.spectral is not None
    return dict(zip(METRICS, (found, found.sign, found.spectral)))


def study(
    width: int, batch_size: int, names: list[str], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Tables of the checkpoints, and of how far the ratio spreads over them."""
    runs, rows, losses = Study(width, batch_size, folder), [], []
    ratios: dict[tuple[str, str], list[float]] = {}
    for name in names:
        for step, (critical, found) in zip(POINTS, runs.points(name)):
            at = {"optimizer": name, "step": step}
            row = at | {"critical batch size": f"{critical.lower:g} to {critical.upper:g}"}
            for metric, scale in estimates(found).items():
                row[metric] = _span(scale)
                ratio = critical.value / scale.noise_scale
                row[f"CBS / {metric}"] = f"{ratio:.3g}"
                ratios.setdefault((name, metric), []).append(ratio)
            rows.append(row | {"doubts": "; ".join(critical.doubts)})
            of_branches = {
                f"k = {b.k:g}": f"{b.loss:.4f} ± {b.loss_std:.4f}" for b in critical.branches
            }
            losses.append(at | of_branches)
            print(rows[-1], flush=True)
    spread = []
    for name in [*names, "all"]:
        row = {"optimizer": name}
        for metric in METRICS:
            of = [
                r
                for (n, m), own in ratios.items()
                if m == metric and name in (n, "all")
                for r in own
            ]
            row[f"CBS / {metric}"] = _spread(of)
        spread.append(row)
    title = f"Width {width}, batches of {batch_size} samples of {tiny_gpt.CONTEXT} tokens"
    return {
        f"{title}: critical batch size and noise scales, samples": rows,
        f"{title}: median ratio, and largest over smallest": spread,
        f"{title}: mean evaluation losses of branches ± standard error": losses,
    }


def _span(scale: Estimate) -> str:
    return f"{scale.noise_scale:.3g} ({scale.lower:.3g} to {scale.upper:.3g})"


def _spread(ratios: list[float]) -> str:
    known = sorted(r for r in ratios if math.isfinite(r))
    if not known:
        return "-"
    return f"{known[len(known) // 2]:.3g}, {known[-1] / known[0]:.2g}, of {len(known)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--only", choices=[*OPTIMIZERS], nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--runs", type=Path, required=True, help="folder for the branches")
    parser.add_argument("--record", type=Path, help="folder for the record, else only printed")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tables = study(options.width, options.batch_size, options.only, options.runs)
    for title, rows in tables.items():
        print(f"\n{title}\n\n" + "\n".join(record.markdown(rows)))
    if options.record:
        only = [] if options.only == [*OPTIMIZERS] else ["--only", *options.only]
        words = ["--width", options.width, "--batch-size", options.batch_size, *only]
        command = " ".join(map(str, ["python -m benchmarks geometry", *words]))
        print(f"\nwritten: {record.write('cpu-geometry', command, tables, options.record)}")
