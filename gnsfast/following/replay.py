# SPDX-License-Identifier: Apache-2.0
"""Functions without a kernel: one of them is run again in backward, for each sample alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from gnsfast.following.layouts import Chosen, Layout, Place
from gnsfast.following.leaf import Expression, unfollowed
from gnsfast.following.sample_gradients import Dense, flat, is_wanted, leave, reduced
from gnsfast.functional import Plan
from gnsfast.tensors import accumulate_dtype


class Replay:
    """A call of ``func``. ``leaves`` are its arguments, flattened as ``spec`` says; at the places
    ``own`` are ``expressions`` of parameters, at those of ``places`` the samples lie as they say.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: pytree.TreeSpec,
        own: list[int],
        expressions: list[Expression],
        places: dict[int, Place],
        samples: int,
    ) -> None:
        self.func, self.spec, self.own, self.samples = func, spec, own, samples
        self.expressions, self.places = expressions, places
        self.leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        self.random = torch.get_rng_state()
        self.results: list[Layout | Chosen] = []  # of the results that have a gradient

    def gradients(self, b: int, dys: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sample b's gradient of each expression.

        Raises:
            RuntimeError: where the function does not take a single sample.
        """
        B, arguments = self.samples, list(self.leaves)
        for i, place in self.places.items():
            if isinstance(place, (Layout, Chosen)):
                arguments[i] = place.of_sample(self.leaves[i], b, B)
        ends = [self.leaves[i].detach().requires_grad_() for i in self.own]
        for i, end in zip(self.own, ends):
            arguments[i] = end
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(self.random)
            args, kwargs = pytree.tree_unflatten(arguments, self.spec)
            found = _with_gradient(self.func(*args, **kwargs))
        pairs = [
            (y, place.of_sample(dy, b, B))
            for y, dy, place in zip(found, dys, self.results)
            if dy is not None
        ]
        if len(found) != len(dys) or any(y.shape != dy.shape for y, dy in pairs):
            raise RuntimeError("for a single sample its results have another shape")
        ys, own_dys = zip(*pairs)
        return torch.autograd.grad(ys, ends, own_dys, allow_unused=True)

    def rows(self, dys: tuple[Tensor | None, ...]) -> list[Tensor]:
        """The probe rows of each expression. Those of joined uses are zeros, and left as parts."""
        held: list[list[Tensor]] = [[] for _ in self.expressions]
        for b in range(self.samples):
            for own, g, i in zip(held, self.gradients(b, dys), self.own):
                like = self.leaves[i]
                g = torch.zeros_like(like) if g is None else g
                g = g.to_dense() if g.is_sparse else g
                own.append(g.to(accumulate_dtype(like.dtype)).reshape(1, 1, -1))
        return [
            self._row(number, torch.cat(own) if own else None) for number, own in enumerate(held)
        ]

    def _row(self, number: int, g_B1P: Tensor | None) -> Tensor:
        expression, like = self.expressions[number], self.leaves[self.own[number]]
        if g_B1P is None:
            g_B1P = like.new_zeros(0, 1, like.numel(), dtype=accumulate_dtype(like.dtype))
        if expression.is_parted:
            if is_wanted([expression]):
                leave(expression, Dense(_sample_of(g_B1P, like.shape)), (self, number))
            return torch.zeros_like(expression.leaves[0].probe)
        return reduced(g_B1P, Plan(**flat(expression.facts(like))), g_B1P.dtype)[1]


def _sample_of(g_B1P: Tensor, shape: torch.Size) -> Callable[[int], Tensor]:
    return lambda b: g_B1P[b].reshape(shape)


def _with_gradient(results: Any) -> list[Tensor]:
    """The tensors among ``results`` that need a gradient."""
    return [t for t in flatten(results) if t.requires_grad]


class _Replayed(torch.autograd.Function):
    """Passes on the results of a function, which backward replays."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, probes: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay, ctx.probes = replay, probes
        ctx.set_materialize_grads(False)
        # A new tensor for each result, because autograd forbids in-place operations on a view that
        # a custom Function returns.
        return tuple(torch.ops.aten._unsafe_view(t, t.shape) for t in tensors[probes:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        rows: list[Tensor | None] = [None] * ctx.probes
        if any(dy is not None for dy in dys):
            with unfollowed():
                try:
                    rows = ctx.replay.rows(dys)
                except RuntimeError as error:
                    name, why = ctx.replay.func.__name__, str(error).splitlines()[0]
                    for expression in ctx.replay.expressions:
                        for leaf in expression.leaves:
                            leaf.fail(f"{name} does not take a single sample: {why}")
        return None, None, *rows, *dys


def replayed(replay: Replay, results: Any, probes: list[Tensor]) -> Any:
    """``results`` of a function, whose backward fills the ``probes`` of its expressions."""
    found = _with_gradient(results)
    passed = _Replayed.apply(replay, len(probes), *probes, *found)
    new = dict(zip(map(id, found), passed))
    return pytree.tree_map(lambda t: new.get(id(t), t), results)


def flatten(tree: Any) -> Iterator[Tensor]:
    """The tensors of a result."""
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))
