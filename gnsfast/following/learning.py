# SPDX-License-Identifier: Apache-2.0
"""What one batch shows: which functions take each parameter, and where the samples lie in them.

A few samples go through the model as they are, and again with one of them replaced at a time. What
changes with sample b belongs to sample b. No gradient is computed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gnsfast.following.dispatch import (
    CASTS,
    COPIES,
    OPENED,
    QUERIES,
    copied_along,
    is_transformed,
    name_of,
    numbered,
)
from gnsfast.following.layouts import (
    SHARED,
    UNKNOWN,
    Layout,
    Place,
    Print,
    grown,
    owners_of,
    place_of,
    weights_of,
)
from gnsfast.following.leaf import Leaf, Step, expression_of, unfollowed
from gnsfast.functional import Documents
from gnsfast.tensors import map_tensors, tensors_of, whole

FEW = 3
"""So many samples of the first batch are looked at; two are too few to tell a sample from all."""


class Seen(NamedTuple):
    """A call of a function that takes a parameter. ``arguments`` and ``results`` are prints of its
    tensors, None for parameters and other values. ``of_data``: one of them was made from the batch;
    ``is_data`` says which of them were, and need a gradient. ``has_grad``: it was called in grad
    mode. ``owner_N`` are the samples of rows that an index has chosen, and ``number_N`` says
    what is in each. ``is_ragged``: the data have chosen its rows.
    """

    name: str
    arguments: list[Print | None]
    results: list[Print | None]
    of_data: bool
    is_data: tuple[list[bool], list[bool]]
    copies: bool
    has_grad: bool
    owner_N: Tensor | None
    number_N: Tensor | None
    is_ragged: bool


class Look(TorchFunctionMode):
    """A pass over samples in which each function of torch is seen. Tensors that are made from the
    batch, or from a parameter, carry a mark. With ``varied`` the copy of a parameter for a sample
    is changed as that sample is. The results of ``growing`` calls of a leaf count as data.
    """

    def __init__(self, sample: int, varied: bool, growing: set[tuple[Leaf, int]]) -> None:
        super().__init__()
        self.sample, self.varied, self.growing = sample, varied, growing
        self.seen: dict[Leaf, list[Seen]] = {}
        self.copied: set[Leaf] = set()
        self.results: list[Print] = []
        self.uses: dict[Leaf, dict[str, None]] = {}
        self.made: dict[Leaf, dict[Leaf, None]] = {}  # what meets others before the data
        self.is_half = False

    def begin(self, example: "Example") -> None:
        """Mark the tensors that have samples."""
        for t, d in zip(tensors_of((example.args, example.kwargs)), example.dims):
            if d is not None:
                _mark(t, DATA)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
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
            data = _data_of(name, arguments, marks)
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
            is_written = name[-1] == "_" and name[-2:] != "__"
            if of_data and is_written and isinstance(arguments[0], Tensor):
                _mark(arguments[0], data)
            for t in found:
                if of_data:
                    _mark(t, DATA if name in VIEWS and t.ndim > arguments[0].ndim else data)
                elif leaves and t.requires_grad and _mark_of(t) is None:
                    _mark(t, min(leaves, key=lambda leaf: leaf.index))
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
        owner_N = None
        if of_data and x is not None and x.ndim == 2 and x.is_floating_point():
            owner_N = owners_of(x, leaf.samples)
        active = (
            [_is_data(mark) and _is_active(t) for t, mark in zip(arguments, marks)],
            [of_data and _is_active(t) for t in results],
        )
        tensors = (t for t in (*arguments, *results) if isinstance(t, Tensor))
        self.is_half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        self.seen.setdefault(leaf, []).append(
            Seen(
                name,
                [
                    Print.of(t) if isinstance(t, Tensor) and not isinstance(m, Leaf) else None
                    for t, m in zip(arguments, marks)
                ],
                [Print.of(t) for t in results],
                of_data,
                active,
                copied is not None,
                torch.is_grad_enabled(),
                owner_N,
                None if owner_N is None or x is None else _number(x.detach()),
                any(mark in (RAGGED, SORTED) for mark in marks),
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


def _data_of(name: str, arguments: list[Any], marks: list[Any]) -> str:
    """The mark of the results of a function of data."""
    if name in INSERTS:
        return marks[0] if _is_data(marks[0]) else DATA
    if name in SELECTS or RAGGED in marks:
        return RAGGED
    by_data = [t for t, mark in zip(arguments[1:], marks[1:]) if _is_data(mark)]
    by_mask = name == "__getitem__" and any(t.dtype in MASKS for t in by_data)
    if by_mask or (name == "repeat_interleave" and by_data):
        return RAGGED
    by_order = name == "__getitem__" and by_data and arguments[1] is by_data[0]
    if by_order or (name == "index_select" and by_data and arguments[1] == 0):
        return DATA if marks[0] is SORTED else SORTED
    return SORTED if SORTED in marks else DATA


MASKS = (torch.bool, torch.uint8)


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


class Example(NamedTuple):
    """Samples of a batch: the arguments ``args`` and ``kwargs`` of a model, of which the tensors in
    ``dims`` have their n samples along these dimensions, each in as many consecutive rows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any, B: int, n: int = FEW) -> "Example | None":
        """So many samples of a batch of ``B``, again from the first if it has fewer; None if no
        tensor has them.
        """
        given = [*tensors_of((args, kwargs))]
        at = 0 if any(t.ndim and t.shape[0] == B for t in given) else 1
        dims = tuple(_dim_of(t, at, B) for t in given)
        if all(d is None for d in dims):
            return None
        whole = cls(tuple(args), dict(kwargs), B, dims)
        return whole.part([b % B for b in range(n)])

    @classmethod
    def several(cls, args: Any, kwargs: Any, B: int) -> "Iterator[Example]":
        """A few samples of a batch of ``B``, then other numbers of them, last all."""
        for n in dict.fromkeys((FEW, FEW + 1, FEW + 2, B)):
            example = cls.of(args, kwargs, B, n)
            if example is not None:
                yield example

    @classmethod
    def without_samples(cls, args: Any, kwargs: Any, n: int) -> "Example":
        """The arguments as they are, for a process that only runs the passes of others."""
        return cls(tuple(args), dict(kwargs), n, (None,) * len(tensors_of((args, kwargs))))

    @classmethod
    def of_documents(
        cls, args: Any, kwargs: Any, rows: int, documents: Documents
    ) -> "Example | None":
        """A few ``rows`` of packed documents as samples. Of a single row they are parts of one
        length, each from the start of a document on. None if documents go on in the next row.
        """
        N, starts = documents.tokens, [*dict.fromkeys(documents.starts.tolist())]
        if rows != 1:
            apart = rows > 1 and all(k * N // rows in starts for k in range(rows))
            return cls.of(args, kwargs, rows) if apart else None
        T, first = N // FEW, [0]
        while T > 1 and len(first) < 2:
            first = [s for s in starts if s + T <= N]
            T = T if len(first) > 1 else T // 2
        given = [t for t in tensors_of((args, kwargs)) if t.ndim]
        if len(first) < 2 or any(t.shape[0] != 1 or N not in t.shape for t in given):
            return None
        n = min(len(first), FEW)
        first = [first[k * (len(first) - 1) // (n - 1)] for k in range(n)]

        def cut(t: Tensor) -> Tensor:
            parts = [t.detach()] * n
            for d, size in enumerate(t.shape):
                if d and size == N:
                    parts = [own.narrow(d, s, T) for own, s in zip(parts, first)]
            return torch.cat(parts) if t.ndim else t.detach().clone()

        dims = tuple(0 if t.ndim else None for t in tensors_of((args, kwargs)))
        args, kwargs = map_tensors(cut, (tuple(args), dict(kwargs)))
        return cls(args, kwargs, n, dims)

    def part(self, samples: Any) -> "Example":
        """Some of the samples."""
        chosen = list(samples)
        dims = iter(self.dims)

        def pick(t: Tensor) -> Tensor:
            d = next(dims)
            own = t.detach().clone() if d is None else _picked(t, d, chosen, self.n)
            return own.requires_grad_(t.requires_grad)

        args, kwargs = map_tensors(pick, (self.args, self.kwargs))
        return Example(args, kwargs, len(chosen), self.dims)

    def replaced(self, b: int) -> "Example":
        """The samples, with the next one in the place of sample ``b``. Sample -1 replaces none."""
        dims = iter(self.dims)

        def pick(t: Tensor) -> Tensor:
            d, new = next(dims), t.detach().clone()
            if d is not None and b >= 0:
                order = [(b + 1) % self.n if k == b else k for k in range(self.n)]
                new = _picked(t, d, order, self.n)
            return new.requires_grad_(t.requires_grad)

        args, kwargs = map_tensors(pick, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)


def _dim_of(t: Tensor, at: int, B: int) -> int | None:
    """The dimension with the B samples of a tensor of the batch: ``at``, or the other one of the
    first two for ids and features, which may lie sequence first beside a mask that does not. A mask
    of each head [B * heads, T, T] has several rows for a sample.
    """
    s = t.shape
    if len(s) > at and s[at] == B:
        return at
    is_mask = t.ndim < 3 and (t.is_floating_point() or t.dtype == torch.bool)
    if at == 0 and len(s) > 1 and s[1] == B and not is_mask:
        return 1
    return 0 if t.ndim == 3 and B > 1 and s[0] and s[0] % B == 0 and B not in s[:2] else None


def _picked(t: Tensor, dim: int, samples: list[int], n: int) -> Tensor:
    """Some of the n samples of a tensor, which may be a DTensor."""
    t, each = t.detach(), t.shape[dim] // n
    return torch.cat([t.narrow(dim, b * each, each) for b in samples], dim)


class Looks(NamedTuple):
    """The passes over an example: as it is, with each sample replaced, and with one sample fewer
    (None if the model does not take it).
    """

    base: Look
    others: dict[int, Look]
    fewer: Look | None


class Learned(NamedTuple):
    """Where the samples lie in the model's results, whether it computes in half precision, and for
    each leaf the functions that take it, and those in which it meets the data. ``unclear`` are
    leaves of which as many copies as samples are made, but not for them.
    """

    results: list[Place]
    is_half: bool
    steps: dict[Leaf, list[Step]]
    routes: dict[Leaf, tuple[str, ...]]
    unclear: frozenset[Leaf]

    def tell(self, leaves: list[Leaf], is_part: bool) -> None:
        """Let each leaf know the functions that take it, of a part or of the whole model."""
        chosen = {step.name for own in self.steps.values() for step in own if step.chosen}
        for leaf in leaves:
            leaf.learn(self.steps.get(leaf, []), self.routes.get(leaf, ()), adds=is_part)
            leaf.functions = 0
            leaf.chosen = leaf.chosen | chosen

    def by(self, key: Callable[[Any], Any]) -> "Learned":
        """The same with another key for each leaf, such as its name."""
        steps = {key(leaf): v for leaf, v in self.steps.items()}
        routes = {key(leaf): v for leaf, v in self.routes.items()}
        return self._replace(steps=steps, routes=routes, unclear=frozenset(map(key, self.unclear)))


def learn(
    leaves: list[Leaf],
    run: Callable[..., Any],
    example: Example,
    held: Callable[[], Any],
    on_any: Callable[[bool], bool],
) -> Learned:
    """What an example shows. ``run`` is the model, or a part of it, ``held`` a context that
    restores its state. ``on_any`` says whether something holds on any of the processes that need
    each other's passes, so that all run the same number of them.

    A copy of a parameter for each sample is varied with its sample. If samples then meet, it was no
    copy for each sample, as one for each of as many heads. Then another number of samples tells
    more.
    """
    looks = _looks(leaves, run, example, held, on_any, varied=True)
    found, unclear = _steps(looks, example.n), frozenset[Leaf]()
    if on_any(bool(looks.base.copied and _lost_in(found))):
        plain = _looks(leaves, run, example, held, on_any, varied=False)
        own = _steps(plain, example.n)
        if _lost_in(found) - _lost_in(own):
            unclear = frozenset(looks.base.copied)
            looks, found = plain, own
    routes = {leaf: tuple(uses) for leaf, uses in _routes(looks.base).items()}
    return Learned(_results(looks, example.n), looks.base.is_half, found, routes, unclear)


def _looks(
    leaves: list[Leaf],
    run: Callable[..., Any],
    example: Example,
    held: Callable[[], Any],
    on_any: Callable[[bool], bool],
    varied: bool,
) -> Looks:
    growing: set[tuple[Leaf, int]] = set()

    def look(own: Example, sample: int) -> Look:
        for leaf in leaves:
            leaf.samples = own.n
        found = Look(sample, varied, growing)
        found.begin(own)
        with held(), found:
            out = run(*own.args, **own.kwargs)
        found.results = [Print.of(whole(t)) for t in tensors_of(out)]
        return found

    def few() -> Look | None:
        try:
            return look(example.part(range(example.n - 1)), -1)
        except Exception:  # the model's own, whatever it is: then sizes show nothing
            return None

    base, fewer = look(example.replaced(-1), -1), few()
    while on_any(bool(more := _growing(base, fewer, example.n) - growing)):
        growing |= more
        base, fewer = look(example.replaced(-1), -1), few()
    others = {b: look(example.replaced(b), b) for b in range(example.n)}
    return Looks(base, others, fewer)


def _growing(base: Look, fewer: Look | None, n: int) -> set[tuple[Leaf, int]]:
    """For each leaf its first call without data whose result is as large as the batch: it has a
    part for each sample, such as rows of a table at positions that are repeated for each.
    """
    found = set()
    for leaf, calls in base.seen.items():
        for k, call in enumerate(calls):
            small = _nth(fewer, leaf, k, call)
            if small is None:
                break
            if call.of_data or call.copies or (leaf, k) in base.growing:
                continue
            pairs = zip(call.results, small.results)
            if any(
                a is not None and b is not None and grown(a.shape, b.shape, n) for a, b in pairs
            ):
                found.add((leaf, k))
                break
    return found


def _results(looks: Looks, n: int) -> list[Place]:
    """Where the samples lie in the model's results. Where they meet, it is the dimension whose size
    is that of the batch.
    """
    found: list[Place] = []
    for k, t in enumerate(looks.base.results):
        others = {b: o.results[k] for b, o in looks.others.items() if len(o.results) > k}
        small = looks.fewer and looks.fewer.results[k : k + 1]
        fewer = small[0].shape if small else None
        place = place_of(t, others, fewer, n) if len(others) == n else UNKNOWN
        if place == UNKNOWN:
            place = grown(t.shape, fewer, n)
        found.append(SHARED if place is None else place)
    return found


def _routes(look: Look) -> dict[Leaf, dict[str, None]]:
    """The functions in which each leaf meets the data, as what it was made into does."""
    found = dict(look.uses)
    for leaf in sorted(look.made, key=lambda each: each.index):  # a mark is that of the first
        for other in look.made[leaf]:
            found[other] = {**found.get(other, {}), **found.get(leaf, {})}
    return found


def _steps(looks: Looks, n: int) -> dict[Leaf, list[Step]]:
    """The steps of each leaf."""
    found: dict[Leaf, list[Step]] = {}
    for leaf, calls in looks.base.seen.items():
        chosen = _chosen(leaf, looks, n)
        in_grad_mode = any(call.has_grad for call in calls)
        for k, call in enumerate(calls):
            if in_grad_mode and not call.has_grad:  # else a checkpoint calls it again
                continue
            others = {b: own for b, o in looks.others.items() if (own := _nth(o, leaf, k, call))}
            fewer = _nth(looks.fewer, leaf, k, call)
            if not call.of_data and (leaf, k) not in looks.base.growing:
                fewer = None
            step = _step(call, others, fewer, n)  # a branch may be that of some samples
            found.setdefault(leaf, []).append(step._replace(chosen=call.name in chosen))
    return found


def _nth(look: Look | None, leaf: Leaf, k: int, like: Seen) -> Seen | None:
    """Call number ``k`` of another pass, if it is the same function."""
    calls = look.seen.get(leaf, []) if look is not None else []
    found = calls[k] if k < len(calls) else None
    same = found is not None and found.name == like.name
    same = same and len(found.arguments) == len(like.arguments) if found else False
    return found if found and same and len(found.results) == len(like.results) else None


def _step(call: Seen, others: dict[int, Seen], fewer: Seen | None, n: int) -> Step:
    """A step, from what was seen of it in all passes."""

    def places(kind: str, data: list[bool]) -> list[Place | None]:
        own: list[Place | None] = []
        for k, t in enumerate(getattr(call, kind)):
            same = {b: getattr(o, kind)[k] for b, o in others.items()}
            if t is None or not others or any(o is None for o in same.values()):
                own.append(None if t is None else UNKNOWN)
                continue
            small = getattr(fewer, kind)[k] if fewer else None
            place = place_of(t, same, None if small is None else small.shape, n)
            if place is None:  # nothing changed: an activation that is zero, or a constant
                place = NO_CHANGE if data[k] else SHARED
            own.append(place)
        return own

    arguments, results = (places(k, d) for k, d in zip(("arguments", "results"), call.is_data))
    first = next((p for p in (*arguments, *results) if isinstance(p, Layout)), None)
    for kind, own in (("arguments", arguments), ("results", results)):
        for k, t in enumerate(getattr(call, kind)):
            if own[k] == NO_CHANGE:  # it lies as the others do
                d = (first or Layout()).dim
                fits = len(t.shape) > d and t.shape[d] >= n and t.shape[d] % n == 0
                each = t.shape[d] // n if fits and t.shape[d] > n else 0
                other = Layout(d, bool(first and first.interleaved), each)
                own[k] = other if fits else UNKNOWN
    if call.is_ragged:
        arguments = [UNKNOWN if p else p for p in arguments]
        results = [UNKNOWN if p else p for p in results]
    kept = tuple(p for p in results if p is not None)
    return Step(call.name, tuple(arguments), kept, call.copies)


NO_CHANGE = "no change"


def _lost_in(found: dict[Leaf, list[Step]]) -> set[tuple[Leaf, int]]:
    """The steps in which samples were not found."""
    return {
        (leaf, k)
        for leaf, steps in found.items()
        for k, step in enumerate(steps)
        if UNKNOWN in (*step.arguments, *step.results)
    }


def _chosen(leaf: Leaf, looks: Looks, n: int) -> set[str]:
    """The functions whose rows the data have chosen: each sample keeps its rows, in any order,
    while others are replaced.
    """
    names = {call.name for call in looks.base.seen[leaf]}
    return {name for name in names if _keeps_rows(leaf, name, looks, n)}


def _keeps_rows(leaf: Leaf, name: str, looks: Looks, n: int) -> bool:
    def of(look: Look) -> list[Tensor] | None:
        calls = [call for call in look.seen.get(leaf, []) if call.name == name]
        if any(call.owner_N is None for call in calls):
            return None
        if not calls:  # an expert that no sample was sent to
            return [torch.zeros(0, dtype=torch.float64)] * n
        owners = torch.cat([call.owner_N for call in calls if call.owner_N is not None])
        rows = torch.cat([call.number_N for call in calls if call.number_N is not None])
        return [rows[owners == b].sort().values for b in range(n)]

    first = of(looks.base)
    if first is None:
        return False

    def same(a: Tensor, b: Tensor) -> bool:
        return len(a) == len(b) and torch.allclose(a, b, rtol=1e-4, atol=1e-4)

    changed = False
    for b, look in looks.others.items():
        other = of(look)
        if other is None or not all(same(first[j], other[j]) for j in range(n) if j != b):
            return False
        changed |= not same(first[b], other[b])
    return changed


def _number(x_ND: Tensor) -> Tensor:
    """A number for each row."""
    x_ND = x_ND.double()
    return x_ND @ weights_of(x_ND.shape[1], x_ND)
