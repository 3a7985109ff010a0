# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a tensor lie."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.following.checkpoints import saves_nothing
from gnsfast.tensors import is_dtensor


class Layout(NamedTuple):
    """Dimension ``dim`` holds B samples of consecutive rows, or if ``interleaved`` rows that are B
    apart. ``several`` is the number of rows that a sample had there in the example, 0 for one.
    ``ANY_NUMBER`` stands for any number; None for unknown: without an example only a dimension of
    size B counts.
    """

    dim: int = 0
    interleaved: bool = False
    several: int | None = None

    @classmethod
    def of(cls, shape: torch.Size, n: int, dim: int, interleaved: bool = False) -> "Layout":
        """That of n samples along a dimension of a tensor of this shape."""
        return cls(dim, interleaved, shape[dim] // n if shape[dim] > n else 0)

    def fits(self, shape: torch.Size | tuple[int, ...], B: int) -> bool:
        """Whether a tensor of this shape may hold B samples so. Where each sample had one row in
        the example, more rows may lie in either order.
        """
        if self.dim >= len(shape) or (B and shape[self.dim] % B):
            return False
        return bool(self.several) or shape[self.dim] == B

    @property
    def is_first(self) -> bool:
        """Whether dimension 0 has the size of the batch."""
        return self.dim == 0 and not self.several

    def samples_first(self, t: Tensor, B: int) -> Tensor:
        """``t`` with the samples in dimension 0 and, if they have several rows, those in
        ``dim`` + 1.
        """
        d, n = self.dim, t.shape[self.dim]
        if n == B:
            return t.movedim(d, 0) if d else t
        parts, own = ((n // B, B), d + 1) if self.interleaved else ((B, n // B), d)
        first: Tensor = torch.unflatten(t, d, parts).movedim(own, 0)
        return first

    def owners(self, shape: torch.Size, B: int, device: torch.device) -> Tensor:
        """The sample of each entry of a tensor of this shape."""
        n = shape[self.dim]
        rows = torch.arange(n, device=device)
        rows = rows % B if self.interleaved else rows // max(n // max(B, 1), 1)
        return rows.view(-1, *(1,) * (len(shape) - self.dim - 1)).expand(shape)

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's part of ``t``, with as many dimensions."""
        each = t.shape[self.dim] // B
        if self.interleaved:
            rows: Tensor = torch.unflatten(t, self.dim, (each, B))
            return rows.select(self.dim + 1, b)
        return t.narrow(self.dim, b * each, each)

    def alone(self, t: Tensor, b: int, B: int) -> Tensor:
        """``t`` with zeros in the place of all samples but b."""
        return t.masked_fill(self.owners(t.shape, B, t.device) != b, 0.0)


class Growth:
    """How many rows a sample may have in this batch, of a tensor in which it had several in the
    first one: as many, or more where the samples are longer. Else the data may have chosen them.
    Some rows may stay, as that of a class token does, if a proof has shown it.

    ``sizes`` are those of the samples now and in the first batch, of each tensor that has samples
    and of its parts, by their numbers. ``proven`` tells by the name of a parameter with which of
    these sizes the rows grow that its functions get, and how many stay. ``tried`` are those that a
    proof is to show, None if none runs.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}
        self.proven: dict[str, set[tuple[int, int]]] = {}
        self.tried: dict[str, set[tuple[int, int]]] | None = None

    def allows(self, name: str, first: int, now: int) -> bool:
        """Whether a sample may have so many rows ``now`` that had ``first`` ones, of a function
        that takes the parameter ``name``.
        """
        is_plain, found = now == first, set()
        for k, (new, old) in self.sizes.items():
            is_plain |= now * old == first * new or now * old**2 == first * new**2
            if old and new != old:
                stay, rest = divmod(first * new - now * old, new - old)
                if not rest and stay <= min(first, now):
                    found.add((k, stay))
        if self.tried is not None:
            self.tried.setdefault(name, set()).update(found)
            return is_plain or bool(found)
        proven = self.proven.get(name, ())
        for k, stay in proven:
            new, old = self.sizes.get(k, (0, 1))
            if new and (now - stay) * old == (first - stay) * new:
                return True
        return is_plain and (now != first or not proven)


class Chosen(NamedTuple):
    """Dimension 0 holds rows that the data have chosen, as before an expert. ``owner_N`` is the
    sample of each row.
    """

    owner_N: Tensor

    @property
    def order_N(self) -> Tensor:
        """The order in which the rows of each sample lie one after the other."""
        return self.owner_N.argsort(stable=True)

    def starts(self, B: int) -> Tensor:
        """[B + 1], where the rows of each sample begin in this order."""
        ends_B = torch.bincount(self.owner_N, minlength=B).cumsum(0)
        return torch.cat([ends_B.new_zeros(1), ends_B])

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's rows."""
        return t[self.owner_N == b]

    def alone(self, t: Tensor, b: int, B: int) -> Tensor:
        """``t`` with zeros in the place of all rows but those of sample b."""
        return t.masked_fill((self.owner_N != b).view(-1, *[1] * (t.ndim - 1)), 0.0)


class Owned(NamedTuple):
    """Each entry belongs to the sample that ``owner`` tells, which has the shape of the tensor."""

    owner: Tensor


FIRST = Layout()
"""Samples lie along dimension 0."""

ANY_NUMBER = -1

ALONE = Layout(several=ANY_NUMBER)
"""All rows belong to the one sample of the batch."""

SHARED = "shared"
"""No sample has a part in the tensor: it is made of parameters and constants alone."""

UNKNOWN = "unknown"
"""The samples of the tensor were not found."""

Place = Layout | Chosen | str


class Print(NamedTuple):
    """The fingerprint of a tensor: for each dimension a number for each of its indices, which a
    change there changes. It takes little memory, so those of whole passes can be kept.
    The pass had ``n`` samples. ``is_active``: a gradient goes through the tensor to the batch.
    """

    n: int
    shape: torch.Size
    along: tuple[Tensor, ...]
    is_active: bool = False

    @classmethod
    def of(cls, t: Any, n: int, is_active: bool = False) -> "Print":
        """The fingerprint of ``t``, in its own precision where it has floating-point numbers."""
        if is_dtensor(t):  # a vocabulary in parts can be added up only once
            partial = any(placement.is_partial() for placement in t.placements)
            t = t.to_local() if partial else t.full_tensor()
        if t.is_nested:
            return cls(n, torch.Size(), (), is_active)
        shape, t = t.shape, t.detach()
        if t.layout != torch.strided:
            return cls(n, shape, tuple(_along_sparse(t)), is_active)
        t = t.as_subclass(Tensor)
        if t.is_complex():
            t = torch.view_as_real(t).sum(-1)
        elif not t.is_floating_point():
            t = t.double()
        found = _along(t)
        if not all(bool(each.isfinite().all()) for each in found):  # as of a mask
            found = _along(t.nan_to_num(0.1, 1e4, -1e4))
        return cls(n, shape, tuple(found), is_active)

    def differs(self, other: "Print", d: int) -> Tensor:
        """At which indices of dimension ``d`` two tensors differ by more than rounding."""
        a, b = self.along[d], other.along[d]
        largest = a.abs().amax() if a.numel() else 0.0
        return (a - b).abs() > TOLERANCE * largest


TOLERANCE = 1e-5
"""Of the largest number of a print: below it a difference between two passes is rounding."""


def _along(t: Tensor) -> list[Tensor]:
    """A number for each index of each dimension of ``t``, in two passes over it."""
    found: list[Tensor] = []
    if not t.numel():
        return [t.new_zeros(size) for size in t.shape]
    for d in reversed(range(t.ndim)):  # the last dimension is summed over, and so on
        rest = t.reshape(t.shape[:d].numel(), t.shape[d])  # also without elements
        found.append(weights_of(len(rest), t) @ rest)
        t = t @ weights_of(t.shape[d], t) if d else t
    return found[::-1]


def _along_sparse(t: Tensor) -> list[Tensor]:
    """The same of a sparse tensor, of which a dense one may be too large."""
    t = t.to_sparse_coo().coalesce()
    indices, values_N = t.indices(), t.values().double()
    if values_N.ndim > 1:
        values_N = values_N.flatten(1) @ weights_of(values_N[0].numel(), values_N)
    for size, at_N in zip(t.shape, indices):
        values_N = values_N * weights_of(size, values_N)[at_N]
    return [values_N.new_zeros(n).index_add(0, at_N, values_N) for n, at_N in zip(t.shape, indices)]


def weights_of(n: int, like: Tensor) -> Tensor:
    """Weights that look random. They use no random generator, whose state belongs to the user."""
    k = torch.arange(1, n + 1, dtype=torch.float64, device=like.device)
    return k.mul(0.7391).sin_().to(like.dtype)


def place_of(base: Print, others: dict[int, Print], fewer: Print | None) -> Place | None:
    """Where the samples of a tensor lie. ``base`` is its print, ``others`` are those in passes in
    which one sample was replaced, by the number of that sample, and ``fewer`` is that of a pass of
    another number of samples. None if nothing in it changed.
    """
    n, number = base.n, len(others)
    others = {b: other for b, other in others.items() if other.shape == base.shape}
    if len(others) < max(number - 1, min(number, 2)):  # the longest sample may give all its length
        return UNKNOWN
    dims = range(len(base.shape))
    changed = {b: [base.differs(other, d) for d in dims] for b, other in others.items()}
    if not any(bool(c.any()) for each in changed.values() for c in each):
        found = grown(base, fewer)
        if found is not None and _is_interleaved(base.along[found.dim], n):
            found = found._replace(interleaved=True)
        return found
    for d, size in enumerate(base.shape):
        if size < n or size % n:
            continue
        for interleaved in (False, True):
            parts = (size // n, n) if interleaved else (n, size // n)
            own = {
                b: each[d].view(parts).any(0 if interleaved else 1) for b, each in changed.items()
            }
            if not any(bool(o[[j for j in range(n) if j != b]].any()) for b, o in own.items()):
                return Layout.of(base.shape, n, d, interleaved)
    return UNKNOWN


def _is_interleaved(number_N: Tensor, n: int) -> bool:
    """Whether the rows of n samples, which are the same in each, lie so that each is beside the
    same one of the others.
    """
    if len(number_N) % n:  # as one row of each pair of samples
        return False
    largest = number_N.abs().amax()

    def is_same(number_nT: Tensor) -> bool:
        return bool((number_nT - number_nT[:1]).abs().amax() <= TOLERANCE * largest)

    return is_same(number_N.view(-1, n).t()) and not is_same(number_N.view(n, -1))


def grown(base: Print, fewer: Print | None) -> Layout | None:
    """The one dimension whose size is in proportion to the number of samples. Others may be as long
    as the longest sample.
    """
    dims = growing(base, fewer)
    return Layout.of(base.shape, base.n, dims[0]) if len(dims) == 1 else None


def growing(base: Print, fewer: Print | None) -> list[int]:
    """The dimensions whose sizes are in proportion to the number of samples."""
    if fewer is None or len(fewer.shape) != len(base.shape):
        return []
    sizes = enumerate(zip(base.shape, fewer.shape))
    return [d for d, (a, b) in sizes if a != b and a * fewer.n == b * base.n]


class Owners(NamedTuple):
    """The sample of each row that was chosen from a tensor in which a sample has ``each`` rows.
    ``is_sure``: the shape of that tensor shows without an example that dimension 0 holds samples.
    """

    owner_N: Tensor
    each: int
    is_sure: bool


def owners_of(x: Tensor, B: int) -> Owners | None:
    """The samples of rows [n, ...] that were indexed from those of a batch, also several times, as
    autograd's graph of ``x`` tells. Whether all between an index and the next one, or ``x``, keeps
    the rows is for the example to show.
    """
    return None if saves_nothing() or not B else _owners(x.grad_fn, x.output_nr, x.shape[0], B)


def _owners(fn: Any, number: int, n: int, B: int, deep: int = 0) -> Owners | None:
    """The same for the n rows of result ``number`` of a node, behind so many others."""
    if deep > DEEP:
        return None
    todo: list[tuple[Any, int, int | None]] = [(fn, number, None)]
    seen = set[Any]()
    while todo and len(seen) < FAR:
        at = fn, number, start = todo.pop(0)
        if at in seen:
            continue
        seen.add(at)
        size = torch.Size() if fn is None else _size_of(fn, number)
        keeps = any(_holds(size[: d + 1].numel(), n, start) for d in range(len(size)))
        if not keeps or _is_made(fn) or fn.name() in MOVES:
            continue
        name, behind = fn.name(), fn.next_functions
        if name == "SplitWithSizesBackward0" and fn._saved_dim == 0:  # rows of one expert of all
            start = (start or 0) + sum(fn._saved_split_sizes[:number])
        if name == "SliceBackward0" and fn._saved_dim == 0 and fn._saved_step == 1:
            begin, rows = fn._saved_start, fn._saved_self_sym_sizes[0]
            start = (start or 0) + (begin if begin < 2**63 else begin + rows - 2**64)
        if name == "CatBackward0" and fn._saved_dim == 0 and all(f for f, _ in behind):
            parts = [(f, nr, _size_of(f, nr)[0]) for f, nr in behind]
            is_all = sum(k for *_, k in parts) == n
            of_all = [_owners(*part, B, deep + 1) for part in parts] if is_all else [None]
            known = [own for own in of_all if own is not None]
            if len(known) == len(of_all):
                return known[0]._replace(owner_N=torch.cat([own.owner_N for own in known]))
        if name in ("SelectBackward0", "UnbindBackward0") and fn._saved_dim == 0:  # of one sample
            size = _size_of(*behind[0])
            index, rows = number if name == "UnbindBackward0" else fn._saved_index, size[0]
            if rows and rows % B == 0 and _holds(size[1:-1].numel(), n, start):
                index = (index + rows) % 2**64 if index >= rows else index  # -1 has no sign there
                at_n = torch.full((n,), index, device=fn._input_metadata[0].device)
                return _owners_at(at_n, behind[0], size, B, deep)
        if name == "IndexBackward0" or (name in ALONG and fn._saved_dim == 0):
            indices = fn._saved_indices if name == "IndexBackward0" else (fn._saved_index,)
            k, index = next((k, i) for k, i in enumerate(indices) if i is not None)
            size = _size_of(*behind[0])
            is_first, size = size[:k].numel() == 1, size[k:]
            if name == "GatherBackward0":
                if any(index.stride()[1:]):  # each column may have other rows
                    return None
                index = index.as_strided(index.shape[:1], index.stride()[:1])
            if index.dtype == torch.bool:
                if size[0] % B:  # all its dimensions together hold the tokens of documents
                    size, index = torch.Size((index.numel(),)), index.flatten()
                index = index.nonzero()[:, 0]
            chosen = index.ndim == 1 and index.dtype == torch.int64 and is_first
            if chosen and _holds(len(index), n, start):
                index = index.as_subclass(Tensor)[start or 0 :][:n] % size[0]
                return _owners_at(index, behind[0], size, B, deep)
        todo += [(f, nr, start) for f, nr in behind[: 1 if name in INSERTS else None]]
    return None


def _owners_at(
    at_n: Tensor, of: tuple[Any, int], size: torch.Size, B: int, deep: int
) -> Owners | None:
    """Those of some rows of a node's result, ``of`` which number, that may be chosen rows too."""
    (fn, number), rows = of, size[0]
    while fn.name() == "UnsqueezeBackward0":  # as each of many experts makes of the same rows
        fn, number = fn.next_functions[0]
    known: dict[Any, Owners | None] = fn.metadata.setdefault(OWNERS, {})
    if (key := (number, rows, B)) not in known:
        known[key] = _owners(fn, number, rows, B, deep + 1)
    if (own := known[key]) is not None:
        return own._replace(owner_N=own.owner_N[at_n])
    if rows % B or CHOSEN in fn.metadata:
        return None
    if rows > B and fn.name() in FLATTENED:
        size = fn._saved_self_sym_sizes
    return Owners(at_n // (rows // B), rows // B, size[0] == B and B not in size[1:])


def _holds(rows: int, n: int, start: int | None) -> bool:
    """Whether n rows may be all of so many ``rows``, or those from number ``start`` on."""
    return rows == n if start is None else rows >= start + n


def _size_of(fn: Any, number: int) -> torch.Size:
    """The shape of result ``number`` of a node."""
    return torch.Size(fn._input_metadata[number].shape)


def mark_chosen(t: Tensor) -> None:
    """Note in the graph of ``t`` that the data have chosen its rows."""
    if t.grad_fn is not None:
        t.grad_fn.metadata[CHOSEN] = True  # type: ignore[index]


OWNERS, CHOSEN = "gnsfast: samples of rows", "gnsfast: chosen by the data"

ALONG = frozenset(("IndexSelectBackward0", "GatherBackward0"))
"""Nodes of an index along one dimension."""

MOVES = frozenset(("FlipBackward0", "RollBackward0"))
"""Nodes whose result has the rows of their argument in another order."""

INSERTS = frozenset(
    f"{name}Backward0"
    for name in "IndexAdd IndexCopy IndexPut Scatter ScatterAdd MaskedScatter".split()
)
"""Nodes whose result has the rows of their first argument."""


def mark_made(t: Tensor) -> None:
    """Note in the graph of ``t`` that it is made of parameters and constants alone."""
    if t.grad_fn is not None:
        t.grad_fn.metadata[MADE] = True  # type: ignore[index]


MADE = "gnsfast: made of parameters"


def _is_made(fn: Any) -> bool:
    """Whether a node's result holds elements of parameters, or of what is made of them: a piece,
    such as the matrix of one expert of as many, or rows of a table at ids of the data. Of such rows
    the data may choose some.
    """
    choices = 0
    while fn is not None and fn.name() in CHOICES and MADE not in fn.metadata:
        choices += fn.name() not in VIEWS
        fn = fn.next_functions[0][0]
    if fn is None or choices > 1:
        return False
    return MADE in fn.metadata or isinstance(getattr(fn, "variable", None), nn.Parameter)


VIEWS = frozenset(
    f"{name}Backward0"
    for name in "Select Unbind Split SplitWithSizes Slice Transpose T Permute View UnsafeView "
    "Alias Squeeze Unsqueeze ReshapeAlias ToCopy Clone Expand AsStrided".split()
)
"""Nodes whose result holds elements of one argument."""

CHOICES = VIEWS | {"IndexBackward0", "IndexSelectBackward0", "EmbeddingBackward0"}

FLATTENED = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
"""Nodes of ``flatten``."""

FAR = 80
"""So many nodes of the graph are searched for the index of an expert's rows."""

DEEP = 16
"""So many indices one behind the other are followed."""
