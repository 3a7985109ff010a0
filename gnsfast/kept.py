# SPDX-License-Identifier: Apache-2.0
"""Restores what a measurement must not change: state, gradients, modes and random generators."""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnsfast.tensors import is_dtensor, writes
from gnsfast.torch_internals import hooks_of, unfollowed


@contextmanager
def kept_state(model: nn.Module, given: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the state of a model at the end, whether it was written to or replaced: its buffers,
    its parameters (as those of a teacher that forward updates), its hooks (which transformers adds
    in the first pass that needs them), and the own attributes of its modules: numbers, tensors,
    arrays, and what lists, dictionaries, tuples, sets, queues and plain objects hold, such as a
    meter. The same for objects among the arguments that are ``given``, such as a cache.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [(m, dict(m._buffers), _own_attributes(m)) for m in modules]
    hooks = [(vars(m)[name], {**vars(m)[name]}) for m in modules for name in HOOKS]
    values = _Values()
    for value in given:
        if not isinstance(value, Tensor):
            values.add(value)
    for t in model.buffers():
        values.add(t)
    for p in model.parameters():  # such as a gradient that a function of the model adds to
        for value in vars(p).values():
            if isinstance(value, Tensor) and value.shape == p.shape:
                values.add(value)
    for _, _, attributes in held:
        for value in attributes.values():
            values.add(value)
    writes = _Writes(model)
    try:
        with writes:
            yield
    finally:
        for module, buffers, attributes in held:
            module._buffers.clear()
            module._buffers.update(buffers)
            registered = {*module._parameters, *module._modules}
            for name in _own_attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update((k, v) for k, v in attributes.items() if k not in registered)
        for hooks_m, content in hooks:
            if hooks_m != content:
                hooks_m.clear()
                hooks_m.update(content)
        values.restore()
        writes.restore()


class _Values:
    """Values that can be written to, and what they held."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Any, Any]] = {}

    def add(self, value: Any) -> None:
        """Keep what ``value`` holds, and all that is in it."""
        if isinstance(value, Tensor):
            # An attribute with a graph is an activation.
            if value.grad_fn is None and not isinstance(value, nn.Parameter):
                self._tensors[id(value)] = value, value.detach().clone()
        elif type(value) in (*CONTAINERS, tuple) and id(value) not in self._containers:
            self._containers[id(value)] = value, value if type(value) is tuple else copy(value)
            for part in value.values() if isinstance(value, dict) else value:
                self.add(part)
        elif type(value).__module__ == "numpy" and hasattr(value, "setflags"):
            self._tensors[id(value)] = value, value.copy()
        elif _is_plain(value):
            self.add(vars(value))

    def restore(self) -> None:
        """Let all hold what they held."""
        for container, content in self._containers.values():
            if type(container) is not tuple:
                container.clear()
                is_row = isinstance(container, (list, deque))
                (container.extend if is_row else container.update)(content)
        for t, value in self._tensors.values():
            if isinstance(t, Tensor):
                if t.grad_fn is not None:  # a loss was added to it
                    t.detach_()
                if t.shape == value.shape:
                    t.data.copy_(value)  # graphs may hold it, so its version stays what it is
                else:  # it has grown
                    t.data = value
            elif t.flags.writeable:
                t[...] = value


def _is_plain(value: Any) -> bool:
    """Whether an object has attributes, none of which is an object that has some."""
    attributes, held = getattr(value, "__dict__", {}).values(), (Tensor, *CONTAINERS)
    simple = [t for t in attributes if isinstance(t, held) or not hasattr(t, "__dict__")]
    others = (Tensor, type, nn.Module, torch.optim.Optimizer, *CONTAINERS)
    return 0 < len(attributes) == len(simple) and not isinstance(value, others)


class _Writes(TorchFunctionMode):
    """Keeps a parameter's values when a function of torch is about to write to it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._at: dict[int, list[Any]] = {}  # several parameters may be pieces of one memory
        for p in model.parameters():
            if not is_dtensor(p) and (address := _address(p)):
                self._at.setdefault(address, []).append(p)
        self._kept: dict[int, tuple[Any, Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if writes(name) or "out" in kwargs:
            first = args[0] if args else None
            written = first if isinstance(first, (list, tuple)) else (first,)
            for t in (*written, kwargs.get("out")):
                if isinstance(t, Tensor) and not is_dtensor(t):
                    self._keep(t)
        return func(*args, **kwargs)

    def _keep(self, t: Tensor) -> None:
        with unfollowed():
            address = _address(t)
            for p in self._at.get(address, ()):
                # FSDP2 frees parameters between their uses.
                if id(p) not in self._kept and _address(p) == address:
                    data = p.data
                    self._kept[id(p)] = p, data, data.clone()

    def restore(self) -> None:
        """Let the parameters be what they were."""
        with unfollowed():
            for p, data, value in self._kept.values():
                data.copy_(value)
                p.data = data


def _address(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor that consists of others
        return 0


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


OF_TORCH = frozenset(vars(nn.Module()))
HOOKS = [
    name
    for name, value in vars(nn.Module()).items()
    if name.startswith(("_forward", "_backward")) and isinstance(value, dict)
]
CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)


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
def kept_grads(parameters: Iterable[Any]) -> Iterator[None]:
    """Restore gradients at the end. Inside they are None and no hook of a parameter runs, because a
    function of the model may run a backward pass of its own.
    """
    with unfollowed():
        held = [(p, p.grad, [{**(hooks_p or {})} for hooks_p in hooks_of(p)]) for p in parameters]
    try:
        for p, _, hooks in held:
            p.grad = None
            if any(hooks):
                _set_hooks(p, [{}, {}])
        yield
    finally:
        for p, grad, hooks in held:
            p.grad = grad
            _set_hooks(p, hooks)


def _set_hooks(p: Any, hooks: list[dict[Any, Any]]) -> None:
    """Let a parameter have these hooks, in the very dictionaries that torch holds."""
    with unfollowed():
        for hooks_p, content in zip(hooks_of(p), hooks):
            if hooks_p is not None and hooks_p != content:
                hooks_p.clear()
                hooks_p.update(content)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Restore gradients, state and training flags at the end. Inside, gradients are None."""
    with kept_grads(model.parameters()), kept_state(model), kept_modes(model):
        yield


@contextmanager
def kept_chance(model: nn.Module, given: Sequence[Any] = ()) -> Iterator[None]:
    """Restore every random generator at the end: torch's, Python's and NumPy's, those that modules
    hold as attributes, and those among the arguments that are ``given``.
    """
    devices = {t.device for t in chain(model.parameters(), model.buffers()) if t.is_cuda}
    restorers = [*_restorers(model, given)]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for restore in restorers:
            restore()


def held_by(model: nn.Module, given: Sequence[Any] = ()) -> Iterator[Any]:
    """The attributes of all modules, and what is ``given``."""
    yield from given
    for module in model.modules():
        yield from vars(module).values()


def _restorers(model: nn.Module, given: Sequence[Any]) -> Iterator[Callable[[], Any]]:
    """For each random generator a function that sets it to the state that it has now."""
    numpy: Any = sys.modules.get("numpy")
    yield partial(random.setstate, random.getstate())
    if numpy:
        yield partial(numpy.random.set_state, numpy.random.get_state())
    for held in held_by(model, given):
        if isinstance(held, random.Random):
            yield partial(held.setstate, held.getstate())
        elif isinstance(held, torch.Generator) or (
            numpy and isinstance(held, numpy.random.RandomState)
        ):
            yield partial(held.set_state, held.get_state())
        elif numpy and isinstance(held, numpy.random.Generator):
            yield partial(setattr, held.bit_generator, "state", held.bit_generator.state)
