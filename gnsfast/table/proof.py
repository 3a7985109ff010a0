# SPDX-License-Identifier: Apache-2.0
"""The proof of a table: the norms of a measured pass over a few samples, beside those of a loop
over single samples of the very same model.

The loss weighs the outputs of each sample at random, so that no gradients cancel. Gradients come
from ``autograd.grad``: nothing reaches ``.grad``, hooks of accumulation, or other processes.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import reasons
from gnsfast.errors import ObservationError, SampleShapeError, first_line
from gnsfast.following import (
    FIRST,
    Followed,
    Layout,
    Leaf,
    Place,
    Row,
    Weighted,
    fill_probes,
    gradients,
    unfollowed,
)
from gnsfast.functional import Ragged, graphs_of_gradients, map_of
from gnsfast.kept import kept_modes
from gnsfast.parallel import shared
from gnsfast.table.samples import Samples
from gnsfast.tensors import is_dtensor, local_part, map_tensors, tensors_of, whole

Rows = Mapping[str, tuple[Row, ...]]


class Proof(NamedTuple):
    """What a proof shows. ``reason`` says why there is none. Else ``wrong`` holds the parameters
    whose norms are wrong, or missing, with the reason; ``silent`` are those that got no gradient.
    ``sqnorms`` are the squared norms of the samples' gradients of each parameter, added up.
    """

    reason: str = ""
    wrong: dict[str, str] = {}
    silent: frozenset[str] = frozenset()
    sqnorms: dict[str, float] = {}

    def with_late(self, other: "Proof", late: frozenset[str]) -> "Proof":
        """This proof with what another one, in training mode, says of the ``late`` parameters."""
        lost = dict.fromkeys(late, other.reason) if other.reason else other.wrong
        wrong = {name: why for name, why in self.wrong.items() if name not in late}
        sqnorms = {name: sqnorm for name, sqnorm in other.sqnorms.items() if name in late}
        return self._replace(
            wrong=wrong | {name: why for name, why in lost.items() if name in late},
            silent=(self.silent - late) | (other.silent & late),
            sqnorms=self.sqnorms | sqnorms,
        )


class Weighed(NamedTuple):
    """Result ``number`` of the model, where its samples lie, and for each of the few the weights of
    its entries in a loss.
    """

    number: int
    place: Layout
    weights: list[Tensor]


class ModelError(Exception):
    """An error of the model itself, whatever it is."""


@contextmanager
def of_the_model() -> Iterator[None]:
    """Raise errors as the model's own, but for those of gnsfast and of the memory."""
    try:
        yield
    except (ObservationError, SampleShapeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(first_line(error)) from error


class Trial(NamedTuple):
    """A model that runs for our own ends: ``run`` gets a batch of some ``samples``. The numbers in
    ``order`` are those of the few that are looked at. A ``ragged`` batch it gets whole.
    """

    followed: Followed
    run: Callable[[Any], Any]
    samples: Samples
    order: list[int]
    ragged: Ragged | None = None

    @property
    def leaves(self) -> list[Leaf]:
        """The parameters of the model."""
        return self.followed.leaves

    @property
    def rows(self) -> list[int]:
        """The rows of the batch in a pass over the few. Samples come in reversed order, which shows
        whether the model puts them into an order of its own.
        """
        return self.order[::-1] if self.ragged is None else [*range(self.samples.n)]

    @property
    def numbers(self) -> list[int]:
        """Which sample of this pass each of the few is."""
        return self.order if self.ragged else [*range(len(self.order))][::-1]

    @property
    def size(self) -> int:
        """How many samples this pass has."""
        return len(self.order) if self.ragged is None else self.ragged.slots

    def outputs(self, order: Sequence[int]) -> Any:
        """What the model returns for some of its samples. Its state is then what it was."""
        batch = self.samples.some(order)
        with self.followed.structure.as_it_was(), of_the_model():
            return self.run(batch)

    def in_order(self) -> list[Tensor] | None:
        """The results of the few in their order. None if the model draws random numbers, or does
        not take them so: then a sample alone cannot be compared with the batch.
        """
        structure = self.followed.structure
        batch, before = self.samples.some(self.order), structure.chance()
        try:
            with structure.bare(), structure.as_it_was(), of_the_model(), torch.no_grad():
                results = [whole(t).detach() for t in tensors_of(self.run(batch))]
                return results if structure.chance() == before else None
        except ModelError:
            return None

    def is_moved(
        self, results: Sequence[Tensor], j: int, in_order: Sequence[Tensor], measured: "Measured"
    ) -> bool:
        """Whether the ``results`` of sample number ``j`` of the few alone are those of another
        place ``in_order``.
        """
        for number, place, _ in measured.weighed:
            alone, n = self.part(results[number], place, 0, 1), len(self.order)
            parts = [self.part(in_order[number], place, k, n) for k in range(n)]
            is_like = [alone is not None and t is not None and _is_like(t, alone) for t in parts]
            if any(is_like) and not is_like[j]:
                return True
        return False

    @contextmanager
    def results(self, order: Sequence[int]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The same as tensors, and images in the batch that get a gradient: torch 2.13's group norm
        of images that are stored channels-last crashes on a CPU where its input gets none.
        """
        images: list[Tensor] = []

        def pick(t: Tensor) -> Tensor:
            if t.is_cuda or t.ndim < 4 or t.is_contiguous() or not t.is_floating_point():
                return t
            images.append(t.detach().requires_grad_())
            return images[-1].clone()  # which may be written to

        batch = map_tensors(pick, self.samples.some(order))
        with self.followed.structure.as_it_was():
            with of_the_model():
                results = self.run(batch)
            yield [*map(whole, tensors_of(results))], images

    def part(self, t: Tensor, place: Layout, k: int, n: int) -> Tensor | None:
        """Sample number ``k`` of n in a result; None if it does not hold them."""
        if self.ragged is None:
            return place.of_sample(t, k, n) if place.fits(t.shape, n) else None
        rows = self.samples.n
        if rows > 1 and place.fits(t.shape, rows):
            t = place.samples_first(t, rows)
        maps = self.ragged.maps
        is_shifted = t.ndim > 1 and t.shape[0] * (t.shape[1] + 1) == maps[0].size
        if maps[0].is_list and is_shifted:  # losses of next tokens
            t = torch.cat([t, t.new_zeros(t.shape[0], 1, *t.shape[2:])], 1)
        rows_of = map_of(maps, t.shape)
        return None if rows_of is None else rows_of[0].rows_of(t.reshape(rows_of[0].size, -1), k)

    def weighed(self, results: Sequence[Tensor], places: Sequence[Place]) -> list[Weighed]:
        """The results that hold the few, with random weights. They grow with the samples: the bias
        of a layer would else have nearly the same norm in all.
        """
        weighed = []
        for number, (t, place) in enumerate(zip(results, places or [FIRST] * len(results))):
            if isinstance(place, Layout) and t.requires_grad:
                parts = [self.part(t, place, k, self.size) for k in self.numbers]
                held = [part for part in parts if part is not None]
                weights = [(1 + j / 2) * torch.randn_like(part) for j, part in enumerate(held)]
                weighed += [Weighed(number, place, weights)] if weights else []
        return weighed

    def loss(
        self, results: Sequence[Tensor], weighed: Sequence[Weighed], j: int, k: int, n: int
    ) -> list[Weighted]:
        """The loss of number ``j`` of the few, which is number ``k`` of n in a pass.

        Raises:
            ModelError: if the results do not hold such a part.
        """
        loss = []
        for number, place, weights in weighed:
            part = self.part(results[number], place, k, n)
            if part is None or part.shape != weights[j].shape:
                raise ModelError("its results then have another shape")
            loss.append((part, weights[j]))
        return loss

    def norms(self, parts: Sequence[Weighted], n: int) -> dict[Leaf, Tensor] | str:
        """The norms of all n samples in the loss of ``parts`` of an open pass, or the error of its
        backward pass.
        """
        try:
            with of_the_model():
                fill_probes(parts, self.leaves)
        except ModelError as error:  # as of an autograd function
            return str(error)
        rows = self.followed.passes.rows(self.leaves)
        return {leaf: row[0, :n] for leaf, row in rows.items()}

    @property
    def failed(self) -> dict[str, str]:
        """The parameters that the pass could not measure, with the reason."""
        return {leaf.name: leaf.this_pass.failed for leaf in self.leaves if leaf.this_pass.failed}


class Measured(NamedTuple):
    """What a measured pass gave: the ``norms`` of the few, or why there are none, and ``lost``, the
    parameters that it could not measure. Those that are ``mixed`` have a norm of other samples
    too. ``drew``: the model drew random numbers.
    """

    weighed: list[Weighed]
    norms: dict[Leaf, Tensor] | str
    lost: dict[str, str]
    drew: bool
    mixed: dict[str, str] = {}


def _is_like(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal but for rounding, and not empty."""
    b = b.detach()
    most = float(b.abs().max()) if a.shape == b.shape and b.numel() else math.nan
    return math.isfinite(most) and torch.allclose(a, b, rtol=0.0, atol=1e-3 * most)


def prove(
    trial: Trial,
    rows: Rows | None,
    places: Sequence[Place],
    rtol: float,
    training: bool,
    in_order: list[Tensor] | None = None,
) -> tuple[Proof, Rows, Sequence[Place]]:
    """The proof of ``rows``, with the samples of the model's results at ``places``, and the rows
    and places that it proves: those that fail as consecutive rows of each sample are tried as
    interleaved ones, so many in turn as another call has rows of each sample. The model is as it is
    where that is ``training``, else in evaluation mode. No ``rows`` stand for a table that could
    not be learnt. ``in_order`` are the results of the few, if they are known.
    """
    followed, structure, table = trial.followed, trial.followed.structure, rows or {}
    followed.learn(*[table][: rows is not None])
    with kept_modes(structure.model):
        if not training:
            structure.model.eval()
        if in_order is None and trial.ragged is None:
            in_order = trial.in_order()
        measured = _measured(trial, places)
        truth = _truths(trial, measured, in_order)
        proof = judged(measured, truth, rtol)
        for run in shared(_runs(table), _joined, structure.groups):
            turned_places = [turned_place(place, run) for place in places]
            is_same = turned_places == [*places]
            # Where results are turned, what was right may only have been alike in all samples.
            names = proof.wrong if is_same else dict.fromkeys((*table, *proof.wrong))
            turned = in_turns({name: table.get(name, ()) for name in names}, run)
            turned = {name: new for name, new in turned.items() if new != table.get(name, ())}
            if not structure.on_any(not turned.keys().isdisjoint(proof.wrong)):
                continue
            followed.learn({**table, **turned})
            tried = _measured(trial, turned_places, measured.weighed if is_same else None)
            truth_of_tried = truth if is_same else _truths(trial, tried, in_order)
            again = judged(tried, truth_of_tried, rtol)
            right = set() if again.reason else {*turned, *proof.wrong} - again.wrong.keys()
            if not again.reason and len(again.wrong) < len(proof.wrong):
                places, measured, truth = turned_places, tried, truth_of_tried
            else:
                right &= proof.wrong.keys()
            table = {**table, **{name: turned[name] for name in right & turned.keys()}}
            wrong = {name: why for name, why in proof.wrong.items() if name not in right}
            proof = proof._replace(wrong=wrong)
            followed.learn(table)
    return proof, table, places


def _measured(
    trial: Trial, places: Sequence[Place], weighed: list[Weighed] | None = None
) -> Measured:
    """The norms of a pass over the few."""
    structure = trial.followed.structure
    graphs, chance = graphs_of_gradients[0], structure.chance()
    trial.followed.passes.begin_trial(trial.size, trial.ragged)
    with trial.results(trial.rows) as (results, _):
        drew = structure.on_any(structure.chance() != chance)
        for leaf in trial.leaves:
            leaf.known_uses, leaf.is_known_joined = leaf.expected, leaf.this_pass.joined
        weighed = trial.weighed(results, places) if weighed is None else weighed
        if structure.on_any(graphs_of_gradients[0] != graphs):
            why = reasons.TWICE.text()
            return Measured([], why, dict.fromkeys((leaf.name for leaf in trial.leaves), why), drew)
        if structure.on_any(not weighed):
            return Measured([], reasons.NO_RESULT.text(), trial.failed, drew)
        losses = (
            trial.loss(results, weighed, j, k, trial.size) for j, k in enumerate(trial.numbers)
        )
        norms = trial.norms([*chain(*losses)], trial.size)
    mixed = _mixed(norms, trial.numbers)
    if not isinstance(norms, str):
        norms = {leaf: row[trial.numbers] for leaf, row in norms.items()}
    return Measured(weighed, norms, trial.failed, drew, mixed)


def _truths(
    trial: Trial, measured: Measured, in_order: list[Tensor] | None
) -> "list[dict[Leaf, float]] | str":
    """The squared norm of each parameter for each of the few, by a pass over this sample alone.
    Ragged ones have one of all of them, with a loss of this one, and so have samples of a model
    that draws random numbers even in evaluation mode, or takes no single sample.
    """
    if isinstance(measured.norms, str):
        return measured.norms
    values, moved = [leaf.current for leaf in trial.leaves], set[int]()

    def truth(j: int, copies: int) -> dict[Leaf, float]:
        rows = [trial.order[j]] * copies or trial.rows
        k, n = (0, copies) if copies else (trial.numbers[j], trial.size)
        with trial.followed.structure.bare(), trial.results(rows) as (results, images):
            loss = trial.loss(results, measured.weighed, j, k, n)
            if copies == 1 and in_order and trial.is_moved(results, j, in_order, measured):
                moved.add(j)
            with of_the_model():
                grads = gradients(loss, [*values, *images], keep=True)
        return {leaf: 0.0 if g is None else _sqnorm(g) for leaf, g in zip(trial.leaves, grads)}

    why = ""
    # Torch 2.13's gradients of a batch norm in evaluation mode are wrong for one image that is
    # stored channels-last. A function that normalises over the batch takes no single sample, and
    # shows by two copies of one that it does.
    by_copies = [2, 0] if trial.followed.structure.batch_norms else [1, 2, 0]
    for copies in [0] if measured.drew or trial.ragged else by_copies:
        try:
            truths = [truth(j, copies) for j in range(len(trial.order))]
            return MOVED if moved else truths
        except ModelError as error:
            why = why or str(error)
    return f"the model does not take a single sample ({why})"


def _sqnorm(g: Tensor) -> float:
    g = g.coalesce().values() if g.is_sparse else g
    sqnorm: float = whole(g).detach().double().square().sum().item()
    return sqnorm


def judged(measured: Measured, truth: "list[dict[Leaf, float]] | str", rtol: float) -> Proof:
    """The parameters whose norms differ from those of single samples by more than ``rtol``."""
    if isinstance(measured.norms, str) or isinstance(truth, str):
        return Proof(str(truth), measured.lost)
    known = measured.mixed | measured.lost
    norms = {leaf: measured.norms.get(leaf) for leaf in truth[0] if leaf.name not in known}
    if not norms:
        return Proof("", known)
    zero_B = torch.zeros(len(truth), dtype=torch.float64, device="cpu")
    norm_PB = torch.stack([zero_B if t is None else t.double().cpu() for t in norms.values()])
    if not bool(norm_PB.isfinite().all()):
        return Proof(NOT_FINITE, known)
    real_PB = norm_PB.new_tensor([[sqnorms[leaf] for sqnorms in truth] for leaf in norms])
    # Rounding adds an error to the gradient, not to its square.
    eps_P1 = norm_PB.new_tensor([[torch.finfo(leaf.current.dtype).eps] for leaf in norms])
    noise_PB = 32 * eps_P1 * real_PB.sum(0).sqrt() + LEAST
    error_PB, limit_PB = (norm_PB.sqrt() - real_PB.sqrt()).abs(), rtol * real_PB.sqrt()
    is_right_PB = error_PB <= limit_PB + noise_PB
    wrong = dict(known)
    for p, leaf in enumerate(norms):
        if not bool(is_right_PB[p].all()):
            b = is_right_PB[p].tolist().index(False)
            wrong[leaf.name] = (
                reasons.DIFFERS.text(norm=float(norm_PB[p, b]), real=float(real_PB[p, b]))
                if bool(norm_PB[p].any())
                else reasons.UNSEEN.text()
            )
    is_shown_PB = (error_PB <= limit_PB) & (real_PB.sqrt() > LEAST)
    silent = (~is_shown_PB & (real_PB.sqrt() <= noise_PB)).all(1).tolist()
    return Proof(
        "",
        wrong,
        frozenset(leaf.name for leaf, is_silent in zip(norms, silent) if is_silent),
        {leaf.name: sum(sqnorms[leaf] for sqnorms in truth) for leaf in truth[0]},
    )


MOVED = "the model puts its samples into another order than that of the batch"
NOT_FINITE = "the gradients of its samples are not finite"


def _runs(table: Rows) -> list[int]:
    """How many rows in turn interleaved samples may have: one, or as many as in another call."""
    rows = [row for calls in table.values() for row in calls]
    places = [place for row in rows for place in (*row.arguments, *row.results)]
    return _joined([1], [p.several for p in places if isinstance(p, Layout) and p.several > 1])


def _joined(a: list[int], b: list[int]) -> list[int]:
    return sorted({*a, *b})


def in_turns(table: Rows, run: int) -> Rows:
    """Rows of a table whose samples have interleaved rows, ``run`` in turn, where they had
    consecutive ones.
    """

    def turned(row: Row) -> Row:
        both = row.arguments, row.results
        arguments, results = (tuple(turned_place(p, run) for p in places) for places in both)
        return row._replace(arguments=arguments, results=results)

    return {name: tuple(map(turned, rows)) for name, rows in table.items()}


def turned_place(place: Any, run: int) -> Any:
    """A place of interleaved rows where it is one of several consecutive ones."""
    if not isinstance(place, Layout) or not place.several or place.several % run:
        return place
    return place if place.several == run > 1 else place._replace(interleaved=run)


def meeting(trial: Trial, places: Sequence[Place]) -> dict[str, str]:
    """The parameters of which other samples of the whole batch have a norm in a loss of some
    samples alone, as the model is (in training mode where it trains), with the reason.
    """
    n = max(trial.samples.n, len(trial.order))
    half = _half(n)
    trial.followed.passes.begin_trial(n)
    with trial.results(range(n)) as (results, _):
        parts = []
        for t, place in zip(results, places):
            if isinstance(place, Layout) and t.requires_grad and place.fits(t.shape, n):
                weights = torch.zeros_like(t, requires_grad=False)
                for b in half:
                    place.of_sample(weights, b, n).normal_()
                parts.append((t, weights))
        norms = "" if trial.followed.structure.on_any(not parts) else trial.norms(parts, n)
    return _mixed(norms, half) | trial.failed


def _half(n: int) -> list[int]:
    """Half of n samples. The few before them came in reversed order: a model that sorts them and
    left them so puts sample 2 before samples 1 and 0 in the whole batch. So these two are chosen.
    """
    first = [0, 1][: n // 2]
    others = range(3, n) if n > 3 else range(0)
    return first + random.Random(n).sample(others, n // 2 - len(first))


def _mixed(norms: "dict[Leaf, Tensor] | str", chosen: Sequence[int]) -> dict[str, str]:
    """The parameters of which others than the ``chosen`` have norms, which alone have a loss."""
    if isinstance(norms, str):
        return {}
    at = torch.tensor([*chosen], dtype=torch.int64, device="cpu")
    return {
        leaf.name: MIXED
        for leaf, row in norms.items()
        if float(row.index_fill(0, at.to(row.device), 0.0).sum()) > 1e-12 * float(row.sum())
    }


def of_ragged(trial: Trial, ragged: Ragged) -> Trial:
    """The same for a ragged batch, of whose samples a few are looked at."""
    lengths = zip(*(rows.starts.diff().tolist() for rows in ragged.maps))
    full = [b for b, of_maps in enumerate(lengths) if all(of_maps)]  # of rows of all kinds
    full = full or [b for b, n in enumerate(ragged.maps[0].starts.diff().tolist()) if n]
    few = full[1::2][:3] or full[:1]
    few = few[: shared(len(few), min, trial.followed.structure.groups)]
    return trial._replace(order=few, ragged=ragged)


def refuse_attention(trial: Trial, proof: Proof) -> None:
    """Raise if a loss of some documents gives others a gradient, since they attend to each
    other.
    """
    out = {leaf.name for leaf in trial.leaves if leaf.left_out}
    for name in {name for name, why in proof.wrong.items() if why == MIXED} - out:
        raise ObservationError(
            f"{type(trial.followed.structure.model).__name__}: the packed documents attend to each "
            f"other, as the gradients of {name} show. The attention mask must be block-diagonal: "
            "position_ids that begin again at 0 with every document for models of transformers, "
            "attn_mask [rows * heads, T, T] for torch.nn.MultiheadAttention."
        )


@contextmanager
def gates_open(leaves: Sequence[Leaf], groups: Sequence[Any] = ()) -> Iterator[None]:
    """Let parameters that are all zeros, as those of a new adapter or of a gate that opens late,
    have small random values meanwhile, so that what is behind them gets a gradient. ``groups`` are
    those of the processes that shard them.
    """
    with unfollowed(), torch.no_grad():
        parts = [local_part(leaf.parameter).data for leaf in leaves]
        is_open = shared([bool(part.any()) for part in parts], _either, groups)
        closed = [k for k, opened in enumerate(is_open) if not opened]
    try:
        with unfollowed(), torch.no_grad():
            for k in closed:
                # Replicas of a part get its values.
                generator = torch.Generator("cpu").manual_seed(k)
                shape = parts[k].shape
                value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                value = value.mul_(0.1).to(parts[k])
                if is_dtensor(leaves[k].parameter):  # FSDP2 gathers the memory of the part
                    parts[k].copy_(value)
                else:
                    leaves[k].parameter.data = value
        _forget_twins([leaves[k] for k in closed])
        yield
    finally:
        with unfollowed(), torch.no_grad():
            for k in closed:
                if is_dtensor(leaves[k].parameter):
                    parts[k].zero_()
                else:
                    leaves[k].parameter.data = parts[k]
        _forget_twins([leaves[k] for k in closed])


def _forget_twins(leaves: Sequence[Leaf]) -> None:
    """Forget the twins of parameters, which may have the memory that these had."""
    for leaf in leaves:
        leaf.twin = leaf.whole.twin = None


def _either(a: list[bool], b: list[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b)]


MIXED = reasons.MIXED.text()
LEAST = torch.finfo(torch.float32).tiny ** 0.5
"""The square of a smaller norm is no normal float32."""
