# SPDX-License-Identifier: Apache-2.0
"""The marks of tensors that are made from the batch, by which a look tells what the data chose."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Mark(Enum):
    """What a tensor is that is made from the batch. Of ``RAGGED`` ones the data have chosen how
    many rows there are, and of ``SORTED`` ones their order, until the data order them again.
    Another batch may choose in another way.
    """

    DATA, RAGGED, SORTED = "data", "ragged", "sorted"


DATA, RAGGED, SORTED = Mark

SELECTS = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive _pack_padded_sequence".split()
)
INSERTS = frozenset(
    "__setitem__ index_copy index_add index_put masked_scatter scatter scatter_add index_copy_ "
    "index_add_ index_put_ masked_scatter_ scatter_ scatter_add_ index_fill index_fill_".split()
)
"""Functions whose result has the shape of their first argument."""


def mark_of_results(
    name: str, arguments: list[Any], marks: list[Any], args: Any, kwargs: Any, samples: int
) -> Mark:
    """The mark of the results of a function of data."""
    by_order = _reorders(name, arguments, marks, args, kwargs, samples)
    if name in INSERTS:
        source = next(m for t, m in zip(arguments[::-1], marks[::-1]) if isinstance(t, Tensor))
        if by_order and source in (DATA, SORTED):
            return DATA if source is SORTED else SORTED
        return marks[0] if isinstance(marks[0], Mark) else DATA
    if name == "_pad_packed_sequence":  # the samples lie as they were packed
        return SORTED
    if name in SELECTS or RAGGED in marks:
        return RAGGED
    by_data = [t for t, mark in zip(arguments[1:], marks[1:]) if isinstance(mark, Mark)]
    by_mask = name == "__getitem__" and any(t.dtype in MASKS for t in by_data)
    if (
        by_mask
        or (name == "where" and len(arguments) == 1)
        or (name == "repeat_interleave" and by_data)
    ):
        return RAGGED
    chooses = name == "__getitem__" and bool(by_data) and arguments[1] is by_data[0]
    by_order |= chooses and not _is_table(arguments[0], marks[0])
    if by_order:
        return DATA if marks[name == "embedding"] is SORTED else SORTED
    return SORTED if SORTED in marks else DATA


def _is_table(t: Any, mark: Any) -> bool:
    """Whether a tensor is made of parameters and constants alone. Its rows are no samples, and so
    those that the data choose have the order of the samples in the index. (What has a gradient but
    no mark comes from a kernel that is no function of torch.)
    """
    return t.grad_fn is None if mark is None else not isinstance(mark, Mark)


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
    if name not in INSERTS and _is_table(x, own[k][1]):
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
