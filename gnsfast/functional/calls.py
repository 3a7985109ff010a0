# SPDX-License-Identifier: Apache-2.0
"""A layer that a model calls several times in one pass.

A sample's gradient is then the sum over the calls k of dy_kᵀ x_k, which is one weight gradient over
the tokens of all calls. The backward of each call therefore keeps its operands, and the operator
runs once, after the last call.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from gnsfast import combinations
from gnsfast.errors import ObservationError
from gnsfast.functional._autocast import without_autocast
from gnsfast.functional._links import Link, link_grads
from gnsfast.functional.documents import documents_of_rows
from gnsfast.functional.plan import Operator, Plan
from gnsfast.signatures import BY_SAMPLE, RESULTS, ConvWgrad, NormBackward
from gnsfast.tensors import is_dtensor

JOINED = BY_SAMPLE | {ConvWgrad: (2, RESULTS["conv_wgrad"])}
"""Operators whose calls can be joined -> the number of their first fields that have a part for each
sample, and the kinds of their results."""


class Calls:
    """The calls of one layer in one pass. Its ``Plan`` passes this object to each call.

    All calls get the probe and the parameters from one autograd node, whose backward runs after
    that of every call that the loss depends on. There the operator runs on the operands of all
    calls, joined along their tokens. Until then their inputs and output gradients stay in memory.
    A call reports by its own gradient of the probe, such as a NaN for its counter.
    """

    def __init__(self) -> None:
        self._source: tuple[Tensor | None, ...] = ()
        self._handed: tuple[Tensor | None, ...] = ()
        self._kept = _Kept()

    def enter(
        self,
        layer: str,
        plan: Plan,
        source: tuple[Tensor | None, ...],
        links: tuple[Link, ...] = (),
    ) -> tuple[Any, ...]:
        """The tensors that a call uses instead of ``source``, the probe and the parameters. The
        ``links`` of earlier embeddings are taken here, not by the call.
        """
        probe, weight = (*source, None)[:2]
        assert probe is not None
        if not self._source or torch.compiler.is_compiling():
            features = plan.features(layer, is_dtensor(weight), bool(links), probe.is_cuda)
            combinations.refuse(layer, features, plan.module)
        if not torch.is_grad_enabled():
            return source
        if not self._source:
            given = [t for t in source if t is not None and t.requires_grad]
            handed = iter(_Handed.apply(self._kept, len(given), *given, *chain(*links)))
            trained = (t is not None and t.requires_grad for t in source)
            self._handed = tuple(next(handed) if own else t for t, own in zip(source, trained))
            self._source = source
        elif links and torch._C._current_graph_task_id() == -1:  # in backward: recomputed
            why = "the embedding that shares its weight runs between two calls, so links are lost"
            raise _error(plan, why)
        elif any(t is not first for t, first in zip(source, self._source)):
            raise _error(plan, "its parameters were replaced between two calls in one block")
        return self._handed

    def keep(
        self, plan: Plan, operator: Operator, a: Any, wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        """``plan.run(operator, a, wanted)`` without the sums over all calls, which come later."""
        self._kept.add(plan, operator, a, wanted)
        dx = None
        if isinstance(a, NormBackward):
            alone = a._replace(weight=False, bias=False, moments=[], constants_P2=None)
            dx = operator(alone)[0]
        found = {"sum": None, "rows": self._nothing(), "samples": dx}
        return tuple(found[kind] for kind in JOINED[type(a)][1])

    def hold(self, part: Any, finish: Callable[[list[Any]], Tensor]) -> Tensor:
        """Keep any ``part`` of a call. ``finish`` turns the parts of all calls into probe rows."""
        self._kept.hold(part, finish)
        return self._nothing()

    def _nothing(self) -> Tensor:
        """A call's own gradient of the probe."""
        probe = self._source[0]
        assert probe is not None
        return torch.zeros_like(probe)


class _Handed(torch.autograd.Function):
    """Passes on the first ``count`` of ``tensors``, the probe and the trainable parameters. The
    others are links.
    """

    @staticmethod
    def forward(ctx: Any, kept: "_Kept", count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.link_ids = kept, list(tensors[count::3])
        ctx.shapes = [t.shape for t in tensors[:count]]
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, said: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ObservationError(
                "backward(create_graph=True) has no per-sample norms. Run the pass that you "
                "measure without it."
            )
        found = ctx.kept.gradients(ctx.link_ids)
        if found is None or said is None:  # the loss does not depend on any call
            return (None,) * (2 + len(ctx.shapes) + 3 * len(ctx.link_ids))
        (rows, *sums), to_links = found
        own = (t.reshape(shape) for t, shape in zip((rows + said, *sums), ctx.shapes))
        return None, None, *own, *to_links


class _Kept:
    """The operands of the calls that a backward pass has gone through so far."""

    def __init__(self) -> None:
        self._pass = -1
        self._options: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._operands: list[list[Tensor | None]] = []
        self._versions: list[int] = []
        self._starts: list[Tensor] = []
        self._parts: list[Any] = []

    def _begin(self) -> None:
        """Forget what an earlier backward pass left, such as one for the gradient of inputs."""
        current = torch._C._current_graph_task_id()
        if self._pass != current:
            self._pass = current
            self._forget()

    def hold(self, part: Any, finish: Callable[[list[Any]], Tensor]) -> None:
        """Keep a part of a call that has no operator."""
        self._begin()
        self._parts.append(part)
        self._finish = finish

    def add(self, plan: Plan, operator: Operator, a: Any, wanted: Sequence[bool]) -> None:
        """Keep a call."""
        self._begin()
        self._plan, self._operator, self._wanted, self._kind = plan, operator, wanted, type(a)
        inputs, _ = JOINED[self._kind]
        # The kept operands must not hold the graph that they were computed in.
        fields = [t.detach() if isinstance(t, Tensor) else t for t in a]
        own, options = fields[:inputs], fields[inputs:]
        if self._operands and any(map(_differ, options, self._options)):
            why = "its padding, dilation, padding_idx or a similar setting differs between calls"
            raise _error(plan, why)
        self._options = options
        if isinstance(a, ConvWgrad):
            own = [t.unflatten(0, (max(a.samples, 1), -1)) for t in own]
        elif a.starts is not None:
            self._starts.append(a.starts)
        self._operands.append(own)
        self._versions += _versions(own)

    def gradients(self, link_ids: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]] | None:
        """The probe rows and the wanted gradients of all calls, then the gradients of the links.
        None if there was no call.
        """
        self._begin()
        if parts := self._parts:
            self._forget()
            return [self._finish(parts)], []
        if not self._operands:
            return None
        if _versions(chain(*self._operands)) != self._versions:
            raise _error(
                self._plan,
                "the input of a call, or the gradient of its output, was changed before the "
                "backward pass of all calls had ended",
            )
        a = self._joined()
        ids_BS = torch.cat(link_ids, dim=1) if link_ids else None
        if ids_BS is not None:
            a = a._replace(ids_BS=ids_BS)
        kinds = JOINED[self._kind][1]
        with without_autocast(a[0]):
            found = self._plan.run(self._operator, a, self._wanted, ids_BS)
            to_links = link_grads(link_ids, found[len(kinds) - 1], found[0], *found[len(kinds) :])
        sums = [t for t, kind in zip(found, kinds) if kind == "sum"]
        return [found[kinds.index("rows")], *compress(sums, self._wanted)], to_links

    def _joined(self) -> Any:
        """The operator's arguments for all calls. Each field's operands are freed once joined."""
        dim, starts, order = 1, self._starts, None
        if starts:
            (first, *_), *_ = self._operands
            dim = 0 if first is None else first.ndim - 2  # of rows [N, ...] or [1, N, ...]
            order = self._by_document(dim)
        columns = [list(column) for column in zip(*self._operands)]
        self._forget()
        for column in columns if self._kind is ConvWgrad else ():
            sizes = sorted({tuple(t.shape[3:]) for t in column if t is not None})
            if len(sizes) > 1:
                said = " and ".join(str([*size]) for size in sizes)
                why = f"its inputs or outputs have different sizes in different calls, {said}"
                raise _error(self._plan, why)
        joined = []
        while columns:
            joined.append(_cat(columns.pop(0), dim, order))
        if self._kind is ConvWgrad:
            joined = [t.flatten(0, 1) for t in joined if t is not None]
        a: Any = self._kind(*joined, *self._options)
        return a._replace(starts=sum(starts)) if starts else a

    def _by_document(self, dim: int) -> Tensor | None:
        """The order that puts the rows of each document together, call by call."""
        if len(self._starts) == 1:
            return None
        documents = [
            documents_of_rows(starts, own[0].shape[dim])
            for starts, own in zip(self._starts, self._operands)
            if own[0] is not None
        ]
        return torch.cat(documents).argsort(stable=True)


def _differ(a: Any, b: Any) -> bool:
    """Whether an option differs between two calls. Their tensors are joined or are the same."""
    told = isinstance(a, (int, float, torch.dtype)) or (
        isinstance(a, list) and not any(isinstance(each, Tensor) for each in a)
    )
    return told and bool(a != b)


def _cat(parts: list[Tensor | None], dim: int, order: Tensor | None) -> Tensor | None:
    tensors = [t for t in parts if t is not None]
    if not tensors:
        return None
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
    return whole if order is None else whole.index_select(dim, order)


def _versions(tensors: Iterable[Tensor | None]) -> list[int]:
    return [t._version for t in tensors if t is not None]


def _error(plan: Plan, reason: str) -> ObservationError:
    where = plan.module or "a layer that is called several times"
    leave_out = f" Leave it out: convert(model, exclude=[{plan.module!r}])." if plan.module else ""
    return ObservationError(f"{where}: {reason}.{leave_out}")
