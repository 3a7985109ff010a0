# SPDX-License-Identifier: Apache-2.0
"""A pass over a few samples in which each function that takes a parameter is seen, with what its
tensors hold. No gradient is computed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gnsfast.following.dispatch import takes_functions
from gnsfast.following.examples import Example
from gnsfast.following.functions import (
    CASTS,
    COPIES,
    OPENED,
    QUERIES,
    copied_along,
    is_transformed,
    name_of,
    numbered,
)
from gnsfast.following.layouts import Layout, Owners, Print, mark_made, owners_of, weights_of
from gnsfast.following.leaf import Leaf, expression_of, unfollowed
from gnsfast.tensors import tensors_of, writes


class Seen(NamedTuple):
    """A call of a function that takes a parameter. ``arguments`` and ``results`` are prints of its
    tensors, None for parameters and other values. ``of_data``: one of them was made from the batch.
    ``has_grad``: it was called in grad mode. ``owners`` are the samples of rows that an index has
    chosen, and ``number_N`` says what is in each. ``is_ragged``: the data have chosen its rows.
    """

    name: str
    arguments: list[Print | None]
    results: list[Print]
    of_data: bool
    copies: int | None
    has_grad: bool
    owners: Owners | None
    number_N: Tensor | None
    is_ragged: bool

    @property
    def tensors(self) -> list[Print | None]:
        """The prints of its arguments, and of its results."""
        return [*self.arguments, *self.results]


class Look(TorchFunctionMode):
    """A pass over samples in which each function of torch is seen. Tensors that are made from the
    batch, or from a parameter, carry a mark. With ``varied`` the copy of a parameter for a sample
    is changed as that sample is. The results of ``growing`` calls of a leaf count as data.
    """

    def __init__(
        self, samples: int, sample: int, varied: bool, growing: set[tuple[Leaf, int]]
    ) -> None:
        super().__init__()
        self.samples = samples
        self.sample, self.varied, self.growing = sample, varied, growing
        self.seen: dict[Leaf, list[Seen]] = {}
        self.copied: set[Leaf] = set()
        self.results: list[Print] = []
        self.uses: dict[Leaf, dict[str, None]] = {}
        self.made: dict[Leaf, dict[Leaf, None]] = {}  # what meets others before the data
        self.is_half = False
        self._taken: list[Any] = []  # functions that a class of others has taken

    def begin(self, example: Example) -> None:
        """Mark the tensors that have samples."""
        for t, d in zip(tensors_of((example.args, example.kwargs)), example.dims):
            if d is not None:
                _mark(t, DATA)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
                return _queried(func, args, kwargs, name)
            if name == "__getitem__" and isinstance(_mark_of(args[0]), Leaf):
                args = numbered(args)
            arguments = [*_values(args, kwargs)]
            marks = [_mark_of(t) if isinstance(t, Tensor) else None for t in arguments]
            of_data = any(map(_is_data, marks))
            of_data = of_data and not (
                name in CASTS and not (marks[0] is None or _is_data(marks[0]))
            )
            data = _data_of(name, arguments, marks, args, kwargs, self.samples)
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
                found = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
            if leaves:
                of_data, out, found = self._note(name, args, kwargs, leaves, of_data, out, found)
            if of_data and writes(name) and isinstance(arguments[0], Tensor):
                _mark(arguments[0], data)
            for t in found:
                if of_data:
                    _mark(t, DATA if name in VIEWS and t.ndim > arguments[0].ndim else data)
                elif leaves and t.requires_grad and _mark_of(t) is None:
                    _mark(t, min(leaves, key=lambda leaf: leaf.index))
                    mark_made(t)
        return out

    def _note(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        leaves: list[Leaf],
        of_data: bool,
        out: Any,
        results: list[Tensor],
    ) -> tuple[bool, Any, list[Tensor]]:
        """Note a call. Where it repeats a parameter for each sample, the results are data."""
        leaf = min(leaves, key=lambda each: each.index)
        if of_data and not any(t.numel() for t in results):  # of an expert without rows
            return of_data, out, results
        for each in leaves:
            if of_data:
                self.uses.setdefault(each, {})[name] = None
            elif each is not leaf:
                self.made.setdefault(leaf, {})[each] = None
        arguments = pytree.tree_leaves((args, kwargs))
        marks = [_mark_of(t) if isinstance(t, Tensor) else None for t in arguments]
        copied = None
        if name in COPIES and not of_data:
            copied = copied_along(name, arguments, leaf.samples)
        x = next((t for t, mark in zip(arguments, marks) if _is_data(mark)), None)
        owners = None
        if of_data and x is not None and x.ndim == 2 and x.is_floating_point():
            owners = owners_of(x, leaf.samples)
        tensors = (t for t in (*arguments, *results) if isinstance(t, Tensor))
        self.is_half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        self.seen.setdefault(leaf, []).append(
            Seen(
                name,
                [
                    None
                    if isinstance(mark, Leaf) or not isinstance(t, Tensor)
                    else Print.of(t, _is_data(mark) and _is_active(t))
                    for t, mark in zip(arguments, marks)
                ],
                [Print.of(t, of_data and _is_active(t)) for t in results],
                of_data,
                None if copied is None else copied.dim,
                torch.is_grad_enabled(),
                owners,
                None if owners is None or x is None else _number(x.detach()),
                any(mark in (RAGGED, SORTED) for mark in marks)
                or any(t.is_nested for t in results),
            )
        )
        if copied is None:
            number = len(self.seen[leaf]) - 1
            return of_data or (leaf, number) in self.growing, out, results
        self.copied.add(leaf)
        self.uses.setdefault(leaf, {})[name] = None
        if self.varied:  # in each pass, since kernels round in other ways where copies lie apart
            with torch.no_grad():
                out = out.clone()
                if self.sample >= 0:
                    own = Layout(copied.dim).of_sample(out, self.sample, leaf.samples)
                    own.mul_(1.5).add_(0.1)
            out.requires_grad_()
            results = [out]
        return True, out, results


EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided"))

DATA, RAGGED, SORTED = "data", "ragged", "sorted"
"""The marks of tensors that are made from the batch. Of ``RAGGED`` ones the data have chosen how
many rows there are, and of ``SORTED`` ones their order, until the data order them again. Another
batch may choose in another way.
"""

SELECTS = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive _pack_padded_sequence".split()
)
INSERTS = frozenset(
    "__setitem__ index_copy index_add index_put masked_scatter scatter scatter_add index_copy_ "
    "index_add_ index_put_ masked_scatter_ scatter_ scatter_add_ index_fill index_fill_".split()
)
"""Functions whose result has the shape of their first argument."""

VIEWS = frozenset("view reshape unflatten".split())


def _is_data(mark: Any) -> bool:
    return mark in (DATA, RAGGED, SORTED)


def _data_of(
    name: str, arguments: list[Any], marks: list[Any], args: Any, kwargs: Any, samples: int
) -> str:
    """The mark of the results of a function of data."""
    by_order = _reorders(name, arguments, marks, args, kwargs, samples)
    if name in INSERTS:
        source = next(m for t, m in zip(arguments[::-1], marks[::-1]) if isinstance(t, Tensor))
        if by_order and source in (DATA, SORTED):
            return DATA if source is SORTED else SORTED
        return marks[0] if _is_data(marks[0]) else DATA
    if name == "_pad_packed_sequence":  # the samples lie as they were packed
        return SORTED
    if name in SELECTS or RAGGED in marks:
        return RAGGED
    by_data = [t for t, mark in zip(arguments[1:], marks[1:]) if _is_data(mark)]
    by_mask = name == "__getitem__" and any(t.dtype in MASKS for t in by_data)
    if by_mask or (name == "repeat_interleave" and by_data):
        return RAGGED
    by_order |= name == "__getitem__" and bool(by_data) and arguments[1] is by_data[0]
    # The data may have chosen the numbers of a list or an array.
    by_order |= name == "__getitem__" and _lists_samples(args[1], args[0], samples)
    if by_order:
        return DATA if marks[name == "embedding"] is SORTED else SORTED
    return SORTED if SORTED in marks else DATA


def _reorders(
    name: str, arguments: list[Any], marks: list[Any], args: Any, kwargs: Any, samples: int
) -> bool:
    """Whether an index that the data have chosen reorders what may be samples: it has as many
    numbers as the dimension that it is for, or is any for dimension 0 of ``ALONG``.
    """
    if name not in REORDERS:
        return False
    k = int(name == "embedding")
    own = list(zip(arguments, marks))
    x, rest = own[k][0], own[:1] if k else own[1:]
    if not isinstance(x, Tensor):  # named arguments in another order
        return False
    chosen = [t for t, mark in rest if mark in (DATA, SORTED) and not t.is_floating_point()]
    if not chosen or chosen[0].dtype in MASKS:
        return False
    index, d = chosen[0], 0
    if "getitem" in name or "setitem" in name or "index_put" in name:
        given = kwargs["indices"] if "indices" in kwargs else args[1]
        given = given if isinstance(given, (tuple, list)) else (given,)
        d = next((d for d, each in enumerate(given) if each is index), x.ndim)
    elif not k:
        numbers = [n for n in (kwargs.get("dim"), *args) if isinstance(n, int)]
        d = numbers[0] % max(x.ndim, 1) if numbers else x.ndim
    if d == 0 and name in ALONG:
        return True
    fits = d < x.ndim and x.shape[d] % samples == 0 and index.shape[:1] == x.shape[d : d + 1]
    return fits and (index.ndim == 1 or d == 0)


ALONG = frozenset(("index_select", "gather", "take_along_dim"))
"""Functions that take an index and the dimension that it is for."""

REORDERS = ALONG | INSERTS | {"__getitem__", "embedding"}

MASKS = (torch.bool, torch.uint8)


def _lists_samples(index: Any, t: Tensor, samples: int) -> bool:
    """Whether an index has a list or an array of as many numbers as samples are in its place."""
    own = zip(index if isinstance(index, tuple) else (index,), t.shape)
    return any(
        hasattr(each, "__len__")
        and not isinstance(each, (Tensor, str))
        and len(each) == size
        and size % samples == 0
        for each, size in own
    )


def _mark(t: Tensor, mark: Any) -> None:
    t._gnsfast_look = mark  # type: ignore[attr-defined]


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


def _queried(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The result of a function without a gradient. That of data is data."""
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and _is_data(mark := _mark_of(args[0])):
        _mark(out, mark)
    return out


def _values(args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments of a function, and those in its lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from _values(value, {})
        else:
            yield value


def _number(x_ND: Tensor) -> Tensor:
    """A number for each row."""
    x_ND = x_ND.double()
    return x_ND @ weights_of(x_ND.shape[1], x_ND)
