# SPDX-License-Identifier: Apache-2.0
"""A use: a function with a kernel that takes parameters and data, with the plan and the probe that
its kernel needs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import combinations
from gnsfast.following import packed
from gnsfast.following.checkpoints import recomputing
from gnsfast.following.layouts import FIRST, Chosen, Layout, lengths_of
from gnsfast.following.leaf import (
    NOTHING,
    SAME,
    Expression,
    Leaf,
    Row,
    compiling,
    expression_of,
    first_leaf,
)
from gnsfast.following.sample_gradients import Operands, is_wanted, leave
from gnsfast.functional import Plan
from gnsfast.ops import norms_alone
from gnsfast.signatures import BY_SAMPLE, OPERATORS, RESULTS, NormBackward
from gnsfast.tensors import is_dtensor
from gnsfast.torch_internals import any_autocast, in_backward

ROWS_AT = {
    arguments: RESULTS[name].index("rows")
    for name, arguments in OPERATORS.items()
    if "rows" in RESULTS[name]
}
"""Operator's arguments -> which of its results holds the probe rows."""


class Joining:
    """Decides in backward whether the rows of a kernel are the norms of its parameters, or a part
    that is joined with other uses (``Plan.uses``).
    """

    def __init__(
        self,
        expressions: tuple[Expression, ...],
        use: object = None,
        probed: tuple[Expression, ...] = (),
    ) -> None:
        self.expressions, self._use = expressions, use or self
        self._probed = probed or expressions  # the parameters that share a probe

    def of(self, k: int) -> "Joining":
        """The same of parameter number ``k`` alone."""
        return Joining((self.expressions[k],), (self._use, k), self._probed)

    def splits(self, plan: Plan) -> bool:
        """Whether the operator may be called for one part of the weight after the other."""
        return _is_plain(plan) and not any(e.is_joined for e in self.expressions)

    @property
    def is_joined(self) -> bool:
        """Whether the rows of some parameter are only a part."""
        return any(e.is_joined for e in self.expressions)

    def keep(
        self, plan: Plan, operator: Callable[[Any], Any], a: Any, wanted: Any, at_BS: Any
    ) -> tuple[Any, ...]:
        """The results of the operator. The rows of joined uses are zeros, and kept as parts."""
        is_plain = _is_plain(plan)
        joined = [e.is_joined for e in self.expressions]
        if is_plain and at_BS is None and not any(joined):
            return norms_alone(operator, a) if plan.norms_alone else operator(a)
        at, plan, asked = ROWS_AT[type(a)], plan._replace(uses=None), is_wanted(self._probed)
        serves = is_plain or type(a) in BY_SAMPLE
        if serves:
            results = list(plan.run(operator, a, wanted, at_BS))
        else:
            results, joined = list(operator(a)), [True] * len(joined)
        if not any(joined):
            return tuple(results)
        which = [k for k, want in enumerate(wanted) if want]
        P = len(which)
        detached = type(a)._make(t.detach() if isinstance(t, Tensor) else t for t in a)
        if isinstance(detached, NormBackward):  # FSDP2 frees the weight before the parts are joined
            detached = detached._replace(w_F=_copy(detached.w_F), b_F=_copy(detached.b_F))
        if "ids_BS" in a._fields:
            detached = detached._replace(ids_BS=None)
        rows = results[at]
        kept: list[Tensor | None] = [None] * P
        if serves:
            kept, results[at] = [rows[k::P].clone() for k in range(P)], rows.clone()
        else:
            groups = 0 if plan.groups is None else len(plan.groups.sizes_G)
            results[at] = rows.new_zeros(P, rows.shape[1] + groups)
        for k, (number, expression) in enumerate(zip(which, self.expressions)):
            if joined[k]:
                results[at][k::P] = 0.0
                if asked:
                    part = Operands(plan, operator, detached, number, kept[k])
                    leave(expression, part, (self._use, k))
        return tuple(results)


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def _is_plain(plan: Plan) -> bool:
    """Whether only the norms of samples are measured."""
    return plan.groups is None


def plan_for(
    expressions: list[Expression],
    values: list[Tensor],
    layout: Layout,
    transposed: bool = False,
    starts: Tensor | None = None,
    joins: bool = True,
) -> Plan:
    """The plan of a use, which ``joins`` others of the same parameters in backward. A plan knows
    samples in dimension 0, and in dimension 1 or interleaved in dimension 0, which is the same. The
    rows of a ragged batch have ``starts``.
    """
    leaf = expressions[0].leaves[0]
    dim = 1 if layout.interleaved or layout.dim == 1 else 0
    dim = 0 if leaf.is_ragged else dim
    if is_dtensor(values[0]):
        if not compiling() and any(e.is_joined for e in expressions):
            leaf.fail(combinations.reason([combinations.REPEATED, combinations.TENSOR_PARALLEL]))
        return Plan(batch_dim=dim, transposed=transposed, norms_alone=leaf.norms_alone)
    options: dict[str, Any] = {"norms_alone": leaf.norms_alone}
    if joins and not compiling():
        options |= {"uses": Joining(tuple(expressions)), "module": leaf.name}
    groups = leaf.facts.groups  # those of all leaves
    return Plan(batch_dim=dim, transposed=transposed, starts=starts, groups=groups, **options)


def probe_of(expressions: list[Expression]) -> Tensor:
    """The probe of a use of one parameter, or of two."""
    first = expressions[0].leaves[0]
    if len(expressions) == 1:
        probe: Tensor = first.probe
        return probe
    second = expressions[1].leaves[0]
    if first.next is second:
        pair: Tensor = first.pair
        return pair
    return torch.cat([first.probe, second.probe])


def trained(parameters: tuple[Any, ...]) -> tuple[list[Expression], list[Tensor]]:
    """What those of ``parameters`` that need a gradient are made of, and their values. Nothing if
    one of them is not followed: a kernel serves all or none.
    """
    expressions, values = [], []
    for t in parameters:
        if t is None or not t.requires_grad:
            continue
        expression = expression_of(t)
        if expression is None or (compiling() and not _is_compiled(expression)):
            return [], []
        expressions.append(expression)
        values.append(t)
    return expressions, values


def _is_compiled(expression: Expression) -> bool:
    return expression.is_compiled and expression.kind == SAME


class Use(NamedTuple):
    """A use that a kernel serves, of what ``expressions`` are. ``leaf`` is the first of its
    parameters in the model. ``lengths`` are the sizes of a sample that it shows (``Lengths``), and
    ``rows`` how many rows a sample has where it has several. ``segments`` are those of ragged ones.
    """

    leaf: Leaf
    layout: Layout | Chosen
    plan: Plan
    probe: Tensor
    expressions: list[Expression]
    lengths: frozenset[tuple[int, int]]
    rows: int
    segments: packed.Segments | None = None

    @property
    def recurs(self) -> bool:
        """Whether the next pass has it too where it is like this one: the table has it, its
        parameters are whole ones, and the data choose nothing.
        """
        leaf, first = self.leaf, self.expressions[0].leaves[0]
        return (
            leaf is first
            and leaf.is_learned
            and not in_backward()
            and isinstance(self.layout, Layout)
            and all(e.is_whole for e in self.expressions)
        )

    @property
    def is_sorted(self) -> bool:
        """Whether the kernel gets rows that the data have chosen, sorted by sample."""
        return isinstance(self.layout, Chosen) and self.plan.starts is not None

    def data(self, x: Tensor) -> Tensor:
        """``x`` for the kernel, which has no gradient for it where torch gives the gradients."""
        return x.detach() if self.plan.norms_alone else x

    def run(self, kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``kernel(x)``, which sees packed documents in their order, and rows that the data have
        chosen by sample.
        """
        if self.plan.norms_alone:
            x = x.detach()
        if isinstance(self.layout, Chosen):
            if not self.is_sorted:
                return packed.run_padded(kernel, x, self.layout, self.leaf.samples)
            order_N = self.layout.order_N
            y = kernel(packed.rows_at(x, order_N))
            return packed.rows_at(y, order_N.argsort()) if y.ndim else y
        if self.segments is None:
            return kernel(x)
        x, back = packed.in_order(x, self.layout, self.leaf)
        return back(self.segments.run(kernel, x))


class Recent(NamedTuple):
    """A use of an earlier pass, and what its function got."""

    name: str
    shape: torch.Size
    parameters: tuple[Any, ...]
    use: Use

    def is_like(self, name: str, x: Tensor, parameters: tuple[Any, ...]) -> bool:
        """Whether a function of this pass is used in the same way."""
        use, leaf = self.use, self.use.leaf
        if name != self.name or type(x) is not Tensor or x.shape != self.shape:
            return False
        if leaf.left_out or in_backward():
            return False
        if use.rows and isinstance(use.layout, Layout):
            if not leaf.lengths.allows(use.layout.several, use.rows):
                return False
        return all(
            t is before and (t is None or t.requires_grad)
            for t, before in zip(parameters, self.parameters)
        )


Takes = Callable[[Tensor, Layout | Chosen, Leaf], bool]
"""Whether a kernel takes data with their samples in a layout, for the pass that a leaf is in."""


def in_first(x: Tensor, layout: Layout | Chosen, leaf: Leaf) -> bool:
    """Samples of consecutive rows in dimension 0, no packed documents."""
    if isinstance(layout, Chosen):
        return False
    return layout.dim == 0 and not layout.interleaved and not leaf.is_ragged


def in_rows(x: Tensor, layout: Layout | Chosen, leaf: Leaf, features: int = 1) -> bool:
    """What a plan can say: samples in dimension 0, one row of each in dimension 1, or interleaved
    rows [N, features]. The last ``features`` dimensions hold no samples. Packed documents may lie
    in any way, and so may rows [N, features] that the data have chosen.
    """
    if isinstance(layout, Chosen):
        return features == 1
    if leaf.is_ragged:
        return True
    lead = x.ndim - features
    if layout.dim >= lead:
        return False
    if layout.dim == 1:
        return features == 1 and x.shape[1] == leaf.samples
    return layout.dim == 0 and (not layout.interleaved or (lead == 1 == layout.interleaved))


def begin(
    name: str, x: Tensor, parameters: tuple[Any, ...], takes: Takes = in_first, **options: Any
) -> Use | None:
    """The use of ``parameters`` by function ``name`` with the ``options`` of ``_begun``; None where
    no kernel serves it. A use like one of an earlier pass is that one again.
    """
    first = None if compiling() else expression_of(parameters[0])
    if first is None or not first.is_whole or name in OURS:  # which depend on other arguments too
        return _begun(name, x, parameters, takes, **options)
    leaf = first.leaves[0]
    number = leaf.this_pass.functions, leaf.this_pass.uses
    recent: Recent | None = leaf.recent.get(number)
    if recent is not None and recent.is_like(name, x, parameters):
        leaf.this_pass.functions += 1
        if recent.use.lengths:
            leaf.lengths.pairs |= recent.use.lengths
        for expression in recent.use.expressions:
            expression.note_use(name)
        return recent.use
    use = _begun(name, x, parameters, takes, **options)
    taken = [t for t in parameters if t is not None]
    if use is not None and use.recurs and len(use.expressions) == len(taken):
        leaf.recent[number] = Recent(name, x.shape, parameters, use)
    return use


def _begun(
    name: str,
    x: Tensor,
    parameters: tuple[Any, ...],
    takes: Takes,
    *,
    place: int = 0,
    features: int = 1,
    transposed: bool = False,
    has_plan: bool = True,
) -> Use | None:
    """The use of ``parameters`` by function ``name``, whose argument number ``place`` is ``x``. The
    last ``features`` dimensions of ``x`` hold no samples. A function that ``has_plan`` False
    measures nothing but the norms of parameters that have one use.
    """
    expressions, values = trained(parameters)
    left_out = all(e.leaves[0].left_out for e in expressions)
    if left_out or expression_of(x) is not None:
        return None
    if not has_plan and not all(map(_is_alone, expressions)):
        return None
    leaf = first_leaf(expressions)
    layout, then = _place(leaf, name, x, place)
    segments = None
    if layout is None or not takes(x, layout, leaf):
        layout = None
    elif leaf.is_ragged and isinstance(layout, Layout):
        shape = packed.in_order(x, layout, leaf)[0].shape
        segments = packed.Segments.of(shape[: len(shape) - features], leaf)
        if segments is None:
            layout = None
            leaf.fail(packed.unmapped(name, [x], leaf))
    if layout is None:
        if not compiling():
            leaf.uncount()  # the next kind of function looks for the same row
        return None
    lengths, rows = (NO_LENGTHS, 0) if compiling() else _lengths(leaf, layout, x, then)
    if not compiling():
        leaf.is_half |= x.is_floating_point() and x.dtype.itemsize < 4
        leaf.is_half |= leaf.norms_alone and any_autocast()  # torch's gradients may be
    in_order = isinstance(layout, Chosen) and (leaf.is_ragged or not _is_padded(expressions))
    if not compiling():
        for expression in expressions:
            expression.note_use("" if in_order else name)
    dim = layout if isinstance(layout, Layout) else FIRST
    starts = None if segments is None else segments.starts
    plan = plan_for(expressions, values, dim, transposed, starts)
    if isinstance(layout, Chosen) and in_order:
        plan = plan._replace(starts=layout.starts(leaf.samples))
    return Use(leaf, layout, plan, probe_of(expressions), expressions, lengths, rows, segments)


NO_LENGTHS: frozenset[tuple[int, int]] = frozenset()


def _lengths(
    leaf: Leaf, layout: Layout | Chosen, x: Tensor, then: tuple[int, ...]
) -> tuple[frozenset[tuple[int, int]], int]:
    """What a use shows of the lengths of the samples, and how many rows each has where it has
    several.
    """
    if isinstance(layout, Chosen) or leaf.is_ragged:
        return NO_LENGTHS, 0
    if layout.several:
        return NO_LENGTHS, x.shape[layout.dim] // max(leaf.samples, 1)
    lengths = lengths_of((*x.shape[: layout.dim], *x.shape[layout.dim + 1 :]), then)
    leaf.lengths.pairs |= lengths
    return lengths, 0


def _is_padded(expressions: list[Expression]) -> bool:
    """Whether rows that the data have chosen are padded to as many of each sample: links of ties
    need that.
    """
    return any(e.is_whole and e.leaves[0].is_tied for e in expressions)


def _is_alone(expression: Expression) -> bool:
    """Whether nothing but norms is measured of a parameter that has one use."""
    leaf = expression.leaves[0]
    several = leaf.this_pass.uses > again() or leaf.known_uses > 1
    several |= any(sum(row.is_use for row in rows) > 1 for rows in leaf.batches)
    return expression.kind == SAME and leaf.facts is NOTHING and not several


def _place(
    leaf: Leaf, name: str, x: Tensor, place: int
) -> tuple[Layout | Chosen | None, tuple[int, ...]]:
    """Where the samples of ``x`` lie, None where that is not known, and the sizes of a sample when
    the table was learnt.
    """

    def fits(row: Row) -> bool:
        layout = row.argument(place)
        fits = not isinstance(layout, Layout) or leaf.fits(layout, x.shape)
        return fits and not row.is_of_another(place, x, leaf.samples)

    row = leaf.row(name, fits)
    if row is not None and row.is_of_another(place, x, leaf.samples):
        row = Row(name)
    layout: Any = None
    if x.ndim == 2 and not len(x) and not compiling():  # of an expert without rows
        return Chosen(torch.zeros(0, dtype=torch.int64, device=x.device)), ()
    if row is not None and row.chosen and not compiling():
        owner_N = packed.owners_to_save(x, leaf, row) if x.ndim == 2 else None
        return None if owner_N is None else Chosen(owner_N), ()
    if row is not None:
        layout = row.argument(place)
    if leaf.is_ragged:
        return packed.place_of(layout, x, leaf), ()
    if row is None or not row.arguments:
        layout = FIRST if name in OURS and leaf.samples > 1 else packed.alone(x, leaf)
    is_known = isinstance(layout, Layout) and leaf.fits(layout, x.shape)
    return layout if is_known else None, () if row is None else row.sizes


OURS = frozenset(("linear_cross_entropy", "attention"))
"""Our own functions, which take samples in dimension 0."""


def again() -> bool:
    """Whether a checkpoint runs this code again."""
    return not compiling() and recomputing()


def bare(t: Any) -> Any:
    """``t`` for a kernel. Dynamo looks at the class of what is handed to functions of torch, and
    has numbers in its graphs, which it cannot ask for attributes.
    """
    is_tensor = compiling() and isinstance(t, Tensor)
    return t.view_as(t) if is_tensor and expression_of(t) is not None else t
