# SPDX-License-Identifier: Apache-2.0
"""What a measured layer costs in Python: a model of 100 linear layers of 16 with bias, whose
arithmetic is next to nothing. Each part of an update takes turns with plain torch's, in time of the
process, which other processes do not lengthen.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gnsfast
from benchmarks import record

LAYERS, WIDTH, SAMPLES = 100, 16, 16
WARM_UP = 40  # past the first audits, of updates 0, 1, 2, 4, ..., 32

Step = Callable[[], dict[str, float]]
"""One update; the seconds of its parts."""


def split(*parts: tuple[str, Callable[[], object]]) -> dict[str, float]:
    seconds = {}
    for name, run in parts:
        start = time.process_time()
        run()
        seconds[name] = time.process_time() - start
    return seconds


def steps() -> dict[str, Step]:
    """Plain torch's update, that of ``GradientNoiseScale``, and a block of norms alone."""
    torch.manual_seed(0)
    x_BI = torch.randn(SAMPLES, WIDTH)
    models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(3)]
    losses: list[Any] = [None]

    def passes(model: nn.Module) -> tuple[tuple[str, Callable[[], object]], ...]:
        def forward() -> None:
            losses[0] = model(x_BI).square().sum()

        return ("forward", forward), ("backward", lambda: losses[0].backward())

    def plain() -> dict[str, float]:
        seconds = split(*passes(models[0]))
        models[0].zero_grad()
        return seconds

    gns = gnsfast.GradientNoiseScale(models[1])

    def measured() -> dict[str, float]:
        block = gns.update(SAMPLES)
        around = ("open", block.__enter__), ("close", lambda: block.__exit__(None, None, None))
        seconds = split(around[0], *passes(models[1]), around[1])
        models[1].zero_grad()
        return seconds

    def norms() -> dict[str, float]:
        block = gnsfast.per_sample_sqnorms(models[2], SAMPLES)
        around = ("open", block.__enter__), ("close", lambda: block.__exit__(None, None, None))
        seconds = split(around[0], *passes(models[2]), around[1])
        models[2].zero_grad()
        return seconds

    return {"plain": plain, "GradientNoiseScale": measured, "per_sample_sqnorms": norms}


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
    contestants = steps()
    for _ in range(WARM_UP):
        for step in contestants.values():
            step()
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            seconds[name].append(contestants[name]())
    plain, rows = seconds.pop("plain"), []
    for name, timed in seconds.items():
        for part in timed[0]:
            base = [each.get(part, 0.0) for each in plain]
            rows.append(row(name, part, [each[part] for each in timed], base))
        whole = [sum(each.values()) for each in timed]
        rows.append(row(name, "all", whole, [sum(each.values()) for each in plain]))
    return {f"A linear layer of {WIDTH}, us of the process": rows}


def row(name: str, part: str, ours: list[float], plain: list[float]) -> dict[str, Any]:
    """A layer's share, and quartiles of what gnsfast adds to it."""
    us = 1e6 / LAYERS
    lower, added, upper = statistics.quantiles([us * (a - b) for a, b in zip(ours, plain)], n=4)
    middle = us * statistics.median(ours)
    return {
        "block": name,
        "part": part,
        "plain": round(us * statistics.median(plain), 1),
        "gnsfast": round(middle, 1),
        "added": f"{added:.1f} ({lower:.1f} to {upper:.1f})",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=300)
    record.add_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    command = f"python -m benchmarks host --rounds {options.rounds}"
    record.publish("cpu-host", command, tables(options.rounds), options.record)
