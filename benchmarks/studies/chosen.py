# SPDX-License-Identifier: Apache-2.0
"""The batch that gnsfast, nanochat's rule and Step Law choose for one small model, and the loss
that each gives after the same tokens.

The model has 25,000 parameters and sees half a million tokens, a thousandth and less of what the
rules were fitted on: the table says what they choose there, not how they do where they belong.
"""

import math
import statistics
from typing import Any

import torch

import gnsfast
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import LR
from examples import tiny_gpt
from gnsfast.critical_batch import Rules, laws
from gnsfast.critical_batch.control import cosine

TOKENS, SEEDS = 2**19, (1, 2)
SIZES = (1, 2, 4, 8, 16, 64, 256)
FIRST = 4
"""The batch in which gnsfast measures."""
SHARES = (0.02, 0.1)
"""Of the run, after which gnsfast chooses."""
AT = 16
"""The batch size that has the learning rate ``LR``; others follow by the rule "sqrt"."""
FACTORS = (1.0, 2.0, 4.0)
"""Of that learning rate; the best one of each batch size counts."""
HELD_OUT = 256
NANOCHAT = 2**19, 10.5 * (12 * 12 * 768**2 + 768 * 32768)
"""Its batch in tokens at depth 12, and the tokens of that run: 10.5 for each parameter of its
matrices and its head."""


def trained(
    seed: int, size: int, factor: float, until: float = 1.0, measured: bool = False
) -> tuple[float, gnsfast.GradientNoiseScale]:
    """The loss on held-out text after this share of the run, and what gnsfast has measured."""
    torch.manual_seed(seed)
    model, text = tiny_gpt.TinyGPT(width=32, layers=1), tiny_gpt.read_text()
    cut, generator = len(text) * 9 // 10, torch.Generator().manual_seed(seed)
    rate = LR * factor * Rules("sqrt").lr_factor(size / AT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    shape = cosine(TOKENS, warm_up=TOKENS // 20, final=0.1)
    gns = gnsfast.GradientNoiseScale(model)
    per_step = size * tiny_gpt.CONTEXT
    for step in range(math.ceil(until * TOKENS / per_step)):
        optimizer.param_groups[0]["lr"] = rate * shape((step + 1) * per_step)
        batch = tiny_gpt.draw(text[:cut], size, generator)
        if measured:
            with gns.update(size):
                tiny_gpt.loss_of(model, batch).backward()
        else:
            tiny_gpt.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = tiny_gpt.draw(text[cut:], HELD_OUT, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return tiny_gpt.loss_of(model, held_out).item(), gns


def chosen() -> list[tuple[str, float]]:
    """Who chooses which batch, in samples."""
    reference, of_tokens = NANOCHAT
    nanochat = reference * (TOKENS / of_tokens) ** 0.383 / tiny_gpt.CONTEXT
    step_law = laws.STEP_LAW.batch_tokens(TOKENS) / tiny_gpt.CONTEXT
    found = []
    for share in SHARES:
        scales = [trained(seed, FIRST, 1.0, share, True)[1].compute().noise_scale for seed in SEEDS]
        finite = [scale for scale in scales if 0 < scale < math.inf]
        value = statistics.geometric_mean(finite) if finite else math.nan
        found.append((f"gnsfast after {share:.0%} of the run", value))
    return [*found, ("nanochat, D^0.383", nanochat), ("Step Law", step_law)]


def nearest(size: float) -> int:
    """The trained size that is nearest in ratio."""
    return min(SIZES, key=lambda each: abs(math.log(each / size)))


def sweep() -> dict[int, dict[str, Any]]:
    """Each size with the best of the learning rates: the mean loss over the seeds."""
    found = {}
    for size in SIZES:
        runs = {f: [trained(seed, size, f)[0] for seed in SEEDS] for f in FACTORS}
        factor = min(runs, key=lambda each: statistics.mean(runs[each]))
        losses = runs[factor]
        found[size] = {
            "batch size": size,
            "steps": math.ceil(TOKENS / (size * tiny_gpt.CONTEXT)),
            "learning rate": LR * factor * Rules("sqrt").lr_factor(size / AT),
            "loss": statistics.mean(losses),
            "apart": max(losses) - min(losses),
        }
        print(found[size], flush=True)
    return found


def tables() -> Tables:
    runs = sweep()
    best = min(run["loss"] for run in runs.values())
    rows: Rows = []
    for who, size in chosen():
        none = {"who": who, "says": "no number", "loss": None}
        if not math.isfinite(size):
            rows.append(none)
            continue
        run = runs[nearest(size)]
        rows.append(
            {"who": who, "says": size, "trained": run["batch size"], "steps": run["steps"]}
            | {"loss": run["loss"], "above the best": run["loss"] - best}
        )
    tokens = f"{TOKENS:,} tokens of {tiny_gpt.CONTEXT} a sample"
    return {
        f"A byte-level GPT of 25,000 parameters, {tokens}: the batch that each chooses, the "
        "nearest size that was trained, and its loss on held-out text": rows,
        f"Every size, by the best of {len(FACTORS)} learning rates; mean of {len(SEEDS)} seeds, "
        "and how far they are apart": [*runs.values()],
    }
