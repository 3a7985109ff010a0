# SPDX-License-Identifier: Apache-2.0
"""From the gradients of single samples to the rows of a probe, and the joining of several uses."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import ops
from gnsfast.errors import first_line
from gnsfast.following.leaf import ADD_UP, SAME, Expression, Leaf
from gnsfast.functional import Groups, Plan
from gnsfast.signatures import (
    OPERATORS,
    RESULTS,
    ConvWgrad,
    EmbeddingWgrad,
    LinearWgrad,
    NormBackward,
)
from gnsfast.tensors import accumulate_dtype
from gnsfast.torch_internals import runs_in_this_pass

AS_BIAS = False, True
"""A gradient of each sample is that of the bias of a linear layer."""


def reduced(g_BTP: Tensor, plan: Plan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum over samples and tokens in ``dtype``, and the probe rows. Of the gradients [B, T, P]
    the sum over T is that of a sample.
    """
    a = plan.linear_wgrad(g_BTP, g_BTP, AS_BIAS, dtype)
    _, total, rows, _ = plan.run(ops.linear_wgrad, a, AS_BIAS)
    return total, rows


class Operands(NamedTuple):
    """A use whose operator can be asked again: the operator's arguments ``a``. The expression
    is its weight (``which`` is 0) or its bias (1). ``rows`` are None where the operator does not
    measure all that is asked for.
    """

    plan: Plan
    operator: Callable[[Any], tuple[Tensor, ...]]
    a: Any
    which: int
    rows: Tensor | None

    def gradient(self, b: int) -> Tensor:
        """Sample b's gradient of the expression: the operator's, for this sample alone."""
        a = self.a
        if isinstance(a, ConvWgrad):
            rows = len(a.x) // a.samples
            x, dy = (t[b * rows : (b + 1) * rows] for t in (a.x, a.dy))
            a = a._replace(x=x, dy=dy, samples=1)
        else:
            fields = TOKENS[type(a)]
            tensors = [t if t is None else self._of_sample(t, b) for t in a[:fields]]
            a = type(a)(*tensors, *a[fields:])._replace(starts=None)
        if "dtype" in a._fields:
            a = a._replace(dtype=accumulate_dtype(a[0].dtype))
        kinds = RESULTS[NAMES[type(a)]]
        sums = [t for t, kind in zip(self.operator(a), kinds) if kind == "sum"]
        return sums[self.which]

    def _of_sample(self, t: Tensor, b: int) -> Tensor:
        if self.a.starts is None:
            return t[b : b + 1]
        start, end = (int(n) for n in self.a.starts[b : b + 2])
        rows = t.flatten() if t.dtype == torch.int64 else t.reshape(-1, t.shape[-1])  # of ids
        return rows[None, start:end]


class Dense(NamedTuple):
    """A use that has each sample's gradient, ``of(b)``."""

    of: Callable[[int], Tensor]

    def gradient(self, b: int) -> Tensor:
        """Sample b's gradient of the expression."""
        return self.of(b)


Part = Operands | Dense


def leave(expression: Expression, part: Part, use: object) -> None:
    """Leave a part of the norms of a joined parameter. ``use`` tells one use from all others."""
    leaf = expression.leaves[0]
    leaf.notes.is_unusual, parts = True, leaf.this_pass.parts or {}
    if use in parts:
        expression.fail("backward went through a use of it 2 times in one block, and " + ADD_UP)
    leaf.this_pass.parts = {**parts, use: (expression, part)}


def is_wanted(expressions: Sequence[Expression]) -> bool:
    """Whether the backward pass that is running asks for norms. ``autograd.grad`` and
    ``backward(inputs=...)`` of other tensors do not.
    """
    first, *more = (e.leaves[0] for e in expressions)
    probe = first.pair if more and first.next is more[0] else first.probe
    try:
        node = torch.autograd.graph.get_gradient_edge(probe).node
        return bool(runs_in_this_pass(node))
    except RuntimeError:  # ``autograd.grad`` of the probe itself, as in a proof
        return True


def settle(leaves: list[Leaf], B: int) -> dict[Leaf, Tensor]:
    """The probe rows [1, B + 2 + G] of each leaf whose uses left parts: of the norm of their sum.

    A leaf that is used whole by one kernel several times asks the kernel once, for the tokens of
    all uses. Else each sample's gradient is pulled back through the expressions of all uses.
    """
    parts: dict[Leaf, list[tuple[Expression, Part]]] = {}
    for leaf in leaves:
        for expression, part in (leaf.this_pass.parts or {}).values():
            for taken in expression.leaves:
                parts.setdefault(taken, []).append((expression, part))
    rows_of: dict[Leaf, Tensor] = {}
    for leaf, leaf_parts in parts.items():
        rows = _together(leaf, leaf_parts)
        if rows is not None:
            rows_of[leaf] = rows
    left = [leaf for leaf in parts if leaf not in rows_of]
    uses = {id(part): (e, part) for leaf in left for e, part in parts[leaf]}
    try:
        rows_of |= _pulled_back(left, uses, B) if left else {}
    except RuntimeError as error:
        for leaf in left:
            leaf.fail(f"its samples' gradients cannot be pulled back to it: {first_line(error)}")
    for leaf, rows in rows_of.items():
        rows[:, B + 1] = len(parts[leaf])
    return rows_of


def _together(leaf: Leaf, parts: list[tuple[Expression, Part]]) -> Tensor | None:
    """The rows of a leaf that needs no pulling back: of one use, or of several of one kernel."""
    if any(expression.kind != SAME or expression.leaves != (leaf,) for expression, _ in parts):
        return None
    first = parts[0][1]
    if len(parts) == 1 and isinstance(first, Operands):
        return first.rows
    uses = [part for expression, part in parts if expression.is_whole]
    if len(uses) < len(parts) or not all(isinstance(use, Operands) for use in uses):
        return None
    operands: Any = uses
    return _joined(operands)


def _joined(uses: list[Operands]) -> Tensor | None:
    """The rows of several uses by one kernel, of which it sees all tokens as one sample's."""
    first = uses[0]
    a = first.a
    if type(a) not in TOKENS or any(type(use.a) is not type(a) for use in uses):
        return None
    if any(use.which != first.which or use.plan.starts is not None for use in uses):
        return None
    fields, weight = TOKENS[type(a)], first.which == 0
    if any(_options(use.a, fields) != _options(a, fields) for use in uses):
        return None
    columns = [[use.a[k] for use in uses] for k in range(fields)]
    tensors = [None if column[0] is None else torch.cat(column, 1) for column in columns]
    a = type(a)(*tensors, *a[fields:])
    wanted: tuple[bool, ...] = (True,)
    if not isinstance(a, EmbeddingWgrad):
        a, wanted = a._replace(weight=weight, bias=not weight), (weight, not weight)
    results = first.plan.run(first.operator, a, wanted)
    return results[RESULTS[NAMES[type(a)]].index("rows")]


TOKENS: dict[type, int] = {LinearWgrad: 2, EmbeddingWgrad: 2, NormBackward: 4}
"""Operators whose first so many fields have the tokens of a sample in dimension 1."""

NAMES = {arguments: name for name, arguments in OPERATORS.items()}


def _options(a: Any, fields: int) -> list[Any]:
    """The settings of an operator that all calls must share."""
    shared = [t for t in a[fields:] if not isinstance(t, (Tensor, list))]
    if isinstance(a, (LinearWgrad, NormBackward)):  # which parameters are wanted is no setting
        at = a._fields.index("weight") - fields
        del shared[max(at, 0) : max(at, 0) + 2]
    return shared


def _pulled_back(
    leaves: list[Leaf], parts: dict[int, tuple[Expression, Part]], B: int
) -> dict[Leaf, Tensor]:
    """The rows of leaves, from each sample's gradient of every use, sample by sample."""
    ends = [expression.graph() for expression, _ in parts.values()]
    twins: list[Tensor] = []
    for leaf in leaves:
        leaf.whole.graph()
        assert leaf.twin is not None
        twins.append(leaf.twin)

    groups = leaves[0].facts.groups  # those of all leaves
    order = [*range(B)] if groups is None else groups.order_B.tolist()

    def gradients() -> Iterator[tuple[Tensor, ...]]:
        for b in order:
            of_parts = [
                part.gradient(b).reshape(end.shape).to(end.dtype)
                for end, (_, part) in zip(ends, parts.values())
            ]
            yield torch.autograd.grad(
                ends, twins, of_parts, retain_graph=True, materialize_grads=True
            )

    likes = [leaf.current for leaf in leaves]
    return dict(zip(leaves, streamed(gradients(), likes, order, groups)))


def streamed(
    gradients: Iterator[tuple[Tensor, ...]],
    likes: list[Tensor],
    order: list[int],
    groups: Groups | None,
) -> list[Tensor]:
    """The rows of tensors such as ``likes``, whose gradients come sample by sample in this
    ``order``: those of a group of samples one after the other. None of them is kept.
    """
    totals = [t.new_zeros(t.numel(), dtype=accumulate_dtype(t.dtype)) for t in likes]
    sqnorms: list[list[Tensor]] = [[] for _ in likes]
    of_groups: list[list[Tensor]] = [[] for _ in likes]
    samples = zip(order, gradients)
    for size in [len(order)] if groups is None else groups.sizes_G.tolist():
        sums = totals if groups is None else [*map(torch.zeros_like, totals)]
        for _, grads in islice(samples, size):
            for total, columns, g in zip(sums, sqnorms, grads):
                g = g.to(total.dtype)
                total += g.flatten()
                columns.append(reduced(g.reshape(1, 1, -1), Plan(), total.dtype)[1][:, :1])
        if groups is not None:
            for total, part, columns in zip(totals, sums, of_groups):
                total += part
                columns.append(reduced(part[None, None], Plan(), total.dtype)[1][:, :1])
    rows = []
    for total, columns, group_columns in zip(totals, sqnorms, of_groups):
        of_sum = reduced(total[None, None], Plan(), total.dtype)[1]
        row = torch.cat([*columns, of_sum[:, 1:], *group_columns], 1)
        row[:, order] = row[:, : len(order)].clone()
        rows.append(row)
    return rows
