# SPDX-License-Identifier: Apache-2.0
"""Lets nanochat's optimizer run on gloo, which cannot average, nor wait by a future: import it
before.
"""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_tensor
all_gather = dist.all_gather_into_tensor
ENDED = SimpleNamespace(get_future=lambda: SimpleNamespace(wait=lambda: None))
CALLS: list[str] = []
"""What the optimizer called."""


def averaged_all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
    if op != dist.ReduceOp.AVG:
        return all_reduce(x, op=op, **options)
    CALLS.append("all_reduce")
    x /= dist.get_world_size()
    all_reduce(x)
    return ENDED


def averaged_reduce_scatter(out: Tensor, x: Tensor, op: Any, async_op: bool) -> Any:
    assert op == dist.ReduceOp.AVG
    CALLS.append("reduce_scatter")
    reduce_scatter(out, x / dist.get_world_size())
    return ENDED


def gathered(out: Tensor, x: Tensor, async_op: bool = False) -> Any:
    CALLS.append("all_gather")
    all_gather(out, x)
    return ENDED


dist.all_reduce, dist.reduce_scatter_tensor = averaged_all_reduce, averaged_reduce_scatter
dist.all_gather_into_tensor = gathered
