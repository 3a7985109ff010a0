# SPDX-License-Identifier: Apache-2.0
"""Finds the layout of a module in its calls."""

from gnsfast.conversion.looks import Prints
from gnsfast.conversion.prints import SHARED, Lost, Rows
from gnsfast.layers import DropIn, Embedding, SampleLayout

ALTERNATING = ("linear", "embedding", "layer_norm", "rms_norm", "experts", "router")
"""The routes that can read rows in which the samples alternate."""

Laid = tuple[SampleLayout, str]
"""A layout and a note."""
SHARES = "all samples share its index"


def laid(cls: type[DropIn], prints: Prints, found: list[Rows | Lost | None]) -> Laid | Lost:
    """The layout of a module, from the first tensor that a call gave it."""
    for print_, rows in zip(prints, found):
        if print_ is not None and rows is not None:
            return rows if isinstance(rows, Lost) else _layout(cls, rows, print_.shape)
    return Lost("it is called without an ordinary tensor (torch.func.vmap hides them)")


def _layout(cls: type[DropIn], rows: Rows, shape: tuple[int, ...]) -> Laid | Lost:
    """The layout of a module whose input has its samples at ``rows``, and a note."""
    dim, each, interleaved = rows
    if rows == SHARED:
        row = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
        if not (row and issubclass(cls, Embedding)):
            return Lost("all samples share its input, so no row belongs to one sample")
        return SampleLayout(broadcast=len(shape) == 1), SHARES
    if interleaved:
        flat = len(shape) == (1 if issubclass(cls, Embedding) else 2)
        if dim or not flat or cls.gnsfast.route not in ALTERNATING:
            return Lost(f"the rows of the samples alternate in dimension {dim}")
        return SampleLayout(1, flattened=True), "the rows of the samples alternate"
    if dim and each > 1:
        return Lost(f"dimension {dim} holds {each} rows of each sample")
    note = f"{each} consecutive rows are one sample" if each > 1 else ""
    return SampleLayout(dim, fold=each > 1), note or (
        "" if dim == 0 else f"the samples lie along dimension {dim}"
    )
