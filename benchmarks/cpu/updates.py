# SPDX-License-Identifier: Apache-2.0
"""Whole updates of small models, where calls cost more than arithmetic: ``gns.update(n)`` around
forward and backward pass, AdamW, and one ``gns.compute()`` in 128 updates. What gnsfast puts off to
later updates is counted, which the time of a single step would hide.
"""

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import gnsfast
from benchmarks import record
from benchmarks.measure import interleave
from benchmarks.networks import NanoGPT, Perceptron, labelled, perceptron_loss
from examples import tiny_gpt

UPDATES = 128
"""In a round: two windows, and audits as they come while nobody asks for the numbers."""

Loss = Callable[[nn.Module, Any], Tensor]


def cases() -> dict[str, tuple[nn.Module, Loss, Any, int]]:
    """Model, loss, a batch, and its samples."""
    torch.manual_seed(0)
    text, generator = tiny_gpt.read_text(), torch.Generator().manual_seed(0)
    ids = tiny_gpt.draw(text, 8, generator)
    loss_of, nano = tiny_gpt.loss_of, (NanoGPT.B, NanoGPT.T + 1)
    return {
        "perceptron 32-64-8, 16 samples": (Perceptron(), perceptron_loss, labelled(), 16),
        "the demo's GPT, 8 samples": (tiny_gpt.TinyGPT(), loss_of, ids, 8),
        "nanoGPT's recipe for a CPU, 12 samples": (
            *(NanoGPT(), loss_of, torch.randint(0, NanoGPT.vocabulary, nano), NanoGPT.B),
        ),
    }


CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "gnsfast": {},
    "gnsfast, every=8": {"every": 8},
    "gnsfast, budget=0.05": {"budget": 0.05},
    "gnsfast, budget=0.01": {"budget": 0.01},
    "gnsfast, budget=0.02, torch's gradients": {"budget": 0.02, "gradients": "torch"},
}
"""The settings of the estimator, or None for plain torch."""


def updates(
    model: nn.Module, loss_of: Loss, batch: Any, B: int, settings: dict[str, Any] | None
) -> Any:
    """A function that runs ``UPDATES`` of them."""
    model = copy.deepcopy(model)
    gns = None if settings is None else gnsfast.GradientNoiseScale(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        for _ in range(UPDATES):
            with nullcontext() if gns is None else gns.update(B):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if gns is not None:
            gns.compute()

    return run


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
    rows = []
    for name, case in cases().items():
        contestants = {each: updates(*case, settings) for each, settings in CONTESTANTS.items()}
        for contestant, timing in interleave(contestants, rounds).items():
            ms = round(timing.milliseconds / UPDATES, 3)
            rows.append({"model": name, "contestant": contestant, "ms": ms, "ratio": timing})
    return {"Whole updates": rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=11)
    record.add_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    command = f"python -m benchmarks updates --rounds {options.rounds}"
    found = tables(options.rounds)
    record.publish("cpu-updates", command, found, options.record, record.INTERLEAVED)
