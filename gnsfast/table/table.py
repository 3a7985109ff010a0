# SPDX-License-Identifier: Apache-2.0
"""The table of a model: where the samples lie in each call that takes a parameter."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gnsfast.errors import ObservationError
from gnsfast.following import RAGGED, Followed, Layout, Place, Row

PROVEN = "proven"
"""What a table says of a loss whose gradient is the weighted sum of those of its samples."""

Rows = Mapping[str, tuple[Row, ...]]


@dataclass(frozen=True)
class Table:
    """What ``gnsfast.learn`` has found out about a model. It prints, compares, is saved and loaded,
    and ``a | b`` joins the tables of two batches.

    ``batches`` holds for each batch the calls of each parameter, in their order, and ``routes`` the
    functions in which a parameter meets the data. ``proofs`` says of each measured parameter how
    its norms were proven, ``left_out`` of each other one why it has none; a parameter that is
    ``unreached`` is one that the batch did not show. ``elements`` and ``sqnorms`` are the numbers
    of elements, and the squared norms of the samples' gradients, added up over the few samples.
    ``is_half``: the model computes in half precision. ``is_trained``: it is proven in training
    mode. ``has_ragged`` and ``has_even``: it was learnt from packed documents or another ragged
    batch, and from one in which each sample is as many rows. ``loss`` is ``"proven"`` of a loss
    that ``learn(loss=...)`` was given, or why it is not; empty without one. ``has_weights``: the
    samples of a loss have unequal weights, which ``learn(tokens=...)`` was given.
    """

    model: str
    batches: tuple[Rows, ...]
    routes: Mapping[str, tuple[str, ...]]
    proofs: Mapping[str, str]
    left_out: Mapping[str, str]
    unreached: frozenset[str]
    elements: Mapping[str, int]
    sqnorms: Mapping[str, float] = field(default_factory=dict)
    is_half: bool = False
    is_trained: bool = False
    has_ragged: bool = False
    loss: str = ""
    has_even: bool = True
    has_weights: bool = False

    def __or__(self, other: "Table") -> "Table":
        """The table of both batches. A parameter is measured if one of them proves it and none
        proves it wrong.
        """
        if self.elements.keys() != other.elements.keys():
            raise ValueError(f"The tables are of two models, {self.model} and {other.model}.")
        wrong = {
            name: why
            for table in (other, self)
            for name, why in table.left_out.items()
            if name not in table.unreached
        }
        proofs = {k: v for k, v in {**other.proofs, **self.proofs}.items() if k not in wrong}
        both = {**other.left_out, **self.left_out, **wrong}
        left_out = {name: why for name, why in both.items() if name not in proofs}
        names = {*self.routes, *other.routes}
        routes = {
            n: tuple(dict.fromkeys(self.routes.get(n, ()) + other.routes.get(n, ()))) for n in names
        }
        return replace(
            self,
            batches=(*self.batches, *(rows for rows in other.batches if rows not in self.batches)),
            routes=routes,
            proofs=proofs,
            left_out=left_out,
            unreached=(self.unreached | other.unreached) & left_out.keys() - wrong.keys(),
            sqnorms={**other.sqnorms, **self.sqnorms},
            is_half=self.is_half or other.is_half,
            is_trained=self.is_trained or other.is_trained,
            has_ragged=self.has_ragged or other.has_ragged,
            has_even=self.has_even or other.has_even,
            has_weights=self.has_weights or other.has_weights,
            loss=next(
                (loss for loss in (self.loss, other.loss) if loss not in (PROVEN, "")),
                self.loss or other.loss,
            ),
        )

    def tell(self, followed: Followed) -> None:
        """Let an open model execute this table.

        Raises:
            ObservationError: if it is the table of a model with other parameters.
        """
        names = {leaf.name for leaf in followed.leaves}
        if names != self.elements.keys():
            some = sorted(names ^ self.elements.keys())[:3]
            raise ObservationError(
                f"The table is of a {self.model} with other trained parameters: {', '.join(some)} "
                f"{'is' if len(some) == 1 else 'are'} in one of both only. Learn the table anew: "
                "gnsfast.learn(model, batch)."
            )
        followed.learn(*self.batches, routes=self.routes)
        for leaf in followed.leaves:
            leaf.left_out = leaf.refused or self.left_out.get(leaf.name, "")
        followed.table = self

    @property
    def covered_fraction(self) -> float:
        """The share of the elements that are measured, of parameters that the batch gives a
        gradient.
        """
        return self._share(self.elements)

    @property
    def covered_norm(self) -> float:
        """The share of the samples' squared gradient norms that is measured; NaN where no proof has
        shown them.
        """
        return self._share(self.sqnorms) if any(self.sqnorms.values()) else math.nan

    def _share(self, sizes: Mapping[str, float]) -> float:
        total = sum(n for name, n in sizes.items() if name not in self.unreached)
        return sum(n for name, n in sizes.items() if name in self.proofs) / total if total else 1.0

    def save(self, path: str | Path) -> None:
        """Write the table to a file of JSON."""
        Path(path).write_text(json.dumps(self.state_dict()))

    @classmethod
    def load(cls, path: str | Path) -> "Table":
        """The table that ``save`` has written."""
        return cls.from_state_dict(json.loads(Path(path).read_text()))

    def state_dict(self) -> dict[str, Any]:
        """The table as numbers, texts, lists and dictionaries."""
        state = asdict(replace(self, batches=(), unreached=frozenset()))
        batches = [
            {name: [_packed(row) for row in calls] for name, calls in rows.items()}
            for rows in self.batches
        ]
        return state | {"batches": batches, "unreached": sorted(self.unreached)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Table":
        """The table of ``state_dict``."""
        batches = tuple(
            {name: tuple(map(_unpacked, calls)) for name, calls in rows.items()}
            for rows in state["batches"]
        )
        routes = {name: tuple(route) for name, route in state["routes"].items()}
        unreached = frozenset(state["unreached"])
        return cls(**{**state, "batches": batches, "routes": routes, "unreached": unreached})

    def __str__(self) -> str:
        lines = [("parameter", "elements", "functions", "samples", "proven by")]
        for names in _alike(self.proofs, lambda name: (self._places(name), self.routes.get(name))):
            n = sum(self.elements[name] for name in names)
            route = " + ".join(self.routes.get(names[0], ())) or "-"
            proof = self.proofs[names[0]]
            lines.append((_title(names), f"{n:,}", route, self._places(names[0]), proof))
        return "\n".join([*aligned(lines), self.summary()])

    def summary(self) -> str:
        """How much is measured, and what is left out, why."""
        total = sum(self.sqnorms.values())
        norms = and_of_norms(self.covered_norm)
        first = (
            f"{self.model}: {len(self.proofs)} of {len(self.elements)} parameters are measured, "
            f"{self.covered_fraction:.1%} of the elements{norms}."
        )
        if not all(how.startswith("not proven") for how in self.proofs.values()):
            first += f" This is {of_loss(self.loss)}."
        text = [first]
        titles: dict[str, list[list[str]]] = {}
        for names in _alike(self.left_out, self.left_out.__getitem__):
            titles.setdefault(self.left_out[names[0]], []).append(names)
        for why, groups in titles.items():
            share = sum(self.sqnorms.get(name, 0.0) for names in groups for name in names)
            of_norms = f" ({share / total:.1%} of the squared norms)" if total else ""
            text.append(f"left out: {', '.join(map(_title, groups))}{of_norms}: {why}")
        return "\n".join(text)

    def _places(self, name: str) -> str:
        """Where the samples are in the arguments of the calls of a parameter, in words."""
        calls = [row for rows in self.batches for row in rows.get(name, ()) if row.is_use]
        words = dict.fromkeys(_words(row) for row in calls)
        return ", ".join(words) or "as in the call of its weight"


def and_of_norms(share: float) -> str:
    """What is said behind a share of the elements, of which NaN says nothing."""
    return "" if math.isnan(share) else f" and {share:.1%} of the squared gradient norms"


def of_loss(loss: str) -> str:
    """What the ``loss`` of a table says, in words."""
    if loss == PROVEN:
        return "proven for the model and the loss"
    why = loss or "gnsfast.learn(model, batch, loss=...) was not given it"
    return f"proven for the model, not for the loss: {why}"


def aligned(lines: Sequence[Sequence[str]], number: int = -1) -> list[str]:
    """Lines of cells in columns, of which that of the ``number`` is aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    formats = [f"{'>' if k == number else '<'}{width}" for k, width in enumerate(widths)]
    return ["  ".join(map(format, line, formats)).rstrip() for line in lines]


def _words(row: Row) -> str:
    if row.chosen:
        return "chosen by the data"
    places = (*row.arguments, *row.results)
    if RAGGED in places:
        return RAGGED
    layout = next((place for place in places if isinstance(place, Layout)), None)
    return "not known" if layout is None else str(layout)


def pattern_of(name: str) -> str:
    """The name of a parameter without its numbers, which it shares with its siblings."""
    return re.sub(r"\d+", "#", name)


def _alike(names: Mapping[str, Any], kind: Any) -> list[list[str]]:
    """The names that differ in numbers only, and are of one kind."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault((pattern_of(name), kind(name)), []).append(name)
    return [*groups.values()]


def _title(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern_of(names[0])} ({len(names)})"


def _packed(row: Row) -> list[Any]:
    places = [
        [p if isinstance(p, str | None) else [*p] for p in places_of] for places_of in row[1:3]
    ]
    return [row.name, *places, sorted(row.chosen), [*row.sizes], row.is_assumed]


def _unpacked(packed: list[Any]) -> Row:
    def place(p: Any) -> Place | None:
        return Layout(*p) if isinstance(p, list) else p

    name, arguments, results, chosen, sizes, is_assumed = packed
    places = tuple(map(place, arguments)), tuple(map(place, results))
    return Row(name, *places, frozenset(chosen), tuple(sizes), is_assumed)  # type: ignore[arg-type]
