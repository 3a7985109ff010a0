# SPDX-License-Identifier: Apache-2.0
"""A pass over a few samples in which each function that takes a parameter is seen, with what its
tensors hold. No gradient is computed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gnsfast.following.dispatch import takes_functions
from gnsfast.following.examples import KINDS, Example
from gnsfast.following.functions import (
    CASTS,
    OPENED,
    QUERIES,
    is_transformed,
    name_of,
    numbered,
    of_torch,
)
from gnsfast.following.layouts import Owners, Print, mark_chosen, mark_made, owners_of, weights_of
from gnsfast.following.leaf import Leaf, expression_of, unfollowed
from gnsfast.following.marks import DATA, RAGGED, SORTED, Mark, mark_of_results
from gnsfast.tensors import tensors_of, writes


class Seen(NamedTuple):
    """A call of a function that takes a parameter. ``arguments`` and ``results`` are prints of its
    tensors, None for parameters and other values. ``of_data``: one of them was made from the batch.
    ``has_grad``: it was called in grad mode. ``chosen`` are the samples of rows that an index has
    chosen, with a number for what is in each. ``is_ragged``: the data have chosen its rows.
    """

    name: str
    arguments: list[Print | None]
    results: list[Print]
    of_data: bool
    has_grad: bool
    chosen: tuple[Owners, Tensor] | None
    is_ragged: bool

    @property
    def tensors(self) -> list[Print | None]:
        """The prints of its results, and of its arguments."""
        return [*self.results, *self.arguments]


class Look(TorchFunctionMode):
    """A pass over samples in which each function of torch is seen. Tensors that are made from the
    batch, or from a parameter, carry a mark. The results of ``growing`` calls of a leaf are data.
    """

    def __init__(self, samples: int, growing: set[tuple[Leaf, int]]) -> None:
        super().__init__()
        self.samples, self.growing = samples, growing
        self.seen: dict[Leaf, list[Seen]] = {}
        self.results: list[Print] = []
        self.uses: dict[Leaf, dict[str, None]] = {}
        self.made: dict[Leaf, dict[Leaf, None]] = {}  # what meets others before the data
        self.is_half = False
        self._taken: list[Any] = []  # functions that a class of others has taken

    def begin(self, example: Example) -> None:
        """Mark the tensors that have samples."""
        given = tensors_of((example.args, example.kwargs), KINDS)
        for t in tensors_of([[t] for t, own in zip(given, example.layouts) if own is not None]):
            _mark(t, DATA)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, of_torch(func)
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        other = next((cls for cls in types if takes_functions(cls)), None)
        if other is not None and func not in self._taken:
            self._taken.append(func)
            try:
                with self:
                    return other.__torch_function__(func, types, args, kwargs)
            finally:
                self._taken.pop()
        name = name_of(func)
        with unfollowed():
            if is_transformed():
                return func(*args, **kwargs)
            if name in QUERIES:
                return _queried(func, args, kwargs)
            if name == "__getitem__" and isinstance(_mark_of(args[0]), Leaf):
                args = numbered(args)
            arguments = pytree.tree_leaves((args, kwargs))
            marks = [_mark_of(t) if isinstance(t, Tensor) else None for t in arguments]
            told = marks[:1] if name in CASTS else marks  # others tell a dtype alone
            of_data = any(isinstance(mark, Mark) for mark in told)
            data = mark_of_results(name, arguments, marks, args, kwargs, self.samples)
            leaves = [
                mark
                for t, mark in zip(arguments, marks)
                if isinstance(mark, Leaf) and t.requires_grad
            ]
            out = func(*args, **kwargs)
            if name in EMPTY:
                out.zero_()  # what lies in memory would look like a change
            if name == "__setitem__":
                found = [args[0]]
            elif hasattr(out, "__next__"):
                out = iter(found := list(out))
            else:
                found = tensors_of(out)
            if leaves:
                of_data = self._note(name, arguments, marks, leaves, of_data, found)
            if of_data and writes(name) and isinstance(arguments[0], Tensor):
                _mark(arguments[0], data)
            for t in found:
                if of_data:
                    splits = name in UNFLATTENS and t.ndim > arguments[0].ndim
                    _mark(t, DATA if splits and data is SORTED else data)
                elif leaves and t.requires_grad and _mark_of(t) is None:
                    _mark(t, min(leaves, key=lambda leaf: leaf.index))
                    mark_made(t)
        return out

    def _note(
        self,
        name: str,
        arguments: list[Any],
        marks: list[Any],
        leaves: list[Leaf],
        of_data: bool,
        results: list[Tensor],
    ) -> bool:
        """Note a call. Returns whether its results are data."""
        leaf = min(leaves, key=lambda each: each.index)
        if of_data and not any(t.numel() for t in results):  # of an expert without rows
            return of_data
        of_data |= (leaf, len(self.seen.get(leaf, ()))) in self.growing
        for each in leaves:
            if of_data:
                self.uses.setdefault(each, {})[name] = None
            elif each is not leaf:
                self.made.setdefault(leaf, {})[each] = None
        x = next((t for t, mark in zip(arguments, marks) if isinstance(mark, Mark)), None)
        chosen = None
        if of_data and x is not None and x.ndim == 2 and x.is_floating_point():
            owners = owners_of(x, leaf.samples)
            x_ND = x.detach().double()
            chosen = owners and (owners, x_ND @ weights_of(x_ND.shape[1], x_ND))
        tensors = (t for t in (*arguments, *results) if isinstance(t, Tensor))
        self.is_half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        self.seen.setdefault(leaf, []).append(
            Seen(
                name,
                [
                    None
                    if isinstance(mark, Leaf) or not isinstance(t, Tensor)
                    else Print.of(t, self.samples, isinstance(mark, Mark) and _is_active(t))
                    for t, mark in zip(arguments, marks)
                ],
                [Print.of(t, self.samples, of_data and _is_active(t)) for t in results],
                of_data,
                torch.is_grad_enabled(),
                chosen,
                any(mark in (RAGGED, SORTED) for mark in marks)
                or any(t.is_nested for t in results),
            )
        )
        return of_data


EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided"))

ALIKE = frozenset(
    "new_zeros new_ones new_full new_tensor new_empty zeros_like ones_like empty_like".split()
)
"""Functions that make a constant tensor that is like another one."""

UNFLATTENS = frozenset("view reshape unflatten".split())
"""Functions that may split the dimension of the samples, which puts sorted ones in their order."""


def _mark(t: Tensor, mark: Any) -> None:
    t._gnsfast_look = mark  # type: ignore[attr-defined]
    if mark in (RAGGED, SORTED):
        mark_chosen(t)


def _mark_of(t: Any) -> Any:
    found = getattr(t, "_gnsfast_look", None)
    if found is None and (expression := expression_of(t)) is not None:
        return expression.leaves[0]
    return found


def _is_active(t: Tensor) -> bool:
    """Whether the gradient goes through a tensor. Without grad mode, as in a checkpoint's first
    forward, it may go through all floating-point numbers.
    """
    return t.requires_grad if torch.is_grad_enabled() else t.is_floating_point()


def _queried(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function without a gradient. That of data is data, but for what has its
    shape or dtype alone.
    """
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and isinstance(mark := _mark_of(args[0]), Mark):
        if name_of(func) not in ALIKE:
            _mark(out, mark)
    return out
