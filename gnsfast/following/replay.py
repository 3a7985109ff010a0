# SPDX-License-Identifier: Apache-2.0
"""Functions without a kernel: one of them is run again in backward, for each sample alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnsfast import guard, reasons
from gnsfast.errors import first_line
from gnsfast.following.functions import ELEMENTWISE, RECURRENT, Call, chance_of
from gnsfast.following.layouts import FIRST, UNKNOWN, Chosen, Layout, Place
from gnsfast.following.leaf import Leaf, Row
from gnsfast.following.packed import alone, in_pass, unmapped
from gnsfast.following.sample_gradients import Dense, is_wanted, leave, streamed
from gnsfast.functional import backward_pass, passed_on
from gnsfast.tensors import tensors_of
from gnsfast.torch_internals import pytree


class Replay:
    """A call to run again for each of so many ``samples``, which lie as ``places`` say in its
    arguments (``Call.leaves``).
    """

    def __init__(self, call: Call, places: dict[int, Place], samples: int) -> None:
        self.name, self.function, self.parameters_at = call.name, call.function, call.parameters_at
        self.expressions, self.places, self.samples = call.expressions, places, samples
        self.leaves = [t.detach() if isinstance(t, Tensor) else t for t in call.leaves]
        self.as_now = call.as_now(draws=True)
        self.results: list[Layout | Chosen] = []  # of the results that have a gradient

    def gradients(self, b: int, dys: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sample b's gradient of each expression.

        Raises:
            RuntimeError: where the function does not take a single sample.
        """
        B, arguments, is_cut = self.samples, list(self.leaves), False
        for i, place in self.places.items():
            if isinstance(place, (Layout, Chosen)):
                arguments[i], is_cut = place.of_sample(self.leaves[i], b, B), True
        if self.name in RECURRENT and not _has_states_of_each(arguments):
            raise RuntimeError("its states are of other sequences than its input")
        ends = [self.leaves[i].detach().requires_grad_() for i in self.parameters_at]
        for i, end in zip(self.parameters_at, ends):
            arguments[i] = end
        with self.as_now(), torch.enable_grad():
            results = _with_gradient(self.function(arguments))
        pairs = [
            (y, place.of_sample(dy, b, B) if is_cut else place.alone(dy, b, B))
            for y, dy, place in zip(results, dys, self.results)
            if dy is not None
        ]
        if len(results) != len(dys) or any(y.shape != dy.shape for y, dy in pairs):
            raise RuntimeError("for a single sample its results have another shape")
        ys, own_dys = zip(*pairs)
        return torch.autograd.grad(ys, ends, own_dys, allow_unused=True)

    def rows(self, dys: tuple[Tensor | None, ...]) -> list[Tensor]:
        """The probe rows of each expression. Those of joined uses are zeros, and left as parts. The
        gradients of one sample at a time are in memory.
        """
        latest: dict[int, tuple[Tensor | None, ...]] = {}

        def gradient(number: int, b: int) -> Tensor:
            if b not in latest:
                latest.clear()
                latest[b] = self.gradients(b, dys)
            g, like = latest[b][number], self.leaves[self.parameters_at[number]]
            if g is None:
                return torch.zeros_like(like)
            return g.to_dense() if g.is_sparse else g

        rows = [torch.zeros_like(e.leaves[0].probe) for e in self.expressions]
        alone = []
        for number, expression in enumerate(self.expressions):
            if not expression.is_parted:
                alone.append(number)
            elif is_wanted([expression]):
                leave(expression, Dense(partial(gradient, number)), (self, number))
        if alone:
            groups = self.expressions[0].leaves[0].facts.groups  # those of all leaves
            order = [*range(self.samples)] if groups is None else groups.order_B.tolist()
            gradients = (tuple(gradient(number, b) for number in alone) for b in order)
            likes = [self.leaves[self.parameters_at[number]] for number in alone]
            for number, row in zip(alone, streamed(gradients, likes, order, groups)):
                rows[number] = row
        return rows


def _has_states_of_each(arguments: list[Any]) -> bool:
    """Whether a recurrent layer gets as many states as sequences. Torch does not look, and writes
    to memory of others. Packed sequences come with the numbers of those that are as long.
    """
    x, states, is_first = arguments[0], arguments[1], arguments[-1]
    sequences = x.shape[0 if is_first else 1]
    return bool(states.ndim < 3 or x.ndim < 3 or states.shape[1] == sequences)


def _with_gradient(results: Any) -> list[Tensor]:
    """The tensors among ``results`` that need a gradient."""
    return [t for t in tensors_of(results) if t.requires_grad]


class _Replayed(torch.autograd.Function):
    """Passes on the results of a function, which backward replays."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, probes: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay, ctx.probes = replay, probes
        ctx.set_materialize_grads(False)
        return tuple(map(passed_on, tensors[probes:]))

    @staticmethod
    @backward_pass
    def backward(ctx: Any, _: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        rows: list[Tensor | None] = [None] * ctx.probes
        if any(dy is not None for dy in dys):
            try:
                rows = ctx.replay.rows(dys)
            except Exception as error:  # the function's own, whatever it is
                name, why = ctx.replay.name, first_line(error)
                for expression in ctx.replay.expressions:
                    expression.fail(f"{name} does not take a single sample: {why}")
        return None, None, *rows, *dys


def _replayed(replay: Replay, results: Any, probes: list[Tensor]) -> Any:
    """``results`` of a function, whose backward fills the ``probes`` of its expressions."""
    results_with_grad = _with_gradient(results)
    passed = _Replayed.apply(replay, len(probes), *probes, *results_with_grad)
    new = dict(zip(map(id, results_with_grad), passed))
    return pytree.tree_map(lambda t: new.get(id(t), t), results)


def replay(call: Call, row: Row | None, places: dict[int, Place], leaf: Leaf) -> Any:
    """The result of a function that is run again for each sample in backward."""
    leaves, is_packed = call.leaves, any(rows.is_list for rows in leaf.maps)
    B = leaf.lanes if is_packed else leaf.samples
    places = {i: in_pass(place, leaves[i], leaf) for i, place in places.items()}
    again = Replay(call, places, B)
    versions = [*map(guard.version_of, leaves)]
    drawn = chance_of(leaves)
    out = call.run()
    drew = B > 1 and chance_of(leaves) != drawn
    flat = tensors_of(out)
    if not any(t.requires_grad for t in flat):
        return out
    is_written = versions != [*map(guard.version_of, leaves)]
    results = _results(call, row, places, flat, leaf)
    for expression in call.expressions:
        expression.note_use(call.name)
    data = [(place, leaves[i]) for i, place in places.items()]
    results_with_grad = [(place, t) for place, t in zip(results, flat) if t.requires_grad]
    is_known = _is_empty(call, leaf) or all(
        _fits(place, t, leaf) for place, t in data + results_with_grad
    )
    is_known &= not any(t is x for t in flat for x in leaves)
    if is_written or drew or is_packed or not is_known:
        why = _why_not(call, flat, leaf, is_written, drew)
        for expression in call.expressions:
            expression.fail(why)
        return out
    again.results = [place for place, _ in results_with_grad]  # type: ignore[misc]
    return _replayed(again, out, [e.leaves[0].probe for e in call.expressions])


def _results(
    call: Call, row: Row | None, places: dict[int, Place], flat: list[Tensor], leaf: Leaf
) -> list[Place]:
    """Where the samples lie in the results. The ``places`` of the arguments become any where there
    is nothing to tell apart: all norms are zero.
    """
    if _is_empty(call, leaf):
        places.update(dict.fromkeys(places, FIRST))
        return [FIRST] * len(flat)
    results: list[Place] = [
        (alone(t, leaf) or UNKNOWN) if row is None else row.result(k) for k, t in enumerate(flat)
    ]
    results = [in_pass(place, t, leaf) for place, t in zip(results, flat)]
    return [place if isinstance(place, (Layout, Chosen)) else UNKNOWN for place in results]


def _is_empty(call: Call, leaf: Leaf) -> bool:
    """Whether there is nothing to tell apart."""
    data = [call.leaves[i] for i in call.data_at]
    return not leaf.samples or (bool(data) and not any(t.numel() for t in data))


def _fits(place: Place, t: Tensor, leaf: Leaf) -> bool:
    """Whether the samples lie in a tensor as ``place`` says."""
    if isinstance(place, Layout) and not leaf.is_ragged:
        return leaf.fits(place, t.shape)
    return place != UNKNOWN


def _why_not(call: Call, flat: list[Tensor], leaf: Leaf, is_written: bool, drew: bool) -> str:
    """Why the norms of a function would be wrong, whose results are ``flat``."""
    data = [call.leaves[i] for i in call.data_at]
    facts = {"function": call.name, "shapes": ", ".join(str([*t.shape]) for t in data)}
    if is_written and any(t.ndim for t in data):
        return reasons.WRITES.text(**facts)
    if drew:
        return reasons.DRAWS.text(**facts)
    if call.name in RECURRENT and call.leaves[1].ndim == 1:  # the numbers of sequences in each step
        return reasons.PACKED_SEQUENCE.text(**facts)
    if leaf.is_ragged:
        return unmapped(call.name, data, leaf)
    if not leaf.is_learned:
        return reasons.NO_BATCH.text(**facts)
    if any(t.ndim for t in data):
        is_new = call.name in ELEMENTWISE and call.name not in leaf.by_name
        return (reasons.ADDED_TO_SAMPLES if is_new else reasons.OTHER_CALL).text(**facts)
    return reasons.PENALTY_ON_WEIGHTS.text(**facts)
