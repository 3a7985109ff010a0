# SPDX-License-Identifier: Apache-2.0
"""First right, then timed: every contestant's norms against a float64 loop over single samples."""

import copy
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import Problem
from benchmarks.contestants import ALL, GNSFAST, PLAIN, Contestant, Session
from benchmarks.contestants.sessions import sample_of

TOLERANCE = 1e-3
"""Largest relative error of a squared norm, of one parameter and one sample, and of a gradient.

The packages sum squares in float32 over whole weights, which on a CPU is off by 2e-4 at 1M.
"""
OURS = 1e-4
"""The same for gnsfast, which must also cover every parameter."""
FLOOR = 1e-6
"""Below this share of the sample's whole squared norm an error counts relative to that share."""


@dataclass(frozen=True)
class Truth:
    """Of each parameter, in float64: every sample's squared norm, and the gradient."""

    sqnorms: dict[str, Tensor]
    grads: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """``complaint``: empty, or why this contestant is not timed. ``seconds``: of its second pass
    over ``samples``.
    """

    contestant: Contestant
    complaint: str = ""
    error: float | None = None
    covered: float = 0.0
    uncovered: str = ""
    seconds: float = 0.0
    samples: int = 0


def single_samples(problem: Problem) -> Truth:
    model = copy.deepcopy(problem.model).double()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sqnorms: dict[str, list[Tensor]] = {name: [] for name in parameters}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    batch = tuple(t.double() if t.is_floating_point() else t for t in problem.batch)
    for b in range(problem.B):
        loss = problem.loss_of(model, sample_of(batch, b))
        for name, g in zip(parameters, torch.autograd.grad(loss, list(parameters.values()))):
            sqnorms[name].append(g.div_(problem.B).square().sum())
            total[name] += g
    return Truth({name: torch.stack(norms) for name, norms in sqnorms.items()}, total)


def judged(
    problem: Problem,
    entered: Iterable[Contestant] | None = None,
    tolerance: float = TOLERANCE,
    ours: float = OURS,
) -> dict[str, Verdict]:
    """Of these contestants, or of all; while gnsfast is wrong, by any of its back-ends, nothing is
    timed.
    """
    truth = single_samples(problem)
    found = {c.name: judge(c, problem, truth, tolerance) for c in (entered or ALL)}
    where = f"{problem.layer}, T = {problem.T}"
    for name, own in found.items():
        if not name.startswith(GNSFAST.name):
            continue
        if own.complaint or (own.error or 0.0) > ours:
            said = own.complaint or f"a squared norm is off by {own.error:.1e}"
            raise SystemExit(f"{name} is wrong on {where}: {said}")
        if own.covered < 1:
            raise SystemExit(f"{name} covers {own.covered:.2%} of {where}: not {own.uncovered}")
    return found


def coverage(found: dict[str, Verdict]) -> list[dict[str, Any]]:
    """A row for each but plain: what it covers, how far off it is, and whether it is timed."""
    rows = []
    for verdict in found.values():
        if verdict.contestant is not PLAIN:
            missing = verdict.contestant.missing()
            row = {
                "contestant": verdict.contestant.name,
                "version": None if missing else verdict.contestant.version,
                "worst error": verdict.error and float(f"{verdict.error:.1e}"),
                "covered": round(verdict.covered, 4),
                "not covered": verdict.uncovered or "-",
            }
            rows.append(row | {"verdict": verdict.complaint or "right"})
    return rows


def judge(
    contestant: Contestant, problem: Problem, truth: Truth, tolerance: float = TOLERANCE
) -> Verdict:
    """Two passes of a contestant, the first over the same samples in another order, the second
    compared: what the first leaves behind counts too.
    """
    if reason := contestant.missing():
        return Verdict(contestant, reason)
    try:
        session = problem.prepare(contestant)
        session.batch = tuple(
            t.detach().roll(1, 0).requires_grad_(t.requires_grad) for t in problem.batch
        )
        session.once()
        session.batch = problem.batch
        start = time.perf_counter()
        session.run()
        seconds = time.perf_counter() - start
    except Exception as error:  # a package may refuse a model in any way: its words are reported
        return Verdict(contestant, f"raises {type(error).__name__}: {first_line(error)}")
    return compared(contestant, problem.model, session, truth, seconds, tolerance)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def compared(
    contestant: Contestant,
    model: nn.Module,
    session: Session,
    truth: Truth,
    seconds: float,
    tolerance: float,
) -> Verdict:
    sqnorms, total_B = session.sqnorms(), torch.stack(list(truth.sqnorms.values())).sum(0)
    errors, complaints = {}, []
    for name, ours in sqnorms.items():
        if name not in truth.sqnorms or ours.shape != total_B.shape:
            complaints.append(f"{name}: norms of shape {list(ours.shape)}, B = {len(total_B)}")
            continue
        theirs_B = truth.sqnorms[name]
        scale_B = torch.maximum(theirs_B, FLOOR * total_B)
        error_B = (ours.detach().double() - theirs_B).abs() / scale_B
        errors[name] = error_B.nan_to_num(nan=float("inf")).max().item()
    wrong = max(errors, key=lambda name: errors[name], default="")
    if wrong and errors[wrong] > tolerance:
        complaints.append(f"{wrong}: a sample's squared norm is off by {errors[wrong]:.1e}")
    complaints += wrong_gradients(session, truth, tolerance)
    sizes = {name: p.numel() for name, p in session.parameters.items()}
    return Verdict(
        contestant,
        "; ".join(complaints),
        errors.get(wrong),
        sum(sizes[name] for name in sqnorms if name in sizes) / sum(sizes.values()),
        listed(model, sizes.keys() - sqnorms.keys()),
        seconds,
        session.B,
    )


def wrong_gradients(session: Session, truth: Truth, tolerance: float) -> list[str]:
    """The norms come beside the ordinary gradients, which have to be there and right too."""
    sizes = {name: torch.linalg.vector_norm(g) for name, g in truth.grads.items()}
    least = FLOOR**0.5 * torch.linalg.vector_norm(torch.stack(list(sizes.values())))
    for name, p in session.parameters.items():
        if p.grad is None:
            return [f"{name}: no .grad"]
        difference = torch.linalg.vector_norm(p.grad.double() - truth.grads[name])
        error = difference / sizes[name].maximum(least)
        if not error <= tolerance:
            return [f"{name}: .grad is off by {error:.1e}"]
    return []


def listed(model: nn.Module, names: set[str]) -> str:
    """Parameters by the layers that they belong to: "9 LayerNorm.weight, 9 LayerNorm.bias"."""
    modules = dict(model.named_modules())
    of = lambda name: type(modules[name.rpartition(".")[0]]).__name__
    counts = Counter(f"{of(name)}.{name.rpartition('.')[2]}" for name in sorted(names))
    return ", ".join(f"{n} {what}" for what, n in counts.items())
