# SPDX-License-Identifier: Apache-2.0
"""The passes of a block: the probes that backward fills, and the rows that it leaves in them."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import guard
from gnsfast.following.leaf import NOTHING, Facts, Leaf, nobody
from gnsfast.following.sample_gradients import settle
from gnsfast.functional import Ragged, RowMap


class Asked(NamedTuple):
    """What a block measures: the norms of so many samples, the rows that they have in a ``ragged``
    batch, and the facts of each parameter by name. ``norms_alone``: torch gives the gradients.
    """

    samples: int = 0
    facts: Mapping[str, Facts] = {}
    ragged: Ragged | None = None
    norms_alone: bool = False


class Sharing:
    """The leaves of some probes, each that of one leaf, or that of two in turn. ``leaves`` are all
    of them in this order. A leaf that has both has two entries.
    """

    def __init__(self, of_probes: Sequence[tuple[Leaf, ...]] = ()) -> None:
        self.of_probes, self.leaves = of_probes, [*chain(*of_probes)]


class Rows(Mapping[Leaf, Tensor]):
    """The probe rows [1, B + 2 + G] of the leaves that a pass has reached: ``tensors`` hold them,
    one for each probe.
    """

    def __init__(self, tensors: list[Tensor], sharing: Sharing) -> None:
        self.tensors, self.leaves, self._sharing = tensors, sharing.leaves, sharing.of_probes

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> "Rows":
        """Those that are in the probes of ``leaves``."""
        probes = [(probe, of_probe) for leaf in leaves for probe, of_probe in _sharing_of(leaf)]
        reached = [(p.grad, of_probe) for p, of_probe in probes if p.grad is not None]
        return cls([rows for rows, _ in reached], Sharing([of_probe for _, of_probe in reached]))

    @functools.cached_property
    def _rows_of(self) -> dict[Leaf, Tensor]:
        rows_of: dict[Leaf, Tensor] = {}
        for rows, leaves in zip(self.tensors, self._sharing):
            for k, leaf in enumerate(leaves):
                own_rows = rows[k :: len(leaves)]
                rows_of[leaf] = rows_of[leaf] + own_rows if leaf in rows_of else own_rows
        return rows_of

    def __getitem__(self, leaf: Leaf) -> Tensor:
        return self._rows_of[leaf]

    def __setitem__(self, leaf: Leaf, rows: Tensor) -> None:
        rows_of = self._rows_of
        rows_of[leaf] = rows
        self.leaves, self.tensors = [*rows_of], [*rows_of.values()]

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._rows_of)

    def __len__(self) -> int:
        return len(self._rows_of)


class Passes:
    """The probes of ``leaves``. ``asked`` is what the open block measures. ``last`` are the rows of
    the user's pass in the open block, and ``reached`` are the leaves of the last one, if there was
    one. ``_arrived`` are the numbers of the probes that its backward pass has reached so far.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        self.leaves, self.asked = leaves, Asked()
        self.last: Rows | None = None
        self.reached: Sequence[Leaf] | None = None
        self._probes: dict[Any, list[Tensor]] = {}  # of each leaf two, its probe and its pair
        self._open: list[Tensor] = []
        self._bound: list[Tensor] | None = None  # those of norms alone in all leaves
        self._arrived: list[int] = []
        self._last_arrived: tuple[list[int], Sharing] = [], Sharing()
        self._watched: set[Any] = set()
        self._watcher: Callable[[], Any] = nobody

    def begin(self, asked: Asked, leaves: Sequence[Leaf] | None = None) -> None:
        """Begin a pass for some ``leaves``, or for all."""
        samples, facts, ragged, norms_alone = asked
        probes = self._open = self._probes_for(samples, facts)
        some = self.leaves if leaves is None else leaves
        if some:
            some[0].lengths.clear()  # those of all leaves
            some[0].notes.is_unusual = False
        is_plain = leaves is None and ragged is None and not facts
        is_like = not some or some[0].norms_alone is norms_alone
        if not (is_plain and is_like and probes is self._bound):  # else it is like the pass before
            maps: dict[torch.device, tuple[RowMap, ...]] = {}
            for leaf in some:
                leaf.recent.clear()
                leaf.facts = facts.get(leaf.name, NOTHING)
                device, leaf.is_ragged = leaf.current.device, ragged is not None
                if ragged is not None and device not in maps:
                    maps[device] = ragged.to(device)
                leaf.maps = maps.get(device, ())
                leaf.probe, leaf.pair = probes[2 * leaf.index : 2 * leaf.index + 2]
                leaf.samples, leaf.norms_alone = samples, norms_alone
                leaf.probe.grad = leaf.pair.grad = None
            self._bound = probes if is_plain else None
        else:
            for number in self._arrived:
                probes[number].grad = None
        self._arrived = []
        for leaf in some:
            leaf.open()

    def begin_trial(self, samples: int, ragged: Ragged | None = None) -> None:
        """Begin a pass of our own, for all leaves."""
        asked = self.asked._replace(samples=samples, facts={}, ragged=ragged)
        self.begin(asked, self.leaves)

    def _probes_for(self, samples: int, facts: Mapping[str, Facts]) -> list[Tensor]:
        """Leaves of zeros [P, B + 2 + G], which store one number each."""
        some = next(iter(facts.values()), NOTHING)
        groups = 0 if some.groups is None else len(some.groups.sizes_G)
        key = samples, groups
        probes = self._probes.pop(key, None)
        if probes is None:
            if len(self._probes) >= KEPT:
                unused = next(iter(self._probes))
                self._watched.discard(unused)
                del self._probes[unused]
            probes = []
            for leaf in self.leaves:
                zero = torch.zeros((), dtype=torch.float32, device=leaf.parameter.device)
                both = (zero.expand(n, samples + 2 + groups) for n in (1, 2))
                probes += [probe.requires_grad_() for probe in both]
        self._probes[key] = probes  # the newest: those of the open block stay
        if samples == self.asked.samples and key not in self._watched:
            self._watched.add(key)  # once: a hook takes 8 µs to register, and 1 to run
            reference = weakref.ref(self)  # Python cannot see that C++ holds it
            for number, probe in enumerate(probes):
                probe.register_post_accumulate_grad_hook(partial(_arrived, reference, number))
        return probes

    def watch(self, watcher: Any) -> None:
        """Call ``watcher.arrives()`` whenever backward reaches a probe of the open pass, or nobody
        if it is None.
        """
        self._watcher = nobody if watcher is None else weakref.ref(watcher)

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass."""
        return _probes_of(self.leaves)

    @property
    def is_reached(self) -> bool:
        """Whether backward has reached a probe of the last pass."""
        return bool(self._arrived)

    def forget_probes(self) -> None:
        """Make new probes for the next pass, since the graph of a failed pass may hold the old."""
        self._probes.clear()
        self._watched.clear()

    def rows(self, leaves: Sequence[Leaf] | None = None) -> Rows:
        """The rows that a pass has left: one of the user, or for ``leaves`` one of our own."""
        is_own = leaves is not None
        rows_of = self._left() if leaves is None else Rows.of(leaves)
        leaves = self.leaves if leaves is None else leaves
        if self.is_unusual and any(leaf.this_pass.parts for leaf in leaves):
            B = leaves[0].samples
            with torch.no_grad():
                for leaf, rows in settle(list(leaves), B).items():
                    if leaf in rows_of:  # of uses that were not joined, if it is not zeros
                        rows[:, B + 1].masked_fill_(rows_of[leaf][:, B + 1] != 0, torch.inf)
                    rows_of[leaf] = rows
                for leaf in leaves:
                    leaf.this_pass.parts = None
        for leaf in [leaf for leaf in leaves if not leaf.this_pass.uses]:  # of compiled code
            if leaf.is_lost_in_graphs and leaf in rows_of:
                leaf.fail("compiled code uses it several times, which only eager code joins")
        if not is_own:
            self.last, self.reached = rows_of, rows_of.leaves
        return rows_of

    def _left(self) -> Rows:
        """The rows that the user's pass has left in its probes."""
        arrived = sorted({*self._arrived})
        before, sharing = self._last_arrived
        if before != arrived:
            of_probes = [of_probe for leaf in self.leaves for _, of_probe in _sharing_of(leaf)]
            sharing = Sharing([of_probes[number] for number in arrived])
            self._last_arrived = arrived, sharing
        left: list[Any] = [self._open[number].grad for number in arrived]
        return Rows(left, sharing)

    @property
    def is_unusual(self) -> bool:
        """Whether the pass has left something to look for in each leaf (``Notes``)."""
        return bool(self.leaves) and self.leaves[0].notes.is_unusual


KEPT = 8
"""How many numbers of samples the probes are kept for. A run with more of them makes probes
again."""


Weighted = tuple[Tensor, Tensor]
"""A part of what a model returns, and a weight for each of its entries in a loss."""


def fill_probes(parts: Sequence[Weighted], leaves: list[Leaf]) -> None:
    """A backward pass of the loss of ``parts`` that reaches the probes of ``leaves`` and nothing
    else.
    """
    probes = _probes_of(leaves)
    for t, g in zip(probes, gradients(parts, probes)):
        t.grad = g


def gradients(
    parts: Sequence[Weighted], tensors: Sequence[Tensor], keep: bool = False
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` of the weighted sum of ``parts``, of which infinite entries, as of
    masks, do not count. Outside of autocast, where backward passes belong: inside of it torch's own
    gradients of a bilinear layer are less precise. ``keep``: the graph may have parts that were
    made before the model ran.
    """
    outputs, weights = zip(*((t, _of_finite(t, w)) for t, w in parts))
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, tensors, weights, retain_graph=keep, allow_unused=True)


def _of_finite(t: Tensor, weights: Tensor) -> Tensor:
    """``weights``, of which those of infinite entries are zero."""
    is_finite = t.detach().isfinite()
    return weights if is_finite.all() else weights.masked_fill(~is_finite, 0.0)


def _sharing_of(leaf: Leaf) -> Iterator[tuple[Tensor, tuple[Leaf, ...]]]:
    """The probe and the pair of a leaf, with the leaves of each."""
    yield leaf.probe, (leaf,)
    yield leaf.pair, (leaf,) if leaf.next is None else (leaf, leaf.next)


def _probes_of(leaves: list[Leaf]) -> list[Tensor]:
    return [probe for leaf in leaves for probe in (leaf.probe, leaf.pair)]


def _arrived(passes: "weakref.ref[Passes]", number: int, probe: Tensor) -> None:
    open_passes = passes()
    if open_passes is None or open_passes._open[number] is not probe:  # or the graph is older
        return
    open_passes._arrived.append(number)
    if (watcher := open_passes._watcher()) is not None:
        try:
            watcher.arrives()
        except Exception as error:
            if not guard.takes(error):
                raise
