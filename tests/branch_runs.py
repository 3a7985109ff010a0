# SPDX-License-Identifier: Apache-2.0
"""Runs to branch: one whose losses are written down, and a small real one."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gnsfast.critical_batch import SampleStream
from gnsfast.critical_batch.branches import BranchStep, TorchRun
from gnsfast.noise_scale import AdamNoiseScale, DualNoiseScale, NoiseScale

LEVELS = {4: 2.0, 8: 2.0, 16: 2.005, 32: 2.3}
"""The loss of a batch size: the largest k that matches is 2."""


class ScriptedRun:
    """Its loss is the level of its batch size, and noise from a generator that it saves."""

    batch_size, tokens_per_sample = 8, 10

    def __init__(self, levels: dict[int, Any] = LEVELS, noise: float = 1e-3) -> None:
        self.levels, self.noise, self.tokens = levels, noise, 800
        self.random = random.Random(0)
        self.trained: list[tuple[int, float]] = []
        self.saves: dict[str, tuple[str, float]] = {}
        self.die = ""  # "save NAME" or "step BATCH TOKENS": where to be killed

    def state(self) -> list[Any]:
        return [self.tokens, self.random.getstate()]

    def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(self.state()))
        if self.die.startswith("save") and self.die.split()[1] in folder.name:
            (folder / "state.json").write_text("half of it")
            os.kill(os.getpid(), signal.SIGKILL)

    def restore(self, folder: Path) -> None:
        self.tokens, (version, internal, gauss) = json.loads((folder / "state.json").read_text())
        self.random.setstate((version, tuple(internal), gauss))

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        self.trained.append((batch_size, lr_factor))
        for done in range(0, tokens, batch_size * self.tokens_per_sample):
            if self.die == f"step {batch_size} {done}":
                os.kill(os.getpid(), signal.SIGKILL)
            level = self.levels[batch_size]
            if isinstance(level, BaseException) and done:
                raise level
            loss = 2.0 if isinstance(level, BaseException) else level
            self.tokens += batch_size * self.tokens_per_sample
            yield BranchStep(
                batch_size * self.tokens_per_sample, loss + self.noise * self.random.random()
            )


class MeasuredRun(ScriptedRun):
    """It knows a noise scale, and an evaluation loss of its own."""

    def noise_scale(self) -> NoiseScale:
        adam = AdamNoiseScale(40.0, 20.0, 80.0, 1.0, 0.025, 5)
        sign = DualNoiseScale(6.0, 4.0, 9.0, 3.0, 1.0, 1.5, "sign", 4, ("w",), {})
        return NoiseScale(10.0, 8.0, 12.5, 1.0, 0.1, False, 5, 0, 40, {}, adam, sign=sign)

    def evaluate(self) -> float:
        return 1.0 + self.tokens / 1e6


def out_of_memory() -> ScriptedRun:
    return ScriptedRun({**LEVELS, 16: RuntimeError("no memory")})


def killed() -> ScriptedRun:
    """Its process is, in batches of 16."""
    run = ScriptedRun()
    run.random.seed(5)
    run.die = "step 16 480"
    return run


class Stream:
    """Samples from Python's and torch's global generators, and a position."""

    def __init__(self) -> None:
        self.state = {"position": 0}

    def draw(self, n: int) -> torch.Tensor:
        self.state["position"] += n
        return torch.randn(n, 6) + random.random() + self.state["position"] / 1000

    def state_dict(self) -> dict[str, int]:
        return self.state  # no copy, as of many a stream

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def small_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    random.seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )


def small_run(seed: int = 0, **options: Any) -> TorchRun:
    """With dropout, a buffer that moves, Adam's state, clipping and a schedule."""
    model = small_model(seed)
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    settings = {
        "batch_size": 8,
        "tokens_per_sample": 10,
        "micro_batch": 3,
        "clip": 1.0,
        "lr": halving,
    }
    return TorchRun(model, optimizer, loss_fn, Stream(), **{**settings, **options})


def halving(tokens: int) -> float:
    return 0.5 ** (tokens / 2000)


def trained() -> TorchRun:
    """The small run after five steps."""
    run = small_run()
    list(run.train(400))
    return run


def note(run: Any, batch_size: int) -> int:
    """Note a step of a branch, and the process that took it; how many are noted."""
    with Path(os.environ["STEPS"]).open("a+") as file:
        file.write(f"{os.getpid()} {batch_size} {run.tokens}\n")
        file.seek(0)
        return len(file.readlines())


class Logged(ScriptedRun):
    """Notes each step that it takes, of which any may be the one before it is killed."""

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        for step in super().train(tokens, batch_size=batch_size, lr_factor=lr_factor):
            note(self, batch_size)
            time.sleep(0.004)
            yield step


DEATHS = {4: 11, 8: 5, 16: 3}
"""The steps of branches, by their batch size, in which a ``mortal`` run is killed, once each."""


def mortal() -> TorchRun:
    """The small run after five steps, whose process is killed once in each branch."""
    run, at = trained(), Path(os.environ["STEPS"])

    def train(tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        for step in TorchRun.train(run, tokens, batch_size=batch_size, lr_factor=lr_factor):
            note(run, batch_size)
            died = at.with_name(f"died-{batch_size}")
            if run.tokens == 400 + DEATHS[batch_size] * 10 * batch_size and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield step

    run.train = train
    return run


def sharded_run(wrap: str, **options: Any) -> TorchRun:
    """The part of this process in a run of several, on samples whose order has a seed."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, data = small_model(), torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)  # of dropout
    if wrap == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard  # 1 s that most tests need not wait

        fully_shard(model)
    stream = SampleStream(data, rank=rank, world_size=ranks)
    settings = {"batch_size": 8, "tokens_per_sample": 10, "micro_batch": 3, "clip": 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TorchRun(model, optimizer, loss_fn, stream, **{**settings, "lr": halving, **options})


def launched_run() -> TorchRun:
    """As torchrun starts it, after five steps."""
    torch.distributed.init_process_group("gloo")
    run = sharded_run("fsdp")
    list(run.train(400))
    return run
