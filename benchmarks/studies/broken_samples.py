# SPDX-License-Identifier: Apache-2.0
"""Whether the samples with the largest gradients are the broken ones: a byte-level GPT that trains
on text of which one window in 200 is broken, and what it costs to keep the largest.
"""

from collections import Counter
from functools import partial

import torch
from torch import Tensor

import gnsfast
from benchmarks.measure import interleave
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import narrow_run, update
from examples import tiny_gpt

SEEDS = (21, 22)
STEPS, WARM_UP, BATCH = 1000, 100, 16
ONE_IN = 200
KINDS = {
    "one byte, repeated": lambda window: window[:1].expand(len(window)),
    "bytes in another order": lambda window: window[torch.randperm(len(window))],
    "wrong encoding": lambda window: window ^ 0x80,
}


def broken(text: Tensor, generator: torch.Generator) -> tuple[Tensor, list[str]]:
    """A batch of windows, and of each what is wrong with it; empty where nothing is."""
    windows = tiny_gpt.draw(text, BATCH, generator).clone()
    what = [""] * BATCH
    for b in (torch.rand(BATCH, generator=generator) < 1 / ONE_IN).nonzero()[:, 0].tolist():
        kind = int(torch.randint(len(KINDS), (), generator=generator))
        what[b] = [*KINDS][kind]
        windows[b] = KINDS[what[b]](windows[b])
    return windows, what


def found(seed: int) -> Rows:
    """How many broken samples are among the hundredth with the largest shares, by kind."""
    text, generator = tiny_gpt.read_text(), torch.Generator().manual_seed(seed)
    draw = lambda: broken(text, generator)
    *_, (_, gns) = narrow_run(seed, STEPS, WARM_UP, draw, keep_largest=BATCH, window=STEPS)
    later = [sample for sample in gns.largest() if sample.update >= WARM_UP]
    among, all_ = Counter(s.id for s in later[: len(later) // 100]), Counter(s.id for s in later)
    rows = [{"samples": kind, "all": all_[kind], "largest 1 %": among[kind]} for kind in KINDS]
    return [{"seed": seed, **row} for row in [*rows, _whole(all_, among)]]


def _whole(all_: Counter[str], among: Counter[str]) -> dict[str, object]:
    return {"samples": "not broken", "all": all_[""], "largest 1 %": among[""]}


def cost() -> Rows:
    """The time of an update that keeps the largest, over one that does not."""
    text, generator = tiny_gpt.read_text(), torch.Generator().manual_seed(1)
    windows, model = tiny_gpt.draw(text, BATCH, generator), tiny_gpt.TinyGPT()
    ways = {
        name: partial(update, gnsfast.GradientNoiseScale(model, keep_largest=kept), windows)
        for name, kept in (("none", 0), ("kept", BATCH))
    }
    return [{"kept of each update": BATCH, "over none": interleave(ways, 60)["kept"]}]


def tables() -> Tables:
    """Both, of all seeds."""
    rows = [row for seed in SEEDS for row in found(seed)]
    return {
        f"{STEPS - WARM_UP} updates of {BATCH} samples, one in {ONE_IN} of which is broken": rows,
        "time of an update": cost(),
    }
