# SPDX-License-Identifier: Apache-2.0
"""The table of parameters: how their per-sample norms are found, or why there are none."""

import math
from dataclasses import dataclass

from torch import nn

from gnsfast.following import Followed
from gnsfast.table.table import Table, aligned, and_of_norms, of_loss

BATCH_STATISTICS = "batch statistics tie samples together: no per-sample gradient exists"


@dataclass(frozen=True)
class CoverageRow:
    """One parameter.

    ``route`` names the functions in which it meets the data. That of a "frozen" parameter, and of
    one that the batch gives no gradient ("none"), is no part of what is covered. ``static`` says
    whether it has norms. ``observed`` says whether backward reached it in the last pass, and is
    None before the first. ``reason`` says why there are no norms, or why they are not proven.
    """

    parameter: str
    elements: int
    route: str
    static: bool
    observed: bool | None
    reason: str


@dataclass(frozen=True)
class Coverage:
    """The result of ``gnsfast.coverage``. It prints as a table. ``proof`` is empty if the norms are
    proven, else it says why not. ``covered_norm`` is the share of the squared gradient norms that
    is measured, of the samples that the model was learnt from; NaN where there were none.
    ``loss`` is that of the table.
    """

    rows: tuple[CoverageRow, ...]
    proof: str = ""
    covered_norm: float = math.nan
    loss: str = ""

    @property
    def covered_fraction(self) -> float:
        """The share of the trainable elements whose parameters have per-sample norms."""
        total = sum(r.elements for r in self.rows if r.route not in ("frozen", "none"))
        return sum(r.elements for r in self.rows if r.static) / total if total else 1.0

    def __str__(self) -> str:
        head = ("parameter", "elements", "route", "static", "observed", "reason")
        words = {True: "yes", False: "no", None: "-"}
        table = [head] + [
            (
                r.parameter,
                f"{r.elements:,}",
                r.route or "-",
                words[r.static],
                words[r.observed],
                r.reason,
            )
            for r in self.rows
        ]
        lines = aligned(table, number=1)
        norms = and_of_norms(self.covered_norm)
        lines.append(f"covered: {self.covered_fraction:.1%} of the trainable elements{norms}")
        lines.append(f"not proven: {self.proof}" if self.proof else of_loss(self.loss))
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """Show for each parameter of ``model`` how its per-sample norms are found, or why there are
    none.

    The first batch in a block shows this, or a table of ``gnsfast.learn`` that a block was given.
    Before it, every trainable parameter counts as covered.

    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8))
    >>> gnsfast.coverage(model).rows[2].reason
    'batch statistics tie samples together: no per-sample gradient exists'
    """
    followed = Followed.of(model)
    table: Table | None = followed.table
    leaves = {leaf.name: leaf for leaf in followed.leaves}
    tied = {id(p) for _, m in followed.mixing for p in m.parameters()}
    last, rows = followed.passes.reached, []
    reached = None if last is None else {*last}
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            why = "its shape is not known yet: run a forward pass first"
            rows.append(CoverageRow(name, 0, "", False, None, why))
            continue
        leaf = leaves.get(name)
        why = "" if leaf is None else leaf.left_out or (BATCH_STATISTICS if id(p) in tied else "")
        if leaf is None or why:
            is_reached = table is None or name not in table.unreached
            route = "frozen" if leaf is None else "" if is_reached else "none"
            rows.append(CoverageRow(name, p.numel(), route, False, None, why))
            continue
        observed = None if reached is None else leaf in reached
        how = "" if table is None else table.proofs.get(name, "")
        note = how if how.startswith("not proven") else ""
        route = " + ".join(leaf.routes)
        rows.append(CoverageRow(name, p.numel(), route, True, observed, note))
    if table is None:
        return Coverage(tuple(rows), NOT_BEGUN)
    return Coverage(tuple(rows), covered_norm=table.covered_norm, loss=table.loss)


NOT_BEGUN = "no batch has gone through the model in a block"
