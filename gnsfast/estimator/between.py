# SPDX-License-Identifier: Apache-2.0
"""Finds gradients that began anew within an update, so that they lack its earlier passes."""

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.estimator.settings import Mark
from gnsfast.probing import checks

DDP_WRITES = 2
"""The most writes of DDP to a gradient that arrives: it may divide it and copy it to a bucket."""


@functools.cache
def arrival_writes() -> int:
    """By how much the mark of a gradient grows when autograd adds to it."""
    p = nn.Parameter(torch.zeros(1, device="cpu"))
    with torch.enable_grad():
        p.sum().backward()
        before = checks.mark(p)
        p.sum().backward()
        after = checks.mark(p)
    assert before is not None and after is not None
    return after[1] - before[1]


def begun_anew(parameters: Sequence[nn.Parameter], before: list[Mark], now: list[Mark]) -> bool:
    """Whether a gradient began anew in a pass: a new tensor has version 0, a sum more."""
    for p, old, new in zip(parameters, before, now):
        if old is None or old == new or new is not None and new[1] > old[1]:
            continue
        if new is None or type(p.grad) is Tensor:  # those of subclasses are summed to new ones
            return True
    return False


def written_before_backward(
    parameters: Sequence[tuple[str, nn.Parameter]],
    before: list[Mark],
    arrived: Mapping[str, int],
) -> bool:
    """Whether gradients were written to since the last pass, as by ``zero_grad(set_to_none=False)``
    in a block. To be called when backward has just begun and few gradients have ``arrived``.
    Gradients that share a buffer share the count of writes to it.
    """
    writes, arrivals = dict[int, int](), dict[int, int]()
    several = dist.is_initialized()
    for (name, p), old in zip(parameters, before):
        if old is None:
            continue
        now, base = checks.mark(p), None if p.grad is None else p.grad._base
        buffer = id(p.grad if base is None else base)
        arrivals[buffer] = arrivals.get(buffer, 0) + arrived.get(name, 0)
        if now is not None and now[0] == old[0]:
            if not (arrivals[buffer] and _has_hooks(p)):
                writes[buffer] = now[1] - old[1]
        elif not arrived.get(name, 0) and not (several and base is not None):
            return True  # but DDP makes new buckets after its first pass
    each = arrival_writes() * (1 + several * DDP_WRITES)
    return any(count > each * arrivals[buffer] for buffer, count in writes.items())


def _has_hooks(p: nn.Parameter) -> bool:
    """Whether anybody but the watch has a hook on a gradient that was accumulated, which may write
    to it.
    """
    return len(p._post_accumulate_grad_hooks or ()) > 1
