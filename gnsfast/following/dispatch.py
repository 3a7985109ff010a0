# SPDX-License-Identifier: Apache-2.0
"""The class that trainable parameters have while a block is open: it sees each function of torch
that takes one of them, with the arguments that it really gets.

Such a function is one of four things. A function with a kernel (``kernels.py``) is served by
``gnsfast.functional``. One of parameters and constants alone gives another tensor of this kind. An
element-wise one is a reduction (``elementwise.py``). Any other is run again for each sample in
backward (``replay.py``).
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import guard, reasons
from gnsfast.following.elementwise import assigned, broadcast
from gnsfast.following.functions import (
    CASTS,
    COMPILED,
    ELEMENTWISE,
    KEEPS,
    LOOKUPS,
    OPENED,
    PIECES,
    QUERIES,
    SHIFTS,
    Call,
    name_of,
    numbered,
    of_torch,
    renew_attention,
)
from gnsfast.following.kernels import KERNELS, cast_data
from gnsfast.following.layouts import RAGGED, SHARED, UNKNOWN, Layout, Place
from gnsfast.following.leaf import (
    MADE,
    ROWS,
    SAME,
    Expression,
    Leaf,
    Row,
    Span,
    compiling,
    expression_of,
    fail,
    first_leaf,
    twin_of,
)
from gnsfast.following.owners import mark_made
from gnsfast.following.packed import alone
from gnsfast.following.replay import replay
from gnsfast.following.uses import bare
from gnsfast.functional import beside
from gnsfast.tensors import writes
from gnsfast.torch_internals import (
    StopRecomputation,
    break_graph,
    is_compiler_loaded,
    is_never_compiled,
    is_transformed,
    pytree,
    rebuilt_parameter,
    skip_in_compiler,
    takes_no_functions,
    unfollowed,
)


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

    __torch_function__ = Tracked.__dict__["__torch_function__"]

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        if id(self) not in memo:
            with unfollowed():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unfollowed():
            return rebuilt_parameter, (
                self.detach(),
                self.requires_grad,
                OrderedDict(),
            )


_measured: dict[type, type] = {nn.Parameter: Measured}
_plain: dict[type, type] = {Measured: nn.Parameter}


def takes_functions(cls: Any) -> bool:
    """Whether a class of others takes the functions of torch itself, as quantized weights do."""
    function: Any = cls.__torch_function__
    default: Any = Tensor.__torch_function__
    is_ours = cls is Tracked or cls in _plain
    return (
        not is_ours
        and function is not takes_no_functions
        and function.__func__ is not default.__func__
    )


def why_opaque(p: Tensor) -> str:
    """Why the functions that take a parameter cannot be seen; empty if they can."""
    if p.is_complex():
        return reasons.COMPLEX.text()
    cls = type(p)
    return (
        f"its class {cls.__name__} takes torch's functions itself" if takes_functions(cls) else ""
    )


def attach(leaf: Leaf, p: Any) -> None:
    """Let functions of ``p`` be seen, as those of ``leaf``."""
    cls = type(p)
    measured = _measured.get(cls)
    if cls in _plain or leaf.is_opaque:
        return
    if measured is None:  # such as a DTensor
        members = {"__torch_function__": Measured.__dict__["__torch_function__"]}
        _measured[cls] = measured = type(
            cls.__name__, (cls,), {**members, "__module__": cls.__module__}
        )
        _plain[measured] = cls
    leaf.current = p
    p._gnsfast = leaf.whole
    p.__class__ = measured


def release(leaf: Leaf) -> None:
    """Let what was made of a parameter, and is still held, be plain tensors."""
    for reference in leaf.made:
        if isinstance(held := reference(), Tracked):
            plain: Any = held
            plain.__class__ = Tensor
            del plain._gnsfast
    leaf.made.clear()


def detach(p: Any) -> bool:
    """Make ``p`` what it was. Returns whether it was attached."""
    plain = _plain.get(type(p))
    if plain is None:
        return False
    p.__class__ = plain
    del p._gnsfast
    return True


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``, which takes a parameter or a tensor that was made of one."""
    if torch.compiler.is_compiling() or not guard.is_open() or func in OPENED:
        return followed(func, args, kwargs)
    first: Any = args[0] if args else None
    call = func, *(expression.leaves for t in args if (expression := expression_of(t)))
    with unfollowed():
        if guard.is_plain(call):
            return func(*args, **kwargs)
        before = guard.version_of(first)
    try:
        return followed(func, args, kwargs)
    except StopRecomputation:
        raise
    except Exception as error:
        with unfollowed():
            is_written = guard.version_of(first) != before
            y = first if is_written else func(*args, **kwargs)  # raises what is torch's own
        guard.takes(error, call)
        return y


def followed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``, and what of its norms is measured in backward."""
    by_compiler = torch.compiler.is_compiling() and not compiling()
    if by_compiler or not torch.is_grad_enabled():
        with unfollowed():
            return func(*args, **kwargs)
    if not compiling():
        func = of_torch(func)
    if (opened := OPENED.get(func)) is not None:
        if func is torch.autograd.backward:
            fail(args[0], reasons.OF_NO_SAMPLE.text())
        return opened(*args, **kwargs)
    if not compiling() and is_transformed():
        return _transformed(func, args, kwargs)
    with unfollowed():
        if (kernel := KERNELS.get(func)) is not None:
            if open_beside[0] and _is_of_torch(args, kwargs):
                y = _beside(kernel, func, args, kwargs)
            else:
                y = kernel(*args, **kwargs)
            if y is not NotImplemented:
                return y
        y = _without_kernel(func, args, kwargs)
    if y is not NotImplemented:
        return y
    name = Call(func, args, kwargs).expressions[0].leaves[0].name
    break_graph(f"{name}: {NOT_COMPILED}")  # what fullgraph=True raises
    return in_eager_code(func, args, kwargs)


open_beside = [0]
"""How many models with an open block leave the gradients to torch."""


def _beside(kernel: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``, which has torch's gradients, and the norms of a kernel."""
    args, kwargs = cast_data(func, args, kwargs)
    stand_in = kernel(*args, **kwargs)
    if stand_in is NotImplemented:
        return stand_in
    named = {name: bare(t) for name, t in kwargs.items()}
    return beside(func(*map(bare, args), **named), stand_in)


def _is_of_torch(args: Any, kwargs: Any) -> bool:
    """Whether torch's own functions give the gradients of the parameters among the arguments."""
    for t in (*args, *kwargs.values()):
        if (expression := expression_of(t)) is not None:
            return expression.leaves[0].norms_alone
    return False


def in_eager_code(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that compiled code does not follow (``prepare_compiler``)."""
    return dispatch(func, args, kwargs)


def prepare_compiler() -> None:
    """Let ``in_eager_code`` break the graph, let what eager code calls be no graph of its own, and
    let one graph serve all numbers of samples. (What is reached from a parameter has fixed sizes
    otherwise.)
    """
    global in_eager_code
    if not is_compiler_loaded():
        return
    renew_attention()  # compiled code cannot do so itself
    if not is_never_compiled(in_eager_code):
        skip_in_compiler(Tracked.__torch_function__, Tracked.detach)
        config = torch.compiler.config
        config.dynamic_sources = ",".join(filter(None, (config.dynamic_sources, SIZES)))
        # At last, since it tells that all is done, also after an error in the lines before.
        in_eager_code = torch.compiler.disable(in_eager_code, reason=NOT_COMPILED)


SIZES = r".*\._gnsfast\..*\.(probe|pair|samples|size)"

NOT_COMPILED = (
    "gnsfast follows this parameter in eager code only. It meets the data several times, in a "
    "function without a kernel, or after arithmetic. Compile without fullgraph=True, or leave it "
    "out: gnsfast.configure(model, exclude=[...])"
)


def _transformed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function inside of a transform, where no sample can be seen."""
    fail((args, kwargs), reasons.TRANSFORM.text())
    with unfollowed():
        return func(*args, **kwargs)


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
    row = leaf.row(name, lambda row: _fits(call, row, leaf))
    if row is not None and _is_of_another(call, row, leaf):
        row = Row(name)
    if name in CASTS and 0 not in call.parameters_at:  # a parameter that tells its dtype alone
        return call.run()
    places = _places(call, row, leaf)
    is_made = _is_of_parameters(call, row, places)
    if is_made:
        return _of_parameters(call, leaf)
    is_bias = name == "scaled_dot_product_attention" and call.parameters_at == [3]
    if is_bias and leaf.norms_alone:
        return _attended(call, row, places, leaf)
    if name in ELEMENTWISE or is_bias:
        spreads = broadcast(call, row, places, leaf)
        if spreads is not None and name == "repeat":
            return spreads[0].contiguous()
        if spreads is not None:
            return call.run_with(dict(zip(call.parameters_at, spreads)))
    if name == "__setitem__" and (value := assigned(call, places, leaf)) is not None:
        return call.run_with(dict(zip(call.parameters_at, [value])))
    if compiling():
        return NotImplemented
    return replay(call, row, places, leaf)


def _attended(call: Call, row: Row | None, places: dict[int, Place], leaf: Leaf) -> Any:
    """The result of attention with a bias, which runs once more for the norms of that alone: torch
    may have cast the bias before it adds up its gradient.
    """
    spreads = None if compiling() else broadcast(call, row, places, leaf, alone=True)
    if spreads is None:
        return NotImplemented if compiling() else replay(call, row, places, leaf)
    as_now = call.as_now(draws=True)
    y = call.run()
    values = {i: call.leaves[i].detach() for i in call.data_at}
    values |= dict(zip(call.parameters_at, spreads))
    with as_now():
        return beside(y, call.run_with(values))


_GRAD: Any = getattr(Tensor, "grad").__get__  # noqa: B009


def _queried(func: Any, args: Any, kwargs: Any) -> Any:
    """The answer of a function that gives no gradient to a parameter."""
    out = func(*args, **kwargs)
    if func == _GRAD:  # it has a graph after ``create_graph=True``
        return out
    if isinstance(out, Tensor) and out.grad_fn is not None and not compiling():  # as ``w.real``
        fail(args[0], f"{name_of(func)} of a parameter is not followed")
    return out


def _fits(call: Call, row: Row, leaf: Leaf) -> bool:
    """Whether the samples may lie in the tensors of a call as a row of the table says."""
    places = ((row.argument(i), call.leaves[i].shape) for i in call.data_at)
    all_fit = all(leaf.fits(p, shape) for p, shape in places if isinstance(p, Layout))
    return all_fit and not _is_of_another(call, row, leaf)


def _is_of_another(call: Call, row: Row, leaf: Leaf) -> bool:
    return any(row.is_of_another(i, call.leaves[i], leaf.samples) for i in call.data_at)


def _places(call: Call, row: Row | None, leaf: Leaf) -> dict[int, Place]:
    """Where the samples lie in the other tensors of a call."""
    places: dict[int, Place] = {}
    for i in call.data_at:
        t = call.leaves[i]
        if row is not None:
            places[i] = row.argument(i) or SHARED  # None for a parameter that is left out now
        else:
            places[i] = (alone(t, leaf) or UNKNOWN) if t.ndim else SHARED
    return places


def _is_of_parameters(call: Call, row: Row | None, places: dict[int, Place]) -> bool:
    """Whether a function takes nothing but parameters and constants, and has no result with a part
    for each sample.
    """
    results = () if row is None else row.results
    if row is not None and not call.data_at:
        if any(isinstance(place, Layout) for place in row.arguments):  # of a call that takes data
            return True
    if call.name in CASTS or not call.data_at:
        return not any(isinstance(place, Layout) or place == RAGGED for place in results)
    return all(place == SHARED for place in (*places.values(), *results))


def _of_parameters(call: Call, leaf: Leaf) -> Any:
    """The result of a function of parameters and constants, which is followed too."""
    eager = not compiling()
    if not (eager or call.name in COMPILED):
        return NotImplemented
    before = [guard.version_of(call.leaves[i]) for i in call.parameters_at] if eager else []
    is_written = eager and writes(call.name)
    if is_written:
        call.keep_first()
    as_now = call.as_now() if eager else nullcontext
    out = call.run()
    is_written |= eager and [guard.version_of(call.leaves[i]) for i in call.parameters_at] != before
    by_index = {taken.index: taken for e in call.expressions for taken in e.leaves}
    leaves = tuple(by_index[k] for k in sorted(by_index))
    results, spec = pytree.tree_flatten(tuple(out) if hasattr(out, "__next__") else out)
    arguments = {id(t) for t in call.leaves} if eager else ()
    for k, t in enumerate(results):
        if not isinstance(t, Tensor) or not t.requires_grad:
            continue
        if id(t) in arguments and not is_written:
            continue
        if t.is_complex():
            if not eager:
                return NotImplemented
            for leaf in leaves:
                leaf.fail(reasons.MADE_COMPLEX.text())
            continue
        expression = _expression(call, leaves, k, t, is_written, as_now)
        if eager:
            mark_made(t)
            first_leaf(call.expressions).made.append(weakref.ref(t))
        if expression.kind == MADE:
            if not eager:
                return NotImplemented
            expression.graph()
        if not eager:
            t = results[k] = t.as_subclass(Tracked)
        elif type(t) is Tensor:
            t.__class__ = Tracked
        t._gnsfast = expression
    if len(results) == 1 and type(out) not in (list, tuple) and not hasattr(out, "__next__"):
        return results[0]
    return pytree.tree_unflatten(results, spec)


def _expression(
    call: Call, leaves: tuple[Leaf, ...], k: int, t: Tensor, is_written: bool, as_now: Any
) -> Expression:
    """What result number ``k`` of a function of parameters is made of."""
    first, name = call.expressions[0], call.name
    make = _not_remade if compiling() else _remade(call, k, is_written, as_now)
    keeps = len(call.parameters_at) == 1 and first.kind == SAME and not is_written
    shifts = name in SHIFTS and not call.is_scaled
    shifted = first.is_shifted or shifts
    if keeps and (
        name in KEEPS or (shifts and t.shape == call.leaves[call.parameters_at[0]].shape)
    ):
        return Expression(leaves, SAME, make, span=first.span, is_shifted=shifted)
    if keeps and name in PIECES and (name != "__getitem__" or _is_plain_index(call.index)):
        span = None if compiling() or first.is_shifted else Span.of(t)
        return Expression(leaves, SAME, make, span=span, is_shifted=first.is_shifted)
    if name == "embedding" and call.parameters_at == [1] and first.is_whole:
        padding_idx = call.leaves[2] if len(call.leaves) > 2 else None
        return Expression(leaves, ROWS, make, rows=(call.leaves[0], padding_idx))
    if name in LOOKUPS and first.is_whole and (ids := _ids_of_rows(call)) is not None:
        return Expression(leaves, ROWS, make, rows=(ids, None))
    return Expression(leaves, MADE, make)


def _ids_of_rows(call: Call) -> Tensor | None:
    """The ids of ``table[ids]``, or of ``table.index_select(0, ids)``, as none that count from the
    end; None for any other index.
    """
    if compiling() or call.parameters_at != [0] or call.leaves[0].ndim != 2:
        return None
    table, *dim, ids = call.leaves
    is_list = isinstance(ids, Tensor) and ids.ndim == 1 and ids.dtype == torch.int64
    is_first = dim == ([0] if call.name == "index_select" else [])
    return ids % len(table) if is_list and is_first else None


def _not_remade(value: Callable[[Leaf], Tensor]) -> Tensor:
    raise RuntimeError("compiled code made a tensor of it")


def _is_plain_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in parts)


def _remade(call: Call, k: int, is_written: bool, as_now: Any) -> Callable[..., Tensor]:
    """A function that computes result number ``k`` again, from other tensors for the leaves, in the
    context ``as_now``.
    """
    function, at, expressions = call.function, call.parameters_at, call.expressions
    constants = [t.detach() if isinstance(t, Tensor) else t for t in call.constants]

    def make(value: Callable[[Leaf], Tensor]) -> Tensor:
        arguments = list(constants)
        for i, e in zip(at, expressions):
            one = e.graph() if value is twin_of else e.make(value)
            arguments[i] = one.clone() if is_written else one
        if is_written and 0 not in at:
            arguments[0] = arguments[0].clone()
        with as_now():
            out = function(arguments)
        out = tuple(out) if hasattr(out, "__next__") else out
        result: Tensor = pytree.tree_leaves(out)[k]
        return result

    return make
