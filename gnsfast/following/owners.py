# SPDX-License-Identifier: Apache-2.0
"""The samples of rows that an index of the data has chosen, as autograd's graph tells."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.following.checkpoints import saves_nothing
from gnsfast.torch_internals import result_of, saved


class Owners(NamedTuple):
    """The sample of each row that was chosen from a tensor in which a sample has
    ``per_sample`` rows. Zero stands for rows that the data have chosen in a way that is not
    followed. ``is_piece``: they are all rows of one piece of the tensor, such as ``x[k]``.
    """

    owner_N: Tensor
    per_sample: int
    is_piece: bool = False


def owners_of(x: Tensor, B: int) -> Owners | None:
    """The samples of rows [n, ...] that one index has chosen from those of a batch of B; None if no
    index did. A second index behind the first is not followed. Whether all between the index and
    ``x`` keeps the rows is for the proof to show.
    """
    if saves_nothing() or not B or not x.ndim:
        return None
    index = _index_of(x.grad_fn, x.output_nr, x.shape[0], B)
    if index is None:
        return None
    if not index.rows or index.rows % B or index.is_behind_another(B):
        return Owners(index.at_n, 0)
    per_sample = index.rows // B
    return Owners(index.at_n // per_sample, per_sample, index.is_piece)


class _Index(NamedTuple):
    """An index at ``at_n`` of the ``rows`` of result ``number`` of a node of the graph."""

    at_n: Tensor
    node: Any
    number: int
    rows: int
    is_piece: bool = False

    def is_behind_another(self, B: int) -> bool:
        """Whether an index has chosen these rows too."""
        node, number = self.node, self.number
        while node is not None and node.name() == "UnsqueezeBackward0":  # each expert makes its own
            node, number = node.next_functions[0]
        if node is None:
            return False
        known: dict[Any, bool] = node.metadata.setdefault(BEHIND, {})
        key = number, self.rows, B
        if key not in known:
            known[key] = _index_of(node, number, self.rows, B) is not None
        return known[key]


def _index_of(node: Any, number: int, n: int, B: int) -> _Index | None:
    """The index that has chosen the n rows of result ``number`` of a node; None if none did."""
    todo: list[tuple[Any, int, int | None]] = [(node, number, None)]
    seen = set[Any]()
    while todo and len(seen) < FAR:
        place = node, number, start = todo.pop(0)
        if place in seen:
            continue
        seen.add(place)
        if node is not None and node.name() == "MaskedSelectBackward0":
            return _Index(torch.zeros(n, dtype=torch.int64, device="cpu"), node, number, 0)
        size = torch.Size() if node is None else _size_of(node, number)
        keeps = any(_holds(size[: d + 1].numel(), n, start) for d in range(len(size)))
        if not keeps or _is_made(node) or node.name() in MOVES:
            continue
        name, behind = node.name(), node.next_functions
        if name == "StackBackward0" and saved(node, "dim") == 0:
            continue  # each argument is one of the rows
        if (
            name == "SplitWithSizesBackward0" and saved(node, "dim") == 0
        ):  # rows of one expert of all
            start = (start or 0) + sum(saved(node, "split_sizes")[:number])
        if name == "SliceBackward0" and saved(node, "dim") == 0 and saved(node, "step") == 1:
            begin, rows = saved(node, "start"), saved(node, "self_sym_sizes")[0]
            start = (start or 0) + (begin if begin < 2**63 else begin + rows - 2**64)
        if (
            name in ("SelectBackward0", "UnbindBackward0") and saved(node, "dim") == 0
        ):  # of one sample
            size = _size_of(*behind[0])
            at, rows = number if name == "UnbindBackward0" else saved(node, "index"), size[0]
            if rows and rows % B == 0 and _holds(size[1:-1].numel(), n, start):
                at = (at + rows) % 2**64 if at >= rows else at  # -1 has no sign there
                at_n = torch.full((n,), at, device=result_of(node, 0).device)
                return _Index(at_n, behind[0][0], behind[0][1], rows, is_piece=True)
        if name == "IndexBackward0" or (name in ALONG and saved(node, "dim") == 0):
            size = _size_of(*behind[0])
            index, skipped = _saved_index(node)
            is_first, size = size[:skipped].numel() == 1, size[skipped:]
            if index is not None and index.dtype == torch.bool:
                if size[0] % B:  # all its dimensions together hold the tokens of documents
                    size, index = torch.Size((index.numel(),)), index.flatten()
                index = index.nonzero()[:, 0]
            is_of_rows = index is not None and index.ndim == 1 and index.dtype == torch.int64
            if index is not None and is_of_rows and is_first and _holds(len(index), n, start):
                at_n = index.as_subclass(Tensor)[start or 0 :][:n] % size[0]
                return _Index(at_n, behind[0][0], behind[0][1], size[0])
        todo += [(f, nr, start) for f, nr in behind[: 1 if name in INSERTS else None]]
    return None


def _saved_index(node: Any) -> tuple[Tensor | None, int]:
    """The first index of a node, and the dimension that it is for; no index of ``gather`` whose
    columns have other rows.
    """
    if node.name() != "IndexBackward0":
        index = saved(node, "index")
        if node.name() == "GatherBackward0":
            if any(index.stride()[1:]):
                return None, 0
            index = index.as_strided(index.shape[:1], index.stride()[:1])
        return index, 0
    return next((i, k) for k, i in enumerate(saved(node, "indices")) if i is not None)


def _holds(rows: int, n: int, start: int | None) -> bool:
    """Whether n rows may be all of so many ``rows``, or those from number ``start`` on."""
    return rows == n if start is None else rows >= start + n


def _size_of(node: Any, number: int) -> torch.Size:
    """The shape of result ``number`` of a node."""
    return torch.Size(result_of(node, number).shape)


BEHIND = "gnsfast: rows behind an index"

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


def _is_made(node: Any) -> bool:
    """Whether a node's result holds elements of parameters, or of what is made of them: a piece,
    such as the matrix of one expert of as many, or rows of a table at ids of the data. Of such rows
    the data may choose some.
    """
    choices = 0
    while node is not None and node.name() in CHOICES and MADE not in node.metadata:
        choices += node.name() not in VIEWS
        node = node.next_functions[0][0]
    if node is None or choices > 1:
        return False
    return MADE in node.metadata or isinstance(getattr(node, "variable", None), nn.Parameter)


VIEWS = frozenset(
    f"{name}Backward0"
    for name in "Select Unbind Split SplitWithSizes Slice Transpose T Permute View UnsafeView "
    "Alias Squeeze Unsqueeze ReshapeAlias ToCopy Clone Expand AsStrided".split()
)
"""Nodes whose result holds elements of one argument."""

CHOICES = VIEWS | ALONG | {"IndexBackward0", "EmbeddingBackward0"}

FAR = 80
"""So many nodes of the graph are searched for the index of an expert's rows."""
