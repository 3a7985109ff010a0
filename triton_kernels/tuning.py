# SPDX-License-Identifier: Apache-2.0
"""Chooses a configuration by measuring, and keeps the choice in memory and in Triton's cache on
disk.
"""

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
    """Whether configurations are chosen by measuring: not with ``GNSFAST_AUTOTUNE=0``, nor with
    torch's deterministic algorithms, since each process may choose another configuration.
    """
    off = INTERPRETED or os.environ.get("GNSFAST_AUTOTUNE", "1") == "0"
    return not (off or torch.are_deterministic_algorithms_enabled())


def choose(
    key: tuple[object, ...], configs: Sequence[Config], run: Callable[[Config], object]
) -> Config:
    """The fastest of ``configs`` for ``key``. Where nothing is measured, as during the capture of a
    CUDA graph, it is the first, the fixed one; if its kernel has not run in this process, the
    capture fails (``ops/backends.py`` says what to do). So it is in this process where memory is
    too short to measure: that says nothing about the configurations, and another process measures
    again.

    ``run`` must write only to memory that nobody else reads.
    """
    if len(configs) == 1 or not tuned():
        return configs[0]
    key = (*key, torch.cuda.current_device())
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return configs[0]
        try:
            _chosen[key] = _fastest(key, configs, run)
        except torch.OutOfMemoryError:
            _chosen[key] = configs[0]
    return _chosen[key]


def _fastest(
    key: tuple[object, ...], configs: Sequence[Config], run: Callable[[Config], object]
) -> Config:
    """The fastest by the times in Triton's cache on disk; they are measured if missing there."""
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
    except OutOfResources:  # more shared memory or registers than the device has
        return float("inf")
