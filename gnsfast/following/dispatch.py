# SPDX-License-Identifier: Apache-2.0
"""The class that trainable parameters have while a block is open: it sees each function of torch
that takes one of them, with the arguments that it really gets.

Such a function is one of four things. A function with a kernel (``kernels.py``) is served by
``gnsfast.functional``. One of parameters and constants alone gives another tensor of this kind. An
element-wise one is a reduction (``elementwise.py``). Any other is run again for each sample in
backward (``replay.py``).
"""

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gnsfast import functional
from gnsfast.following import packed
from gnsfast.following.elementwise import spread
from gnsfast.following.kernels import KERNELS
from gnsfast.following.layouts import (
    ALONE,
    FIRST,
    SHARED,
    UNKNOWN,
    Chosen,
    Layout,
    Owned,
    Place,
)
from gnsfast.following.leaf import (
    MADE,
    ROWS,
    SAME,
    Expression,
    Leaf,
    Span,
    Step,
    compiling,
    expression_of,
    first_leaf,
    twin_of,
    unfollowed,
)
from gnsfast.following.replay import Replay, flatten, replayed
from gnsfast.following.uses import bare, plan_for


class Tracked(Tensor):
    """A tensor made of parameters and constants alone, while a block is open."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def detach(self) -> Tensor:
        """As torch's. ``nn.Parameter(t)`` asks for a result of the same class."""
        with unfollowed():
            return super().detach().as_subclass(Tracked)


class Measured(nn.Parameter):
    """A trainable parameter while a block is open."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        if id(self) not in memo:
            with unfollowed():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unfollowed():
            return torch._utils._rebuild_parameter, (
                self.detach(),
                self.requires_grad,
                OrderedDict(),
            )


_measured: dict[type, type] = {nn.Parameter: Measured}
_plain: dict[type, type] = {Measured: nn.Parameter}


def attach(leaf: Leaf, p: Any) -> None:
    """Let functions of ``p`` be seen, as those of ``leaf``."""
    cls = type(p)
    if cls in _plain:
        return
    if cls not in _measured:  # such as a DTensor
        own = {"__torch_function__": Measured.__dict__["__torch_function__"]}
        _measured[cls] = made = type(cls.__name__, (cls,), {**own, "__module__": cls.__module__})
        _plain[made] = cls
    leaf.current = p
    p._gnsfast = leaf.whole
    p.__class__ = _measured[cls]


def detach(p: Any) -> bool:
    """Make ``p`` what it was. Returns whether it was attached."""
    if type(p) not in _plain:
        return False
    p.__class__ = _plain[type(p)]
    del p._gnsfast
    return True


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``, which takes a parameter or a tensor that was made of one."""
    by_compiler = torch.compiler.is_compiling() and not compiling()
    if by_compiler or not torch.is_grad_enabled():
        with unfollowed():
            return func(*args, **kwargs)
    if (opened := OPENED.get(func)) is not None:
        if func is torch.autograd.backward:
            _note_penalties(args[0])
        return opened(*args, **kwargs)
    if not compiling() and is_transformed():
        return _transformed(func, args, kwargs)
    with unfollowed():
        if (kernel := KERNELS.get(func)) is not None:
            y = kernel(*args, **kwargs)
            if y is not NotImplemented:
                return y
        y = _without_kernel(func, args, kwargs)
    if y is not NotImplemented:
        return y
    name = Call(func, args, kwargs).expressions[0].leaves[0].name
    torch._dynamo.graph_break(msg=f"{name}: {NOT_COMPILED}")  # what fullgraph=True raises
    return in_eager_code(func, args, kwargs)


def in_eager_code(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that compiled code does not follow (``prepare_compiler``)."""
    return dispatch(func, args, kwargs)


def prepare_compiler() -> None:
    """Let ``in_eager_code`` break the graph, let what eager code calls be no graph of its own, and
    let one graph serve all numbers of samples. (What is reached from a parameter has fixed sizes
    otherwise.) To import the compiler for this takes a second.
    """
    global in_eager_code
    if "torch._dynamo" in sys.modules and not hasattr(in_eager_code, "_torchdynamo_disable"):
        in_eager_code = torch.compiler.disable(in_eager_code, reason=NOT_COMPILED)
        eval_frame = torch._C._dynamo.eval_frame
        skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
        for cls in (Measured, Tracked):
            code = cls.__dict__["__torch_function__"].__func__.__code__
            eval_frame.set_code_exec_strategy(code, skip)
        config = torch.compiler.config
        config.dynamic_sources = ",".join(filter(None, (config.dynamic_sources, SIZES)))


SIZES = r".*\._gnsfast\..*\.(probe|pair|samples|tokens)"

NOT_COMPILED = (
    "gnsfast follows this parameter in eager code only. It meets the data several times, in a "
    "function without a kernel, or after arithmetic. Compile without fullgraph=True, or leave it "
    "out: gnsfast.configure(model, exclude=[...])"
)


def is_transformed() -> bool:
    """Whether a function runs inside of ``torch.func.vmap`` or its likes."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _transformed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function inside of a transform, where no sample can be seen."""
    for t in pytree.tree_leaves((args, kwargs)):
        expression = expression_of(t)
        for leaf in expression.leaves if expression is not None else ():
            leaf.fail("a transform of torch.func, such as vmap, takes it")
    with unfollowed():
        return func(*args, **kwargs)


KEEPS = frozenset(
    "t transpose permute view reshape flatten unflatten squeeze unsqueeze contiguous clone to "
    "float double half bfloat16 type type_as movedim swapaxes swapdims view_as reshape_as T mT "
    "ravel adjoint H mH".split()
)
"""Functions whose result holds each element of their argument once."""

SHIFTS = frozenset("__neg__ neg __add__ __radd__ __sub__ __rsub__".split())
"""Functions whose result has the parameter's gradient, or its negative, if shapes stay."""

PIECES = frozenset(
    "narrow select chunk split unbind tensor_split split_with_sizes __iter__ __getitem__".split()
)
"""Functions whose results hold each element of their argument at most once."""

ELEMENTWISE = frozenset(
    f"__{kind}{name}__"
    for name in ("add", "sub", "mul", "truediv", "pow")
    for kind in ("", "r", "i")
) | frozenset(
    "add sub mul div pow lerp addcmul addcdiv maximum minimum where multiply subtract divide "
    "true_divide rsub add_ sub_ mul_ div_ copy_ masked_fill masked_fill_ expand_as".split()
)
"""Functions that broadcast their arguments against each other."""

IN_PLACE = frozenset(
    "__iadd__ __isub__ __imul__ __itruediv__ __ipow__ add_ sub_ mul_ div_ masked_fill_".split()
)
"""Those of them that write to their first argument."""

QUERIES = frozenset(
    "__get__ __set__ __delete__ size dim numel nelement __len__ ndimension is_floating_point "
    "is_complex is_contiguous "
    "element_size get_device stride detach requires_grad_ register_hook data_ptr storage_offset "
    "__repr__ __format__ is_shared untyped_storage zero_ __hash__ new_zeros new_ones new_empty "
    "register_post_accumulate_grad_hook new_full new_tensor zeros_like ones_like empty_like type_ "
    "is_same_size item tolist __bool__".split()
)
"""Functions that give no gradient to a parameter."""

COMPILED = KEEPS | SHIFTS | PIECES | {"embedding"}
"""Functions of parameters alone that compiled code follows."""

CASTS = frozenset(("to", "type_as"))
COPIES = frozenset("expand expand_as repeat broadcast_to".split())
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())

_views = {getattr(Tensor, name).__get__: name for name in ("T", "mT", "real", "imag")}
_views |= {getattr(Tensor, name).__get__: "adjoint" for name in ("H", "mH")}
_products = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
NAMES: dict[Any, str] = {**_views, **dict.fromkeys(_products, "matmul")}


def name_of(func: Any) -> str:
    """The name of a function of torch in the steps of an example."""
    name: str = NAMES.get(func) or func.__name__
    return name


def _opened(f: Any) -> Any:
    """A function of ``torch.nn.functional`` that does not ask for a tensor subclass first."""
    own = {
        **f.__globals__,
        "has_torch_function": lambda *_: False,
        "has_torch_function_unary": lambda *_: False,
    }
    opened = types.FunctionType(f.__code__, own, f.__name__, f.__defaults__, f.__closure__)
    opened.__kwdefaults__ = f.__kwdefaults__
    return opened


OPENED: dict[Any, Any] = {
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
    **{f: _opened(f) for f in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)},
}
"""Functions of torch whose own functions are seen one by one. (Inside of ``unfollowed`` a backward
pass could not unpack the tensors of a checkpoint.)
"""


def _set_item(x: Tensor, index: Any, value: Any) -> Tensor:
    """``x[index] = value``"""
    x[index] = value
    return x


class Call:
    """A call of a function without a kernel: ``leaves`` are its arguments, flattened. At the places
    ``own`` are parameters, or tensors made of them, which need a gradient.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.name, self._given = name_of(func), (args, kwargs)
        self.func = _set_item if self.name == "__setitem__" else func
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.constants = self.leaves
        self.own, self.expressions = [], []
        for i, t in enumerate(self.leaves):
            e = expression_of(t) if isinstance(t, Tensor) else None
            if e is not None and t.requires_grad:
                self.own.append(i)
                self.expressions.append(e)
        self.others = [
            i for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and i not in self.own
        ]

    def keep_first(self) -> None:
        """Keep the first argument, a constant that the function will write to, for later runs."""
        if 0 not in self.own:
            self.constants = [self.leaves[0].detach().clone(), *self.leaves[1:]]

    def run(self) -> Any:
        """The result of the function."""
        args, kwargs = self._given
        return self.func(*args, **kwargs)

    def run_with(self, values: dict[int, Any]) -> Any:
        """The result of the function with other values at some places."""
        leaves = [values.get(i, t) for i, t in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    @property
    def index(self) -> Any:
        """The index of ``__setitem__``."""
        return self._given[0][1]

    @property
    def is_in_place(self) -> bool:
        """Whether the function writes to its first argument."""
        name = self.name
        dunder = name.startswith("__")
        return name.startswith(("__i", "__set")) if dunder else name.endswith("_")


def _without_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function without a kernel, or of one that no kernel serves;
    ``NotImplemented`` where compiled code does not follow it.
    """
    name = name_of(func)
    if name in QUERIES:
        return _queried(func, args, kwargs)
    if name == "__getitem__" and not compiling():
        args = numbered(args)
    call = Call(func, args, kwargs)
    if all(leaf.left_out for e in call.expressions for leaf in e.leaves):
        return func(*args, **kwargs)
    if compiling() and not all(e.is_compiled for e in call.expressions):
        return NotImplemented
    leaf = first_leaf(call.expressions)
    step = leaf.step(name)
    places = _places(call, step, leaf)
    if _is_of_parameters(call, step, places):
        copies = name in COPIES and (step is None or step.copies)
        return _of_parameters(call, leaf, copies)
    if name in ELEMENTWISE or (name == "scaled_dot_product_attention" and call.own == [3]):
        spreads = _spreads(call, step, places, leaf)
        if spreads is not None:
            return call.run_with(dict(zip(call.own, spreads)))
    if name == "__setitem__" and (value := _assigned(call, places, leaf)) is not None:
        return call.run_with(dict(zip(call.own, [value])))
    if compiling():
        return NotImplemented
    return _replay(call, step, places, leaf)


def _note_penalties(losses: Any) -> None:
    """Note the parameters of losses that are made of parameters alone."""
    for loss in (losses,) if isinstance(losses, Tensor) else losses:
        if (expression := expression_of(loss)) is not None:
            for leaf in expression.leaves:
                leaf.fail("a loss is made of parameters alone, and belongs to no sample")


_GRAD: Any = getattr(Tensor, "grad").__get__  # noqa: B009


def _queried(func: Any, args: Any, kwargs: Any) -> Any:
    """The answer of a function that gives no gradient to a parameter."""
    out = func(*args, **kwargs)
    if func == _GRAD:  # it has a graph after ``create_graph=True``
        return out
    if isinstance(out, Tensor) and out.grad_fn is not None and (e := expression_of(args[0])):
        for leaf in e.leaves if not compiling() else ():  # such as ``w.real``
            leaf.fail(f"{name_of(func)} of a parameter is not followed")
    return out


def numbered(args: Any) -> Any:
    """The arguments of an index. That of a parameter by one number which is a tensor becomes that
    number.
    """
    t, index = args
    alone = isinstance(index, Tensor) and index.ndim == 0
    if alone and not index.is_floating_point() and index.dtype != torch.bool:
        return t, int(index)
    return args


def _places(call: Call, step: Step | None, leaf: Leaf) -> dict[int, Place]:
    """Where the samples lie in the other tensors of a call."""
    found: dict[int, Place] = {}
    for i in call.others:
        t = call.leaves[i]
        if step is not None:
            place = step.arguments[i] if i < len(step.arguments) else UNKNOWN
            found[i] = SHARED if place is None else place  # a parameter's, which is left out now
        elif leaf.lanes == 1:
            found[i] = ALONE if t.ndim else SHARED
        elif t.ndim:
            found[i] = FIRST if t.shape[0] == leaf.lanes else UNKNOWN
        else:
            found[i] = SHARED
    return found


def _is_of_parameters(call: Call, step: Step | None, places: dict[int, Place]) -> bool:
    """Whether a function takes nothing but parameters and constants."""
    if call.name in CASTS or not call.others:
        return True
    shared = all(place == SHARED for place in places.values())
    return shared and (step is None or all(place == SHARED for place in step.results))


def _spreads(
    call: Call, step: Step | None, places: dict[int, Place], leaf: Leaf
) -> list[Tensor] | None:
    """The parameters of an element-wise function, broadcast to its result, in which the samples are
    known; None where they are not.
    """
    leaves = call.leaves
    layout: Place
    if call.name == "scaled_dot_product_attention":
        shape = torch.Size((*leaves[0].shape[:-1], leaves[1].shape[-2]))
    else:
        shape = torch.broadcast_shapes(*(t.shape for t in leaves if isinstance(t, Tensor)))
    if step is None:
        layout = ALONE if leaf.lanes == 1 else FIRST
    elif step.chosen and not compiling():
        owner_N = packed.owners(leaves[call.others[0]], leaf)
        layout = UNKNOWN if owner_N is None else Chosen(owner_N)
    elif call.name == "expand_as":
        layout = places[call.others[0]]
    else:
        layout = step.results[0] if step.results else UNKNOWN
    values = [leaves[i] for i in call.own]
    if isinstance(layout, Chosen):
        if len(shape) < 2 or shape[0] != len(layout.owner_N):
            return None
    elif not isinstance(layout, Layout):
        return None
    elif leaf.starts is not None and leaf.rows <= 1:  # a single row is in order
        if not leaf.rows and shape[:1] != (1,):
            return None
    elif not layout.fits(shape, leaf.lanes, leaf.growth):
        return None
    if call.name in IN_PLACE and 0 in call.own:
        return None
    # A 0-d tensor does not change the dtype of a result, and its broadcast copy would.
    others = [leaves[i].dtype for i in call.others]
    if any(t.ndim == 0 and any(t.dtype != other for other in others) for t in values):
        return None
    found = [spread_out(t, shape, layout) for t in values]
    return None if any(t is None for t in found) else [t for t in found if t is not None]


def _assigned(call: Call, places: dict[int, Place], leaf: Leaf) -> Tensor | None:
    """The value of ``x[index] = value``, broadcast to the entries of data that it is written to;
    None where their samples are not known.
    """
    x, layout, last = call.leaves[0], places.get(0), len(call.leaves) - 1
    if compiling() or leaf.starts is not None or call.own != [last]:
        return None
    if not isinstance(layout, Layout) or not layout.fits(x.shape, leaf.samples, leaf.growth):
        return None
    owner = layout.owners(x.shape, leaf.samples, x.device)[call.index]
    value = call.leaves[last]
    y = spread_out(value, owner.shape, Owned(owner))
    return y if y is None else y.to(x.dtype)


def spread_out(e: Tensor, shape: torch.Size, layout: Layout | Chosen | Owned) -> Tensor | None:
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
    if wide[d : d + 1] != (1,) and not isinstance(layout, Owned):
        return None
    first = isinstance(layout, Layout) and layout.is_first
    if expression.kind == ROWS and first and (y := _as_rows(expression, shape)) is not None:
        return y
    each = 1
    if leaf.starts is not None and isinstance(layout, Layout):
        rows = layout.samples_first(torch.empty(shape, device="meta"), leaf.rows or 1).shape
        inner = next((k for k, size in enumerate(wide) if size != 1), len(wide)) - len(wide)
        each = packed.rows_of_token(rows[: len(rows) + inner], leaf)
        if not each:
            return None
    if compiling() and expression.kind != SAME:
        return None
    if not compiling():
        expression.note_use()
    plan = plan_for([expression], [e], FIRST, each=each)._replace(uses=None, module=None)
    if isinstance(layout, Chosen):
        plan = plan._replace(starts=None)
    joins = None if compiling() else expression
    return spread(bare(e), leaf.probe, plan, shape, layout, joins, leaf.rows)


def _as_rows(expression: Expression, shape: torch.Size) -> Tensor | None:
    """Rows of a table at ids that all samples share, looked up for each sample."""
    leaf = expression.leaves[0]
    assert expression.rows is not None
    ids, padding_idx = expression.rows
    B, n = leaf.lanes, len(shape)
    if shape[0] != B or (leaf.starts is not None and shape[:-1].numel() != leaf.tokens):
        return None
    if ids.ndim == n - 1 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != n - 2 and not (ids.ndim == n - 1 and ids.shape[0] == B):
        return None
    if not compiling():
        leaf.whole.note_use("rows")
    ids = ids.expand(B, *ids.shape[ids.ndim - n + 2 :])
    plan = plan_for([leaf.whole], [leaf.current], FIRST)
    y, _ = functional.embedding(ids, bare(leaf.current), leaf.probe, plan, padding_idx=padding_idx)
    return y.expand(shape)


def _of_parameters(call: Call, leaf: Leaf, copies: bool) -> Any:
    """The result of a function of parameters and constants, which is followed too."""
    if copies and call.own == [0] and (y := _copied(call, leaf)) is not None:
        return y
    eager = not compiling()
    if not (eager or call.name in COMPILED):
        return NotImplemented
    before = [call.leaves[i]._version for i in call.own] if eager else []
    if eager and call.is_in_place:
        call.keep_first()
    out = call.run()
    is_written = eager and [call.leaves[i]._version for i in call.own] != before
    is_written |= eager and call.is_in_place
    found = {each.index: each for e in call.expressions for each in e.leaves}
    leaves = tuple(found[k] for k in sorted(found))
    results, spec = pytree.tree_flatten(tuple(out) if hasattr(out, "__next__") else out)
    arguments = {id(t) for t in call.leaves} if eager else ()
    for k, t in enumerate(results):
        if not isinstance(t, Tensor) or not t.requires_grad:
            continue
        if id(t) in arguments and not is_written:
            continue
        made = _expression(call, leaves, k, t, is_written)
        if made.kind == MADE:
            if not eager:
                return NotImplemented
            made.graph()
        if not eager:
            t = results[k] = t.as_subclass(Tracked)
        elif type(t) is Tensor:
            t.__class__ = Tracked
        t._gnsfast = made
    if len(results) == 1 and type(out) not in (list, tuple) and not hasattr(out, "__next__"):
        return results[0]
    return pytree.tree_unflatten(results, spec)


def _expression(
    call: Call, leaves: tuple[Leaf, ...], k: int, t: Tensor, is_written: bool
) -> Expression:
    """What result number ``k`` of a function of parameters is made of."""
    first, name = call.expressions[0], call.name
    is_remade = not compiling() or first.leaves[0].facts.v is not None
    make = _remade(call, k, is_written) if is_remade else _not_remade
    keeps = len(call.own) == 1 and first.kind == SAME and not is_written
    shifted = first.is_shifted or name in SHIFTS
    if keeps and (name in KEEPS or (name in SHIFTS and t.shape == call.leaves[call.own[0]].shape)):
        return Expression(leaves, SAME, make, span=first.span, is_shifted=shifted)
    if keeps and name in PIECES and (name != "__getitem__" or _is_plain_index(call.leaves[1:])):
        span = None if compiling() or first.is_shifted else Span.of(t)
        return Expression(leaves, SAME, make, span=span, is_shifted=first.is_shifted)
    if name == "embedding" and call.own == [1] and first.is_whole:
        padding_idx = call.leaves[2] if len(call.leaves) > 2 else None
        return Expression(leaves, ROWS, make, rows=(call.leaves[0], padding_idx))
    return Expression(leaves, MADE, make)


def _not_remade(value: Callable[[Leaf], Tensor]) -> Tensor:
    raise RuntimeError("compiled code made a tensor of it")


def _is_plain_index(index: list[Any]) -> bool:
    return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index)


def _remade(call: Call, k: int, is_written: bool) -> Callable[..., Tensor]:
    """A function that computes result number ``k`` again, from other tensors for the leaves."""
    func, spec, own, expressions = call.func, call.spec, call.own, call.expressions
    constants = [t.detach() if isinstance(t, Tensor) else t for t in call.constants]

    def make(value: Callable[[Leaf], Tensor]) -> Tensor:
        arguments = list(constants)
        for i, e in zip(own, expressions):
            one = e.graph() if value is twin_of else e.make(value)
            arguments[i] = one.clone() if is_written else one
        if is_written and 0 not in own:
            arguments[0] = arguments[0].clone()
        args, kwargs = pytree.tree_unflatten(arguments, spec)
        out = func(*args, **kwargs)
        out = tuple(out) if hasattr(out, "__next__") else out
        result: Tensor = pytree.tree_leaves(out)[k]
        return result

    return make


class Copied(NamedTuple):
    """How a parameter is repeated for each sample: along dimension ``dim`` of the result, which
    holds ``each`` rows of it for a sample. ``less`` are the other numbers of ``repeat``.
    """

    dim: int
    each: int
    less: tuple[int, ...] | None


def copied_along(name: str, arguments: list[Any], B: int) -> Copied | None:
    """How ``expand`` or ``repeat`` repeats its first argument for each of B samples, if it does."""
    e, sizes = arguments[0], [n for n in arguments[1:] if isinstance(n, int)]
    if name == "expand_as":
        sizes = list(arguments[1].shape)
    new = len(sizes) - e.ndim
    for d, n in enumerate(sizes):
        each = 1 if d < new else e.shape[d - new]
        if n == B and B > 1 and (each == 1 or name == "repeat"):
            own = (*sizes[:d], 1, *sizes[d + 1 :])
            needed = name == "repeat" and any(k != 1 for k in own)
            return Copied(d, each, own if needed else None)
    return None


def _copied(call: Call, leaf: Leaf) -> Tensor | None:
    """A parameter that is repeated for each sample: its copies are data."""
    copied = copied_along(call.name, call.leaves, leaf.lanes)
    if copied is None:
        return None
    with torch.no_grad():
        shape = call.run().shape
    e, d = call.leaves[0], copied.dim
    if copied.less is not None:
        e = _of_parameters(Call(Tensor.repeat, (e, *copied.less), {}), leaf, copies=False)
    if copied.each > 1:  # rows (B, each) along one dimension
        e = _of_parameters(Call(Tensor.unsqueeze, (e, d - len(shape) - 1), {}), leaf, copies=False)
        shape = torch.Size((*shape[:d], leaf.lanes, copied.each, *shape[d + 1 :]))
    if not e.requires_grad:
        return None
    y = spread_out(e, shape, Layout(d))
    if y is None:
        return None
    y = y.flatten(d, d + 1) if copied.each > 1 else y
    return y.contiguous() if call.name == "repeat" else y


def chance_of(leaves: list[Any]) -> list[Any]:
    """What changes when a function draws random numbers on the devices of its tensors."""
    gpus = {t.device.index for t in leaves if isinstance(t, Tensor) and t.is_cuda}
    offsets = [torch.cuda.default_generators[k].get_offset() for k in sorted(gpus)]
    return [torch.get_rng_state().view(torch.int64).tolist(), *offsets]


def _replay(call: Call, step: Step | None, places: dict[int, Place], leaf: Leaf) -> Any:
    """The result of a function that is run again for each sample in backward."""
    B, leaves = leaf.lanes, call.leaves
    replay = Replay(call.func, leaves, call.spec, call.own, call.expressions, places, B)
    versions = [t._version if isinstance(t, Tensor) else 0 for t in leaves]
    drawn = chance_of(leaves)
    out = call.run()
    drew = B > 1 and chance_of(leaves) != drawn
    flat = [*flatten(out)]
    if not any(t.requires_grad for t in flat):
        return out
    if step is None:
        some = ALONE if B == 1 else FIRST
        results: list[Place] = [some if some.fits(t.shape, B) else UNKNOWN for t in flat]
    else:
        results = [*step.results][: len(flat)]
        results += [UNKNOWN] * (len(flat) - len(results))
    if call.name in RECURRENT:
        first = leaves[-1] is True
        states = [Layout(1)] * len(call.others)
        places |= dict(zip(call.others, [Layout(0 if first else 1), *states]))
        of_results: list[Place] = [Layout(0 if first else 1), Layout(1), Layout(1)]
        results = of_results[: len(flat)]
    shapes = [list(leaves[i].shape) for i in places], [list(t.shape) for t in flat]
    fits = all(
        not isinstance(place, Layout) or place.fits(leaves[i].shape, B, leaf.growth)
        for i, place in places.items()
    )
    lost = any(place == UNKNOWN for place in places.values()) or not fits
    lost |= any(
        not isinstance(place, Layout) or not place.fits(t.shape, B, leaf.growth)
        for place, t in zip(results, flat)
        if t.requires_grad
    )
    is_written = any(
        isinstance(t, Tensor) and t._version != v for t, v in zip(leaves, versions)
    ) or any(t is given for t in flat for given in leaves)
    if not leaf.samples or not any(leaves[i].numel() for i in call.others):
        lost, results = False, [FIRST] * len(flat)  # nothing to tell apart: all norms are zero
        places.update(dict.fromkeys(places, FIRST))
    where = f"{shapes[0]} -> {shapes[1]}"
    for expression in call.expressions:
        expression.note_use(call.name)
        for each in expression.leaves:
            if is_written:
                each.fail(f"{call.name} writes to data")
            elif drew:
                each.fail(f"{call.name} draws random numbers, other ones for a sample alone")
            elif leaf.starts is not None:
                each.fail(f"{call.name} has no norms for packed documents here, {where}")
            elif lost and not any(leaves[i].ndim for i in call.others):
                each.fail(
                    f"{call.name} joins it with a number of the whole batch, as a penalty on the "
                    "weights does, which belongs to no sample"
                )
            elif lost:
                each.fail(f"the samples were not found in {call.name}, {where}")
    if is_written or drew or lost or leaf.starts is not None:
        return out
    replay.results = [p for p, t in zip(results, flat) if t.requires_grad]  # type: ignore[misc]
    return replayed(replay, out, [e.leaves[0].probe for e in call.expressions])
