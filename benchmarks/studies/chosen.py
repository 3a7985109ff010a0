# SPDX-License-Identifier: Apache-2.0
"""The batch that gnsfast, nanochat's rule and Step Law choose for one small model, and the loss
that each gives after the same tokens.

Every size trains the same tokens from the same initial weights, with the learning rate that is best
for it. The rules choose a size alone: what they say of learning rates and weight decay is not used.

The model has 25,000 parameters and sees half a million tokens, a thousandth and less of what the
rules were fitted on. The table says what they choose there, not how they do where they belong.
"""

import math
import statistics
from typing import Any

import torch

import gnsfast
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import LR, span
from examples import tiny_gpt
from gnsfast.critical_batch import Rules, laws
from gnsfast.critical_batch.control import cosine

TOKENS, SEEDS = 2**19, (1, 2, 3, 4)
SIZES = tuple(2**k for k in range(9))
"""In samples; each of them divides the samples of the run."""
FIRST = 4
"""The batch in which gnsfast measures, with that size's best learning rate."""
SHARES = (0.02, 0.1)
"""Of the run, after which gnsfast chooses: its noise scale is the batch."""
AT = 16
"""Factors of learning rates are of ``LR`` at this batch size, by the rule "sqrt" at others."""
HELD_OUT = 1024
NANOCHAT = 2**19, 12 * (12 * 12 * 768**2 + 768 * 32768)
"""Its batch in tokens at depth 12, and the tokens of that run: 12 for each parameter of its blocks
and its head (``scripts/base_train.py`` of commit 92d63d4e; 10.5 when the rule was made)."""


def nanochat_tokens(tokens: float) -> int:
    """nanochat's batch in tokens: 2^19 (D / D of depth 12)^0.383, rounded to a power of two."""
    reference, of_tokens = NANOCHAT
    return int(2 ** round(math.log2(reference * (tokens / of_tokens) ** 0.383)))


def trained(
    seed: int, size: int, factor: float, until: float = 1.0, measured: bool = False
) -> tuple[float, gnsfast.GradientNoiseScale]:
    """The loss on held-out text after this share of the run, and what gnsfast has measured."""
    torch.manual_seed(seed)
    model, text = tiny_gpt.TinyGPT(width=32, layers=1), tiny_gpt.read_text()
    cut, generator = len(text) * 9 // 10, torch.Generator().manual_seed(seed)
    rate = learning_rate(size, factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    shape = cosine(TOKENS, warm_up=TOKENS // 20, final=0.1)
    gns = gnsfast.GradientNoiseScale(model)
    per_step = size * tiny_gpt.CONTEXT
    for step in range(math.ceil(until * TOKENS / per_step)):
        middle = (step + 0.5) * per_step  # of its tokens: the sum of rates is that of all sizes
        optimizer.param_groups[0]["lr"] = rate * shape(middle)
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


def learning_rate(size: int, factor: float) -> float:
    return LR * factor * Rules("sqrt").lr_factor(size / AT)


def tuned(size: int) -> tuple[float, list[float]]:
    """The best factor of the learning rate, between two worse ones half and twice as large, and the
    loss of each seed.
    """
    runs: dict[float, list[float]] = {}
    best, tried = 2.0, None
    while best != tried:
        tried = best
        for factor in (tried / 2, tried, tried * 2):
            if factor not in runs:
                runs[factor] = [trained(seed, size, factor)[0] for seed in SEEDS]
        best = min(runs, key=lambda factor: statistics.mean(runs[factor]))
    print(size, {factor: statistics.mean(losses) for factor, losses in runs.items()}, flush=True)
    return best, runs[best]


def nearest(size: float) -> int:
    """The trained size that is nearest in ratio."""
    return min(SIZES, key=lambda each: abs(math.log(each / size)))


def noise_scales(share: float, factor: float) -> list[float]:
    """What each seed measures in this share of its run; infinite where |G|² is not resolved."""
    runs = [trained(seed, FIRST, factor, share, True)[1] for seed in SEEDS]
    return [gns.compute().noise_scale for gns in runs]


def row(who: str, says: list[float], runs: dict[int, tuple[float, list[float]]]) -> dict[str, Any]:
    """What each seed's size is, the losses of the nearest trained sizes, and how far they are above
    those of the size that is best on average, seed by seed.
    """
    best = min(runs, key=lambda size: statistics.mean(runs[size][1]))
    with_number = [at for at, size in enumerate(says) if math.isfinite(size)]
    found: dict[str, Any] = {"who": who, "seeds with a number": len(with_number)}
    if not with_number:
        return found
    sizes = [says[at] for at in with_number]
    losses = [runs[nearest(says[at])][1][at] for at in with_number]
    above = [loss - runs[best][1][at] for loss, at in zip(losses, with_number)]
    trained_at = sorted({nearest(size) for size in sizes})
    return found | {
        "samples": span(statistics.geometric_mean(sizes), min(sizes), max(sizes)),
        "trained": ", ".join(map(str, trained_at)),
        "steps": ", ".join(str(steps_of(size)) for size in trained_at),
        "loss": statistics.mean(losses),
        "above the best": f"{statistics.mean(above):.4f} ({min(above):.4f} to {max(above):.4f})",
    }


def steps_of(size: int) -> int:
    return TOKENS // (size * tiny_gpt.CONTEXT)


def tables() -> Tables:
    runs = {size: tuned(size) for size in SIZES}
    sizes: Rows = [
        {
            "batch size": size,
            "steps": steps_of(size),
            "learning rate": learning_rate(size, factor),
            "loss": statistics.mean(losses),
            "lowest": min(losses),
            "highest": max(losses),
        }
        for size, (factor, losses) in runs.items()
    ]
    says = {
        f"gnsfast, {share:.0%} of the run": noise_scales(share, runs[FIRST][0]) for share in SHARES
    }
    says |= {
        who: [tokens / tiny_gpt.CONTEXT] * len(SEEDS)
        for who, tokens in (
            ("nanochat, D^0.383", nanochat_tokens(TOKENS)),
            ("Step Law", laws.STEP_LAW.batch_tokens(TOKENS)),
        )
    }
    budget = f"{TOKENS:,} tokens in samples of {tiny_gpt.CONTEXT}, {len(SEEDS)} seeds"
    return {
        f"A byte-level GPT of 25,000 parameters, {budget}: the batch that each chooses, the "
        "nearest trained size, its loss on held-out text, and that loss above the best size's": [
            row(who, each, runs) for who, each in says.items()
        ],
        "Every size, each with its best learning rate of factors of two; mean over the seeds, "
        "lowest and highest": sizes,
    }
