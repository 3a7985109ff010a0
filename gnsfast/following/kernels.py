# SPDX-License-Identifier: Apache-2.0
"""The functions of torch that have a kernel: where a parameter is their argument, and the samples
are known, ``gnsfast.functional`` takes their place.

Each entry of ``KERNELS`` takes the arguments of its function, under torch's names, and returns
``NotImplemented`` where it does not serve them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.nn.functional import group_norm as torch_group_norm
from torch.nn.functional import instance_norm as torch_instance_norm

from gnsfast import functional, reasons
from gnsfast.following.functions import PRODUCTS
from gnsfast.following.layouts import Chosen, Layout
from gnsfast.following.leaf import Leaf, compiling, expression_of, fail
from gnsfast.following.packed import rows_at
from gnsfast.following.uses import again, bare, begin, in_rows
from gnsfast.functional import autocast_dtype
from gnsfast.torch_internals import any_autocast
from gnsfast.torch_internals import grouped_mm as torch_grouped_mm


def linear(input: Tensor, weight: Tensor, bias: Any = None) -> Any:
    """``F.linear(input, weight, bias)``"""
    return _linear("linear", input, weight, bias)


def product(x: Tensor, *more: Any, **options: Any) -> Any:
    """``x @ weight``"""
    if len(more) != 1 or options or not isinstance(more[0], Tensor):
        return NotImplemented
    [weight] = more
    if weight.ndim != 2 or x.ndim < 2 or expression_of(weight) is None:
        return NotImplemented
    return _linear("matmul", x, weight, transposed=True)


def addmm(bias: Tensor, *factors: Any, **options: Any) -> Any:
    """``torch.addmm(bias, x, weight)``"""
    if len(factors) != 2 or options or bias.ndim != 1 or expression_of(factors[1]) is None:
        return NotImplemented
    x, weight = factors
    return _linear("addmm", x, weight, bias, transposed=True, place=1)


def _linear(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    *,
    transposed: bool = False,
    place: int = 0,
) -> Any:
    """``x @ weight.T + bias``, or ``x @ weight + bias``; ``place`` is that of ``x`` among the
    arguments of function ``name``.
    """
    width = weight.shape[1 if transposed else 0]
    if weight.ndim != 2 or (bias is not None and bias.shape != (width,)):
        return NotImplemented
    use = begin(name, x, (weight, bias), _of_features, place=place, transposed=transposed)
    if use is None:
        return NotImplemented
    leaf, layout, plan, probe = use.leaf, use.layout, use.plan, use.probe
    dim = layout.dim if isinstance(layout, Layout) and not leaf.is_ragged else 0
    is_plain = x.ndim > 2 and x.shape[1] == leaf.samples
    moved = dim if dim > 1 or (dim == 1 and not is_plain) else 0
    in_turns = isinstance(layout, Layout) and not leaf.is_ragged and layout.interleaved > 1
    if moved:
        x, plan = use.data(x).movedim(moved, 0), plan._replace(batch_dim=0)
    elif in_turns and isinstance(layout, Layout):
        x, plan = layout.samples_first(use.data(x), leaf.samples), plan._replace(batch_dim=0)
    operands = bare(weight), bare(bias), probe, plan, () if use.is_sorted else _links(weight)
    if in_turns:
        return functional.linear(x, *operands).transpose(0, 1).flatten(0, 2)
    if moved:
        return functional.linear(x, *operands).movedim(0, moved).contiguous()
    return use.run(lambda x: functional.linear(x, *operands), x)


def _of_features(x: Tensor, layout: Layout | Chosen, leaf: Leaf) -> bool:
    """A linear layer takes consecutive rows of each sample in any dimension, and interleaved ones
    in dimension 0.
    """
    if in_rows(x, layout, leaf):
        return True
    if isinstance(layout, Chosen):
        return False
    if layout.interleaved:
        return layout.dim == 0 and layout.interleaved > 1
    return 0 < layout.dim < x.ndim - 1


def grouped_mm(
    mat_a: Tensor, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """``F.grouped_mm(mat_a, mat_b, offs=offs)``: rows that are sorted by expert, whose matrices are
    mat_b.
    """
    if offs is None or bias is not None or out_dtype is not None or mat_b.ndim != 3:
        return NotImplemented
    use = begin("_grouped_mm", mat_a, (mat_b,), _is_chosen, has_plan=False)
    if use is None:
        return NotImplemented
    assert isinstance(use.layout, Chosen)
    E, B = len(offs), use.leaf.samples
    rows_N = torch.arange(len(mat_a), device=offs.device, dtype=offs.dtype)
    expert_N = torch.searchsorted(offs, rows_N, right=True)  # E stands for an expert elsewhere
    key_N, order_N = (expert_N * B + use.layout.owner_N).sort(stable=True)
    starts = torch.searchsorted(key_N, torch.arange(E * B + 1, device=key_N.device))
    x = rows_at(use.data(mat_a), order_N)
    own: Any = {"transposed": True, "norms_alone": use.plan.norms_alone}
    y = functional.grouped_linear(x, mat_b, None, starts, use.probe, **own)
    return rows_at(y, order_N.argsort())


def _is_chosen(x: Tensor, layout: Layout | Chosen, leaf: Leaf) -> bool:
    return isinstance(layout, Chosen)


def _links(weight: Any) -> tuple[functional.Link, ...]:
    """The links of earlier embeddings to a head that shares their weight."""
    expression = expression_of(weight)
    if expression is None:
        return ()
    leaf = expression.leaves[0]
    if not leaf.is_tied or weight is not leaf.current or again():
        return ()
    leaf.this_pass.is_taken = True
    return leaf.this_pass.links


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
    if _is_by_frequency(weight, scale_grad_by_freq) or sparse:
        return NotImplemented
    use = begin("embedding", input, (weight,), partial(in_rows, features=0), features=0)
    if use is None:
        return NotImplemented
    leaf, plan, probe = use.leaf, use.plan, use.probe
    if not plan.norms_alone:  # else torch does it
        _renormalise(weight, input, max_norm, norm_type)
    tied = leaf.is_tied and weight is leaf.current and not again()
    if tied and leaf.this_pass.is_taken and compiling():
        return NotImplemented
    links = leaf.this_pass.links if tied else ()

    def looked_up(ids: Tensor) -> Tensor:
        y, link = functional.embedding(
            ids, bare(weight), probe, plan, links, padding_idx=padding_idx, tied=tied
        )
        if link is not None:
            leaf.this_pass.links = (*leaf.this_pass.links, link)
        return y

    return use.run(looked_up, input)


def _is_by_frequency(weight: Tensor, scale_grad_by_freq: bool) -> bool:
    """Whether no sample has a gradient of its own, which is an error then."""
    if scale_grad_by_freq:
        fail(weight, reasons.BY_FREQUENCY.text())
    return scale_grad_by_freq


def _renormalise(weight: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """What torch does to the rows ``ids`` before it looks them up, if they have a ``max_norm``."""
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, ids.contiguous(), max_norm, norm_type)


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """``F.layer_norm(input, normalized_shape, weight, bias, eps)``"""
    shape = tuple(normalized_shape)
    takes = partial(in_rows, features=len(shape))
    use = begin("layer_norm", input, (weight, bias), takes, features=len(shape))
    if use is None:
        return NotImplemented
    operands = bare(weight), bare(bias), use.probe, use.plan
    return use.run(lambda x: functional.layer_norm(x, shape, *operands, eps=eps), input)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """``F.rms_norm(input, normalized_shape, weight, eps)``"""
    features = len(tuple(normalized_shape))
    takes = partial(in_rows, features=features)
    use = begin("rms_norm", input, (weight,), takes, features=features)
    if use is None:
        return NotImplemented
    operands = bare(weight), use.probe, use.plan
    return use.run(lambda x: functional.rms_norm(x, *operands, eps=eps), input)


def conv(
    name: str,
    input: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    output_padding: Any = None,
) -> Any:
    """``F.conv1d`` and its likes, by ``name``; with an output padding they are transposed."""
    dims = weight.ndim - 2
    if isinstance(padding, str) or input.ndim != dims + 2:
        return NotImplemented
    use = begin(name, input, (weight, bias))
    if use is None:
        return NotImplemented

    def wide(value: Any) -> tuple[int, ...]:
        sizes = (value,) if isinstance(value, int) else tuple(value)
        return sizes * dims if len(sizes) == 1 else sizes

    return functional.conv(
        use.data(input),
        bare(weight),
        bare(bias),
        use.probe,
        use.plan,
        stride=wide(stride),
        padding=wide(padding),
        dilation=wide(dilation),
        groups=groups,
        output_padding=None if output_padding is None else wide(output_padding),
    )


def conv_transpose(
    name: str,
    input: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """``F.conv_transpose1d`` and its likes, by ``name``."""
    return conv(name, input, weight, bias, stride, padding, dilation, groups, output_padding)


def _channels(
    name: str,
    x: Tensor,
    weight: Any,
    bias: Any,
    normalised: Callable[[Tensor], Tensor],
    norm: Callable[[Any, Any], Tensor],
) -> Any:
    """A norm with a gain and a bias for each channel, which is ``norm(weight, bias)``."""
    use = begin(name, x, (weight, bias))
    if use is None:
        return NotImplemented
    x, plan = use.data(x), use.plan
    fixed = (t if t is None else t.detach() for t in (weight, bias))
    y = functional.stand_in(x, *x.shape) if plan.norms_alone else norm(*fixed)
    operands = bare(weight), bare(bias), use.probe, plan
    return functional.channel_norm(y, x, *operands, normalised=normalised)


def group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """``F.group_norm(input, num_groups, weight, bias, eps)``"""

    def norm(w: Any, b: Any) -> Tensor:
        return torch_group_norm(input, num_groups, w, b, eps)

    normalised = partial(torch_group_norm, num_groups=num_groups, eps=eps)
    return _channels("group_norm", input, weight, bias, normalised, norm)


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
    if training or running_mean is None or running_var is None:
        return NotImplemented

    def norm(w: Any, b: Any) -> Tensor:
        return torch_batch_norm(input, running_mean, running_var, w, b, False, momentum, eps)

    normalised = partial(_by_running, mean=running_mean, var=running_var, eps=eps)
    return _channels("batch_norm", input, weight, bias, normalised, norm)


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

    def norm(w: Any, b: Any) -> Tensor:
        return torch_instance_norm(input, mean, var, w, b, use_input_stats, momentum, eps)

    normalised: Callable[[Tensor], Tensor] = partial(torch_instance_norm, eps=eps)
    if not use_input_stats:
        normalised = partial(_by_running, mean=mean, var=var, eps=eps)
    return _channels("instance_norm", input, weight, bias, normalised, norm)


def _by_running(t: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """``t``, normalised by running statistics."""
    shape = (1, -1, *(1,) * (t.ndim - 2))
    rstd = (var.to(t.dtype) + eps).rsqrt()
    return (t - mean.to(t.dtype).view(shape)) * rstd.view(shape)


def bilinear(input1: Tensor, input2: Tensor, weight: Any, bias: Any = None) -> Any:
    """``F.bilinear(input1, input2, weight, bias)``"""
    if expression_of(input2) is not None:
        return NotImplemented
    use = begin("bilinear", input1, (weight, bias))
    if use is None:
        return NotImplemented
    operands = bare(weight), bare(bias), use.probe, use.plan
    return functional.bilinear(use.data(input1), use.data(input2), *operands)


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
    """``F.embedding_bag(input, weight, offsets, mode=mode)``, where each bag is a sample."""
    if _is_by_frequency(weight, scale_grad_by_freq) or mode == "max" or sparse:
        return NotImplemented
    bags = input
    if offsets is not None:  # there is one offset for each bag
        bags = offsets[:-1] if include_last_offset else offsets
    place = 0 if offsets is None else 2
    use = begin("embedding_bag", bags, (weight,), place=place, has_plan=False)
    if use is None:
        return NotImplemented
    if not use.plan.norms_alone:
        _renormalise(weight, input, max_norm, norm_type)
    factors = per_sample_weights if per_sample_weights is None else use.data(per_sample_weights)
    return functional.embedding_bag(
        input,
        bare(weight),
        use.probe,
        use.plan,
        offsets=offsets,
        mode=mode,
        per_sample_weights=factors,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def cross_entropy(
    x: Tensor, weight: Any, labels: Tensor, *, bias: Any = None, **options: Any
) -> Any:
    """``functional.linear_cross_entropy(x, weight, labels)``"""
    takes = partial(_in_order, shift=bool(options.get("shift")))
    use = begin("linear_cross_entropy", x, (weight, bias), takes)
    if use is None:
        return NotImplemented
    options_of: Any = dict(options, bias=bare(bias), probe=use.probe, plan=use.plan)
    if isinstance(use.layout, Chosen):  # of which links and padded labels are not served
        labels = labels[use.layout.order_N]
    elif use.segments is not None and (order := use.segments.rows.order) is not None:
        labels = labels.flatten()[order]
    else:
        options_of["links"] = _links(weight)
    return use.run(
        lambda x: functional.linear_cross_entropy(x, bare(weight), labels, **options_of), x
    )


def _in_order(x: Tensor, layout: Layout | Chosen, leaf: Leaf, shift: bool) -> bool:
    """The labels lie as the rows do, so packed documents must lie in their order. It knows no links
    of documents to other uses of its weight. A ``shift`` of the labels is along their last
    dimension, which must not hold the samples.
    """
    if isinstance(layout, Chosen):
        return not (shift or leaf.this_pass.uses or leaf.is_tied)
    if shift and any(rows.order is not None for rows in leaf.maps):
        return False
    in_order = layout.dim == 0 and not layout.interleaved
    is_plain = not leaf.is_ragged or not (leaf.this_pass.links or leaf.this_pass.uses)
    needs_order = shift or leaf.is_ragged
    return in_rows(x, layout, leaf) and is_plain and (in_order or not needs_order)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """``functional.attention(q, k, v, sinks=...)``"""
    parameters = tuple(options.get(name) for name in ("sinks", "logit_scale", "q_gain", "k_gain"))
    use = begin("attention", q, parameters, has_plan=False)
    if use is None:
        return NotImplemented
    probe = torch.cat([e.leaves[0].probe for e in use.expressions])
    if use.plan.norms_alone:  # it has no norms alone: the gradients that it gives go nowhere
        for name, t in options.items():
            if isinstance(t, Tensor) and t.requires_grad:
                options[name] = t.detach().requires_grad_()
    q, k, v = map(use.data, (q, k, v))
    return functional.attention(q, k, v, probe=probe, **options)


def cast_data(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``func``, of which the data have the dtype that autocast would give them in
    it. Torch's function and a kernel beside it then keep one tensor. Autocast casts leaves once for
    several functions, so these are left to it.
    """
    if not any_autocast() or func not in LOWERED:
        return args, kwargs

    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point() or expression_of(t) is not None:
            return t
        return t if t.is_leaf and t.requires_grad else t.to(autocast_dtype(t) or t.dtype)

    return tuple(map(cast, args)), {name: cast(t) for name, t in kwargs.items()}


_CONVS = F.conv1d, F.conv2d, F.conv3d
_TRANSPOSED = F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d

KERNELS: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys(PRODUCTS, product),
    torch_grouped_mm: grouped_mm,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.bilinear: bilinear,
    **{f: partial(conv, f.__name__) for f in _CONVS},
    **{f: partial(conv_transpose, f.__name__) for f in _TRANSPOSED},
    functional.linear_cross_entropy: cross_entropy,
    functional.attention: attention,
}

LOWERED = frozenset((F.linear, torch.addmm, *PRODUCTS, *_CONVS, *_TRANSPOSED))
"""Those of them whose arguments autocast casts to a lower precision."""
