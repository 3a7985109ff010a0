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
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from benchmarks import measure
from benchmarks.apart import printed
from benchmarks.gpu.backends import OURS, forced, kernel_of, launches, present
from benchmarks.gpu.operators import device_name, wall_clock
from benchmarks.model.gpu import of_device
from benchmarks.model.plain import MODELS as COUNTED
from benchmarks.model.step import step as counted_step
from benchmarks.networks import GPT2, LlamaBlock, gpt_batch, gpt_loss
from benchmarks.record import Growing, Rows, Tables

MODELS = ("gpt2", "llama")


class Seen(NamedTuple):
    """Of a contestant: its time beside the first one's, the most bytes that it adds, and its weight
    gradients that go to the CUDA extension.
    """

    timing: measure.Timing
    nbytes: int
    launches: int


def side_by_side(
    prepare: Mapping[str, Callable[[], Callable[[], object]]],
    device: str,
    rounds: int,
    seconds_of: measure.Clock,
    passes: int = 1,
) -> dict[str, Seen]:
    """Prepare all contestants, then time them interleaved. Memory is the peak of the last of
    ``passes`` after the first one.
    """
    ways: dict[str, Callable[[], object]] = {}
    peaks, launched = {}, {}
    for name, make in prepare.items():
        before = allocated(device)
        ways[name] = make()
        ways[name]()
        for _ in range(passes):
            reset_peak(device)
            launched[name] = launches(ways[name])
        peaks[name] = peak(device) - before
    timings = measure.interleave(ways, rounds, seconds_of)
    return {name: Seen(t, peaks[name], launched[name]) for name, t in timings.items()}


def beside_plain(name: str, compiled: bool, device: str, rounds: int) -> Rows:
    warm_up(device)
    backends = {"plain": "", **{OURS[each]: each for each in present(device, "triton", "cuda")}}
    prepare = {
        key: partial(training_step, name, backend, compiled, device)
        for key, backend in backends.items()
    }
    found, rows = side_by_side(prepare, device, rounds, wall_clock(device), passes=2), []
    for key, (timing, nbytes, launched) in found.items():
        row: dict[str, Any] = {"training step": name}
        row |= {"mode": "compiled" if compiled else "eager", "contestant": key}
        row |= {"ms": round(timing.milliseconds, 2), "ratio": timing, "MiB": round(nbytes / 2**20)}
        if plain := found["plain"].nbytes:
            row["memory"] = round(nbytes / plain, 4)
        if key == OURS["cuda"]:
            row["CUDA launches"] = launched
        if key != "plain":
            row["predicted"] = predicted(name, device_name(device), key, compiled)
        rows.append(row)
        print(row, flush=True)
    return rows


def predicted(name: str, device: str, contestant: str, compiled: bool = False) -> float | str:
    """Time with norms over plain, counted; for GPT-2 on a GPU that is in the table."""
    gpu = of_device(device)
    if gpu is None or name != "gpt2" or "plain" in contestant:
        return "-"
    counted = counted_step(
        gpu,
        COUNTED["gpt-2"],
        *(GPT2.T, GPT2.B),
        kernel=kernel_of(contestant, gpu),
        compiled=compiled,
    )
    return round(1 + counted.overhead, 3)


def training_step(name: str, backend: str, compiled: bool, device: str) -> Callable[[], object]:
    """Forward, loss, backward, AdamW; with a ``backend`` under an estimator, as a user has it."""
    torch.manual_seed(0)
    model, loss_of, B = (_gpt2 if name == "gpt2" else _llama)(device)
    gns = gnsfast.GradientNoiseScale(model) if backend else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    forward = torch.compile(loss_of) if compiled else loss_of

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            if gns is None:
                forward(model).backward()
            else:
                with forced(backend):
                    with gns.microbatch(B):
                        forward(model).backward()
                    gns.update()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _gpt2(device: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    batch = gpt_batch(GPT2, device)
    return (
        GPT2().to(device),
        lambda model: gpt_loss(model, batch),
        GPT2.B,
    )


def _llama(
    device: str, B: int = 8, T: int = 2048, width: int = 2048, blocks: int = 4
) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """Four blocks over random activations: what a 1B Llama is made of, without its head."""
    batch = tuple(torch.randn(B, T, width, device=device) for _ in range(2))
    model = nn.Sequential(*(LlamaBlock() for _ in range(blocks))).to(device)
    return model, lambda model: llama_loss(model, batch), B


def llama_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def host(device: str, rounds: int = 11) -> Iterator[Tables]:
    """What the host waits for and does: synchronisations of a step, the estimator's own calls, and
    the first steps of fresh processes, which compile everything.
    """
    found = Growing()
    counted = partial(synchronising, device)
    yield from found.over("Host synchronisations", ("plain", "gnsfast"), counted)
    yield from found.over("Estimator", ("GPT-2",), lambda _: [estimator(device, rounds)])
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


def estimator(device: str, rounds: int) -> dict[str, Any]:
    """``microbatch``'s two ends and ``update`` in steps of GPT-2: the host's time, and the
    device's for what they launch; neither holds the layers' own share.
    """
    torch.manual_seed(0)
    model, loss_of, B = _gpt2(device)
    gns = gnsfast.GradientNoiseScale(model)
    once: measure.Clock = partial(measure.cuda_seconds, busy=5e-3, tries=1)
    once = once if device == "cuda" else measure.wall_seconds  # a block cannot be entered again
    on_host: list[float] = []
    on_device: list[float] = []

    def timed(run: Callable[[], object]) -> float:
        """Seconds of the host; the device's are added to ``on_device``."""
        seconds = 0.0

        def call() -> None:
            nonlocal seconds
            seconds = measure.wall_seconds(run)

        on_device.append(once(call))
        return seconds

    def leave(block: Any) -> None:
        block.__exit__(None, None, None)
        gns.update()

    for _ in range(rounds + 2):
        block = gns.microbatch(B)
        opened = timed(block.__enter__)
        with torch.autocast(device, torch.bfloat16):
            loss_of(model).backward()
        on_host.append(opened + timed(lambda: leave(block)))  # noqa: B023
        model.zero_grad()
    both = [a + b for a, b in zip(on_device[4::2], on_device[5::2])]
    return {
        "model": "GPT-2",
        "host ms": round(1e3 * statistics.median(on_host[2:]), 3),
        "device ms": round(1e3 * statistics.median(both), 3),
    }


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


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def warm_up(device: str) -> None:
    """Allocate the linear algebra library's workspace before memory is measured."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(64, 64, device=device, dtype=dtype)
        a @ a


def release(device: str) -> None:
    """Free unused memory; hooked models hold themselves, in cycles."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    print(json.dumps(first_steps(*sys.argv[1:])))
