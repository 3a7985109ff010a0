# SPDX-License-Identifier: Apache-2.0
"""The runs of ``geometry``: byte-level models of one width, and each optimizer with the learning
rate and the rule that belong to it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gnsfast
from gnsfast.cli import tiny_gpt
from gnsfast.cli.optimizers import MuonAdamW, Signum
from gnsfast.critical_batch.branches import TorchRun
from gnsfast.critical_batch.control import SampleStream

BATCH = 8
WARM_UP = 50
"""Steps over which the learning rate rises; it is constant afterwards."""


class Optimizer(NamedTuple):
    """An optimizer's learning rate, its rule for another batch size, and the noise scales beside
    the Euclidean one that it has: Adam's needs second moments.
    """

    lr: float
    rule: str
    metrics: tuple[str, ...] = ("sign", "spectral")


OPTIMIZERS = {
    "sgd": Optimizer(0.3, "linear"),
    "adamw": Optimizer(3e-3, "sqrt", ("adam", "sign", "spectral")),
    "signum": Optimizer(1e-3, "sqrt"),
    "muon": Optimizer(1e-2, "sqrt"),
}
"""Of three learning rates each is the best at every width, or within 0.01 of its loss."""


def make(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer ``name`` of all parameters of ``model``."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    if name == "signum":
        return Signum(model.parameters(), lr=lr)
    return MuonAdamW(model, lr=lr, adam_lr=3e-3)


def warm_up(tokens: int) -> float:
    """The factor of the learning rate in the runs that branches leave."""
    return min(1.0, (tokens + 1) / (WARM_UP * BATCH * tiny_gpt.CONTEXT))


class Study:
    """The runs of all optimizers at one width of the model."""

    def __init__(self, width: int, folder: Path) -> None:
        text = tiny_gpt.read_text()
        held_out = len(text) // 20
        self.windows = text[held_out:].unfold(0, tiny_gpt.CONTEXT + 1, 1)
        drawn = torch.Generator().manual_seed(7)
        self.evaluated = tiny_gpt.draw(text[:held_out], 256, drawn)
        self.width, self.folder = width, folder

    def run(
        self,
        name: str,
        *,
        seed: int = 0,
        lr: float | None = None,
        rate: Callable[[int], float] = warm_up,
    ) -> TorchRun:
        """A run of ``BATCH`` samples; ``seed`` is that of the weights and of the data."""
        torch.manual_seed(seed)
        model = tiny_gpt.TinyGPT(width=self.width, layers=2)
        return TorchRun(
            model,
            make(name, model, OPTIMIZERS[name].lr if lr is None else lr),
            tiny_gpt.loss_of,
            SampleStream(self.windows, seed=seed),
            batch_size=BATCH,
            tokens_per_sample=tiny_gpt.CONTEXT,
            lr=rate,
            clip=1.0,
            evaluate=self.evaluate,
        )

    def evaluate(self, model: nn.Module) -> float:
        """Loss on text that no run trains on, in nats a byte."""
        with torch.no_grad():
            losses = [tiny_gpt.loss_of(model, part) for part in self.evaluated.split(64)]
        return torch.stack(losses).mean().item()

    def gns(self, name: str, run: TorchRun, **options: Any) -> gnsfast.GradientNoiseScale:
        """All noise scales that the optimizer has, or those of ``metric``."""
        metric = options.pop("metric", OPTIMIZERS[name].metrics)
        optimizer = run.optimizer if "adam" in metric else None
        return gnsfast.GradientNoiseScale(
            run.model, metric=metric or None, optimizer=optimizer, **options
        )


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, as JSON; read from ``path`` where an earlier call left it there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(make()))
        partial.replace(path)
    return json.loads(path.read_text())
