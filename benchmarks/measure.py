# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, ratios with their spread, peak memory; and a check before any number is
shown.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import gnsfast
from benchmarks import cases


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
) -> dict[str, Timing]:
    """Time all contestants in turn, round after round; the first one is what the others are
    compared to.

    The order turns round from one round to the next, so that none profits from what ran before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for i in range(rounds):
        order = list(contestants.items())
        for name, run in order if i % 2 else reversed(order):
            seconds[name].append(seconds_of(run))
    base = next(iter(seconds.values()))
    timings = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, base)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        timings[name] = Timing(1e3 * statistics.median(own), middle, lower, upper)
    return timings


def check() -> None:
    """Every case against single samples; no speed is shown while a norm is wrong."""
    torch.manual_seed(0)
    model, batch = gnsfast.convert(cases.GPT()), cases.gpt_batch()
    verdict = gnsfast.verify(model, cases.gpt_loss, batch, rtol=1e-4)
    if not verdict.ok or gnsfast.coverage(model).covered_fraction < 1:
        raise SystemExit(f"the norms of the training step are wrong:\n{verdict}")
    for case in cases.LAYERS:
        x, dy = torch.randn(4, case.T, case.I), torch.randn(4, case.T, case.O)
        got = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)[2][0, :4]
        want = torch.stack(
            [(b.double().T @ a.double()).square().sum() for a, b in zip(x, dy)]
        ).float()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)


def peak_memory(per_sample: bool, threads: int) -> float:
    """MiB that three training steps add to the resident peak of a fresh process."""
    code = (
        f"from benchmarks.measure import memory_of_steps; memory_of_steps({per_sample}, {threads})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(out.stdout)


def memory_of_steps(per_sample: bool, threads: int) -> None:
    """Run in a process of its own by ``peak_memory``; prints MiB."""
    torch.set_num_threads(threads)
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # the linear algebra library's own buffers
    before = _resident_peak()
    step = cases.training_step(per_sample)
    for _ in range(3):
        step()
    print((_resident_peak() - before) / 1024)


def _resident_peak() -> int:
    """KiB; unlike getrusage's it does not begin with what the parent process had."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
