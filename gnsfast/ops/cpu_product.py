# SPDX-License-Identifier: Apache-2.0
"""Chooses who multiplies all tokens of short samples in float32, once their norms are known: the
CPU kernel or torch. Which is faster depends on the processor and on torch's library, so a probe of
a few milliseconds times both, once in a process. Results differ in their last bits only.
"""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gnsfast.tensors import product_dtype

VARIABLE = "GNSFAST_CPU_PRODUCT"
NAMES = ("gnsfast", "torch")

LARGE = 1 << 24
"""Multiply-adds from which torch may be chosen: below, its calls cost more than they gain."""

SIZE = (128, 512, 512)
"""Tokens and columns of the probe's product, which is not smaller than ``LARGE``."""

ROUNDS = 5
MARGIN = 0.95
"""Torch is taken if its best of ``ROUNDS`` takes less than this share of the kernel's. Closer times
would choose by chance.
"""

Way = Callable[[Tensor, Tensor], object]
"""Makes dW from left [1, T, M] and right [1, T, N]."""


class Choice(NamedTuple):
    name: str
    why: str


def chosen(kernel: str, ways: dict[str, Way]) -> Choice:
    """One of ``NAMES`` and why. ``ways`` are what the names stand for, with an instruction set's
    kernel.

    Raises ValueError for an unknown name in ``GNSFAST_CPU_PRODUCT``.
    """
    if name := os.environ.get(VARIABLE):
        if name not in NAMES:
            raise ValueError(f"{VARIABLE}={name}: it must be one of {', '.join(NAMES)}, or not set")
        return Choice(name, f"{VARIABLE} is set")
    if torch.are_deterministic_algorithms_enabled():
        return Choice("gnsfast", "torch.use_deterministic_algorithms is on")
    if product_dtype(torch.empty(0)) != torch.float32:
        return Choice("gnsfast", "torch multiplies float32 in a lower precision")
    if kernel not in _probed:
        _probed[kernel] = probe(ways)
    return _probed[kernel]


_probed: dict[str, Choice] = {}


def probe(ways: dict[str, Way]) -> Choice:
    """The faster way, by the least time of ``ROUNDS`` that take turns. On one thread, since several
    wait for each other beside a busy process.
    """
    T, M, N = SIZE
    left, right = torch.ones(1, T, M), torch.ones(1, T, N)
    least = dict.fromkeys(NAMES, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(ROUNDS):
            for name in NAMES:
                start = time.perf_counter()
                ways[name](left, right)
                least[name] = min(least[name], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    name = "torch" if least["torch"] < MARGIN * least["gnsfast"] else "gnsfast"
    ours, torchs = (f"{1e3 * least[each]:.2f} ms" for each in NAMES)
    return Choice(name, f"a probe took {ours} with gnsfast, {torchs} with torch")
