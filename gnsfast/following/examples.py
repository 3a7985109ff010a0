# SPDX-License-Identifier: Apache-2.0
"""A few samples of a batch, as the arguments of a model."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gnsfast.functional import Documents
from gnsfast.tensors import map_tensors, tensors_of

FEW = 3
"""So many samples of the first batch are looked at; two are too few to tell a sample from all."""


class Listed(list[Any]):
    """A list with a value, or a tensor, of each sample."""


class Example(NamedTuple):
    """Samples of a batch: the arguments ``args`` and ``kwargs`` of a model, of which the tensors in
    ``dims`` have their n samples along these dimensions, each in as many consecutive rows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any, B: int, lists: bool = False) -> "Example | None":
        """A batch of ``B`` samples; None if nothing has them. With ``lists`` those of B values hold
        samples too.
        """
        if lists:
            is_leaf = partial(_is_list_of, B=B)
            args, kwargs = pytree.tree_map_only(list, Listed, (args, kwargs), is_leaf)
        given = tensors_of((args, kwargs), KINDS)
        tensors = [t for t in given if isinstance(t, Tensor)]
        at = 0 if any(t.ndim and t.shape[0] == B for t in tensors) else 1
        square = any(t.shape[:2] == (B, B) and not _is_mask(t) for t in tensors)

        def dim_of(t: Any) -> int | None:
            if isinstance(t, Listed):
                return 0
            return None if square and _is_of_tokens(t, B) else _dim_of(t, at, B)

        dims = tuple(map(dim_of, given))
        return cls(tuple(args), dict(kwargs), B, dims) if {*dims} - {None} else None

    @property
    def lists(self) -> bool:
        """Whether it has lists of samples."""
        return any(isinstance(t, Listed) for t in tensors_of((self.args, self.kwargs), KINDS))

    def few(self, n: int = FEW) -> "Example":
        """So many of its samples, again from the first if it has fewer."""
        return self.part(b % self.n for b in range(n))

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
            whole = cls.of(args, kwargs, rows) if apart else None
            return whole and whole.few()
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

        def pick(t: Any) -> Any:
            d = next(dims)
            if isinstance(t, Listed):
                return Listed(map_tensors(_copy, [t[b] for b in chosen]))
            return _copy(t) if d is None else _copy(t, _picked(t, d, chosen, self.n))

        args, kwargs = map_tensors(pick, (self.args, self.kwargs), KINDS)
        return Example(args, kwargs, len(chosen), self.dims)

    def replaced(self, b: int) -> "Example":
        """The samples, with the next one in the place of sample ``b``. Sample -1 replaces none."""
        return self.part((b + 1) % self.n if k == b else k for k in range(self.n))


KINDS = (Tensor, Listed)


def _is_list_of(value: Any, B: int) -> bool:
    """Whether ``value`` is a list of B values, none of which is a batch itself."""
    if type(value) is not list or len(value) != B:
        return False
    return all(B not in t.shape[:2] for t in tensors_of(value))


def lists_of(tree: Any, B: int) -> list[Any]:
    """The lists in ``tree`` that hold B samples."""
    is_listed = partial(_is_list_of, B=B)
    return [*filter(is_listed, pytree.tree_leaves(tree, is_leaf=is_listed))]


def _copy(t: Tensor, own: Tensor | None = None) -> Tensor:
    """A copy of a tensor, or its ``own`` part, which gets a gradient if it does."""
    own = t.detach().clone() if own is None else own
    return own.requires_grad_(t.requires_grad)


def _dim_of(t: Tensor, at: int, B: int) -> int | None:
    """The dimension with the B samples of a tensor of the batch: ``at``, or the other one of the
    first two for ids and features, which may lie sequence first beside a mask that does not. One
    row of positions [1, T] is none. A mask of each head [B * heads, T, T] has several rows for a
    sample.
    """
    s = t.shape
    if t.layout != torch.strided or t.is_nested:
        return None
    if len(s) > at and s[at] == B:
        return at
    if at == 0 and len(s) > 1 and s[1] == B and not (_is_mask(t) or (len(s) == 2 and s[0] == 1)):
        return 1
    return 0 if t.ndim == 3 and B > 1 and s[0] and s[0] % B == 0 and B not in s[:2] else None


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


def _picked(t: Tensor, dim: int, samples: list[int], n: int) -> Tensor:
    """Some of the n samples of a tensor, which may be a DTensor."""
    t, each = t.detach(), t.shape[dim] // n
    is_all = samples == [*range(n)]  # whose parts take long to cut where they are many
    return torch.cat([t] if is_all else [t.narrow(dim, b * each, each) for b in samples], dim)
