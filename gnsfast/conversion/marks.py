# SPDX-License-Identifier: Apache-2.0
"""Marks tensors by the origin of their rows, which their numbers alone do not show."""

from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

PUTTING_BACK = ("index_put", "index_add", "index_copy", "index_fill", "masked_", "scatter")
"""Operators whose result has the rows of their first argument, whatever values they write."""
ORDERING = ("sort", "argsort", "topk")
MOVING = ("index", "gather", "roll", "flip", "cat", "stack", "take", *ORDERING)
"""Operators that may take rows from elsewhere."""
FLATTENING = ("view", "_unsafe_view", "_reshape_alias", "reshape", "flatten")


class Marks:
    """Remembers which tensors hold rows that the data select or sort, and which hold all rows of a
    flattened tensor [B, ...] or [T, B, ...].
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._picked: Any = WeakIdKeyDictionary()  # tensor -> the number of these rows
        self._flat: Any = WeakIdKeyDictionary()

    def picked(self, t: Tensor) -> bool:
        """Whether another batch may hold other rows, in number or in order."""
        return t in self._picked

    def flat(self, t: Tensor) -> bool:
        """Whether every batch holds as many rows of each sample."""
        return t in self._flat

    def note(self, func: Any, leaves: list[Any], result: Any) -> None:
        """Mark the results of an operator, from the marks of its arguments."""
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.ndim]
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        picks = torch.Tag.dynamic_output_shape in func.tags
        if name == "index":  # the tag means a mask, but the operator takes row numbers too
            picks = any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
        sources = tensors[:1] if name.startswith(PUTTING_BACK) else tensors
        rows = {self._picked[t] for t in sources if t in self._picked}
        flat = {len(t) for t in tensors if t in self._flat}
        if name in FLATTENING:
            flat |= self._leading(tensors[0]) if tensors else set()
        elif name == "repeat" and tensors and len(tensors[0]) == self._samples:
            flat |= {len(t) for t in pytree.tree_leaves(result)}
        elif name.startswith(MOVING):
            flat = set()
        for t in pytree.tree_leaves(result):
            if not isinstance(t, Tensor) or not t.ndim:
                continue
            if picks:
                self._picked[t] = len(t)
            elif found := rows & {*t.shape}:
                self._picked[t] = min(found)
            elif name in ORDERING and t.shape == (self._samples,) and not t.is_floating_point():
                self._picked[t] = self._samples
            if len(t) in flat or (name in FLATTENING and self._grouped(tensors[0], t)):
                self._flat[t] = True

    def _grouped(self, t: Tensor, view: Tensor) -> bool:
        """Whether each row of ``view`` joins several rows of a flat ``t``, as heads are joined."""
        whole = len(view) % self._samples == 0
        return whole and t in self._flat and len(t) in accumulate(view.shape, mul)

    def _leading(self, t: Tensor) -> set[int]:
        """The numbers of rows that ``t`` has if two or more of its dimensions become one."""
        if self._samples not in t.shape[:2] and t not in self._flat:
            return set()
        return {*list(accumulate(t.shape, mul))[1:]}
