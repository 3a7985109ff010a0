# SPDX-License-Identifier: Apache-2.0
"""The table of parameters: the route to their per-sample norms, or why there are none."""

from dataclasses import dataclass

from torch import nn

from gnsfast.combinations import DOCUMENTS, GROUPS, METRIC, SIGN, SPECTRAL, reason
from gnsfast.conversion import fused_losses
from gnsfast.conversion.routes import held, route_of, uses_children_as_tensors
from gnsfast.layers import DropIn, uses_batch_statistics

MEASURES = (DOCUMENTS, METRIC, SIGN, SPECTRAL, GROUPS)
BATCH_STATISTICS = "batch statistics tie samples together: no per-sample gradient exists"


@dataclass(frozen=True)
class CoverageRow:
    """One parameter.

    ``static`` says whether it has a route. ``observed`` says whether its module's backward ran in
    the last pass, and is None before the first pass. ``reason`` says why there are no norms, or
    adds a note. ``measures`` names what its modules can measure beside the samples' norms, such as
    documents of packed rows, Adam's metric, or groups of samples.
    """

    parameter: str
    elements: int
    route: str
    static: bool
    observed: bool | None
    reason: str
    measures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """The result of ``gnsfast.coverage``. It prints as a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def covered_fraction(self) -> float:
        """The share of the trainable elements whose parameters have per-sample norms."""
        return self._fraction([r for r in self.rows if r.static])

    def measured_fraction(self, measure: str) -> float:
        """The share of the trainable elements that support ``measure``, one of ``measures``."""
        return self._fraction([r for r in self.rows if measure in r.measures])

    def _fraction(self, rows: list[CoverageRow]) -> float:
        total = sum(r.elements for r in self.rows if r.route != "frozen")
        return sum(r.elements for r in rows) / total if total else 1.0

    def __str__(self) -> str:
        head = ("parameter", "elements", "route", "static", "observed", "reason")
        said = {True: "yes", False: "no", None: "-"}
        table = [head] + [
            (
                r.parameter,
                f"{r.elements:,}",
                r.route or "-",
                said[r.static],
                said[r.observed],
                r.reason,
            )
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = []
        for row in table:
            cells = [
                c.rjust(w) if i == 1 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))
            ]
            lines.append("  ".join(cells).rstrip())
        lines.append(f"covered: {self.covered_fraction:.1%} of the trainable elements")
        lines += [f"  with {each}: {self.measured_fraction(each):.1%}" for each in MEASURES]
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """Show for each parameter of ``model`` how its per-sample norms are found, or why there are
    none.

    The column ``static`` says whether a route exists, and ``observed`` whether its backward ran in
    the last ``per_sample_sqnorms`` block. A parameter with a route may also have a reason, which
    says that the model's forward bypasses it, as with Liger-Kernel and Cut Cross-Entropy.

    >>> model = gnsfast.convert(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8)))
    >>> gnsfast.coverage(model).rows[2].reason
    'batch statistics tie samples together: no per-sample gradient exists'
    """
    claimed: dict[int, list[tuple[DropIn, str]]] = {}
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, DropIn):
            for name, p in module.claimed_parameters().items():
                claimed.setdefault(id(p), []).append((module, name))
        for parameter in module._parameters.values():
            owners[id(parameter)] = module
    for module in reversed(list(model.modules())):  # outer modules come later and win
        parts = [module] if uses_children_as_tensors(module) else held(module).values()
        owners |= {id(p): module for part in parts for p in part.parameters()}
    fused = fused_losses.notes(model)
    return Coverage(
        tuple(
            _row(name, p, claimed.get(id(p), []), owners.get(id(p), model), fused.get(id(p), ""))
            for name, p in model.named_parameters()
        )
    )


def _row(
    name: str, p: nn.Parameter, claims: list[tuple[DropIn, str]], owner: nn.Module, note: str
) -> CoverageRow:
    if nn.parameter.is_lazy(p):
        return CoverageRow(name, 0, "", False, None, route_of(owner).reason)
    if not p.requires_grad:
        return CoverageRow(name, p.numel(), "frozen", False, None, "")
    reasons = [m.gnsfast.uncovered[own] for m, own in claims if own in m.gnsfast.uncovered]
    if not reasons and uses_batch_statistics(owner):
        reasons = [BATCH_STATISTICS]
    elif not claims:
        reasons = [route_of(owner).reason or "not converted: call gnsfast.convert(model)"]
    if reasons:
        return CoverageRow(name, p.numel(), "", False, None, reasons[0])
    calls = [m.gnsfast.calls for m, _ in claims if m.gnsfast.calls is not None]
    routes = " + ".join(dict.fromkeys(m.gnsfast.route for m, _ in claims))
    own = [m.gnsfast for m, _ in claims]
    measures = tuple(
        each
        for each in MEASURES
        if not any(reason(m.route, m.features(each)) for m in own)
        and (each != SPECTRAL or p.ndim == 2)
    )
    observed = any(calls) if calls else None
    said = "; ".join(dict.fromkeys(filter(None, (note, *(m.gnsfast.note for m, _ in claims)))))
    return CoverageRow(name, p.numel(), routes, True, observed, said, measures)
