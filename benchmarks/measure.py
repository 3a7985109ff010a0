# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, ratios with their spread, and memory."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

CYCLES = 2e9
"""Of a GPU's clock in a second, at most: a longer pause does no harm."""

Clock = Callable[[Callable[[], object]], float]
"""Seconds of a call."""
Timed = TypeVar("Timed")


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


def cuda_wall_seconds(run: Callable[[], object]) -> float:
    """Until the device is done: what a user waits for."""
    torch.cuda.synchronize()
    return wall_seconds(lambda: (run(), torch.cuda.synchronize()))


def cuda_seconds(run: Callable[[], object], busy: float = 1e-3, tries: int = 3) -> float:
    """Device time, by events. The device is first kept busy for ``busy`` seconds, so that it does
    not wait for launches; if these took longer, all runs again after a longer pause, ``tries``
    times at most. A ``run`` that waits for the device is timed with its waiting.
    """
    for _ in range(tries):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(int(busy * CYCLES))
        start.record()
        run()
        end.record()
        launched = time.perf_counter() - began
        end.synchronize()
        if launched < busy:
            break
        busy = 1.5 * launched
    return start.elapsed_time(end) / 1e3


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_of: Clock = wall_seconds,
) -> dict[str, Timing]:
    """Time all contestants in turn, round after round; the others are compared to the first. Pass
    two at a time if a round takes seconds: a shared machine changes during a longer round.

    Each round begins with the next contestant and every other round runs backwards, so that none
    profits from what runs before it.
    """
    for run in contestants.values():
        run()
    names = list(contestants)
    base = names[0]
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        first = i // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order if i % 2 else order[::-1]:
            seconds[name].append(seconds_of(contestants[name]))
    timings = {}
    for name, own in seconds.items():
        ratios = [mine / plain for mine, plain in zip(own, seconds[base])]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        timings[name] = Timing(1e3 * statistics.median(own), middle, lower, upper)
    return timings


def resident(field: str = "VmHWM") -> float:
    """MiB of this process in memory: ``VmHWM`` its most so far, ``VmRSS`` now. Unlike getrusage's
    peak it does not begin with what the parent process had.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024
