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
from gnsfast.functional import Documents


class Asked(NamedTuple):
    """What a block measures: the norms of so many samples, which are documents where they are
    packed, and the facts of each parameter by name. ``norms_alone``: torch gives the gradients.
    """

    samples: int = 0
    facts: Mapping[str, Facts] = {}
    documents: Documents | None = None
    norms_alone: bool = False


class Rows(Mapping[Leaf, Tensor]):
    """The probe rows [1, B + 2 + G] of the leaves that a pass has reached.

    ``tensors`` hold them, each those of a leaf, or those of two that share a probe, in turn;
    ``leaves`` are all of them in this order. A leaf that had both has two entries.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.tensors: list[Tensor] = []
        self._sharing: list[tuple[Leaf, ...]] = []
        for leaf in leaves:  # the longest loop of a pass
            if (rows := leaf.probe.grad) is not None:
                self.tensors.append(rows)
                self._sharing.append((leaf,))
            if leaf.next is not None and (rows := leaf.pair.grad) is not None:
                self.tensors.append(rows)
                self._sharing.append((leaf, leaf.next))
        self.leaves = [*chain(*self._sharing)]

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
    one.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        self.leaves, self.asked = leaves, Asked()
        self.last: Rows | None = None
        self.reached: Sequence[Leaf] | None = None
        self._probes: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._key: Any = None  # of the probes of the open block
        self._bound: list[tuple[Tensor, Tensor]] | None = None  # those of norms alone in all leaves
        self._watched: set[Any] = set()
        self._watcher: Callable[[], Any] = nobody

    def begin(self, asked: Asked, leaves: Sequence[Leaf] | None = None) -> None:
        """Begin a pass for some ``leaves``, or for all."""
        samples, facts, documents, norms_alone = asked
        probes = self._probes_for(samples, facts)
        some = self.leaves if leaves is None else leaves
        if some:
            some[0].lengths.clear()  # those of all leaves
        is_plain = leaves is None and documents is None and not facts
        is_like = not some or some[0].norms_alone is norms_alone
        if not (is_plain and is_like and probes is self._bound):  # else it is like the pass before
            starts = None if documents is None else documents.starts
            for leaf in some:
                leaf.recent.clear()
                leaf.facts = facts.get(leaf.name, NOTHING)
                if starts is not leaf.starts:
                    leaf.starts = starts if starts is None else starts.to(leaf.current.device)
                    leaf.tokens = 0 if documents is None else documents.tokens
                leaf.probe, leaf.pair = probes[leaf.index]
                leaf.samples, leaf.norms_alone = samples, norms_alone
            self._bound = probes if is_plain else None
        for leaf in some:
            leaf.probe.grad = leaf.pair.grad = None
            leaf.open()

    def begin_trial(self, samples: int, documents: Documents | None = None) -> None:
        """Begin a pass of our own, for all leaves."""
        asked = self.asked._replace(samples=samples, facts={}, documents=documents)
        self.begin(asked, self.leaves)

    def _probes_for(self, samples: int, facts: Mapping[str, Facts]) -> list[tuple[Tensor, Tensor]]:
        """Leaves of zeros [P, B + 2 + G], which store one number each."""
        some = next(iter(facts.values()), NOTHING)
        groups = 0 if some.groups is None else len(some.groups.sizes_G)
        key = samples, groups
        if samples == self.asked.samples:
            self._key = key
        probes = self._probes.pop(key, None)
        if probes is None:
            if len(self._probes) >= KEPT:
                unused = next(iter(self._probes))
                self._watched.discard(unused)
                del self._probes[unused]
            probes = []
            for leaf in self.leaves:
                zero = torch.zeros((), dtype=torch.float32, device=leaf.parameter.device)
                probe, pair = (zero.expand(n, samples + 2 + groups) for n in (1, 2))
                probes.append((probe.requires_grad_(), pair.requires_grad_()))
        self._probes[key] = probes  # the newest: those of the open block stay
        return probes

    def watch(self, watcher: Any) -> None:
        """Call ``watcher.arrives()`` whenever backward reaches a probe of the open pass, or nobody
        if it is None.
        """
        self._watcher = nobody if watcher is None else weakref.ref(watcher)
        if watcher is None or self._key in self._watched:
            return
        self._watched.add(self._key)  # once: a hook takes 8 µs to register, and 1 to run
        reference = weakref.ref(self)  # Python cannot see that C++ holds it
        for probe in self.probes:
            probe.register_post_accumulate_grad_hook(partial(_arrived, reference))

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass."""
        return _probes_of(self.leaves)

    @property
    def is_reached(self) -> bool:
        """Whether backward has reached a probe of the last pass."""
        return any(e.probe.grad is not None or e.pair.grad is not None for e in self.leaves)

    def forget_probes(self) -> None:
        """Make new probes for the next pass, since the graph of a failed pass may hold the old."""
        self._probes.clear()
        self._watched.clear()

    def rows(self, leaves: Sequence[Leaf] | None = None) -> Rows:
        """The rows that a pass has left: one of the user, or for ``leaves`` one of our own."""
        is_own = leaves is not None
        leaves = self.leaves if leaves is None else leaves
        rows_of = Rows(leaves)
        if any([leaf.this_pass.parts for leaf in leaves]):
            B = leaves[0].samples
            with torch.no_grad():
                for leaf, rows in settle(list(leaves), B).items():
                    if leaf in rows_of:  # of uses that were not joined, if it is not zeros
                        rows[:, B + 1].masked_fill_(rows_of[leaf][:, B + 1] != 0, torch.inf)
                    rows_of[leaf] = rows
                for leaf in leaves:
                    leaf.this_pass.parts.clear()
        for leaf in [leaf for leaf in leaves if leaf.is_lost_in_graphs]:
            if leaf in rows_of and not leaf.this_pass.uses:
                leaf.fail("compiled code uses it several times, which only eager code joins")
        if not is_own:
            self.last, self.reached = rows_of, rows_of.leaves
        return rows_of


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


def _probes_of(leaves: list[Leaf]) -> list[Tensor]:
    return [probe for leaf in leaves for probe in (leaf.probe, leaf.pair)]


def _arrived(passes: "weakref.ref[Passes]", probe: Tensor) -> None:
    open_passes = passes()
    if open_passes is not None and (watcher := open_passes._watcher()) is not None:
        try:
            watcher.arrives()
        except Exception as error:
            if not guard.takes(error):
                raise
