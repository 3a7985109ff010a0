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

_chosen: dict[str, int] = {}


def tuned() -> bool:
    """Whether configurations are measured: not where ``GNSFAST_AUTOTUNE=0``, not where torch's
    deterministic algorithms are asked for (each process may choose another), not while a CUDA
    graph is captured.
    """
    return not (
        INTERPRETED
        or os.environ.get("GNSFAST_AUTOTUNE", "1") == "0"
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
    )


def choose(
    key: tuple[object, ...], configs: Sequence[Config], run: Callable[[Config], object]
) -> Config:
    """The fastest of ``configs`` for ``key``, or the first, fixed one where nothing is measured.

    ``run`` must leave no trace: what it writes is thrown away.
    """
    if len(configs) == 1 or not tuned():
        return configs[0]
    name = torch.cuda.get_device_name()
    text = repr((key, configs, name, triton.__version__, torch.__version__))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest not in _chosen:
        cache = get_cache_manager(digest)
        path = cache.get_file("gnsfast.json")
        if path is None:
            times = [_milliseconds(config, run) for config in configs]
            record = {"key": text, "milliseconds": times}
            path = cache.put(json.dumps(record), "gnsfast.json", binary=False)
        with open(path) as file:
            times = json.load(file)["milliseconds"]
        _chosen[digest] = min(range(len(times)), key=times.__getitem__)
    return configs[_chosen[digest]]


def _milliseconds(config: Config, run: Callable[[Config], object]) -> float:
    try:
        return float(triton.testing.do_bench(lambda: run(config), warmup=5, rep=30))
    except OutOfResources:  # too much shared memory for this device
        return float("inf")
