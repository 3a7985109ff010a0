# SPDX-License-Identifier: Apache-2.0
"""Parameters that meet the data element by element: gains, biases, tables, class tokens."""

from typing import Any

import torch
from torch import Tensor

from gnsfast import functional
from gnsfast.following import packed
from gnsfast.following.functions import COPIES, IN_PLACE, Call
from gnsfast.following.layouts import FIRST, RAGGED, UNKNOWN, Chosen, Layout, Owned, Place
from gnsfast.following.leaf import (
    MADE,
    ROWS,
    SAME,
    Expression,
    Leaf,
    Row,
    compiling,
    expression_of,
)
from gnsfast.following.sample_gradients import Dense, is_wanted, leave, reduced
from gnsfast.following.uses import bare, plan_for
from gnsfast.functional import Plan, backward_pass, beside
from gnsfast.tensors import accumulate_dtype


class _Spread(torch.autograd.Function):
    """``e.expand(shape)``, whose backward adds up the gradient over all but the samples, and fills
    ``probe``. In ``shape`` the samples, or the ``rows`` of packed documents, lie as ``layout``
    says. ``expression`` says in backward whether the norms are joined with others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        e: Tensor,
        probe: Tensor,
        plan: Plan,
        shape: torch.Size,
        layout: Layout | Chosen | Owned,
        expression: Expression | None,
        rows: int,
        order: Tensor | None,
    ) -> Tensor:
        ctx.size, ctx.dtype, ctx.device = e.shape, e.dtype, e.device
        ctx.samples = plan.samples(probe)
        if expression is not None and expression.is_parted:
            plan = Plan(starts=plan.starts, norms_alone=plan.norms_alone)
        owner_N = layout.owner_N if isinstance(layout, Chosen) else None
        ctx.layout = layout if owner_N is None else None
        ctx.is_sorted = order is not None
        ctx.plan, ctx.expression = plan.without_tensors(), expression
        ctx.use, ctx.shape = None if expression is None else object(), probe.shape
        ctx.rows = rows or 1
        ctx.save_for_backward(order if owner_N is None else owner_N, *plan.tensors())
        return e.detach().expand(shape)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        owner_N, *saved = tensors  # or the order of ragged rows
        plan = ctx.plan.restored(saved)
        if plan.starts is None:
            g_BTP = of_samples(g, ctx.size, ctx.layout or Chosen(owner_N), ctx.samples)
        else:
            g_BTP = of_tokens(ctx.layout.samples_first(g, ctx.rows), ctx.size)
            if ctx.is_sorted:
                g_BTP = g_BTP.unflatten(0, (len(owner_N), -1))[owner_N].flatten(0, 1)
        total, rows = reduced(g_BTP, plan, ctx.dtype)
        if ctx.expression is not None and ctx.expression.is_parted:
            starts = plan.starts
            if is_wanted([ctx.expression]):
                leave(ctx.expression, Dense(lambda b: _of_one(g_BTP, starts, b)), ctx.use)
            rows = rows.new_zeros(ctx.shape)
        de = None if plan.norms_alone else total.reshape(ctx.size)
        return de, rows, None, None, None, None, None, None


def of_samples(g: Tensor, shape: torch.Size, layout: Layout | Chosen | Owned, B: int) -> Tensor:
    """The gradient ``g`` of a tensor of ``shape`` that was broadcast to that of ``g``, as
    [B, T, elements]: the sum over T is the gradient of a sample.
    """
    if isinstance(layout, Owned):
        g_BTP = g.new_zeros(B, 1, shape.numel(), dtype=accumulate_dtype(g.dtype))
        for b in layout.owner.unique().tolist():
            g_BTP[b, 0] = (
                g.masked_fill(layout.owner != b, 0.0).to(g_BTP.dtype).sum_to_size(shape).flatten()
            )
        return g_BTP
    wide = (1,) * (g.ndim - len(shape)) + tuple(shape)
    if isinstance(layout, Layout) and layout.dim < g.ndim - 1 and wide[:-1] == (1,) * (g.ndim - 1):
        if wide[-1] > 1:  # the operator adds up the tokens
            F = g.shape[-1]
            return layout.samples_first(g, B).reshape(B, g.numel() // max(B * F, 1), F)
    acc = accumulate_dtype(g.dtype)
    d = layout.dim if isinstance(layout, Layout) else 0
    dims = [i for i in range(g.ndim) if wide[i] == 1 and i != d]
    g = g.sum(dims, keepdim=True, dtype=acc) if dims else g.to(acc)
    if isinstance(layout, Chosen):
        g_B = g.new_zeros(B, *g.shape[1:]).index_add_(0, layout.owner_N, g)
        return g_B.reshape(B, 1, shape.numel())
    P = shape.numel()
    return layout.samples_first(g, B).reshape(B, g.numel() // max(B * P, 1), P)


def of_tokens(g: Tensor, shape: torch.Size) -> Tensor:
    """The same for packed documents, of which ``g`` begins with the tokens, as [N, elements] with a
    row, or several, for each token.
    """
    lead = g.ndim - len(shape)
    wide = (1,) * lead + tuple(shape)
    first = next((i for i, size in enumerate(wide) if size != 1), g.ndim)
    rest = [i for i in range(first, g.ndim) if wide[i] == 1]
    acc = accumulate_dtype(g.dtype)
    g = g.sum(rest, keepdim=True, dtype=acc) if rest else g
    return g.reshape(-1, shape.numel())


def _of_one(g: Tensor, starts: Tensor | None, b: int) -> Tensor:
    """Sample b's gradient."""
    if starts is None:
        return g[b].sum(0, dtype=accumulate_dtype(g.dtype))
    start, end = (int(n) for n in starts[b : b + 2])
    return g[start:end].sum(0, dtype=accumulate_dtype(g.dtype))


def broadcast(
    call: Call, row: Row | None, places: dict[int, Place], leaf: Leaf, alone: bool = False
) -> list[Tensor] | None:
    """The parameters of an element-wise function, broadcast to its result, in which the samples are
    known; None where they are not. ``alone``: for norms alone, beside torch's function.
    """
    leaves = call.leaves
    layout: Place
    shape: torch.Size | None
    if call.name in COPIES:
        with torch.no_grad():
            shape = _broadcast([leaves[0].shape, call.run().shape])
    elif call.name == "scaled_dot_product_attention":
        shape = torch.Size((*leaves[0].shape[:-1], leaves[1].shape[-2]))
    else:
        shape = _broadcast([t.shape for t in leaves if isinstance(t, Tensor)])
    if shape is None:
        return None
    if row is None:
        whole = [packed.alone(leaves[i], leaf) for i in call.data_at if leaves[i].shape == shape]
        layout = whole[0] or UNKNOWN if whole else UNKNOWN
    elif row.chosen and call.data_at and not compiling():
        owner_N = packed.owners_to_save(leaves[call.data_at[0]], leaf, row)
        layout = UNKNOWN if owner_N is None else Chosen(owner_N)
    elif call.name == "expand_as":
        layout = places[call.data_at[0]]
    else:
        layout = row.result(0)
    if leaf.is_ragged and layout == RAGGED:
        layout = FIRST
    values = [leaves[i] for i in call.parameters_at]
    if isinstance(layout, Chosen):
        if len(shape) < 2 or shape[0] != len(layout.owner_N):
            return None
    elif not isinstance(layout, Layout):
        return None
    elif leaf.is_ragged and leaf.rows <= 1:  # a single row is in order
        if not leaf.rows and shape[:1] != (1,):
            return None
    elif not leaf.fits(layout, shape):
        return None
    if call.name in IN_PLACE and 0 in call.parameters_at:
        return None
    # A 0-d tensor does not change the dtype of a result, and its broadcast copy would.
    others = [leaves[i].dtype for i in call.data_at]
    if any(t.ndim == 0 and any(t.dtype != other for other in others) for t in values):
        return None
    if leaf.norms_alone and not alone and not all(_is_added_up_alike(call, t) for t in values):
        return None
    spreads = [spread_out(t, shape, layout, alone) for t in values]
    return None if any(t is None for t in spreads) else [t for t in spreads if t is not None]


def _is_added_up_alike(call: Call, t: Tensor) -> bool:
    """Whether a broadcast copy of a parameter has its gradient in the same dtype, in which torch
    adds it up.
    """
    dtypes = {own.dtype for own in call.leaves if isinstance(own, Tensor) and own.ndim}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point} | {t.dtype}
    if call.name in IN_PLACE:
        return len(floats) == 1
    widest = max(floats, key=lambda dtype: dtype.itemsize)
    return widest == t.dtype or len(floats) == 1


def _broadcast(shapes: list[torch.Size]) -> torch.Size | None:
    """``torch.broadcast_shapes(*shapes)``, which takes 15 µs; None if they do not fit."""
    sizes: list[int] = []
    for d in range(max(map(len, shapes))):
        sizes_d = [shape[-1 - d] for shape in shapes if len(shape) > d]
        size = next((n for n in sizes_d if n != 1), 1)
        if any(n != size and n != 1 for n in sizes_d):
            return None
        sizes.append(size)
    return torch.Size(sizes[::-1])


def assigned(call: Call, places: dict[int, Place], leaf: Leaf) -> Tensor | None:
    """The value of ``x[index] = value``, broadcast to the entries of data that it is written to;
    None where their samples are not known.
    """
    x, layout, last = call.leaves[0], places.get(0), len(call.leaves) - 1
    if compiling() or leaf.is_ragged or call.parameters_at != [last]:
        return None
    if not isinstance(layout, Layout) or not leaf.fits(layout, x.shape):
        return None
    owner = layout.owners(x.shape, leaf.samples, x.device)[call.index]
    value = call.leaves[last]
    y = spread_out(value, owner.shape, Owned(owner))
    return y if y is None else y.to(x.dtype)


def spread_out(
    e: Tensor, shape: torch.Size, layout: Layout | Chosen | Owned, alone: bool = False
) -> Tensor | None:
    """A tensor made of parameters, broadcast to ``shape``; None if it has a part for each sample,
    or for single tokens of packed documents.
    """
    expression = expression_of(e)
    assert expression is not None
    leaf, missing = expression.leaves[0], len(shape) - e.ndim
    if missing < 0:
        return None
    wide = (1,) * missing + tuple(e.shape)
    d = layout.dim if isinstance(layout, Layout) else 0
    if isinstance(layout, Chosen) and wide[0] == shape[0] != 1:
        if expression.kind == ROWS:
            return _of_chosen(e, shape, layout)
        if expression.kind != MADE or compiling():
            return None
        layout = Owned(layout.owner_N.view(-1, *(1,) * (len(shape) - 1)).expand(shape))
    if wide[d : d + 1] != (1,) and not isinstance(layout, Owned):
        return None
    first = isinstance(layout, Layout) and layout.is_first
    if expression.kind == ROWS and first and (y := _as_rows(e, shape)) is not None:
        return y
    segments = None
    if leaf.is_ragged and isinstance(layout, Layout):
        rows = layout.samples_first(torch.empty(shape, device="meta"), leaf.rows or 1).shape
        inner = next((k for k, size in enumerate(wide) if size != 1), len(wide)) - len(wide)
        segments = packed.Segments.of(rows[: len(rows) + inner], leaf)
        if segments is None:
            return None
    if compiling() and expression.kind != SAME:
        return None
    if not compiling():
        expression.note_use()
    starts, order = (None, None) if segments is None else (segments.starts, segments.rows.order)
    plan = plan_for([expression], [e], FIRST, starts=starts, joins=False)
    joins = None if compiling() else expression
    operands = bare(e), leaf.probe, plan, shape, layout, joins, leaf.rows, order
    spread: Tensor = _Spread.apply(*operands)
    return beside(bare(e).expand(shape), spread) if plan.norms_alone and not alone else spread


def _of_chosen(e: Tensor, shape: torch.Size, chosen: Chosen) -> Tensor:
    """Rows of a table at ids, one for each row that the data have chosen, looked up sorted by
    sample: such as the biases of the experts of all rows.
    """
    expression = expression_of(e)
    assert expression is not None and expression.rows is not None
    leaf, (ids_N, padding_idx) = expression.leaves[0], expression.rows
    leaf.whole.note_use("rows")
    plan = plan_for([leaf.whole], [leaf.current], FIRST)
    plan = plan._replace(starts=chosen.starts(leaf.samples))
    order_N = chosen.order_N
    y, _ = functional.embedding(
        ids_N[order_N], leaf.current, leaf.probe, plan, padding_idx=padding_idx
    )
    y = packed.rows_at(y, order_N.argsort()).expand(shape)
    return beside(e.expand(shape), y) if plan.norms_alone else y


def _as_rows(e: Tensor, shape: torch.Size) -> Tensor | None:
    """Rows of a table at ids that all samples share, looked up for each sample."""
    expression = expression_of(e)
    assert expression is not None and expression.rows is not None
    leaf = expression.leaves[0]
    ids, padding_idx = expression.rows
    B, n = leaf.lanes, len(shape)
    segments = packed.Segments.of(shape[:-1], leaf) if leaf.is_ragged else None
    if segments is not None and (segments.rows.order is not None or shape[0] != B):
        return None
    if shape[0] != B or (leaf.is_ragged and segments is None):
        return None
    if ids.ndim == n - 1 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != n - 2 and not (ids.ndim == n - 1 and ids.shape[0] == B):
        return None
    if not compiling():
        leaf.whole.note_use("rows")
    ids = ids.expand(B, *ids.shape[ids.ndim - n + 2 :])
    starts = None if segments is None else segments.starts
    plan = plan_for([leaf.whole], [leaf.current], FIRST, starts=starts)
    y, _ = functional.embedding(ids, bare(leaf.current), leaf.probe, plan, padding_idx=padding_idx)
    y = y.expand(shape)
    return beside(bare(e).expand(shape), y) if plan.norms_alone else y
