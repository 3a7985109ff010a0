# SPDX-License-Identifier: Apache-2.0
"""The functions of torch that have a kernel: where a parameter is their argument, and the samples
are known, ``gnsfast.functional`` takes their place.

Each entry of ``KERNELS`` takes the arguments of its function and returns ``NotImplemented`` where
it does not serve them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast import functional
from gnsfast.following.layouts import ALONE, FIRST, Chosen, Layout, Place, owners_of
from gnsfast.following.leaf import (
    NOTHING,
    Expression,
    compiling,
    expression_of,
    first_leaf,
)
from gnsfast.following.sample_gradients import Operands
from gnsfast.functional import Plan
from gnsfast.signatures import OPERATORS, RESULTS
from gnsfast.tensors import is_dtensor

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

    def __init__(self, expressions: tuple[Expression, ...]) -> None:
        self.expressions = expressions

    def keep(
        self, plan: Plan, operator: Callable[[Any], Any], a: Any, wanted: Any, at_BS: Any
    ) -> tuple[Any, ...]:
        """The results of the operator. The rows of joined uses are zeros, and kept as parts."""
        is_plain = plan.groups is None and plan.constants_P2 is None and not plan.second
        if is_plain and at_BS is None and not any(e.is_joined for e in self.expressions):
            alone: tuple[Any, ...] = operator(a)
            return alone
        at, plan = ROWS_AT[type(a)], plan._replace(uses=None)
        serves = is_plain or "constants_P2" in a._fields
        joined = [not serves or e.is_joined for e in self.expressions]
        if plan.second and any(joined):  # what is summed over samples is summed when all are joined
            plan, joined = plan._replace(second=()), [True] * len(joined)
        found = list(plan.run(operator, a, wanted, at_BS) if serves else operator(a))
        if not any(joined):
            return tuple(found)
        which = [k for k, want in enumerate(wanted) if want]
        P = len(which)
        own = type(a)._make(t.detach() if isinstance(t, Tensor) else t for t in a)
        rows, kept = found[at], [None] * P
        if serves:
            kept, found[at] = [rows[k::P].clone() for k in range(P)], rows.clone()
        else:
            shape = (1 + (plan.constants_P2 is not None)) * P, rows.shape[1] + _groups(plan)
            found[at] = rows.new_zeros(shape)
        for k, (number, expression) in enumerate(zip(which, self.expressions)):
            if joined[k]:
                part = Operands(plan, operator, own, number, kept[k])
                expression.leaves[0].parts.append((expression, part))
                found[at][k::P] = 0.0
        return tuple(found)


def _groups(plan: Plan) -> int:
    return 0 if plan.groups is None else len(plan.groups.sizes_G)


def plan_for(
    expressions: list[Expression], values: list[Tensor], layout: Layout, transposed: bool = False
) -> Plan:
    """The plan of a use, which is made once as long as the same is measured."""
    leaf = expressions[0].leaves[0]
    dim = 1 if layout.interleaved else 0
    if is_dtensor(values[0]):
        return Plan(batch_dim=dim, transposed=transposed)
    if compiling():
        facts = merged([e.facts(value) for e, value in zip(expressions, values)])
        return Plan(batch_dim=dim, transposed=transposed, starts=leaf.starts, **facts)
    key = (*map(id, expressions), dim, transposed)
    if (plan := leaf.plans.get(key)) is not None:
        return plan
    facts = merged([e.facts(value) for e, value in zip(expressions, values)])
    plan = Plan(batch_dim=dim, transposed=transposed, starts=leaf.starts, **facts)
    plan = plan._replace(uses=Joining(tuple(expressions)), module=leaf.name)
    if all(e.is_whole for e in expressions):
        leaf.plans[key] = plan
    return plan


def merged(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of several parameters of one function."""
    first, *more = facts
    if not more or not first:
        return first
    found = dict(first)
    if "moments" in first:
        found["moments"] = tuple(v for each in facts for v in each["moments"])
        found["constants_P2"] = torch.cat([each["constants_P2"] for each in facts])
    second = [{(type(s), s.feature): s for s in each.get("second", ())} for each in facts]
    kinds = dict.fromkeys(kind for own in second for kind in own)
    found["second"] = tuple(kind[0].merged([own.get(kind) for own in second]) for kind in kinds)
    return found


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
    own = first.probe, second.probe
    return torch.cat([*(t[:1] for t in own), *(t[1:] for t in own)])


def trained(*parameters: Any) -> tuple[list[Expression], list[Tensor]]:
    """What those of ``parameters`` that need a gradient are made of, and their values. Nothing if
    one of them is not followed: a kernel serves all or none.
    """
    expressions, values = [], []
    for t in parameters:
        if t is None or not t.requires_grad:
            continue
        expression = expression_of(t)
        if expression is None:
            return [], []
        expressions.append(expression)
        values.append(t)
    return expressions, values


def place_of_input(
    name: str, x: Tensor, expressions: list[Expression], place: int
) -> Layout | Chosen | None:
    """Where the samples of ``x`` lie, for a use by a kernel; None where that is not known."""
    leaf = first_leaf(expressions)
    if not leaf.samples and leaf.probe is None:
        return None
    step = leaf.step(name)
    found: Place | None
    if step is None:
        found = ALONE if leaf.samples == 1 else FIRST
    elif step.chosen and not compiling():
        owner_N = owners_of(x, leaf.samples) if x.ndim == 2 else None
        found = None if owner_N is None else Chosen(owner_N)
    else:
        found = step.arguments[place] if place < len(step.arguments) else None
    if leaf.starts is not None:
        found = FIRST
    elif isinstance(found, Layout) and not found.fits(x.shape, leaf.samples):
        found = None
    if not isinstance(found, (Layout, Chosen)):
        if not compiling():
            leaf.functions -= 1  # the next kind of function looks for the same step
        return None
    return found


def note(expressions: list[Expression]) -> None:
    """Note a use of each of ``expressions``."""
    if not compiling():
        for expression in expressions:
            expression.note_use()


def undone(expressions: list[Expression]) -> Any:
    """Leave the function to the next kind."""
    if not compiling():
        first_leaf(expressions).functions -= 1
    return NotImplemented


def bare(t: Any) -> Any:
    """``t`` for a kernel. Dynamo looks at the class of what is handed to functions of torch."""
    return t.view_as(t) if compiling() and expression_of(t) is not None else t


def linear(input: Tensor, weight: Tensor, bias: Any = None) -> Any:
    """``F.linear(input, weight, bias)``"""
    return _linear(input, weight, bias)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    *,
    transposed: bool = False,
    name: str = "linear",
    place: int = 0,
) -> Any:
    """``x @ weight.T + bias``; ``place`` is that of ``x`` among the arguments of function
    ``name``.
    """
    expressions, values = trained(weight, bias)
    if not expressions or expression_of(x) is not None:
        return NotImplemented
    layout = place_of_input(name, x, expressions, place)
    if layout is None:
        return NotImplemented
    leaf = first_leaf(expressions)
    if isinstance(layout, Chosen):
        return _of_chosen_rows(x, weight, bias, expressions, values, layout, transposed)
    whole = leaf.starts is not None or x.shape[layout.dim] == leaf.samples
    if layout.dim and not whole:
        return undone(expressions)
    if not whole and layout.interleaved and x.ndim > 2:
        return undone(expressions)
    moved = layout.dim
    if moved == 1 and x.ndim > 2:  # the plan's other layout, [T, B, ...]
        layout, moved = Layout(0, True), 0
    elif moved:
        x = x.movedim(moved, 0)
    if whole and not layout.interleaved:
        layout = FIRST
    note(expressions)
    plan = plan_for(expressions, values, layout, transposed)
    links = leaf.links if weight is leaf.current and leaf.is_tied else ()
    leaf.is_taken = bool(links)
    y = functional.linear(x, bare(weight), bare(bias), probe_of(expressions), plan, links)
    return y.movedim(0, moved).contiguous() if moved else y


def _of_chosen_rows(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    expressions: list[Expression],
    values: list[Tensor],
    layout: Chosen,
    transposed: bool,
) -> Tensor:
    """``F.linear`` for rows that the data have chosen: they are sorted by sample."""
    B = first_leaf(expressions).samples
    order_N = layout.owner_N.argsort(stable=True)
    ends_B = torch.bincount(layout.owner_N, minlength=B).cumsum(0)
    starts = torch.cat([ends_B.new_zeros(1), ends_B])
    note(expressions)
    plan = plan_for(expressions, values, FIRST, transposed)._replace(starts=starts)
    x = x.index_select(0, order_N)  # not an index, which ``owners_of`` would take for a choice
    y = functional.linear(x, weight, bias, probe_of(expressions), plan)
    return y.index_select(0, order_N.argsort())


def product(x: Tensor, *more: Any, **options: Any) -> Any:
    """``x @ weight``"""
    if len(more) != 1 or options or not isinstance(more[0], Tensor):
        return NotImplemented
    [weight] = more
    if weight.ndim != 2 or x.ndim < 2 or expression_of(weight) is None:
        return NotImplemented
    return _linear(x, weight, transposed=True, name="matmul")


def addmm(bias: Tensor, *factors: Any, **options: Any) -> Any:
    """``torch.addmm(bias, x, weight)``"""
    if len(factors) != 2 or options or bias.ndim != 1 or expression_of(factors[1]) is None:
        return NotImplemented
    x, weight = factors
    return _linear(x, weight, bias, transposed=True, name="addmm", place=1)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding(input, weight, padding_idx)``"""
    ids = input
    expressions, values = trained(weight)
    special = max_norm is not None or scale_grad_by_freq or sparse
    if special or not expressions or expression_of(ids) is not None:
        return NotImplemented
    leaf = expressions[0].leaves[0]
    layout = place_of_input("embedding", ids, expressions, 0)
    if not isinstance(layout, Layout):
        return undone(expressions) if layout is not None else NotImplemented
    if layout.dim > 1 or (layout.dim == 0 and layout.interleaved):
        return undone(expressions)
    tied = leaf.is_tied and weight is leaf.current
    if not tied:
        note(expressions)
    elif not compiling():
        leaf.uses += 1
    plan = plan_for(expressions, values, Layout(0, layout.dim == 1))
    if tied:
        plan = plan._replace(uses=None)
        if leaf.is_taken and (compiling() or torch._C._current_graph_task_id() == -1):
            leaf.links, leaf.is_taken = (), False  # the model runs once more
    y, link = functional.embedding(
        ids,
        bare(weight),
        probe_of(expressions),
        plan,
        leaf.links if tied else (),
        padding_idx=padding_idx,
        tied=tied,
    )
    if link is not None:
        leaf.links = (*leaf.links, link)
    return y


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """``F.layer_norm(input, normalized_shape, weight, bias, eps)``"""
    return _norm("layer_norm", input, tuple(normalized_shape), weight, bias, eps)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """``F.rms_norm(input, normalized_shape, weight, eps)``"""
    return _norm("rms_norm", input, tuple(normalized_shape), weight, None, eps)


def _norm(name: str, x: Tensor, shape: tuple[int, ...], weight: Any, bias: Any, eps: Any) -> Any:
    expressions, values = trained(weight, bias)
    if not expressions or expression_of(x) is not None:
        return NotImplemented
    layout = place_of_input(name, x, expressions, 0)
    if layout is None:
        return NotImplemented
    leaf = first_leaf(expressions)
    lead = x.ndim - len(shape)
    if isinstance(layout, Chosen) or not lead or layout.dim >= lead or layout.dim > 1:
        return undone(expressions)
    sequence_first = layout.dim == 1
    if sequence_first and (x.shape[1] != leaf.samples or len(shape) > 1):
        return undone(expressions)
    if layout.dim == 0 and layout.interleaved and lead > 1:
        return undone(expressions)
    note(expressions)
    plan = plan_for(expressions, values, Layout(0, sequence_first or layout.interleaved))
    probe = probe_of(expressions)
    if name == "rms_norm":
        return functional.rms_norm(x, bare(weight), probe, plan, eps=eps)
    return functional.layer_norm(x, shape, bare(weight), bare(bias), probe, plan, eps=eps)


def conv(dims: int, transposed: bool = False) -> Callable[..., Any]:
    """``F.conv1d`` and its likes."""
    name = f"conv{'_transpose' if transposed else ''}{dims}d"

    def wide(value: Any) -> tuple[int, ...]:
        own = (value,) if isinstance(value, int) else tuple(value)
        return own * dims if len(own) == 1 else own

    def plain(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        return run(input, weight, bias, stride, padding, dilation, groups, None)

    def backwards(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return run(input, weight, bias, stride, padding, dilation, groups, wide(output_padding))

    def run(
        x: Tensor,
        weight: Any,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        output_padding: tuple[int, ...] | None,
    ) -> Any:
        expressions, values = trained(weight, bias)
        if not expressions or isinstance(padding, str) or x.ndim != dims + 2:
            return NotImplemented
        if expression_of(x) is not None:
            return NotImplemented
        layout = place_of_input(name, x, expressions, 0)
        if layout is None:
            return NotImplemented
        fits = isinstance(layout, Layout) and layout.dim == 0 and not layout.interleaved
        if not fits or first_leaf(expressions).starts is not None:
            return undone(expressions)
        note(expressions)
        return functional.conv(
            x,
            bare(weight),
            bare(bias),
            probe_of(expressions),
            plan_for(expressions, values, FIRST),
            stride=wide(stride),
            padding=wide(padding),
            dilation=wide(dilation),
            groups=groups,
            output_padding=output_padding,
        )

    return backwards if transposed else plain


def _channels(
    name: str,
    x: Tensor,
    weight: Any,
    bias: Any,
    normalised: Callable[[Tensor], Tensor],
    y: Callable[[Any, Any], Tensor],
) -> Any:
    """A norm with a gain and a bias for each channel."""
    expressions, values = trained(weight, bias)
    if not expressions or expression_of(x) is not None or x.ndim < 2:
        return NotImplemented
    layout = place_of_input(name, x, expressions, 0)
    if layout is None:
        return NotImplemented
    fits = isinstance(layout, Layout) and layout.dim == 0 and not layout.interleaved
    if not fits or first_leaf(expressions).starts is not None:
        return undone(expressions)
    note(expressions)
    plan, probe = plan_for(expressions, values, FIRST), probe_of(expressions)
    own = (t if t is None else t.detach() for t in (weight, bias))
    return functional.channel_norm(
        y(*own), x, bare(weight), bare(bias), probe, plan, normalised=normalised
    )


def group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """``F.group_norm(input, num_groups, weight, bias, eps)``"""
    normalised = partial(F.group_norm, num_groups=num_groups, eps=eps)
    y = partial(F.group_norm, input, num_groups, eps=eps)
    return _channels(
        "group_norm", input, weight, bias, normalised, lambda w, b: y(weight=w, bias=b)
    )


def batch_norm(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)``"""
    mean, var = running_mean, running_var
    if training or mean is None or var is None:
        return NotImplemented

    normalised = partial(_by_running, mean=mean, var=var, eps=eps)

    def y(w: Any, b: Any) -> Tensor:
        return F.batch_norm(input, mean, var, w, b, False, momentum, eps)

    return _channels("batch_norm", input, weight, bias, normalised, y)


def instance_norm(
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.instance_norm(input, weight=weight, bias=bias, eps=eps)``"""
    mean, var = running_mean, running_var
    if use_input_stats:
        normalised: Callable[[Tensor], Tensor] = partial(F.instance_norm, eps=eps)
    else:
        normalised = partial(_by_running, mean=mean, var=var, eps=eps)

    def y(w: Any, b: Any) -> Tensor:
        return F.instance_norm(input, mean, var, w, b, use_input_stats, momentum, eps)

    return _channels("instance_norm", input, weight, bias, normalised, y)


def _by_running(t: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """``t``, normalised by running statistics."""
    shape = (1, -1, *(1,) * (t.ndim - 2))
    rstd = (var.to(t.dtype) + eps).rsqrt()
    return (t - mean.to(t.dtype).view(shape)) * rstd.view(shape)


def bilinear(input1: Tensor, input2: Tensor, weight: Any, bias: Any = None) -> Any:
    """``F.bilinear(input1, input2, weight, bias)``"""
    x1, x2 = input1, input2
    expressions, values = trained(weight, bias)
    if not expressions or any(expression_of(x) is not None for x in (x1, x2)):
        return NotImplemented
    layout = place_of_input("bilinear", x1, expressions, 0)
    if layout is None:
        return NotImplemented
    if not isinstance(layout, Layout) or layout.dim or layout.interleaved:
        return undone(expressions)
    note(expressions)
    plan = plan_for(expressions, values, FIRST)
    return functional.bilinear(x1, x2, bare(weight), bare(bias), probe_of(expressions), plan)


def embedding_bag(
    input: Tensor,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """``F.embedding_bag(ids, weight, offsets, mode=mode)``, where each bag is a sample."""
    ids = input
    expressions, _ = trained(weight)
    if not expressions or mode == "max" or scale_grad_by_freq or sparse:
        return NotImplemented
    leaf = expressions[0].leaves[0]
    bags = ids if offsets is None else offsets[:-1] if include_last_offset else offsets
    plain = expressions[0].is_whole and leaf.starts is None and not leaf.facts.second
    if not plain or leaf.facts != NOTHING or not bags.ndim or bags.shape[0] % max(leaf.samples, 1):
        return NotImplemented
    if offsets is None and place_of_input("embedding_bag", ids, expressions, 0) != FIRST:
        return NotImplemented
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, ids.contiguous(), max_norm, norm_type)
    note(expressions)
    return functional.embedding_bag(
        ids,
        bare(weight),
        leaf.probe,
        offsets=offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def cross_entropy(
    x: Tensor, weight: Any, labels: Tensor, *, bias: Any = None, **options: Any
) -> Any:
    """``functional.linear_cross_entropy(x, weight, labels)``"""
    expressions, values = trained(weight, bias)
    if not expressions:
        return functional.linear_cross_entropy(x, weight, labels, bias=bias, **options)
    layout = place_of_input("linear_cross_entropy", x, expressions, 0)
    leaf = first_leaf(expressions)
    own = dict(options, bias=bare(bias))
    if not isinstance(layout, Layout) or layout.dim > 1:
        for expression in expressions:
            expression.leaves[0].fail("the samples were not found in its cross entropy")
        return functional.linear_cross_entropy(x, weight.detach(), labels, **own)
    note(expressions)
    dim = 1 if layout.dim == 1 or layout.interleaved else 0
    plan = plan_for(expressions, values, Layout(0, dim == 1))
    links = leaf.links if weight is leaf.current and leaf.is_tied else ()
    leaf.is_taken = bool(links)
    return functional.linear_cross_entropy(
        x, bare(weight), labels, probe=probe_of(expressions), plan=plan, links=links, **own
    )


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """``functional.attention(q, k, v, sinks=...)``"""
    parameters = [options.get(name) for name in ("sinks", "logit_scale", "q_gain", "k_gain")]
    expressions, values = trained(*parameters)
    if not expressions:
        return functional.attention(q, k, v, **options)
    layout = place_of_input("attention", q, expressions, 0)
    note(expressions)
    if not isinstance(layout, Layout) or layout.dim or layout.interleaved:
        for expression in expressions:
            expression.leaves[0].fail("the samples were not found in its attention")
    probe = torch.cat([expression.leaves[0].probe for expression in expressions])
    return functional.attention(q, k, v, probe=probe, **options)


KERNELS: dict[Any, Callable[..., Any]] = {
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.bilinear: bilinear,
    F.embedding_bag: embedding_bag,
    functional.linear_cross_entropy: cross_entropy,
    functional.attention: attention,
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), product),
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.conv1d: conv(1),
    F.conv2d: conv(2),
    F.conv3d: conv(3),
    F.conv_transpose1d: conv(1, transposed=True),
    F.conv_transpose2d: conv(2, transposed=True),
    F.conv_transpose3d: conv(3, transposed=True),
}
