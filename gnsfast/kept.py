# SPDX-License-Identifier: Apache-2.0
"""Restores what a measurement must not change: buffers, gradients, modes and random state."""

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and the own attributes of all modules at the end, whether they were
    written to or replaced: numbers, tensors, and what lists, dictionaries, sets and queues hold.
    Other tensors are not written to, because graphs may hold them.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [(m, dict(m._buffers), _own_attributes(m)) for m in modules]
    containers = [
        (value, copy(value))
        for _, _, own in held
        for value in own.values()
        if type(value) in CONTAINERS
    ]
    inside = (c.values() if isinstance(c, dict) else c for _, c in containers)
    found = chain(model.buffers(), *(own.values() for _, _, own in held), *inside)
    tensors = {id(t): t for t in found if isinstance(t, Tensor) and _is_state(t)}
    values = [(t, t._version, t.detach().clone()) for t in tensors.values()]
    try:
        yield
    finally:
        for module, buffers, own in held:
            module._buffers.clear()
            module._buffers.update(buffers)
            registered = {*module._parameters, *module._modules}
            for name in _own_attributes(module).keys() - own.keys():
                del vars(module)[name]
            vars(module).update((k, v) for k, v in own.items() if k not in registered)
        for container, content in containers:
            container.clear()
            is_row = isinstance(container, (list, deque))
            (container.extend if is_row else container.update)(content)
        with torch.no_grad():
            for t, version, value in values:
                if t._version != version:
                    t.copy_(value)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


OF_TORCH = frozenset(vars(nn.Module()))
CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)


def _is_state(t: Tensor) -> bool:
    """Whether a tensor holds a model's state. An attribute with a graph is an activation."""
    return t.grad_fn is None and not isinstance(t, nn.Parameter)


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
        with kept_state(model), kept_modes(model):
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
