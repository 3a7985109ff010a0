# SPDX-License-Identifier: Apache-2.0
"""Where the samples lie in each call that takes a parameter, by shapes alone.

The model runs with n samples and with m. In call number k of a parameter a dimension of size c * n
in one pass and c * m in the other holds the samples, c rows of each. No value is read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnsfast.following import (
    CASTS,
    COPIES,
    ELEMENTWISE,
    KEEPS,
    LOOKUPS,
    NO_ROWS,
    OPENED,
    PIECES,
    QUERIES,
    RAGGED,
    SHARED,
    UNKNOWN,
    Layout,
    Leaf,
    Owners,
    Place,
    Row,
    expression_of,
    mark_made,
    name_of,
    numbered,
    of_torch,
    owners_of,
    takes_functions,
)
from gnsfast.functional import RowMap, map_of
from gnsfast.tensors import tensors_of
from gnsfast.torch_internals import is_transformed, pytree, unfollowed


class Call(NamedTuple):
    """A call of function ``name`` that takes a parameter, or what is made of one.

    ``arguments`` and ``results`` are the shapes of its tensors, None for parameters and for other
    values. A gradient goes through the ``active`` arguments to the batch. ``leaves`` are all
    parameters that it takes. ``is_data``: its results are no longer made of parameters alone.
    An index has chosen its rows from ``per_sample`` rows of each sample, zero if from which is not
    known; None if no index did. ``is_piece``: all of one piece, of a sample or of another thing.
    ``has_grad``: it was called in grad mode.
    """

    name: str
    arguments: tuple[torch.Size | None, ...]
    results: tuple[torch.Size, ...]
    active: tuple[bool, ...]
    leaves: tuple[Leaf, ...]
    is_data: bool
    per_sample: int | None
    has_grad: bool
    is_lookup: bool = False
    is_piece: bool = False


Lookup = tuple[Leaf, int]
"""A lookup of rows of a parameter at ids, by its number."""

Trace = dict[Leaf, list[Call]]
"""The calls of each parameter in their order. A call of several parameters is one of the first."""


class Traces(NamedTuple):
    """The traces of a pass with ``n`` samples and of one with ``m``, and the shapes of the model's
    results in both. ``is_half``: the model computes in half precision. ``maps`` tell whose rows
    those of a ragged batch are, which is the same in both passes.
    """

    n: int
    m: int
    traces: tuple[Trace, Trace]
    results: tuple[list[torch.Size], list[torch.Size]]
    is_half: bool
    maps: tuple[RowMap, ...] = ()

    @property
    def result_places(self) -> list[Place]:
        """Where the samples lie in each result of the model."""
        first, second = self.results
        pairs = zip(first, [*second, *[None] * len(first)])
        return [place_of(a, b, self.n, self.m, self.maps) for a, b in pairs]

    def rows(self) -> dict[str, tuple[Row, ...]]:
        """The rows of the table, by the name of the parameter."""
        first, second = self.traces
        table: dict[str, tuple[Row, ...]] = {}
        for leaf, calls in first.items():
            others = second.get(leaf, [])
            in_grad_mode = any(call.has_grad for call in calls)
            # What a reentrant checkpoint calls without a graph, it calls again with one.
            kept = [(k, c) for k, c in enumerate(calls) if c.has_grad or not in_grad_mode]
            rows = [(_row(c, _like(others, k, c), self), _like(others, k, c)) for k, c in kept]
            agreed = [(c.name, _chosen(c, _like(others, k, c))) for k, c in enumerate(calls)]
            chosen = {
                name: frozenset(rows for each, rows in agreed if rows and each == name)
                for name, _ in agreed
            }
            table[leaf.name] = tuple(
                _with_chosen(_as_its_likes(row, other, rows), chosen) for row, other in rows
            )
        return table

    def routes(self) -> dict[str, tuple[str, ...]]:
        """The functions in which each parameter meets the data, by its name."""
        meets: dict[Leaf, dict[str, None]] = {}
        made_with: dict[Leaf, set[Leaf]] = {}
        for leaf, calls in self.traces[0].items():
            for call in calls:
                for taken in call.leaves:
                    if call.is_data:
                        meets.setdefault(taken, {})[call.name] = None
                    elif taken is not leaf:
                        made_with.setdefault(leaf, set()).add(taken)
        for leaf in sorted(made_with, key=lambda leaf: leaf.index):
            for taken in made_with[leaf]:
                meets.setdefault(taken, {}).update(meets.get(leaf, {}))
        return {leaf.name: tuple(names) for leaf, names in meets.items()}

    def calls(self) -> dict[str, list[frozenset[str]]]:
        """By the name of a parameter, all parameters of each call in which it meets the data."""
        calls: dict[str, list[frozenset[str]]] = {}
        for call in (c for leaf_calls in self.traces[0].values() for c in leaf_calls if c.is_data):
            names = frozenset(leaf.name for leaf in call.leaves)
            for name in names:
                calls.setdefault(name, []).append(names)
        return calls


def place_of(
    a: torch.Size, b: torch.Size | None, n: int, m: int, maps: Sequence[RowMap] = ()
) -> Place:
    """Where the samples lie in a tensor of shape ``a`` with n samples, and ``b`` with m."""
    if maps:
        return SHARED if map_of(maps, a) is None else RAGGED
    if a == b:
        return SHARED
    if b is None or len(a) != len(b):
        return UNKNOWN
    # The n bags of an embedding have n + 1 offsets with the end of the last one.
    ends = len(a) == 1 and (a[0] - 1) * m == (b[0] - 1) * n
    dims = [d for d, (x, y) in enumerate(zip(a, b)) if x != y and (ends or x * m == y * n)]
    return Layout.of(a, n, dims[0]) if len(dims) == 1 else UNKNOWN


def _like(calls: list[Call], k: int, call: Call) -> Call | None:
    """Call number ``k`` of another pass, if it is of the same function."""
    return calls[k] if k < len(calls) and calls[k].name == call.name else None


def _places(
    call: Call, other: Call | None, n: int, m: int, maps: Sequence[RowMap] = ()
) -> tuple[list[Place | None], list[Place]]:
    """Where the samples lie in the arguments and in the results of a call."""

    def places(shapes: Any, others: Any) -> list[Any]:
        others = [*others, *[None] * (len(shapes) - len(others))]
        return [None if a is None else place_of(a, b, n, m, maps) for a, b in zip(shapes, others)]

    arguments = places(call.arguments, () if other is None else other.arguments)
    results = places(call.results, () if other is None else other.results)
    if call.is_lookup:
        return [None if a is None else SHARED for a in arguments], [SHARED for _ in results]
    for i, place in enumerate(arguments):
        if place == SHARED and call.active[i]:  # data has chosen as many rows in both passes
            arguments[i] = UNKNOWN
    if _chosen(call, other) is not None:

        def chosen(places: list[Any]) -> list[Any]:
            return [UNKNOWN if isinstance(p, Layout) and p.dim == 0 else p for p in places]

        arguments, results = chosen(arguments), chosen(results)
    if UNKNOWN in arguments:
        results = [UNKNOWN if place == SHARED else place for place in results]
    return arguments, results


def _chosen(call: Call, other: Call | None) -> int | None:
    """From how many rows of a sample the data have chosen those of a call: zero if that is not
    known, None if they have not. Both passes must say the same: one of so many time steps that
    their number is by chance a multiple of the samples is no piece of a sample.
    """
    a, b = call.per_sample, call.per_sample if other is None else other.per_sample
    if a is None or b is None:
        return None
    if a != b:
        return None if call.is_piece and other is not None and other.is_piece else 0
    return a


def _row(call: Call, other: Call | None, traces: Traces) -> Row:
    arguments, results = _places(call, other, traces.n, traces.m, traces.maps)
    layouts = ((p, s) for p, s in zip(arguments, call.arguments) if isinstance(p, Layout))
    place, shape = next(layouts, (None, None))
    sizes = () if place is None or shape is None else (*shape[: place.dim], *shape[place.dim + 1 :])
    return Row(call.name, tuple(arguments), tuple(results), sizes=sizes)


def _as_its_likes(row: Row, other: Call | None, rows: list[tuple[Row, Call | None]]) -> Row:
    """A call that one pass alone had, as a loop over samples has, is like all others of its
    name."""
    likes = {
        like for like, counterpart in rows if counterpart is not None and like.name == row.name
    }
    return likes.pop() if other is None and len(likes) == 1 else row


def _with_chosen(row: Row, chosen: dict[str, frozenset[int]]) -> Row:
    is_chosen = UNKNOWN in (*row.arguments, *row.results)
    return row._replace(chosen=chosen.get(row.name, NO_ROWS) if is_chosen else NO_ROWS)


def trace(
    run: Callable[[int], Any],
    n: int,
    m: int,
    agree: Callable[[bool], bool],
    maps: tuple[RowMap, ...] = (),
) -> Traces:
    """The traces of ``run(n)`` and ``run(m)``, which run the model with so many samples, in two
    passes. A first guess of what is made of parameters alone is checked by the second pass: where
    it was wrong, both run again. ``agree`` says whether all processes that run the passes together
    hold something true. ``maps`` tell whose rows those of a ragged batch are.
    """
    sizes, traces, is_half = (n, m), [Trace(), Trace()], False
    lookups = set[Lookup]()
    met: list[dict[Lookup, set[int]]] = [{}, {}]
    results: list[list[torch.Size]] = [[], []]
    before: list[Any] = [None, None]
    for number in range(MOST_PASSES):
        i, known = number % 2, len(lookups)
        recorder = Recorder(sizes[i], traces[1 - i], sizes[1 - i], lookups, maps)
        with recorder:
            out = run(sizes[i])
        met[i] |= recorder.met
        if number:
            lookups |= {k for k, rows in met[0].items() if rows & met[1].get(k, rows)}
            lookups |= {k for k, rows in met[1].items() if rows and k not in met[0]}
        results[i] = [_shape(t, sizes[i]) for t in tensors_of(out)]
        traces[i], is_half = recorder.trace, is_half or recorder.is_half
        before[i] = {leaf: [c.is_data for c in calls] for leaf, calls in traces[i].items()}
        if number and agree(_is_same_as_far(*before) and len(lookups) == known):
            break
    return Traces(n, m, (traces[0], traces[1]), (results[0], results[1]), is_half, maps)


MOST_PASSES = 8


def _is_same_as_far(a: dict[Leaf, list[bool]], b: dict[Leaf, list[bool]]) -> bool:
    """Whether two passes took the same tensors for made of parameters alone, as far as both go."""
    return all(x == y for leaf in a.keys() & b.keys() for x, y in zip(a[leaf], b[leaf]))


def _shape(t: Tensor, samples: int) -> torch.Size:
    """The shape of a tensor. That of a nested tensor is none that another pass could have."""
    return torch.Size((-samples,)) if t.is_nested else t.shape


class Recorder(TorchFunctionMode):
    """A pass with ``n`` samples in which each call that takes a parameter is written down.
    ``other`` is the trace of a pass with ``m`` samples, if there was one. ``lookups`` are those
    whose rows meet rows that the data have chosen, as earlier passes of both sizes show. ``met`` is
    for the other lookups that meet rows, from how many of a sample the data have chosen these, and
    zero where no piece is.
    """

    def __init__(
        self,
        n: int,
        other: Trace,
        m: int,
        lookups: set[Lookup],
        maps: tuple[RowMap, ...] = (),
    ) -> None:
        super().__init__()
        self.maps = maps
        self.n, self.other, self.m, self.lookups = n, other, m, lookups
        self.met: dict[Lookup, set[int]] = {}
        self._counts: dict[Leaf, int] = {}
        self.trace: Trace = {}
        self.is_half = False
        self._taken: list[Any] = []  # functions that a tensor class of others has taken

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
            if name in QUERIES or is_transformed():
                return func(*args, **kwargs)
            if name == "__getitem__" and _leaf_of(args[0]) is not None:
                args = numbered(args)
            arguments = pytree.tree_leaves((args, kwargs))
            leaves = [_leaf_of(t) for t in arguments]
            trained = [e for e, t in zip(leaves, arguments) if e is not None and t.requires_grad]
            if not trained:
                out = func(*args, **kwargs)
                self._follow_lookups(name, arguments, out)
                return out
            lookup = self._lookup(name, arguments)
            is_view = name in KEEPS | PIECES and hasattr(arguments[0], "_gnsfast_looked_up")
            data = [
                t if isinstance(t, Tensor) and e is None else None
                for t, e in zip(arguments, leaves)
            ]
            shapes = tuple(None if t is None else _shape(t, self.n) for t in data)
            active = tuple(t is not None and t.requires_grad for t in data)
            out = func(*args, **kwargs)
            if hasattr(out, "__next__"):
                out = iter(results := list(out))
            else:
                results = [args[0]] if name == "__setitem__" else tensors_of(out)
            is_half = (t.is_floating_point() and t.dtype.itemsize < 4 for t in results)
            self.is_half = self.is_half or any(is_half)
            call = Call(
                name,
                shapes,
                tuple(_shape(t, self.n) for t in results),
                active,
                tuple(dict.fromkeys(trained)),
                False,
                None,
                torch.is_grad_enabled(),
                is_view or lookup in self.lookups,
            )
            self._note(call, data, results)
            for t in results:
                if call.is_lookup:
                    t._gnsfast_looked_up = True
                elif lookup is not None:
                    t._gnsfast_lookup = lookup
        return out

    def _lookup(self, name: str, arguments: list[Any]) -> Lookup | None:
        """The number of a call among those that look up rows of its table at a list of ids."""
        if name not in LOOKUPS:
            return None
        ids = [t for t in arguments if isinstance(t, Tensor) and t.dtype == torch.int64]
        leaf = _leaf_of(arguments[1 if name == "embedding" else 0])
        if leaf is None or len(ids) != 1 or ids[0].ndim != 1:
            return None
        self._counts[leaf] = number = self._counts.get(leaf, -1) + 1
        return leaf, number

    def _follow_lookups(self, name: str, arguments: list[Any], out: Any) -> None:
        """See whether what was looked up meets rows that the data have chosen."""
        lookups = [(t, t._gnsfast_lookup) for t in arguments if hasattr(t, "_gnsfast_lookup")]
        if not lookups or not isinstance(out, Tensor):
            return
        looked_up, lookup = lookups[0]
        if name in KEEPS | PIECES and out is not looked_up:
            out._gnsfast_lookup = lookup  # type: ignore[attr-defined]
        if name not in ELEMENTWISE:
            return
        for x in arguments:
            if isinstance(x, Tensor) and x.ndim == 2 and len(x) == len(looked_up):
                owners = None if x is looked_up else owners_of(x, self.n)
                met = self.met.setdefault(lookup, set())
                if owners is not None and owners.per_sample:
                    met |= {owners.per_sample} if owners.is_piece else {owners.per_sample, 0}

    def _note(self, call: Call, data: list[Any], results: list[Tensor]) -> None:
        leaf = min(call.leaves, key=lambda leaf: leaf.index)
        calls = self.trace.setdefault(leaf, [])
        other = _like(self.other.get(leaf, []), len(calls), call)
        is_data = not call.is_lookup and self._is_data(call, other)
        if is_data and not any(shape.numel() for shape in call.results):  # an expert without rows
            return
        rows = (t for t in data if t is not None and t.ndim == 2 and t.is_floating_point())
        x = next(rows, None) if is_data else None
        owners = None if x is None else self._owners(x)
        call = call._replace(is_data=is_data)
        if owners is not None:
            call = call._replace(per_sample=owners.per_sample, is_piece=owners.is_piece)
        calls.append(call)
        for t in () if is_data else results:
            if t.requires_grad and _leaf_of(t) is None:
                t._gnsfast_made_of = leaf  # type: ignore[attr-defined]
                mark_made(t)

    def _owners(self, x: Tensor) -> Owners | None:
        """The samples of rows that an index has chosen."""
        if map_of(self.maps, x.shape) is not None:
            return None
        sizes = [rows.size for rows in self.maps] or [self.n]
        each = [owners for n in sizes if (owners := owners_of(x, n)) is not None]
        return next((owners for owners in each if owners.per_sample), each[0] if each else None)

    def _is_data(self, call: Call, other: Call | None) -> bool:
        """Whether the results of a call are no longer made of parameters and constants alone."""
        casts = call.name in CASTS
        if other is not None or self.maps:
            arguments, results = _places(call, other, self.n, self.m, self.maps)
            arguments = arguments[:1] if casts else arguments  # others tell a dtype alone
            return any(place not in (None, SHARED) for place in (*arguments, *results))
        if call.name in COPIES and not any(call.arguments):
            return self.n in call.results[0]
        if casts and call.arguments[0] is None:
            return False
        shapes = [shape for shape in call.arguments if shape]
        return any(call.active) or any(self.n in s[:2] or s[0] % self.n == 0 for s in shapes)


def _leaf_of(t: Any) -> Leaf | None:
    """The parameter that a tensor is, or is made of; of several the first."""
    if not isinstance(t, Tensor):
        return None
    made_of: Leaf | None = getattr(t, "_gnsfast_made_of", None)
    if made_of is None and (expression := expression_of(t)) is not None:
        return expression.leaves[0]
    return made_of
