# SPDX-License-Identifier: Apache-2.0
"""What it costs to measure clusters of samples beside samples: an update of a small GPT, and the
weight gradient of a linear layer, whose operator is called once for each cluster. A second call for
all clusters, each as one sample, would compute the product twice.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

import gnsfast
from benchmarks.record import Rows, Tables
from gnsfast import ops
from gnsfast.cli import tiny_gpt
from gnsfast.functional import Groups
from gnsfast.signatures import LinearWgrad

BATCH, ROUNDS, FIRST = 64, 24, 4
SIZES = (2, 8, 32)
WIDTH, TOKENS = 768, (16, 64, 256)


def fastest(calls: dict[Any, Callable[[], object]], rounds: int = ROUNDS) -> dict[Any, float]:
    """The lower quartile of the seconds of each, called in turn."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            begun = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - begun)
    return {key: sorted(own[FIRST:])[(rounds - FIRST) // 4] for key, own in times.items()}


def updates() -> Rows:
    """The time of an update over that of one that measures samples alone."""
    text, model = tiny_gpt.read_text(), tiny_gpt.TinyGPT()
    windows = tiny_gpt.draw(text, BATCH, torch.Generator().manual_seed(1))

    def update(size: int) -> Callable[[], None]:
        gns, asked = gnsfast.GradientNoiseScale(model), {"clusters": size} if size > 1 else {}

        def run() -> None:
            with gns.microbatch(BATCH, **asked):
                tiny_gpt.loss_of(model, windows).backward()
            gns.update()
            model.zero_grad()

        return run

    def plain() -> None:
        tiny_gpt.loss_of(model, windows).backward()
        model.zero_grad()

    found = fastest({0: plain, **{size: update(size) for size in (1, *SIZES)}}, 4 * ROUNDS)
    rows: Rows = [{"measured": "nothing", "over samples": found[0] / found[1]}]
    for size in SIZES:
        over = found[size] / found[1]
        rows.append({"measured": f"samples, clusters of {size}", "over samples": over})
    return rows


def products() -> Rows:
    """The time of a weight gradient with norms, over that with the norms of samples alone."""
    return [
        {"tokens of a sample": T, "samples of a cluster": size, **product(T, size)}
        for T in TOKENS
        for size in SIZES
    ]


def product(T: int, size: int) -> dict[str, float]:
    """Of samples of T tokens, in clusters of ``size``."""
    x, dy = torch.randn(BATCH, T, WIDTH), torch.randn(BATCH, T, WIDTH)
    groups = Groups.of(*torch.arange(BATCH).split(size))
    samples = LinearWgrad(x, dy, True, False, False, torch.float32)
    clusters = samples._replace(
        x_BTI=x.view(-1, size * T, WIDTH), dy_BTO=dy.view(-1, size * T, WIDTH)
    )
    found = fastest(
        {
            "samples": lambda: ops.linear_wgrad(samples),
            "call for each cluster": lambda: ops.by_group(samples, groups, [True, False]),
            "second product": lambda: [ops.linear_wgrad(each) for each in (samples, clusters)],
        }
    )
    alone = found.pop("samples")
    return {name: seconds / alone for name, seconds in found.items()}


def tables() -> Tables:
    return {
        f"time of an update of {BATCH} samples": updates(),
        f"time of a weight gradient [{WIDTH}, {WIDTH}] of {BATCH} samples": products(),
    }
