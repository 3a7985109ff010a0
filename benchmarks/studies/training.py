# SPDX-License-Identifier: Apache-2.0
"""Training of the demo's byte-level model, which the studies share: its text, a loss on text that
no run trains on, runs by a controller or not.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gnsfast
from gnsfast.cli import tiny_gpt
from gnsfast.critical_batch.branches import TorchRun
from gnsfast.critical_batch.control import BatchSizeController, SampleStream, cosine
from gnsfast.critical_batch.rules import Rules

LR = 1e-3
"""Of ``narrow_run``."""

Rate = Callable[[int], float]
"""Tokens -> factor of the learning rate."""
Done = Callable[[int, float, Any], object]
"""Takes the steps of a run after each one, the loss of that, and a decision of its controller."""


class Training:
    """Text to train on and to evaluate, and a folder for what runs leave. Runs of ``tokens`` begin
    with ``batch`` samples, and their learning rate has a ``shape``.
    """

    def __init__(self, folder: Path, batch: int, tokens: int) -> None:
        text = tiny_gpt.read_text()
        held_out = len(text) // 20
        self.windows = text[held_out:].unfold(0, tiny_gpt.CONTEXT + 1, 1)
        drawn = torch.Generator().manual_seed(7)
        self.evaluated = tiny_gpt.draw(text[:held_out], 256, drawn)
        self.folder, self.batch, self.tokens = folder, batch, tokens
        self.shape = cosine(tokens, warm_up=tokens // 50, final=0.1)

    def of(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Rate,
        seed: int,
        **options: Any,
    ) -> TorchRun:
        """A run on the data of ``seed``; ``rate`` takes tokens."""
        return TorchRun(
            *(model, optimizer, tiny_gpt.loss_of, SampleStream(self.windows, seed=seed)),
            batch_size=self.batch,
            tokens_per_sample=tiny_gpt.CONTEXT,
            lr=rate,
            clip=1.0,
            evaluate=self.evaluate,
            **options,
        )

    def constant(self, run_of: Callable[[Rate], TorchRun], rule: str, size: int) -> TorchRun:
        """One batch size; the learning rate is scaled by the rule."""
        factor = Rules(rule).lr_factor(size / self.batch)
        run = run_of(lambda tokens: factor * self.shape(tokens))
        run.batch_size = size
        return run

    def controller(self, most: int, **options: Any) -> BatchSizeController:
        """It grows the batch up to ``most`` samples."""
        return BatchSizeController(
            self.batch,
            tokens_per_sample=tiny_gpt.CONTEXT,
            total_tokens=self.tokens,
            max_batch_size=most,
            calibrate=0.02,
            check_every=self.tokens // 100,
            **options,
        )

    def evaluate(self, model: nn.Module) -> float:
        """Loss on text that no run trains on, in nats a byte."""
        with torch.no_grad():
            losses = [tiny_gpt.loss_of(model, part) for part in self.evaluated.split(64)]
        return torch.stack(losses).mean().item()


def train(
    run: TorchRun, tokens: int, controller: BatchSizeController | None, done: Done
) -> dict[str, Any]:
    """Steps up to ``tokens``, and where the batch grew, as a controller decides."""
    steps, grown = 0, []
    while run.tokens < tokens:
        loss = run.step().loss
        steps += 1
        decision = controller and run.gns and controller.update(run.tokens, run.gns.compute)
        if decision and decision.new != decision.old:
            run.batch_size = decision.new
            grown.append(f"{decision.new} at {decision.tokens / tokens:.0%}")
        done(steps, loss, decision)
    return {"steps": steps, "grown": ", ".join(grown) or "-"}


def narrow_run(
    seed: int, steps: int, warm_up: int, draw: Callable[[], tuple[Tensor, Any]], **options: Any
) -> Iterator[tuple[int, gnsfast.GradientNoiseScale]]:
    """Trains a GPT of one layer, of width 32. ``draw`` gives a batch and its ``ids``; each step is
    yielded with the noise scale, measured but not taken yet.
    """
    torch.manual_seed(seed)
    model = tiny_gpt.TinyGPT(width=32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    gns = gnsfast.GradientNoiseScale(model, **options)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / warm_up)
        windows, ids = draw()
        with gns.microbatch(len(windows), ids=ids):
            tiny_gpt.loss_of(model, windows).backward()
        gns.update()
        yield step, gns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def update(gns: gnsfast.GradientNoiseScale, windows: Tensor, **options: Any) -> None:
    """Forward and backward pass, and the noise scale's part; the weights stay."""
    with gns.microbatch(len(windows), **options):
        tiny_gpt.loss_of(gns.model, windows).backward()
    gns.update()
    gns.model.zero_grad()


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, as JSON; read from ``path`` where an earlier call left it there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(make()))
        partial.replace(path)
    return json.loads(path.read_text())


def span(value: float, lower: float, upper: float) -> str:
    return f"{value:.3g} ({lower:.3g} to {upper:.3g})"


def spread(values: list[float], digits: str) -> str:
    """Mean ± standard deviation over the seeds."""
    mean = f"{statistics.fmean(values):{digits}}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{digits.strip('+')}}"
