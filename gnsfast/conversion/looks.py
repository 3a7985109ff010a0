# SPDX-License-Identifier: Apache-2.0
"""One pass of a model without gradients, which takes fingerprints (prints) of the inputs and
outputs of each module.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gnsfast.conversion.marks import Marks
from gnsfast.conversion.prints import Print, print_of
from gnsfast.conversion.trials import Copying
from gnsfast.functional import Copies
from gnsfast.layers import Begun, begin_again, begun, is_plain, replay_dim, without_casts
from gnsfast.tensors import is_wrapper

Prints = tuple[Print | None, ...]


METHODS = ("_conv_forward", "_apply_instance_norm", "forward")
"""A torch layer computes in the first of these methods that it has."""


class Call(NamedTuple):
    """The prints of a module's arguments and outputs. None marks what is not a tensor.

    ``plain`` says whether a replay could repeat the call (``layers.is_plain``), and ``caller``
    names the module that made the call.
    """

    inputs: Prints
    outputs: Prints
    plain: bool
    caller: str


class Look(TorchDispatchMode):
    """One pass, in which nothing is random. It collects:

    ``calls``: the calls of each module, in the order in which the modules ended. ``inner``: the
    calls of torch's forward, for a module whose class wraps it. ``elsewhere``: id of a parameter ->
    the innermost modules that used it while none of its ``owners`` ran. ``random``: the modules
    that would have drawn random numbers, as for dropout.

    Args:
        owners: id of a parameter -> the modules that may use it.
        bases: module -> torch's class, for modules whose class wraps the forward of a torch class.
        samples, batch_dim: the number of samples in this pass, and the dimension that holds them.
        replays: modules to try on a single sample. ``failed`` says for which of them the outputs
            differ, and how.
        expanded: modules to run once for each sample: embeddings whose index [T] all samples
            share, and modules that return a table [1, ...].
        copying: puts copies in the place of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        owners: Mapping[int, Collection[str]],
        bases: Mapping[str, type[nn.Module]],
        samples: int,
        batch_dim: int,
        expanded: Collection[str] = (),
        replays: Collection[str] = (),
        copying: Copying | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, list[Call]] = {}
        self.inner: dict[str, list[Call]] = {}
        self.elsewhere: dict[int, set[str]] = {}
        self.random: set[str] = set()
        self._model, self._owners, self._bases = model, owners, bases
        self._samples, self._batch_dim = samples, batch_dim
        self._expanded, self._replays = expanded, replays
        self._copying = Copying({}, [], False) if copying is None else copying
        self.failed: dict[str, str] = {}
        self._trying = False
        self._marks = Marks(samples)
        for use in self._copying.uses.values():
            use.odd = self._odd
        self._storages = {
            p.untyped_storage().data_ptr(): p
            for p in model.parameters()
            if p.layout == torch.strided and not is_wrapper(p)
        }
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._running: list[str] = []
        self._paused = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Look":
        """Run the model once, in this mode."""
        try:
            with torch.no_grad(), self._recorded(), self:
                self._model(*args, **kwargs)
        finally:
            with torch.no_grad():
                for p, value in self._before.values():
                    p.copy_(value)
        return self

    def own(self, name: str) -> list[Call]:
        """The calls of a layer's own forward, or of the torch forward that it wraps."""
        return (self.inner if name in self._bases else self.calls).get(name, [])

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Put a recording forward on each module, except for scripted ones, which accept none."""
        named = {
            n: m
            for n, m in self._model.named_modules()
            if not isinstance(m, torch.jit.ScriptModule)
        }
        own = {n: m.__dict__["forward"] for n, m in named.items() if "forward" in m.__dict__}
        classes = {n: type(named[n]) for n in self._bases if n in named}
        try:
            for name, cls in classes.items():
                named[name].__class__ = self._around(name, named[name], cls)
            for name, module in named.items():
                forward = without_casts(module)
                module.__dict__["forward"] = self._recording(name, forward, self.calls)
            yield
        finally:
            for name, module in named.items():
                module.__dict__.pop("forward", None)
                if name in own:
                    module.__dict__["forward"] = own[name]
            for name, cls in classes.items():
                named[name].__class__ = cls

    def _around(self, name: str, module: nn.Module, cls: type) -> type:
        """A subclass of ``cls`` in which the forward of torch's class records its calls."""
        base = self._bases[name]
        method = next(name for name in METHODS if hasattr(base, name))
        call = functools.partial(getattr(base, method), module)
        recorded = self._recording(name, call, self.inner)
        seen = type(base.__name__, (base,), {method: lambda _, *a, **k: recorded(*a, **k)})
        return type(cls.__name__, (cls, seen), {"__module__": cls.__module__})

    def _recording(
        self, name: str, forward: Callable[..., Any], calls: dict[str, list[Call]]
    ) -> Callable[..., Any]:
        module = self._model.get_submodule(name)
        expands = name in self._expanded and (name in self._bases) == (calls is self.inner)

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._trying:
                return forward(*args, **kwargs)
            inputs = self._prints((args, kwargs))
            if expands:
                args, kwargs = pytree.tree_map_only(Tensor, self._expand_row, (args, kwargs))
            before = begun(module) if name in self._replays else None
            self._running.append(name)
            try:
                with self._copying.around(name, self._model.get_submodule(name)):
                    output = forward(*args, **kwargs)
            finally:
                self._running.pop()
            if expands:
                output = pytree.tree_map_only(Tensor, self._expand_table, output)
            plain = all(map(is_plain, pytree.tree_leaves((args, kwargs, output))))
            caller = next((n for n in reversed(self._running) if n != name), "")
            calls.setdefault(name, []).append(Call(inputs, self._prints(output), plain, caller))
            if before is not None and calls is self.calls:
                self._try(module, name, before, forward, args, kwargs, output)
            return output

        return recorded

    def _try(
        self,
        module: nn.Module,
        name: str,
        before: Begun,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Compare a module's outputs for a single sample with its outputs for all samples."""

        def one(values: Any) -> Any:
            leaves, spec = pytree.tree_flatten(values)
            for place, t in enumerate(leaves):
                if isinstance(t, Tensor):
                    dim = replay_dim(module, t.shape, place, self._samples, self._batch_dim)
                    leaves[place] = t if dim is None else t.narrow(dim, 1, 1)
            return pytree.tree_unflatten(leaves, spec)

        args, kwargs = one((args, kwargs))
        self._trying = True
        try:
            with begin_again(module, before):
                again = forward(*args, **kwargs)
        except Exception as error:  # a user's module, on a batch that it may not take
            self.failed[name] = f"{type(error).__name__}: {error}"
            return
        finally:
            self._trying = False
        wanted = self._prints(one(output))
        for a, b in zip(wanted, self._prints(again)):
            if a is not None and b is not None and not a.same(b):
                self.failed[name] = "for a single sample it returns something else"

    def _odd(self, t: Tensor) -> str:
        if self._marks.picked(t):
            return "it is combined with rows that the data select or sort"
        flat = len(t) == self._samples or self._marks.flat(t)
        return (
            ""
            if flat
            else "it is combined with rows that are not those of a flattened tensor [B, ...]"
        )

    def _expand_row(self, t: Tensor) -> Tensor:
        return t.expand(self._samples, t.shape[-1]) if t.ndim == 1 or len(t) == 1 else t

    def _expand_table(self, t: Tensor) -> Tensor:
        return t.expand(self._samples, *t.shape[1:]) if t.ndim > 2 and len(t) == 1 else t

    def _prints(self, values: Any) -> Prints:
        self._paused = True
        leaves = pytree.tree_leaves(values)
        prints = tuple(self._print(t) if isinstance(t, Tensor) else None for t in leaves)
        self._paused = False
        return prints

    def _without_chance(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema.arguments
        values = {**dict(zip((a.name for a in schema), args)), **kwargs}
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        if _draws(defaults | values):
            self.random.update(self._running)
        return _without_chance(func, values)

    def _keep_parameters(self, func: Any, args: tuple[Any, ...]) -> None:
        """Copy parameters that an operator will write to: ``max_norm``, a momentum encoder."""
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for t in pytree.tree_leaves(value) if written else ():
                if isinstance(t, Tensor) and t.layout == torch.strided:
                    p = self._storages.get(t.untyped_storage().data_ptr())
                    if p is not None and id(p) not in self._before:
                        self._before[id(p)] = p, p.detach().clone()

    def _print(self, t: Tensor) -> Print | None:
        found = None if isinstance(t, Copies) else print_of(t)
        if found is None:
            return None
        return found._replace(picked=self._marks.picked(t), flat=self._marks.flat(t))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._keep_parameters(func, args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._without_chance(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if not (self._paused or self._trying):
            leaves = pytree.tree_leaves((args, kwargs))
            for t in leaves if func is not torch.ops.aten.detach.default else ():
                if id(t) in self._owners and not {*self._running} & {*self._owners[id(t)]}:
                    self.elsewhere.setdefault(id(t), set()).add(self._running[-1])
            self._marks.note(func, leaves, result)
        return result


LIKELY = {"rand": 0.5, "rand_like": 0.5, "uniform": 0.5}
LIKELY |= dict.fromkeys(("randn", "randn_like", "normal", "randint", "randint_like"), 0.0)
"""The means that take the place of random numbers, which would differ from pass to pass."""
OFF = {"dropout_p": 0.0, "train": False, "training": False}
"""The arguments that turn off the random part of an operator which also does other work."""


def _draws(values: dict[str, Any]) -> bool:
    """Whether the result of a random operator depends on chance with these arguments."""
    if not all(values.get(name, True) for name in ("train", "training")):
        return False
    p = values.get("dropout_p", values.get("p"))
    return not isinstance(p, (int, float)) or 0.0 < p < 1.0


def _without_chance(func: Any, values: dict[str, Any]) -> Any:
    """Run the operator without dropout. An operator that draws numbers returns their means."""
    if off := OFF.keys() & values.keys():
        return func(**values | {name: OFF[name] for name in off})
    drawn, kind = func(**values), func._schema.name.removeprefix("aten::")
    if kind in ("bernoulli", "bernoulli_"):
        p = values["self"] if kind == "bernoulli" and "p" not in values else values.get("p", 0.5)
        return drawn.copy_(torch.as_tensor(p) >= 0.5)
    if kind.startswith("randperm"):  # the identity would hide that it mixes the samples
        return drawn.copy_(drawn.sort(descending=True).values)
    return drawn.fill_(LIKELY[kind.rstrip("_")]) if kind.rstrip("_") in LIKELY else drawn
