# SPDX-License-Identifier: Apache-2.0
"""Measured choice among the named configurations, kept in memory and in Triton's cache on disk."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence

import torch
import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources

from gnsfast.triton_kernels.configs import Config
from gnsfast.triton_kernels.tiles import INTERPRETED

_chosen: dict[tuple[object, ...], Config] = {}


def tuned() -> bool:
    """Whether configurations are chosen by measuring: not where ``GNSFAST_AUTOTUNE=0``, nor where
    torch's deterministic algorithms are asked for (each process may choose another).
    """
    off = INTERPRETED or os.environ.get("GNSFAST_AUTOTUNE", "1") == "0"
    return not (off or torch.are_deterministic_algorithms_enabled())


def choose(
    key: tuple[object, ...], configs: Sequence[Config], run: Callable[[Config], object]
) -> Config:
    """The fastest of ``configs`` for ``key``, or the first, fixed one where nothing is measured, as
    while a CUDA graph is captured.

    ``run`` must leave no trace: what it writes is thrown away.
    """
    if len(configs) == 1 or not tuned():
        return configs[0]
    key = (*key, torch.cuda.current_device())
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return configs[0]
        _chosen[key] = _fastest(key, configs, run)
    return _chosen[key]


def _fastest(
    key: tuple[object, ...], configs: Sequence[Config], run: Callable[[Config], object]
) -> Config:
    """From Triton's cache on disk, or measured and put there."""
    versions = (torch.cuda.get_device_name(), triton.__version__, torch.__version__)
    text = repr((key[:-1], tuple(configs), versions))
    cache = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
    path = cache.get_file("gnsfast.json")
    if path is None:
        record = {"key": text, "milliseconds": [_milliseconds(c, run) for c in configs]}
        path = cache.put(json.dumps(record), "gnsfast.json", binary=False)
    with open(path) as file:
        times = json.load(file)["milliseconds"]
    return configs[min(range(len(times)), key=times.__getitem__)]


def _milliseconds(config: Config, run: Callable[[Config], object]) -> float:
    try:
        return float(triton.testing.do_bench(lambda: run(config), warmup=5, rep=30))
    except (OutOfResources, torch.OutOfMemoryError):  # shared memory; the memory that is left
        return float("inf")
