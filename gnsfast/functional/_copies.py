# SPDX-License-Identifier: Apache-2.0
"""Gives each sample a copy of parameters that a model uses without a layer: gains, mixing
coefficients, class tokens, tables of positions.

The gradient of a copy is that of its sample. Nothing is computed twice: the copies share their
memory, and an element-wise operator gives for them the same bits as for the parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from gnsfast import ops
from gnsfast.functional.plan import PLAIN, Plan

WANTED = False, True  # a parameter's copies are the outputs of a linear layer that is all bias

ELEMENTWISE = frozenset(
    f"__{kind}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for kind in ("", "r")
) | {
    *("add", "sub", "mul", "div", "pow", "lerp", "addcmul", "maximum", "minimum", "where"),
    *("multiply", "subtract", "divide", "true_divide", "rsub", "add_", "mul_", "sub_"),
    *("__iadd__", "__imul__", "__isub__", "scaled_dot_product_attention"),
}
"""The operators between copies and tensors that hold the samples along dimension 0. Attention is
one of them: it broadcasts its mask.
"""

NUMBERS = {"size", "dim", "numel", "nelement", "__len__", "ndimension", "is_floating_point"}
NUMBERS |= {"is_complex", "is_contiguous", "element_size", "get_device", "stride", "__get__"}
"""Methods whose answer is the same for every copy."""

ONE, ALL = "of the parameter alone", "with all samples"
Step = tuple[str, tuple[int, ...], tuple[int, ...]]


REFUSALS = TypeError, ValueError, RuntimeError, IndexError, AttributeError
"""The errors of operators that do not accept copies."""


class Unfollowed(Exception):
    """A parameter is used in a way that does not give each copy its sample's gradient."""


class Use:
    """How one pass over ``samples`` uses the copies of some parameters.

    ``seen`` holds each use, by the operator's name and the dimensions of the copies and of the
    other tensors. ``known`` holds the uses that an example has shown, and any other use is an
    error. ``failed`` collects the parameters that could not be followed, and why. If it is None,
    the first of them raises ``Unfollowed``. ``odd`` says why the rows of a tensor are not the
    samples, if that is known.
    """

    def __init__(
        self, samples: int, known: Mapping[Step, str] | None, failed: dict[str, str] | None = None
    ) -> None:
        self.samples, self.known, self.failed = samples, known, failed
        self.odd: Callable[[Tensor], str] = lambda t: ""
        self.seen: dict[Step, str] = {}
        self.used: set[str] = set()

    def note(self, step: Step, kind: str) -> None:
        """Note an operator's use of copies, which must be the same in every pass."""
        expected = self.seen.setdefault(step, kind) if self.known is None else self.known.get(step)
        if expected != kind:
            raise Unfollowed(f"{step[0]} uses it in another way than in the example")


class Copies(Tensor):
    """Copies [B, ...] of a parameter, or of a tensor made from it, which look like a single one."""

    use: Use
    names: frozenset[str]

    @classmethod
    def of(cls, copies: Tensor, use: Use, names: frozenset[str]) -> "Copies":
        """``copies`` [B, ...] of the parameters called ``names``."""
        own = copies.as_subclass(cls)
        own.use, own.names = use, names
        return own

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        places = [i for i, t in enumerate(leaves) if isinstance(t, Copies)]
        use, names = leaves[places[0]].use, frozenset[str]()
        for i in places:
            names |= leaves[i].names
        with torch._C.DisableTorchFunctionSubclass():
            for i in places:
                leaves[i] = leaves[i].as_subclass(Tensor)

            def call(*values: Any) -> Any:
                for i, value in zip(places, values):
                    leaves[i] = value
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                return func(*args, **kwargs)

            copies = [leaves[i] for i in places]
            if func.__name__ in NUMBERS:
                found = call(*(t[0] for t in copies))
                if not isinstance(found, Tensor):
                    return found
            try:
                if func in BY_ROWS:
                    use.used |= names
                    args, kwargs = pytree.tree_unflatten(leaves, spec)
                    return BY_ROWS[func](use, *args, **kwargs)
                return _followed(use, names, func.__name__, call, copies, leaves, places)
            except Exception as error:
                if use.failed is None and not isinstance(error, (Unfollowed, *REFUSALS)):
                    raise  # such as the end of a checkpoint's recomputation
                why = _reason(error, func.__name__)
                if use.failed is None:
                    raise Unfollowed(f"{', '.join(sorted(names))}: {why}") from error
                for name in names:
                    use.failed.setdefault(name, why)
                return call(*(t[0] for t in copies))


def _reason(error: Exception, name: str) -> str:
    if isinstance(error, Unfollowed):
        return str(error)
    return (
        f"{name} does not take a copy of it for each sample "
        f"({str(error).splitlines()[0] if str(error) else error!r})"
    )


def _followed(
    use: Use,
    names: frozenset[str],
    name: str,
    call: Callable[..., Any],
    copies: list[Tensor],
    leaves: list[Any],
    places: list[int],
) -> Any:
    """The result of an operator: copies, if it depends on parameters alone, or all samples."""
    use.used |= names
    others = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and i not in places]
    wide = [i for i in others if leaves[i].is_floating_point() or leaves[i].is_complex()]
    step = name, tuple(t.ndim - 1 for t in copies), tuple(leaves[i].ndim for i in wide)
    if name in ("to", "type_as") and wide and places == [0]:
        use.note(step, ONE)
        like = leaves[wide[0]]
        return Copies.of(copies[0].to(like.device, like.dtype), use, names)
    if name == "expand_as" and wide:
        use.note(step, ALL)
        return _expanded(copies[0], leaves[wide[0]].shape)
    sizes = [n for n in leaves if isinstance(n, int)] if name in ("expand", "repeat") else []
    if sizes[:1] == [use.samples]:
        use.note(step, ALL)
        if name == "expand":
            return _expanded(copies[0], sizes)
        return _aligned(copies[0], len(sizes)).repeat(1, *sizes[1:])
    if wide:
        if name not in ELEMENTWISE:
            raise Unfollowed(f"{name} does not work element by element")
        each = _rows_a_sample(use, name, [leaves[i] for i in wide])
        use.note(step, ALL if each == 1 else "several rows of each sample")
        ndim = leaves[wide[0]].ndim
        aligned = [_aligned(t, ndim) for t in copies]
        if each > 1:
            aligned = [t.repeat_interleave(each, 0) for t in aligned]
        if places[0] == 0 and name.strip("_") != name and name.startswith("__i"):
            raise Unfollowed(f"{name} writes to it")
        like = leaves[wide[0]]
        if all(t.ndim > 1 or t.dtype == like.dtype for t in copies):
            return call(*aligned)
        if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            raise Unfollowed(f"{name} writes to a tensor of another dtype")
        # A 0-d tensor does not change the dtype, and torch may multiply by it without rounding.
        y = call(*(one[0].detach() for one in copies))
        for i in wide:
            leaves[i] = leaves[i].detach()
        z = call(*(t.to(y.dtype) for t in aligned))
        return _WithGradientOf.apply(y, z) if use.failed is None else z  # copies of a trial differ
    if name.startswith("__i") and name != "__iter__" or name in ("__setitem__", "add_", "mul_"):
        raise Unfollowed(f"{name} writes to it")
    use.note(step, ONE)
    if name == "__iter__":
        return iter([Copies.of(t, use, names) for t in copies[0].unbind(1)])
    result = _each(name, call, copies, leaves)
    return pytree.tree_map_only(Tensor, lambda t: Copies.of(t, use, names), result)


def _each(name: str, call: Callable[..., Any], copies: list[Tensor], leaves: list[Any]) -> Any:
    """The result of an operator for each copy. The first lines avoid ``vmap``: it takes 60 µs."""
    if name == "__getitem__" and len(leaves) == 2 and type(leaves[1]) is int:
        return copies[0].select(1, leaves[1])
    if name in ("float", "double", "half", "bfloat16"):
        return call(*copies)
    return torch.func.vmap(call)(*copies)


def _rows_a_sample(use: Use, name: str, others: Sequence[Tensor]) -> int:
    """How many rows along dimension 0 each sample has in the tensors that the copies meet."""
    if len({t.shape[:1] for t in others} | {t.ndim for t in others}) > 2:
        raise Unfollowed(f"{name} takes tensors of different shapes")
    rows = others[0].shape[0] if others[0].ndim else 0
    if not rows or rows % use.samples:
        raise Unfollowed(
            f"{name} takes a tensor that does not have {use.samples} samples in dimension 0"
        )
    if why := next(filter(None, map(use.odd, others)), ""):
        raise Unfollowed(why)
    return rows // use.samples


def _aligned(copies: Tensor, ndim: int) -> Tensor:
    """Copies of a tensor that is broadcast to ``ndim`` dimensions, with the samples in the first
    of them.
    """
    missing = ndim - (copies.ndim - 1)
    if missing > 0:
        return copies.reshape(len(copies), *(1,) * (missing - 1), *copies.shape[1:])
    if missing == 0 and copies.shape[1] == 1:
        return copies.squeeze(1)
    raise Unfollowed(f"its shape {list(copies.shape[1:])} leaves no dimension for the samples")


def _expanded(copies: Tensor, sizes: Sequence[int]) -> Tensor:
    return _aligned(copies, len(sizes)).expand(*sizes)


def _batch_norm(
    use: Use,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` with running statistics, with the samples' rows as channels of one row."""
    if training or mean is None or var is None:
        raise Unfollowed("the statistics of the batch tie its samples together")
    row, (w, b) = _one_row(use, "batch_norm", x), _of_rows(use, weight, bias)
    mean, var = mean.repeat(len(x)), var.repeat(len(x))
    return F.batch_norm(row, mean, var, w, b, False, momentum, eps).view(x.shape)


def _group_norm(
    use: Use,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.group_norm``, in the same way."""
    row, (w, b) = _one_row(use, "group_norm", x), _of_rows(use, weight, bias)
    return F.group_norm(row, len(x) * num_groups, w, b, eps).view(x.shape)


def _one_row(use: Use, name: str, x: Tensor) -> Tensor:
    """``x`` [B, C, ...] as [1, B · C, positions]."""
    if _rows_a_sample(use, name, [x]) != 1:
        raise Unfollowed(f"{name} takes several rows of each sample")
    use.note((name, (), (x.ndim,)), ALL)
    return x.reshape(1, x.shape[0] * x.shape[1], -1)


def _of_rows(use: Use, *parameters: Tensor | None) -> list[Tensor | None]:
    """Copies [B, C], or a parameter [C] that has none, for the channels of one row."""
    return [
        t if t is None else t.flatten() if t.ndim == 2 else t.repeat(use.samples)
        for t in parameters
    ]


BY_ROWS: dict[Any, Callable[..., Tensor]] = {F.batch_norm: _batch_norm, F.group_norm: _group_norm}


def copies_of(
    parameters: Mapping[str, Tensor],
    probe: Tensor,
    plan: Plan = PLAIN,
    known: Mapping[Step, str] | None = None,
) -> dict[str, Tensor]:
    """Copies of ``parameters``, one for each sample. Their backward fills ``probe``, which has a
    row for each parameter. ``known`` is that of ``Use``, and ``plan`` that of ``linear``.

    >>> gain, probe = torch.ones((), requires_grad=True), torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gains = gnsfast.functional.copies_of({"gain": gain}, probe)
    >>> (gains["gain"] * torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 3.0]])).sum().backward()
    >>> probe.grad[0, :3], gain.grad
    (tensor([ 4., 16.,  9.]), tensor(9.))
    """
    use = Use(plan.samples(probe), known)
    made = _Copy.apply(probe, plan, *parameters.values())
    return {n: Copies.of(t, use, frozenset((n,))) for n, t in zip(parameters, made)}


class _WithGradientOf(torch.autograd.Function):
    """Returns ``y``, and gives its gradient to ``z``, which equals it up to rounding."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor) -> Tensor:
        # Autograd forbids in-place operations on a view that a custom Function returns.
        out: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probe: Tensor, plan: Plan, *parameters: Tensor) -> tuple[Tensor, ...]:
        plan.check("copies", probe, len(parameters), parameters[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*plan.tensors())
        ctx.samples, ctx.plan = plan.samples(probe), plan.without_tensors()._replace(calls=None)
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return tuple(p.detach().expand(ctx.samples, *p.shape) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dcopies: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, B = ctx.plan.restored(ctx.saved_tensors), ctx.samples
        grads: list[Tensor | None] = []
        found = []
        for k, (dcopy, (shape, dtype, device)) in enumerate(zip(dcopies, ctx.like)):
            own = plan._replace(moments=tuple(v.flatten() for v in plan.moments[k : k + 1]))
            if plan.constants_P2 is not None:
                own = own._replace(constants_P2=plan.constants_P2[k : k + 1])
            g = torch.zeros((B, *shape), dtype=dtype, device=device) if dcopy is None else dcopy
            g_B1P = g.reshape(B, 1, shape.numel())
            a = own.linear_wgrad(g_B1P, g_B1P, WANTED, dtype)
            _, grad, rows_M, _ = own.run(ops.linear_wgrad, a, WANTED)
            if dcopy is None:  # the loss does not depend on it
                rows_M[:, B + 1] = 0.0
            grads.append(None if dcopy is None else grad.reshape(shape))
            found.append(rows_M)
        return torch.stack(found, 1).flatten(0, 1), None, *grads
