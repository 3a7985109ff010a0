# SPDX-License-Identifier: Apache-2.0
"""What it costs to measure clusters of samples beside samples: an update of a small GPT, and the
weight gradient of a linear layer, whose operator is called once for each cluster. A second call for
all clusters, each as one sample, would compute the product twice.
"""

from collections.abc import Callable
from functools import partial

import torch

import gnsfast
from benchmarks.measure import Timing, interleave
from benchmarks.record import Rows, Tables
from benchmarks.studies.training import update
from examples import tiny_gpt
from gnsfast import ops
from gnsfast.functional import Groups
from gnsfast.signatures import LinearWgrad

BATCH, ROUNDS = 64, 24
SIZES = (2, 8, 32)
WIDTH, TOKENS = 768, (16, 64, 256)


def updates() -> Rows:
    """The time of an update over that of one that measures samples alone."""
    text, model = tiny_gpt.read_text(), tiny_gpt.TinyGPT()
    windows = tiny_gpt.draw(text, BATCH, torch.Generator().manual_seed(1))

    def plain() -> None:
        tiny_gpt.loss_of(model, windows).backward()
        model.zero_grad()

    of = lambda **asked: partial(update, gnsfast.GradientNoiseScale(model), windows, **asked)
    ways = {"samples": of(), "nothing": plain}
    ways |= {f"samples, clusters of {size}": of(clusters=size) for size in SIZES}
    _, *others = interleave(ways, 4 * ROUNDS).items()
    return [{"measured": name, "over samples": timing} for name, timing in others]


def products() -> Rows:
    """The time of a weight gradient with norms, over that with the norms of samples alone."""
    return [
        {"tokens of a sample": T, "samples of a cluster": size, **product(T, size)}
        for T in TOKENS
        for size in SIZES
    ]


def product(T: int, size: int) -> dict[str, Timing]:
    """Of samples of T tokens, in clusters of ``size``."""
    x, dy = torch.randn(BATCH, T, WIDTH), torch.randn(BATCH, T, WIDTH)
    groups = Groups.of(*torch.arange(BATCH).split(size))
    samples = LinearWgrad(x, dy, True, False, False, torch.float32)
    clusters = samples._replace(
        x_BTI=x.view(-1, size * T, WIDTH), dy_BTO=dy.view(-1, size * T, WIDTH)
    )
    ways: dict[str, Callable[[], object]] = {
        "samples": lambda: ops.linear_wgrad(samples),
        "call for each cluster": lambda: ops.by_group(samples, groups, [True, False]),
        "second product": lambda: [ops.linear_wgrad(each) for each in (samples, clusters)],
    }
    _, *others = interleave(ways, ROUNDS).items()
    return dict(others)


def tables() -> Tables:
    return {
        f"time of an update of {BATCH} samples": updates(),
        f"time of a weight gradient [{WIDTH}, {WIDTH}] of {BATCH} samples": products(),
    }
