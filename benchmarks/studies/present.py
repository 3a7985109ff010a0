# SPDX-License-Identifier: Apache-2.0
"""Whether the estimates of a training run hold the noise scale at its weights: brute force at
checkpoints of a byte-level GPT, on four seeds.
"""

import statistics
from typing import Any

import torch

import gnsfast
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import narrow_run, span
from examples import tiny_gpt
from gnsfast.noise_scale import Estimate

SEEDS = (11, 12, 13, 14)
STEPS, WARM_UP, BATCH = 424, 50, 16
FIRST, EVERY = 64, 24
"""The first look, when the window is full, and the steps between two."""
SAMPLES = 768
"""Single samples of brute force at a look: right to about 10 %."""


def looks(seed: int) -> Rows:
    """What the window says at some steps, and brute force at the weights of its last update."""
    text, generator = tiny_gpt.read_text(), torch.Generator().manual_seed(seed)
    draw = lambda: (tiny_gpt.draw(text, BATCH, generator), None)
    found: Rows = []
    for step, gns in narrow_run(seed, STEPS, WARM_UP, draw):
        if step >= FIRST and (step - FIRST) % EVERY == 0:
            said = gns.compute()
            samples = tiny_gpt.draw(text, SAMPLES, generator).split(1)
            truth = gnsfast.brute_force_noise_scale(gns.model, tiny_gpt.loss_of, samples)
            found.append(
                {"seed": seed, "step": step, "brute force": span(*truth.interval)}
                | _compared("mean", said, truth.noise_scale)
                | _compared("present", said.present, truth.noise_scale)
                | {"drift": said.drift}
            )
            print(found[-1], flush=True)
    return found


def _compared(name: str, found: Estimate, truth: float) -> dict[str, Any]:
    return {name: span(*found.interval), f"{name} right": found.lower <= truth <= found.upper} | {
        f"{name}: upper / lower": found.upper / found.lower if found.resolved else None
    }


def _summary(name: str, rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": name, "looks": len(rows)}
    for kind in ("mean", "present"):
        found[f"{kind} right"] = sum(row[f"{kind} right"] for row in rows)
        widths = [row[f"{kind}: upper / lower"] for row in rows]
        bounded = [width for width in widths if width is not None]
        found[f"{kind} resolved"] = len(bounded)
        found[f"{kind}: upper / lower"] = statistics.median(bounded) if bounded else None
    found["drift"] = sum(row["drift"] for row in rows)
    found["drift, of the looks that the mean misses"] = sum(
        row["drift"] for row in rows if not row["mean right"]
    )
    return found


def tables() -> Tables:
    rows = [looks(seed) for seed in SEEDS]
    every = [row for own in rows for row in own]
    summaries = [_summary(str(seed), own) for seed, own in zip(SEEDS, rows)]
    words = ("no", "yes")
    shown = [
        {key: words[value] if isinstance(value, bool) else value for key, value in row.items()}
        for row in every
    ]
    return {
        f"A GPT in training, batches of {BATCH}: 95 % intervals of the window of 64 updates that "
        "hold the noise scale at the weights of its last update": [
            *summaries,
            _summary("all", every),
        ],
        "Each look, in samples": shown,
    }
