# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.learn``: what a batch shows of a model, once, as a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast import reasons
from gnsfast.eager import EAGER
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.following import UNKNOWN, Followed, Leaf, Place, Row, Structure, unwrapped
from gnsfast.functional import Ragged, RowMap, ragged_of
from gnsfast.kept import kept_modes
from gnsfast.parallel import refuse_context_parallel, shared
from gnsfast.reasons import TAKE
from gnsfast.table.checkpoints import keeping_graphs, not_reentrant
from gnsfast.table.loss import loss_proof
from gnsfast.table.outputs import outermost
from gnsfast.table.proof import (
    ModelError,
    Proof,
    Trial,
    gates_open,
    in_turns,
    meeting,
    of_ragged,
    prove,
    refuse_attention,
    turned_place,
)
from gnsfast.table.samples import Samples, Take
from gnsfast.table.table import Table, pattern_of
from gnsfast.table.trace import Traces, trace
from gnsfast.tensors import tensors_of
from gnsfast.torch_internals import is_compiler_loaded, without_modes

OF_TWO = (
    "the results that belong to single samples give it no gradient, and no proof judges a result "
    "with an entry for each two samples"
)

OF_ROWS = "losses of single samples"

Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)`` is the loss that is trained."""

FEW = 3
"""So many samples of a batch are looked at; two are too few to tell a sample from all others."""


def learn(
    model: nn.Module,
    batch: Any,
    *,
    run: Callable[[Any], Any] | None = None,
    take: Take | None = None,
    num_samples: int | None = None,
    cu_seqlens: Tensor | None = None,
    rows: Any = None,
    unproven: str = "leave_out",
    loss: Loss | None = None,
    tokens: Tensor | None = None,
) -> Table:
    """The table of a model: for each call that takes a parameter, where the samples are, and how
    the norms of their gradients were proven. Its only effect is this value.

    Three samples of the batch go through the model in evaluation mode, and the same with a copy of
    the first: the dimension that grows with their number holds the samples. Then the norms of a
    measured pass are compared with those of each sample alone, and a pass in which half of the
    samples have no loss shows whether they meet. What is not proven is left out, by name. All
    processes that shard the parameters must call this. Gradients, state, modes, hooks and random
    numbers are afterwards what they were.

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments, or a dictionary of
            keyword arguments. A batch that is a tuple itself is ``(batch,)``.
        run: what is called with the batch in place of the model, such as a step that calls its
            parts. What it returns of each sample, such as logits, is what norms are proven on.
        take: ``take(batch, samples)`` is a batch of some samples, given as a list of numbers of
            which some come twice. A number K stands for rows b, b + n, ..., b + (K - 1) n, such as
            2 for the chosen answers and then the rejected ones. By default these rows of each
            tensor whose first dimension has the size ``num_samples``, or its second one where the
            first has not.
        num_samples: by default the size of dimension 0 of the batch's first tensor, over K.
        cu_seqlens: as in ``per_sample_sqnorms``, if the batch holds packed documents: rows count as
            samples, and a loss of every second document must give the others no gradient.
        rows: as in ``per_sample_sqnorms``, if samples have unequal numbers of rows, such as graphs
            batched as one. The batch is taken whole, and a loss of every second sample must give
            the others no gradient. ``num_samples`` is by default the number of the last owner + 1.
        unproven: "measure" also measures parameters that the batch gives no gradient, and those of
            a model none of whose results belongs to single samples.
        loss: ``loss(model, batch)`` is your loss, a number. The batch is then what this takes, and
            without ``run`` the results are those of the modules that it calls. The loss is proven
            too: is the gradient of a batch the sum of those of its samples, or their mean with the
            weights ``tokens``? This runs it once for up to 16 samples, and for each of them alone.
        tokens: the weight of each sample [num_samples] in a ``loss`` that is a weighted mean: what
            blocks get as ``gns.update(n, tokens=...)``.

    Raises:
        ValueError: for a batch without samples, for an unknown ``unproven``, and for ``tokens``
            that are not one weight for each sample of a ``loss``, and for ``rows`` with a ``loss``.
        SampleShapeError: if no tensor of the batch has so many samples, and there is no ``take``.
        ObservationError: if a batch norm uses the statistics of its batch, if packed documents
            attend to each other, if the model does not take some of the samples, and inside of a
            block.

    >>> table = gnsfast.learn(torch.nn.Linear(5, 2), torch.randn(4, 5))
    >>> print(table)  # doctest: +ELLIPSIS
    parameter  elements  functions  samples                       proven by
    weight     10        linear     dimension 0  3 samples alone
    bias       2         linear     as in the call of its weight  3 samples alone
    Linear: 2 of 2 parameters are measured, 100.0% of the elements and 100.0% of ...
    """
    if unproven not in ("leave_out", "measure"):
        raise ValueError(f"unproven must be 'leave_out' or 'measure', not {unproven!r}")
    ragged = None
    if rows is not None or cu_seqlens is not None:
        ragged = ragged_of(cu_seqlens, rows, num_samples if cu_seqlens is None else None)
    if rows is not None:
        num_samples = 1  # the batch is taken whole
    elif num_samples is None:
        num_samples = next((t.shape[0] for t in tensors_of(batch) if t.ndim), 0)
        num_samples //= take if isinstance(take, int) else 1
    if num_samples < 1:
        raise ValueError("The batch has no samples. Give a batch with tensors, or num_samples=.")
    if tokens is not None and (loss is None or tokens.shape != (num_samples,)):
        raise ValueError(
            f"tokens are the weights of the {num_samples} samples in a loss, a tensor "
            f"[{num_samples}]: learn(model, batch, loss=loss, tokens=weights)."
        )
    followed = Followed.of(unwrapped(model))
    followed.refuse_batch_statistics()
    if rows is not None and loss is not None:
        raise ValueError(
            "The loss of a ragged batch cannot be proven, because the batch is taken whole: leave "
            "out loss=, or give take= in the place of rows="
        )
    loss_of = None if loss is None else partial(loss, followed.structure.model)
    if run is None:
        run = _call(followed.structure.model) if loss_of is None else with_outputs(loss_of)
    followed.open(num_samples)
    try:
        table = table_of(followed, run, batch, num_samples, take, ragged, unproven)
        return (
            table
            if loss_of is None
            else of_loss(followed, table, loss_of, batch, num_samples, take, tokens)
        )
    finally:
        followed.close()


def with_outputs(loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What gives the loss of a batch, and what the modules return that make it."""

    def run(batch: Any) -> Any:
        with outermost() as outputs:
            return loss_of(batch), outputs

    return run


def of_loss(
    followed: Followed,
    table: Table,
    loss_of: Callable[[Any], Any],
    batch: Any,
    num_samples: int,
    take: Take | None = None,
    tokens: Tensor | None = None,
) -> Table:
    """The table of an open model with the proof of the loss of its batch."""
    structure = followed.structure
    samples = _samples(structure, batch, num_samples, take)
    structure.arguments = samples.batch
    rtol = 5e-2 if table.is_half else 1e-3
    with _for_our_own_ends(followed), gates_open(followed.leaves, structure.groups):
        shown = loss_proof(Trial(followed, loss_of, samples, []), tokens, rtol)
    has_weights = tokens is not None and bool((tokens != tokens[0]).any())
    return replace(table, loss=shown, has_weights=has_weights)


def _call(model: nn.Module) -> Callable[[Any], Any]:
    """What runs a model with a batch of ``learn``."""

    def run(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)

    return run


def table_of(
    followed: Followed,
    run: Callable[[Any], Any],
    batch: Any,
    num_samples: int,
    take: Take | None = None,
    ragged: Ragged | None = None,
    unproven: str = "leave_out",
) -> Table:
    """The table of an open model, which ``run`` runs with a batch of some samples."""
    refuse_context_parallel()
    structure = followed.structure
    samples = _samples(structure, batch, num_samples, take)
    B = max(samples.n, 1)
    for leaf in followed.leaves:
        leaf.rows = 0 if ragged is None else samples.n
    # Processes that shard the parameters must run as many passes.
    few = shared(FEW if B >= FEW else FEW - 1, min, structure.groups)
    trial = Trial(followed, run, samples, [b % B for b in range(few)])
    structure.arguments = samples.batch
    with _for_our_own_ends(followed), gates_open(followed.leaves, structure.groups):
        try:
            if ragged is None:
                shown, proof = _proven(*_traced_with_some(trial))
            else:
                shown, proof = _proven_ragged(trial, ragged)
        except ModelError as error:
            name, n = type(structure.model).__name__, samples.n
            raise ObservationError(
                f"{name} does not take {few}, {few + 1} or all {n} samples of its batch in any "
                f"order ({error}). Rows of each tensor whose dimension 0 or 1 has the size {n} "
                f"were taken. If they are no samples, {TAKE} says what is one."
            ) from error.__cause__
        proof = proof._replace(wrong=shared(proof.wrong, dict.__or__, structure.groups))
        if ragged is not None and ragged.is_packed:
            refuse_attention(trial, proof)
        table = _assembled(followed, shown, proof, few, unproven, ragged)
        _, table = shared((samples.n > 0, table), _first_with_samples, structure.groups)
    return table


def _samples(structure: Structure, batch: Any, n: int, take: Take | None) -> Samples:
    """The samples of a batch. What is wrong on one of the processes that shard the parameters is an
    error on all of them, none of which then waits for it.
    """
    wrong, samples = "", None
    try:
        samples = Samples.of(batch, n, take, type(structure.model).__name__)
    except SampleShapeError as error:
        wrong = str(error)
    wrong = shared(wrong, max, structure.groups)
    if wrong or samples is None:
        raise SampleShapeError(wrong)
    return samples


def _proven(trial: Trial, traces: Traces, late: Traces | None) -> tuple["Shown", Proof]:
    """What the traces show, and the proof of it."""
    structure, shown = trial.followed.structure, Shown.of(traces, late)
    places: Sequence[Place] = traces.result_places
    rtol, rows = shown.rtol, shown.rows
    if trial.samples.are_in_turn:
        rows, places = in_turns(rows, 1), [turned_place(place, 1) for place in places]
    trains = structure.on_any(structure.model.training)
    in_order = trial.in_order() if trains else None
    is_trained = trains and not structure.on_any(in_order is None)
    in_order = in_order if is_trained else None
    proof, rows, places = prove(trial, rows, places, rtol, is_trained, in_order)
    if structure.on_any(bool(proof.reason) and structure.model.training):  # a model to train alone
        proof, rows, places = prove(trial, rows, places, rtol, training=True)
    if late is not None:
        places = late.result_places
        if trial.samples.are_in_turn:
            places = [turned_place(place, 1) for place in places]
        of_late, rows, places = prove(trial, rows, places, rtol, training=True)
        proof = proof.with_late(of_late, shown.late)
    meet = {} if proof.reason else meeting(trial, places)
    # A parameter that none of the few samples has reached takes the row of its siblings.
    meet = {name: why for name, why in meet.items() if name in shown.routes}
    if trial.samples.are_unclear and (meet or proof.wrong):
        proof, meet = proof._replace(reason=reasons.UNCLEAR.text(), wrong={}), {}
    shown = shown._replace(rows=rows, has_pairs=UNKNOWN in places)
    return shown, proof._replace(wrong={**meet, **proof.wrong})


def _proven_ragged(trial: Trial, ragged: Ragged) -> tuple["Shown", Proof]:
    """The same for a ragged batch. A single row that the model does not take twice needs no
    table: its tokens are in order.
    """
    if not ragged.is_packed:
        shown = Shown.of(*_traced(trial._replace(order=[0]), 1, ragged.maps))
        few = of_ragged(trial, ragged)
        proof, known, _ = prove(few, shown.rows, [], shown.rtol, training=True)
        return shown._replace(rows=known), proof
    has_rows = not trial.followed.structure.on_any(not any(trial.samples.layouts))
    try:
        traced = _traced(trial, len(trial.order) + 1) if has_rows else None
    except ModelError:
        traced = None
    shown, places, rows = Shown({}, {}, {}, frozenset(), 1e-3), list[Place](), None
    if traced is not None:
        shown, places = Shown.of(*traced), traced[0].result_places
        rows = shown.rows
    trial = of_ragged(trial, ragged)
    proof, rows, _ = prove(trial, rows, places, shown.rtol, training=True)
    return shown._replace(rows=rows), proof


class Shown(NamedTuple):
    """What the traces show: the rows and routes of the parameters, by name, and which of them are
    taken by one call. The ``late`` ones are reached in training mode alone. ``has_pairs``: a result
    has an entry for each two samples.
    """

    rows: Mapping[str, tuple[Row, ...]]
    routes: Mapping[str, tuple[str, ...]]
    calls: Mapping[str, Sequence[frozenset[str]]]
    late: frozenset[str]
    rtol: float
    has_pairs: bool = False

    def rows_of_calls(self, name: str) -> list[Row]:
        """The rows of the calls that take a parameter, which may be those of another one."""
        takers = dict.fromkeys(n for call in self.calls.get(name, ()) for n in sorted(call))
        return [row for n in takers for row in self.rows.get(n, ())]

    @classmethod
    def of(cls, traces: Traces, late: Traces | None) -> "Shown":
        """What is shown in evaluation mode, and of other parameters in training mode."""
        rows, routes, calls = traces.rows(), traces.routes(), traces.calls()
        new = frozenset[str]() if late is None else frozenset(late.routes().keys() - routes.keys())
        is_half = traces.is_half
        if late is not None:

            def joined(trained: Mapping[str, Any], evaluated: Mapping[str, Any]) -> dict[str, Any]:
                return {name: trained[name] for name in new & trained.keys()} | {**evaluated}

            rows, routes = joined(late.rows(), rows), joined(late.routes(), routes)
            calls = joined(late.calls(), calls)
            is_half |= late.is_half
        return cls(rows, routes, calls, new, 5e-2 if is_half else 1e-3)


def _traced_with_some(trial: Trial) -> tuple[Trial, Traces, Traces | None]:
    """The traces of a few samples, or where the model does not take so few, as one that compares
    pairs, those of the whole batch.
    """
    try:
        return trial, *_traced(trial, len(trial.order) + 1)
    except ModelError:
        whole = trial._replace(order=[*range(trial.samples.n)])
        return whole, *_traced(whole, 2 * trial.samples.n)


def _traced(trial: Trial, m: int, maps: tuple[RowMap, ...] = ()) -> tuple[Traces, Traces | None]:
    """The traces in evaluation mode of the samples and of ``m``, or of a batch whose rows ``maps``
    tell, and those in training mode if the model trains and evaluation mode has not reached some
    parameter, nor a sibling of it.
    """
    structure, order = trial.followed.structure, trial.order
    model, n = structure.model, len(order)

    def traced() -> Traces:
        def run(k: int) -> Any:
            return trial.outputs([order[b % n] for b in range(k)])

        with keeping_graphs():
            return trace(run, n, m, lambda agrees: not structure.on_any(not agrees), maps)

    trains = model.training
    with kept_modes(model):
        model.eval()
        traces = traced()
    routes = traces.routes()
    reached = {_kind(model, leaf) for leaf in structure.covered if leaf.name in routes}
    is_missing = any(_kind(model, leaf) not in reached for leaf in structure.covered)
    return traces, traced() if structure.on_any(trains and is_missing) else None


def _assembled(
    followed: Followed, shown: Shown, proof: Proof, few: int, unproven: str, ragged: Ragged | None
) -> Table:
    """The table of what is shown and proven."""
    rows, routes = dict(shown.rows), dict(shown.routes)
    proofs: dict[str, str] = {}
    left_out: dict[str, str] = {}
    doubtful: dict[str, str] = {}
    unreached = {leaf.name for leaf in followed.leaves if routes and leaf.name not in routes}
    for leaf in followed.leaves:
        name = leaf.name
        if leaf.refused or name in proof.wrong:
            left_out[name] = leaf.refused or proof.wrong[name]
        elif proof.reason:
            doubtful[name] = f"not proven: {proof.reason}"
        elif routes and name not in routes:
            doubtful[name] = reasons.UNREACHED.text()
        elif name in proof.silent:
            doubtful[name] = OF_TWO if shown.has_pairs else reasons.NO_GRADIENT.text()
        else:
            proofs[name] = OF_ROWS if ragged else f"{few} samples alone"
    model = followed.structure.model
    kinds = {leaf.name: _kind(model, leaf) for leaf in followed.leaves}
    siblings: dict[Any, list[str]] = {}
    for name in proofs:
        siblings.setdefault(kinds[name], []).append(name)
    for name in doubtful:
        calls, alike = shown.calls.get(name, ()), siblings.get(kinds[name], [])
        if calls and all(any(other in proofs for other in call) for call in calls):
            proofs[name] = "the norms of another parameter of its calls"
        elif alike:
            known = [*alike, name] if name in routes else alike
            if _agree([shown.rows_of_calls(other) for other in known]):
                proofs[name] = f"its sibling {alike[0]}"
                if name not in routes:
                    of_sibling = rows.get(alike[0], ())
                    rows[name] = tuple(row._replace(is_assumed=True) for row in of_sibling)
                    routes[name] = routes[alike[0]]
    for name, why in doubtful.items():
        if name not in proofs and unproven == "measure":
            proofs[name] = why
        elif name not in proofs:
            left_out[name] = why
    hidden = unreached if shown.has_pairs else proof.silent | unreached
    return Table(
        type(followed.structure.model).__name__,
        (rows,) if rows else (),
        routes,
        proofs,
        left_out,
        frozenset() if proof.reason else frozenset(hidden & doubtful.keys() & left_out.keys()),
        {leaf.name: leaf.parameter.numel() for leaf in followed.leaves},
        proof.sqnorms,
        is_half=shown.rtol > 1e-2,
        is_trained=followed.structure.model.training,
        has_ragged=ragged is not None,
        has_even=ragged is None,
    )


def _kind(model: nn.Module, leaf: Leaf) -> tuple[str, torch.Size, type]:
    """What siblings have in common: their names but for numbers, their shapes, and the class of
    their modules. In a ``Sequential`` layers of all kinds have such names.
    """
    holder = type(model.get_submodule(leaf.name.rpartition(".")[0]))
    return pattern_of(leaf.name), leaf.parameter.shape, holder


def _agree(rows: Sequence[Sequence[Row]]) -> bool:
    """Whether the samples are in the same places in the calls of several parameters."""
    first, *others = rows
    return all(
        len(calls) == len(first) and all(a.is_like(b) for a, b in zip(calls, first))
        for calls in others
    )


def _first_with_samples(a: tuple[bool, Table], b: tuple[bool, Table]) -> tuple[bool, Table]:
    """The table of the first of two processes that has samples."""
    return a if a[0] or not b[0] else b


@contextmanager
def _for_our_own_ends(followed: Followed) -> Iterator[None]:
    """Run the model, perhaps inside of a block, whose pass then begins as if nothing had run."""
    passes, begun = followed.passes, [leaf for leaf in followed.leaves if leaf.this_pass.is_begun]
    kept = [(leaf, leaf.this_pass, leaf.twin, leaf.whole.twin) for leaf in begun]
    followed.is_learning = True
    try:
        followed.structure.free_gathered()
        for leaf in followed.leaves:
            leaf.forget()
        # A checkpoint around the model must not count what is saved here. (A result that is saved
        # as it is would hold its graph, which would hold it.)
        saved = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
        with _in_eager_mode(), saved, not_reentrant(), without_modes():
            yield
    finally:
        followed.is_learning, followed.structure.arguments = False, ()
        followed.structure.free_gathered()
        for leaf in followed.leaves:
            leaf.forget()
        if followed.table is not None:
            followed.table.tell(followed)
        passes.begin(passes.asked, followed.leaves)
        for leaf, state, twin, whole_twin in kept:
            leaf.this_pass, leaf.twin, leaf.whole.twin = state, twin, whole_twin
            leaf.notes.is_unusual = True  # perhaps


def _in_eager_mode() -> AbstractContextManager[Any]:
    """Compiled parts run in eager mode. To ask costs a second where nothing is compiled."""
    return EAGER.meanwhile() if is_compiler_loaded() else nullcontext()
