# SPDX-License-Identifier: Apache-2.0
"""The demo's training run: steps, what they cost, and the check at the last checkpoint."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gnsfast
from gnsfast.arguments import check_choice, finite_or_none
from gnsfast.cli import optimizers, tiny_gpt
from gnsfast.cli.single_samples import SingleSamples
from gnsfast.estimator import optimizer_for
from gnsfast.integrations.trackers import metrics
from gnsfast.noise_scale import OTHERS, Estimate, ModuleNoiseScale, NoiseScale

REPORT_EVERY = 10
PLAIN_EVERY = 8
"""Every eighth step runs without statistics. The difference of the medians is their cost."""
WARM_UP = 5
CHECK_BATCHES, CHECK_SAMPLES = 40, 2048
MICRO_BATCHES = 4
"""In so many a step is split where other noise scales are measured."""


@dataclass(frozen=True)
class Options:
    """How the demo trains, and which noise scales it measures.

    Args:
        steps: Optimizer steps.
        samples: Samples in a step.
        seed: Seed of the weights and the data.
        optimizer: adamw, sgd, signum, or muon (AdamW for all but hidden matrices).
        metric: Another noise scale: adam, sign, spectral. May be repeated.
        out: Run folder (runs/demo-DATE-TIME).
    """

    steps: int = field(default=800, metadata={"min": 20})
    samples: int = field(default=32, metadata={"min": 2})
    seed: int = 0
    optimizer: str = "adamw"
    metric: list[str] | None = None
    out: Path | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Each of them once."""
        return tuple(dict.fromkeys(self.metric or ()))

    def __post_init__(self) -> None:
        check_choice("--optimizer", self.optimizer, optimizers.OPTIMIZERS)
        for metric in self.metrics:
            check_choice("--metric", metric, OTHERS)
        if "adam" in self.metrics and self.optimizer != "adamw":
            raise ValueError(
                f"--metric adam needs --optimizer adamw, not {self.optimizer}: use --metric sign, "
                "its close relative"
            )


@dataclass(frozen=True)
class Progress:
    """A line of ``metrics.jsonl``, and what the panel shows."""

    step: int
    samples: int
    loss: float
    scale: NoiseScale
    share: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        per_step = self.samples * tiny_gpt.CONTEXT
        found = metrics(
            self.scale, tokens=self.step * per_step, batch_tokens=per_step, per_module=True
        )
        return {"loss": self.loss, **found, "seconds": round(self.seconds, 3), "share": self.share}


@dataclass(frozen=True)
class Check:
    """The estimate at the frozen last checkpoint, beside single-sample gradients there."""

    estimate: NoiseScale
    brute_force: ModuleNoiseScale
    single_samples: Mapping[str, Estimate]
    """The noise scales in other metrics by the same single samples."""

    @property
    def ratio(self) -> float:
        return self.estimate.noise_scale / self.brute_force.noise_scale

    def agrees(self, metric: str) -> bool:
        """Whether the estimate's interval reaches what single samples say."""
        ours, theirs = self.estimate.under(metric), self.single_samples[metric]
        return ours.lower <= theirs.upper and theirs.lower <= ours.upper

    def record(self) -> dict[str, Any]:
        return {
            "kind": "check",
            "estimate": numbers(self.estimate, "trace", "grad_sqnorm", "resolved"),
            "brute_force": numbers(self.brute_force, "trace", "grad_sqnorm", "resolved"),
            "ratio": self.ratio,
            "others": {
                metric: {
                    "estimate": numbers(self.estimate.under(metric)),
                    "single_samples": numbers(found),
                    "agrees": self.agrees(metric),
                }
                for metric, found in self.single_samples.items()
            },
            "batches": CHECK_BATCHES,
            "single_samples": CHECK_SAMPLES,
        }


def numbers(found: Estimate, *more: str) -> dict[str, Any]:
    names = "noise_scale", "lower", "upper", *more
    return {name: finite_or_none(getattr(found, name)) for name in names}


class Demo:
    """A training run of ``TinyGPT``, measured from its first step to its last."""

    def __init__(self, options: Options) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        self.text = tiny_gpt.read_text()
        self.model = tiny_gpt.TinyGPT()
        self.optimizer = optimizers.make(options.optimizer, self.model)
        self.gns = self._estimator()
        self.generator = torch.Generator().manual_seed(options.seed)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def _estimator(self) -> gnsfast.GradientNoiseScale:
        asked: Any = self.options.metrics
        optimizer = optimizer_for(asked, self.optimizer)
        return gnsfast.GradientNoiseScale(self.model, metric=asked, optimizer=optimizer)

    def header(self) -> dict[str, Any]:
        """What the first line of ``metrics.jsonl`` says."""
        return {
            "name": f"gnsfast demo, {self.options.samples} samples a step",
            "optimizer": self.options.optimizer,
            "about": "A byte-level GPT trained on Python's language reference.",
            "loss_unit": "nats per byte",
            "steps": self.options.steps,
            "samples": self.options.samples,
            "tokens_per_sample": tiny_gpt.CONTEXT,
            "seed": self.options.seed,
            "parameters": self.parameters,
            "text_bytes": len(self.text),
            "gnsfast": gnsfast.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
        }

    def draw(self, samples: int) -> torch.Tensor:
        return tiny_gpt.draw(self.text, samples, self.generator)

    def train(self) -> Iterator[Progress]:
        """Train, and yield every ``REPORT_EVERY`` steps."""
        start = time.perf_counter()
        plain: list[float] = []
        measured: list[float] = []
        for step in range(1, self.options.steps + 1):
            batch = self.draw(self.options.samples)
            without = step % PLAIN_EVERY == 0
            began = time.perf_counter()
            loss = self._step(batch, without)
            (plain if without else measured).append(time.perf_counter() - began)
            if step % REPORT_EVERY == 0 or step == self.options.steps:
                share = math.nan
                if len(plain) > 2:
                    share = 1 - statistics.median(plain) / statistics.median(measured[WARM_UP:])
                found, seconds = self.gns.compute(), time.perf_counter() - start
                yield Progress(step, len(batch), loss.item(), found, share, seconds)

    def _step(self, batch: torch.Tensor, without: bool) -> torch.Tensor:
        if without:
            loss = tiny_gpt.loss_of(self.model, batch)
            loss.backward()
        else:
            loss = self._measured(self.gns, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _measured(self, gns: gnsfast.GradientNoiseScale, batch: torch.Tensor) -> torch.Tensor:
        """A measured update; returns its loss. Other metrics compare its micro-batches."""
        parts = batch.chunk(MICRO_BATCHES) if self.options.metrics else [batch]
        total = torch.zeros(())
        for part in parts:
            share = len(part) / len(batch)
            with gns.microbatch(len(part), scale=share):
                loss = tiny_gpt.loss_of(self.model, part) * share
                loss.backward()
            total += loss.detach()
        gns.update()
        return total

    def check(self, tick: Callable[[float], None]) -> Check:
        """Measure the frozen model both ways; ``tick`` gets the share that is done."""
        gns = self._estimator()
        for _ in range(CHECK_BATCHES):
            batch = self.draw(self.options.samples)
            self._measured(gns, batch)
            self.model.zero_grad()

        samples, done = self.draw(CHECK_SAMPLES).split(1), 0

        def loss_of(model: torch.nn.Module, sample: torch.Tensor) -> torch.Tensor:
            nonlocal done
            done += 1
            if done % 64 == 0:
                tick(done / CHECK_SAMPLES)
            return tiny_gpt.loss_of(model, sample)

        found, singles = gns.compute(), SingleSamples(self.model)
        with singles.watched() if found.others else nullcontext():
            truth = gnsfast.brute_force_noise_scale(self.model, loss_of, samples)
        others = {
            metric: singles.estimate(metric, getattr(scale, "left_out", ()), self.optimizer)
            for metric, scale in found.others.items()
        }
        return Check(found, truth, others)
