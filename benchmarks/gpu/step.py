# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on a GPU, plain and under an estimator: time, memory, what the host waits
for, the estimator's own share, and the first steps of fresh processes.
"""

import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from benchmarks import measure
from benchmarks.apart import printed
from benchmarks.contestants import cases
from benchmarks.contestants.cases import Problem
from benchmarks.gpu import operators
from benchmarks.gpu.backends import OURS, forced, launches, present
from benchmarks.gpu.operators import wall_clock
from benchmarks.networks import GPT, GPT2, LlamaBlock
from benchmarks.record import Growing, Rows, Tables


def side_by_side(
    prepare: Mapping[str, Callable[[], Callable[[], object]]],
    device: str,
    rounds: int,
    seconds_of: measure.Clock,
    passes: int = 1,
) -> Rows:
    """Prepare all contestants, then time them interleaved, beside the first one. Memory is the peak
    of the last of ``passes`` after the first one; launches are those of the CUDA extension.
    """
    ways: dict[str, Callable[[], object]] = {}
    peaks, launched = {}, {}
    for name, make in prepare.items():
        before = torch.cuda.memory_allocated()  # 0 without a device
        ways[name] = make()
        ways[name]()
        for _ in range(passes):
            reset_peak(device)
            launched[name] = launches(ways[name])
        peaks[name] = torch.cuda.max_memory_allocated() - before
    plain, rows = next(iter(peaks.values())), []
    for name, timing in measure.interleave(ways, rounds, seconds_of).items():
        row: dict[str, Any] = {"contestant": name, "ms": round(timing.milliseconds, 3)}
        row |= {"ratio": timing, "MiB": round(peaks[name] / 2**20)}
        if plain:
            row["memory"] = round(peaks[name] / plain, 4)
        if name == OURS["cuda"]:
            row["CUDA launches"] = launched[name]
        rows.append(row)
    return rows


def beside_plain(name: str, compiled: bool, device: str) -> Rows:
    warm_up(device)
    backends = {"plain": "", **{OURS[each]: each for each in present(device, "triton", "cuda")}}
    prepare = {
        key: partial(training_step, name, backend, compiled, device)
        for key, backend in backends.items()
    }
    about = {"training step": name, "mode": "compiled" if compiled else "eager"}
    rows = side_by_side(prepare, device, operators.ROUNDS, wall_clock(device), passes=2)
    return [about | row for row in rows]


def training_step(name: str, backend: str, compiled: bool, device: str) -> Callable[[], object]:
    """Forward, loss, backward, AdamW; with a ``backend`` under an estimator, as a user has it."""
    problem = PROBLEMS[name](device)
    model, batch = problem.model, problem.batch
    gns = gnsfast.GradientNoiseScale(model) if backend else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    forward = torch.compile(problem.loss_of) if compiled else problem.loss_of

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            if gns is None:
                forward(model, batch).backward()
            else:
                with forced(backend):
                    with gns.update(problem.B):
                        forward(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def gpt_problem(kind: type[GPT], device: str, autocast: bool = False) -> Problem:
    return replace(cases.small_gpt(kind, device, autocast), layer=kind.__name__)


def llama_problem(
    B: int, T: int, sizes: tuple[int, int, int], blocks: int, device: str, autocast: bool = False
) -> Problem:
    """Blocks over random activations: what a Llama is made of, without its head."""
    torch.manual_seed(0)
    batch = tuple(torch.randn(B, T, sizes[0], device=device) for _ in range(2))
    model = nn.Sequential(*(LlamaBlock(*sizes) for _ in range(blocks))).to(device)
    loss_of = partial(cases.cast_loss, llama_loss) if autocast else llama_loss
    return Problem("Llama", T, model, loss_of, batch)


class SmallGPT(GPT):
    """For the check: a block of the same layers, fewer and shorter samples."""

    B, T, vocabulary = 4, 64, 512
    sizes = 64, 2, 1


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "gpt2": partial(gpt_problem, GPT2),
    "llama": partial(llama_problem, 8, 2048, (2048, 32, 8192), 4),
}
"""Functions of device and autocast. The blocks are those of a 1B Llama."""
SMALL: dict[str, Callable[..., Problem]] = {
    "gpt2": partial(gpt_problem, SmallGPT),
    "llama": partial(llama_problem, 4, 64, (64, 2, 128), 1),
}
"""What is checked before a model's steps are timed."""


def llama_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def host(device: str) -> Iterator[Tables]:
    """What the host waits for and does: synchronisations of a step, the estimator's own calls, and
    the first steps of fresh processes, which compile everything.
    """
    found = Growing()
    counted = partial(synchronising, device)
    yield from found.over("Host synchronisations", ("plain", "gnsfast"), counted)
    yield from found.over("Estimator", ("GPT-2",), lambda _: [estimator(device)])
    processes = itertools.product(("eager", "compiled"), ("", "triton"))
    yield from found.over("Start-up time", processes, partial(start_up, device))


def synchronising(device: str, contestant: str) -> Rows:
    backend = "" if contestant == "plain" else "triton"
    training = training_step("gpt2", backend, False, device)
    return [{"step of GPT-2": contestant, "in 5 steps": synchronisations(training, device)}]


def synchronisations(run: Callable[[], object], device: str, steps: int = 5) -> int:
    """How often torch makes the host wait for the device, as its own debug mode sees it: copies to
    the host and ``item``, not events. The first steps, which audit and tune, are not counted.
    """
    for _ in range(3):
        run()
    wait(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                run()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    for place in sorted({f"{w.filename}:{w.lineno}" for w in found}):
        print(f"synchronises: {place}", flush=True)
    return len(found)


def estimator(device: str) -> dict[str, Any]:
    """The two ends of ``update`` in steps of GPT-2: the host's time, and the device's for what they
    launch; neither holds the layers' own share.
    """
    problem = PROBLEMS["gpt2"](device, autocast=True)
    gns = gnsfast.GradientNoiseScale(problem.model)
    once: measure.Clock = partial(measure.cuda_seconds, busy=5e-3, tries=1)
    once = once if device == "cuda" else measure.wall_seconds  # a block cannot be entered again

    def timed(run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of the host, and of the device."""
        host: list[float] = []
        return once(lambda: host.append(measure.wall_seconds(run))), *host

    found = []
    for _ in range(operators.ROUNDS + 2):
        block = gns.update(problem.B)
        opened = timed(block.__enter__)
        problem.loss_of(problem.model, problem.batch).backward()
        left = timed(lambda: block.__exit__(None, None, None))  # noqa: B023
        found.append([sum(each) for each in zip(opened, left)])
        problem.model.zero_grad()
    on_device, on_host = (round(1e3 * statistics.median(each), 3) for each in zip(*found[2:]))
    return {"model": "GPT-2", "host ms": on_host, "device ms": on_device}


def start_up(device: str, how: tuple[str, str]) -> Rows:
    """Seconds in a process of its own, which finds empty caches; ``how``: mode and back-end."""
    mode, backend = how
    with tempfile.TemporaryDirectory() as caches:
        environment = {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
        answer = printed("gpu.step", *(device, mode, backend), environment=os.environ | environment)
    row = {"model": "GPT-2", "mode": mode, "contestant": OURS.get(backend, "plain")}
    return [row | json.loads(answer.splitlines()[-1])]


def first_steps(device: str, mode: str, backend: str) -> dict[str, float]:
    """Of this process: seconds until a model is on the device, of its first and of a later step."""
    seconds = {}
    start = time.perf_counter()
    run = training_step("gpt2", backend, mode == "compiled", device)
    wait(device)
    seconds["model s"] = round(time.perf_counter() - start, 2)
    for name in ("first step s", "second step s", "third step s"):
        seconds[name] = round(wall_clock(device)(run), 3)
    return seconds


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def warm_up(device: str) -> None:
    """Allocate the linear algebra library's workspace before memory is measured."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(64, 64, device=device, dtype=dtype)
        a @ a


def release() -> None:
    """Free unused memory; hooked models hold themselves, in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    print(json.dumps(first_steps(*sys.argv[1:])))
