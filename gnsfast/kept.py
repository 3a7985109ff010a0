# SPDX-License-Identifier: Apache-2.0
"""Restores what a measurement must not change: buffers, gradients, modes and random state."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers at the end, whether they were written to or replaced. Others are not
    written to, because graphs may hold them.
    """
    held = [(m, dict(m._buffers)) for m in model.modules()]
    values = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore all training flags at the end."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and training flags at the end. Inside, gradients are None."""
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        with kept_buffers(model), kept_modes(model):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad


class _Generator(NamedTuple):
    restore: Callable[[], Any]
    seed: Callable[[int], Any]


@contextmanager
def kept_chance(model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Restore every random generator at the end: torch's, Python's and NumPy's, and those that
    modules hold as attributes. It yields a function that seeds all of them.
    """
    devices = {t.device for t in chain(model.parameters(), model.buffers()) if t.is_cuda}
    generators = [*_generators(model)]

    def seed(number: int) -> None:
        torch.manual_seed(number)
        for each in generators:
            each.seed(number)

    try:
        with torch.random.fork_rng(devices=devices):
            yield seed
    finally:
        for each in generators:
            each.restore()


def _generators(model: nn.Module) -> Iterator[_Generator]:
    numpy: Any = sys.modules.get("numpy")
    yield _Generator(partial(random.setstate, random.getstate()), random.seed)
    if numpy:
        state = numpy.random.get_state()
        yield _Generator(partial(numpy.random.set_state, state), numpy.random.seed)
    for held in chain.from_iterable(vars(module).values() for module in model.modules()):
        if isinstance(held, torch.Generator):
            yield _Generator(partial(held.set_state, held.get_state()), held.manual_seed)
        elif isinstance(held, random.Random):
            yield _Generator(partial(held.setstate, held.getstate()), held.seed)
        elif numpy and isinstance(held, numpy.random.RandomState):
            yield _Generator(partial(held.set_state, held.get_state()), held.seed)
        elif numpy and isinstance(held, numpy.random.Generator):
            bits = held.bit_generator
            yield _Generator(partial(setattr, bits, "state", bits.state), partial(_seed, bits))


def _seed(bits: Any, number: int) -> None:
    bits.state = type(bits)(number).state
