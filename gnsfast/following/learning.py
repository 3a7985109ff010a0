# SPDX-License-Identifier: Apache-2.0
"""What one batch shows: which functions take each parameter, and where the samples lie in them.

A few samples go through the model as they are, and again with one of them replaced at a time. What
changes with sample b belongs to sample b. No gradient is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.errors import first_line
from gnsfast.following.checkpoints import with_graphs
from gnsfast.following.examples import FEW, USUAL, Arrangement, Example, form_of, sizes_of
from gnsfast.following.layouts import (
    FIRST,
    SHARED,
    UNKNOWN,
    Layout,
    Place,
    Print,
    growing,
    grown,
    place_of,
)
from gnsfast.following.leaf import NO_ROWS, Leaf, Step
from gnsfast.following.looks import Look, Seen
from gnsfast.following.passes import Asked, Passes, Weighted, fill_probes
from gnsfast.following.structure import Structure
from gnsfast.functional import Documents
from gnsfast.kept import kept_modes
from gnsfast.parallel import collectives
from gnsfast.tensors import tensors_of, whole


class Looks(NamedTuple):
    """The passes over an example: as it is, with each sample replaced, and with one sample fewer,
    or if the model does not take that with twice as many (None if it takes neither).
    """

    base: Look
    others: dict[int, Look]
    fewer: Look | None


class Learned(NamedTuple):
    """What an example of ``n`` samples, which it holds in an ``arrangement``, has shown: where the
    samples lie in the model's results, whether it computes in half precision and whether it needs
    other processes, and by the name of a parameter the functions that take it, and those in which
    it meets the data. ``sizes`` are those of the samples of its batch, which has this ``form``
    (``form_of``) and ``held`` them in these arguments. ``growth`` is what later ones have proven
    (``Growth.proven``).
    """

    n: int = FEW
    arrangement: Arrangement = USUAL
    results: list[Place] = []
    is_half: bool = False
    is_joint: bool = False
    steps: dict[str, list[Step]] = {}
    routes: dict[str, tuple[str, ...]] = {}
    sizes: list[list[int]] = []
    form: tuple[Any, ...] = ()
    held: tuple[bool, ...] = ()
    growth: dict[str, set[tuple[int, int]]] = {}

    def tell(self, leaves: list[Leaf], is_part: bool) -> None:
        """Let each leaf know the functions that take it, of a part or of the whole model."""
        chosen: dict[str, frozenset[int]] = {}
        for step in (step for own in self.steps.values() for step in own if step.chosen):
            chosen[step.name] = chosen.get(step.name, NO_ROWS) | step.chosen
        for leaf in leaves:
            own = self.steps.get(leaf.name, []), self.routes.get(leaf.name, ())
            leaf.learn(*own, adds=is_part)
            leaf.found.functions = 0
            leaf.chosen = leaf.chosen | chosen

    def take_over(self, other: "Learned", leaves: list[Leaf]) -> None:
        """Add what another example has shown of some leaves."""
        for name in (leaf.name for leaf in leaves):
            self.steps[name] = other.steps.get(name, [])
            self.routes[name] = other.routes.get(name, ())

    def joined(self, other: "Learned") -> "Learned":
        """The same with what another example has shown of leaves that this one did not use."""
        steps, routes = other.steps | self.steps, other.routes | self.routes
        return self._replace(steps=steps, routes=routes)


class Trial(NamedTuple):
    """A model, or a part of it, that runs for our own ends: ``run``, which is ``module`` or calls
    it, gets a ``batch``, whose first samples are those of ``example``. ``leaves`` are followed
    meanwhile, and ``learned`` says what the example has shown.
    """

    structure: Structure
    passes: Passes
    module: nn.Module
    run: Callable[..., Any]
    leaves: list[Leaf]
    batch: Example
    example: Example
    learned: Learned = Learned()

    @property
    def is_part(self) -> bool:
        """Whether it is not the whole model."""
        return self.module is not self.structure.model

    def takes(self) -> bool:
        """Whether the model takes all passes over the example without being looked at."""
        try:
            for b in range(-1, self.example.n):
                one = self.example.replaced(b)
                with self.structure.as_it_was():
                    self.run(*one.args, **one.kwargs)
        except Exception:  # the model's own, whatever it is
            return False
        return True

    @contextmanager
    def measured(self, documents: Documents | None = None) -> Iterator[list[Tensor]]:
        """The results of an open pass over the batch, whose samples may be packed documents."""
        own = self.batch.replaced(-1)
        with self.structure.as_it_was():
            self.passes.begin(Asked(own.n, documents=documents), self.leaves)
            yield [*map(whole, tensors_of(self.run(*own.args, **own.kwargs)))]

    def norms(self, parts: Sequence[Weighted]) -> dict[Leaf, Tensor] | str:
        """The norms of all samples in the loss of ``parts`` of an open pass, or the error of its
        backward pass.
        """
        try:
            fill_probes(parts, self.leaves)
        except Exception as error:  # the model's own, as of an autograd function
            return first_line(error)
        rows = self.passes.rows(self.leaves)
        return {leaf: own[0, : self.batch.n] for leaf, own in rows.items()}

    @property
    def failed(self) -> dict[str, str]:
        """The parameters that the pass could not measure, with the reason."""
        return {leaf.name: leaf.found.failed for leaf in self.leaves if leaf.found.failed}


def learn(trial: Trial) -> Learned:
    """What an example shows. All processes that need each other's passes run the same number of
    them.
    """
    example, begun = trial.example, collectives()
    trial.passes.begin(Asked(example.n), trial.leaves)
    looks, n = _looks(trial), example.n
    return Learned(
        n,
        example.arrangement,
        _results(looks, n),
        looks.base.is_half,
        collectives() != begun,
        {leaf.name: steps for leaf, steps in _steps(looks, n).items()},
        {leaf.name: tuple(uses) for leaf, uses in _routes(looks.base).items()},
        _sizes(trial),
        form_of(tensors_of(trial.structure.given)),
        tuple(layout is not None for layout in trial.batch.layouts),
        {},
    )


def _sizes(trial: Trial) -> list[list[int]]:
    """Those of the tensors that have samples (``sizes_of``)."""
    given, layouts = trial.structure.given, trial.batch.layouts
    sizes = sizes_of(tensors_of(given), trial.passes.asked.samples)
    if trial.batch.arrangement.lists:  # what is in them has no layout of its own
        return sizes
    return [[] if layout is None else own for own, layout in zip(sizes, layouts)]


def learn_skipped(trial: Trial) -> Learned:
    """What evaluation mode shows of parameters that training mode did not use, as those of layers
    that it skips at random; nothing if the model does not take the example there.
    """
    leaves = [leaf for leaf in trial.leaves if leaf.name not in trial.learned.routes]
    if leaves and trial.module.training:
        with kept_modes(trial.module), suppress(Exception):  # the model's own: they stay unseen
            trial.module.eval()
            return learn(trial._replace(leaves=leaves))
    return Learned()


def _looks(trial: Trial) -> Looks:
    structure, example = trial.structure, trial.example
    growing: set[tuple[Leaf, int]] = set()

    def look(own: Example) -> Look:
        for leaf in trial.leaves:
            leaf.samples = own.n
        found = Look(own.n, growing)
        found.begin(own)
        with structure.as_it_was(), with_graphs(), found:
            out = trial.run(*own.args, **own.kwargs)
        found.results = [Print.of(whole(t), own.n) for t in tensors_of(out)]
        return found

    def few() -> Look | None:
        for m in (example.n - 1, 2 * example.n):
            with suppress(Exception):  # the model's own, whatever it is: then sizes show nothing
                return look(example.few(m))
        return None

    base, fewer = look(example.replaced(-1)), few()
    while structure.on_any(bool(more := _growing(base, fewer) - growing)):
        growing |= more
        base, fewer = look(example.replaced(-1)), few()
    others = {b: look(example.replaced(b)) for b in range(example.n)}
    return Looks(base, others, fewer)


def _growing(base: Look, fewer: Look | None) -> set[tuple[Leaf, int]]:
    """For each leaf its first call without data whose result is as large as the batch: it has a
    part for each sample, such as rows of a table at positions that are repeated for each.
    """
    found = set()
    for leaf, calls in base.seen.items():
        for k, call in enumerate(calls):
            small = _nth(fewer, leaf, k, call)
            if small is None:
                break
            if call.of_data:
                continue
            if any(map(grown, call.results, small.results)):
                found.add((leaf, k))
                break
    return found


def _results(looks: Looks, n: int) -> list[Place]:
    """Where the samples lie in the model's results. Where they meet, it is the dimension whose size
    is that of the batch. That of what has an entry for each two samples, as similarities do, is
    ``UNKNOWN``.
    """
    found: list[Place] = []
    for k, t in enumerate(looks.base.results):
        others = {b: o.results[k] for b, o in looks.others.items() if len(o.results) > k}
        fewer = looks.fewer.results[k] if looks.fewer and len(looks.fewer.results) > k else None
        place = place_of(t, others, fewer) if len(others) == n else UNKNOWN
        if place == UNKNOWN:
            place = grown(t, fewer)
        if len(growing(t, fewer)) > 1:
            place = UNKNOWN
        found.append(SHARED if place is None else place)
    return found


def _routes(look: Look) -> dict[Leaf, dict[str, None]]:
    """The functions in which each leaf meets the data, as what it was made into does."""
    found = dict(look.uses)
    for leaf in sorted(look.made, key=lambda each: each.index):  # a mark is that of the first
        for other in look.made[leaf]:
            found[other] = {**found.get(other, {}), **found.get(leaf, {})}
    return found


def _steps(looks: Looks, n: int) -> dict[Leaf, list[Step]]:
    """The steps of each leaf."""
    found: dict[Leaf, list[Step]] = {}
    chosen = _chosen(looks, n)
    for leaf, calls in looks.base.seen.items():
        in_grad_mode = any(call.has_grad for call in calls)
        for k, call in enumerate(calls):
            if in_grad_mode and not call.has_grad:  # else a checkpoint calls it again
                continue
            others = {b: own for b, o in looks.others.items() if (own := _nth(o, leaf, k, call))}
            fewer = _nth(looks.fewer, leaf, k, call) if call.of_data else None
            step = _step(call, others, fewer)  # a branch may be that of some samples
            if UNKNOWN in (*step.arguments, *step.results):
                step = step._replace(chosen=chosen.get((leaf, call.name), NO_ROWS))
            found.setdefault(leaf, []).append(step)
    return found


def _nth(look: Look | None, leaf: Leaf, k: int, like: Seen) -> Seen | None:
    """Call number ``k`` of another pass, if it is the same function."""

    calls = look.seen.get(leaf, []) if look is not None else []
    own = calls[k] if k < len(calls) else None
    is_like = own and own.name == like.name and len(own.results) == len(like.results)
    return own if is_like else None


def _step(call: Seen, others: dict[int, Seen], fewer: Seen | None) -> Step:
    """A step, from what was seen of it in all passes."""
    places: list[Place | None] = []
    for k, t in enumerate(call.tensors):
        same = {b: own for b, o in others.items() if (own := _at(o, k)) is not None}
        if t is None:
            places.append(None)
        elif call.is_ragged or not others or len(same) < len(others):
            places.append(UNKNOWN)
        else:
            places.append(place_of(t, same, fewer and _at(fewer, k)) or SHARED)
    first = next((p for p in places if isinstance(p, Layout)), FIRST)
    for k, t in enumerate(call.tensors):
        if t is not None and t.is_active and places[k] == SHARED:
            places[k] = _as_others(first, t.shape, t.n)
    made = len(call.results)
    results = tuple(p for p in places[:made] if p is not None)
    return Step(call.name, tuple(places[made:]), results)


def _at(call: Seen, k: int) -> Print | None:
    """Tensor number ``k`` of a call, which may have fewer."""
    return call.tensors[k] if k < len(call.tensors) else None


def _as_others(first: Layout, shape: torch.Size, n: int) -> Place:
    """Where the samples lie in a tensor in which nothing changed, as in an activation that is zero:
    as they do in the ``first`` of the others.
    """
    d = first.dim
    if len(shape) <= d or shape[d] < n or shape[d] % n:
        return UNKNOWN
    return Layout.of(shape, n, d, first.interleaved)


def _chosen(looks: Looks, n: int) -> dict[tuple[Leaf, str], frozenset[int]]:
    """The functions of each leaf that take rows that the data have chosen, of which each sample
    keeps its own, in any order, while others are replaced: their ``Step.chosen``.
    """
    found, changing = {}, set()
    for leaf, calls in looks.base.seen.items():
        for name in {call.name for call in calls}:
            every = (_rows_of(o, leaf, name, n) for o in (looks.base, *looks.others.values()))
            own = [rows for rows in every if rows is not None]
            if len(own) < 1 + n:
                continue
            pairs = ((b, j) for b in range(n) for j in range(n))
            changed = [(b, j) for b, j in pairs if not _is_same(own[0][j], own[b + 1][j])]
            if all(b == j for b, j in changed):
                rows = (call.chosen for call in calls if call.name == name and call.chosen)
                found[leaf, name] = frozenset(owners.each for owners, _ in rows)
                changing |= {name} if changed else set()
    # Rows that are the same in all samples, as those of a first token, show nothing alone.
    return {(leaf, name): rows for (leaf, name), rows in found.items() if name in changing}


def _rows_of(look: Look, leaf: Leaf, name: str, n: int) -> list[Tensor] | None:
    """A number for each row of each sample that a function takes, in order; None where the sample
    of a row is not known.
    """
    calls = [call.chosen for call in look.seen.get(leaf, []) if call.name == name]
    known = [chosen for chosen in calls if chosen is not None]
    if len(known) < len(calls):
        return None
    if not calls:  # an expert that no sample was sent to
        return [torch.zeros(0, dtype=torch.float64)] * n
    owner_N = torch.cat([owners.owner_N for owners, _ in known])
    number_N = torch.cat([own_N for _, own_N in known])
    return [number_N[owner_N == b].sort().values for b in range(n)]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return len(a) == len(b) and torch.allclose(a, b, rtol=1e-4, atol=1e-4)
