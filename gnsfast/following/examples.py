# SPDX-License-Identifier: Apache-2.0
"""A few samples of a batch, as the arguments of a model."""

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gnsfast.following.layouts import FIRST, Layout
from gnsfast.functional import Documents
from gnsfast.tensors import map_tensors, tensors_of

FEW = 3
"""So many samples of the first batch are looked at; two are too few to tell a sample from all."""


class Listed(list[Any]):
    """A list with a value, or a tensor, of each sample."""


class Arrangement(NamedTuple):
    """One way in which a batch may hold its samples: in dimension ``dim`` of its tensors, which is
    0 by default where any has their number there, else 1. With ``lists``, lists of B values hold
    samples. In tensors that have several rows for each, those of a sample may lie ``apart``: every
    B-th row. ``in_rows``: so may tensors that have their number in dimension 1, as tokens.
    """

    lists: bool = False
    dim: int | None = None
    apart: bool = False
    in_rows: bool = False

    def __str__(self) -> str:
        if self.lists:
            return "in lists"
        several = " in several rows of each" if self.in_rows else ""
        return f"in dimension {self.dim}{several}" + (", in rows that are apart" * self.apart)


USUAL = Arrangement()


class Example(NamedTuple):
    """Samples of a batch: the arguments ``args`` and ``kwargs`` of a model, of which the tensors
    with ``layouts`` have their n samples there.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    layouts: tuple[Layout | None, ...]
    arrangement: Arrangement = USUAL

    @classmethod
    def of(
        cls,
        args: Any,
        kwargs: Any,
        B: int,
        arrangement: Arrangement = USUAL,
        held: Sequence[bool] = (),
    ) -> "Example | None":
        """A batch of ``B`` samples; None if nothing has them. ``held`` says which of its tensors
        have samples, where another batch has shown it.
        """
        lists, dim, _, in_rows = arrangement
        if lists:
            is_leaf = partial(_is_list_of, B=B)
            args, kwargs = pytree.tree_map_only(list, Listed, (args, kwargs), is_leaf)
        given = tensors_of((args, kwargs), KINDS)
        tensors = [t for t in given if isinstance(t, Tensor)]
        if dim is None:
            dim = 0 if in_rows or any(t.ndim and t.shape[0] == B for t in tensors) else 1
        own = arrangement._replace(dim=dim)
        square = any(_is_square(t, B) for t in tensors)

        def layout_of(t: Any) -> Layout | None:
            if isinstance(t, Listed):
                return FIRST
            return None if square and _is_of_tokens(t, B) else _layout_of(t, B, own)

        layouts = tuple(map(layout_of, given))
        if len(held) == len(layouts):
            layouts = tuple(each if has else None for each, has in zip(layouts, held))
        return cls(tuple(args), dict(kwargs), B, layouts, own) if {*layouts} - {None} else None

    @classmethod
    def all_of(cls, args: Any, kwargs: Any, B: int, dims: int = 2) -> "list[Example]":
        """A batch of ``B`` samples in all ways in which it may hold them, the most usual first: in
        one of the first ``dims`` dimensions.
        """
        given = (args, kwargs)
        listed, tensors = lists_of(given, B), tensors_of(given)
        shapes = [t.shape for t in tensors if t.shape[:1] == (B,) and not _is_of_tokens(t, B)]
        others = [d for d in range(1, dims) if any(shape[d : d + 1] == (B,) for shape in shapes)]
        first = bool(listed) and not any(B in t.shape[:2] for t in tensors_of(listed))
        rows = {False, any(B in t.shape[1:2] and not t.shape[0] % B for t in tensors)}
        ways = itertools.product(sorted(rows), (False, True), (None, *others), (first, not first))
        found: list[Example] = []
        for in_rows, apart, dim, lists in ways:
            own = cls.of(args, kwargs, B, Arrangement(lists, dim, apart, in_rows))
            if own is not None and not any(own.is_like(other) for other in found):
                found.append(own)
        return found

    def is_like(self, other: "Example") -> bool:
        """Whether another one holds the same samples."""
        is_same = self.layouts == other.layouts
        if is_same or self.arrangement.lists != other.arrangement.lists:
            return is_same
        pairs = zip(*(tensors_of((own.args, own.kwargs)) for own in (self.few(), other.few())))
        return all(torch.equal(a, b) for a, b in pairs)

    def few(self, n: int = FEW) -> "Example":
        """So many of its samples, again from the first if it has fewer."""
        return self.part(b % self.n for b in range(n))

    @property
    def is_unclear(self) -> bool:
        """Whether a part of a model that gets this may hold its samples in another way: positions
        that all samples share, or features of a sample, may be as many as samples.
        """
        given = tensors_of((self.args, self.kwargs), KINDS)
        held = [(t, own) for t, own in zip(given, self.layouts) if own is not None]
        tensors = [t for t in given if isinstance(t, Tensor)]
        if any(t.shape == (self.n,) and _is_of_tokens(t, self.n) for t in tensors):
            return True
        return all(_is_of_features(t) and own.dim == 1 for t, own in held)

    @classmethod
    def without_samples(cls, args: Any, kwargs: Any, n: int = 1) -> "Example":
        """The arguments as they are, for a process that only runs the passes of others."""
        return cls(tuple(args), dict(kwargs), n, (None,) * len(tensors_of((args, kwargs))))

    @classmethod
    def of_documents(
        cls, args: Any, kwargs: Any, rows: int, documents: Documents
    ) -> "Example | None":
        """A few ``rows`` of packed documents as samples. Of a single row they are the longest
        documents, as much of each as the shortest of these has. None if documents go on in the next
        row.
        """
        N, length_D = documents.tokens, documents.starts.diff()
        if rows != 1:
            starts = {*documents.starts.tolist()}
            apart = rows > 1 and all(k * N // rows in starts for k in range(rows))
            whole = cls.of(args, kwargs, rows) if apart else None
            return whole and whole.few()
        longest = [d for d in length_D.argsort(descending=True).tolist() if length_D[d] > 1][:FEW]
        given = [t for t in tensors_of((args, kwargs)) if t.ndim]
        if len(longest) < 2 or any(t.shape[0] != 1 or N not in t.shape for t in given):
            return None
        n, T = len(longest), int(length_D[longest[-1]])
        first = documents.starts[longest].tolist()

        def cut(t: Tensor) -> Tensor:
            parts = [t.detach()] * n
            for d, size in enumerate(t.shape):
                if d and size == N:
                    parts = [own.narrow(d, s, T) for own, s in zip(parts, first)]
            return torch.cat(parts) if t.ndim else t.detach().clone()

        layouts = tuple(FIRST if t.ndim else None for t in tensors_of((args, kwargs)))
        args, kwargs = map_tensors(cut, (tuple(args), dict(kwargs)))
        return cls(args, kwargs, n, layouts)

    def part(self, samples: Any) -> "Example":
        """Some of the samples."""
        chosen = list(samples)
        layouts = iter(self.layouts)

        def pick(t: Any) -> Any:
            layout = next(layouts)
            if isinstance(t, Listed):
                return Listed(map_tensors(_copy, [t[b] for b in chosen]))
            return _copy(t, layout, chosen, self.n)

        args, kwargs = map_tensors(pick, (self.args, self.kwargs), KINDS)
        return self._replace(args=args, kwargs=kwargs, n=len(chosen))

    def replaced(self, b: int) -> "Example":
        """The samples, with the next one in the place of sample ``b``. Sample -1 replaces none."""
        return self.part((b + 1) % self.n if k == b else k for k in range(self.n))


KINDS = (Tensor, Listed)


def form_of(given: list[Tensor]) -> tuple[Any, ...]:
    """What tells a batch of images from one of texts."""
    return tuple((t.ndim, t.is_floating_point()) for t in given)


def sizes_of(given: list[Tensor], samples: int) -> list[list[int]]:
    """The dimensions of each tensor of a batch for a sample, as frames, rows and columns, and how
    many of the first ones it has together; nothing if it has no samples.
    """
    sizes: list[list[int]] = []
    for t in given:
        own = [] if t.is_nested else [*t.shape]
        if samples and samples in own[:2]:
            own.remove(samples)
            sizes.append([*itertools.accumulate(own, operator.mul), *own[1:]] or [1])
        else:
            sizes.append([])
    return sizes


def _is_list_of(value: Any, B: int) -> bool:
    return type(value) is list and len(value) == B


def lists_of(tree: Any, B: int) -> list[Any]:
    """The lists in ``tree`` that may hold B samples."""
    is_listed = partial(_is_list_of, B=B)
    return [*filter(is_listed, pytree.tree_leaves(tree, is_leaf=is_listed))]


def _copy(
    t: Tensor, layout: Layout | None = None, samples: Sequence[int] = (), n: int = 0
) -> Tensor:
    """A copy of a tensor, which may be a DTensor, or some of its n ``samples`` if a ``layout`` says
    where they lie. It gets a gradient if the tensor does.
    """
    own = t.detach()
    if layout is None or samples == [*range(n)]:  # whose parts take long to cut where they are many
        return own.clone().requires_grad_(t.requires_grad)
    parts, d = [layout.of_sample(own, b, n) for b in samples], layout.dim
    own = torch.stack(parts, d + 1).flatten(d, d + 1) if layout.interleaved else torch.cat(parts, d)
    return own.requires_grad_(t.requires_grad)


def _layout_of(t: Tensor, B: int, way: Arrangement) -> Layout | None:
    """Where a tensor of the batch holds the B samples: in dimension ``way.dim``, or in the other
    one of the first two for ids and features, which may lie sequence first beside a mask that does
    not. One row of positions [1, T] holds none. In a mask of each head [B * heads, T, T] a sample
    has several rows.
    """
    s, at = t.shape, way.dim or 0
    has_rows = B > 1 and t.ndim > 0 and s[0] > 0 and s[0] % B == 0
    if t.layout != torch.strided or t.is_nested:
        return None
    if len(s) > at and s[at] == B:
        return Layout(at)
    if has_rows and (way.in_rows or (t.ndim == 3 and B not in s[:2])):
        return Layout(0, way.apart, s[0] // B)
    if at == 0 and len(s) > 1 and s[1] == B and not (_is_mask(t) or (len(s) == 2 and s[0] == 1)):
        return Layout(1)
    return FIRST if at and s == (B,) else None


def _is_of_features(t: Any) -> bool:
    """Whether the last of two dimensions may be the features of rows."""
    return isinstance(t, Tensor) and t.ndim == 2 and t.is_floating_point()


def _is_square(t: Tensor, B: int) -> bool:
    """Whether the samples may lie in dimension 0 or in dimension 1."""
    return t.shape[:2] == (B, B) and not _is_mask(t)


def _is_mask(t: Tensor) -> bool:
    return t.ndim < 3 and (t.is_floating_point() or t.dtype == torch.bool)


def _is_of_tokens(t: Tensor, B: int) -> bool:
    """Whether a tensor of a batch with as many tokens as samples holds the positions of the tokens,
    or a mask that hides later ones.
    """
    if t.shape == (B,) and not _is_mask(t):
        return bool((t.diff() == 1).all())
    triangles = (t.tril(), t.triu()) if t.shape == (B, B) and _is_mask(t) else ()
    return any(torch.equal(t, own) for own in triangles)
