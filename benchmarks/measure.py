# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, ratios with their spread, and memory."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contestant, and its ratio to plain in the same rounds: median and
    quartiles.
    """

    milliseconds: float
    ratio: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.lower:.3f} to {self.upper:.3f})"


def wall_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_seconds(run: Callable[[], object]) -> float:
    """Device time, by events; the device is kept busy for about a millisecond first, so that it
    does not wait for launches.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_of: Callable[[Callable[[], object]], float] = wall_seconds,
    paired: bool = False,
) -> dict[str, Timing]:
    """Time all contestants in turn, round after round; the first one is what the others are
    compared to, ``paired`` beside a run of it for each of them: where a round takes seconds, a
    shared machine is another one at its end.

    The order turns round from one round to the next, so that none profits from what ran before it.
    """
    for run in contestants.values():
        run()
    base, *others = contestants
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    groups = [[base, name] for name in others] if paired and others else [[base, *others]]
    for i in range(rounds):
        for group in groups if i % 2 else groups[::-1]:
            order = group if i % 2 else group[::-1]
            took = {name: seconds_of(contestants[name]) for name in order}
            for name in order:
                seconds[name].append(took[name])
                ratios[name].append(took[name] / took[base])
    timings = {}
    for name, own in seconds.items():
        lower, middle, upper = statistics.quantiles(ratios[name], n=4)
        timings[name] = Timing(1e3 * statistics.median(own), middle, lower, upper)
    return timings


def resident(field: str = "VmHWM") -> float:
    """MiB of this process in memory: ``VmHWM`` its most so far, ``VmRSS`` now. Unlike getrusage's
    peak it does not begin with what the parent process had.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024
