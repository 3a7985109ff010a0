# SPDX-License-Identifier: Apache-2.0
"""Who is right is timed: every contestant's norms against a float64 loop over single samples."""

import copy
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import ALL, GNSFAST, PLAIN, Contestant, Session
from benchmarks.contestants.cases import Problem
from benchmarks.contestants.sessions import SingleSamples
from benchmarks.record import raised

TOLERANCE = 1e-3
"""Largest relative error of a squared norm, of one parameter and one sample, and of a gradient.

The packages sum squares in float32 over whole weights, which on a CPU is off by 2e-4 at 1M.
"""
OURS = 1e-4
"""The same for gnsfast, which must also cover every parameter."""
FLOOR = 1e-6
"""A squared norm below this share of its sample's total is compared relative to that share."""


@dataclass(frozen=True)
class Truth:
    """In float64: every sample's squared norm and the gradient of each parameter, and the gradient
    of each tensor of the batch that requires one, by its position.
    """

    sqnorms: dict[str, Tensor]
    grads: dict[str, Tensor]
    inputs: dict[int, Tensor]


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


def single_samples(
    problem: Problem, some: Iterable[int] | None = None, dtype: torch.dtype = torch.float64
) -> Truth:
    """The truth of all samples, or of ``some``."""
    model, index = copy.deepcopy(problem.model).to(dtype), [*(some or range(problem.B))]
    model.zero_grad()
    batch = tuple(
        (t.to(dtype) if t.is_floating_point() else t)[index]
        .detach()
        .requires_grad_(t.requires_grad)
        for t in problem.batch
    )
    session = SingleSamples(model, problem.loss_of, batch, problem.B)
    session.run()
    grads = {name: p.grad for name, p in session.parameters.items()}
    inputs = {i: t.grad for i, t in enumerate(batch) if t.requires_grad}
    return Truth(session.sqnorms(), grads, inputs)


def judged(
    problem: Problem,
    entered: Iterable[Contestant] | None = None,
    tolerance: float = TOLERANCE,
    ours: float = OURS,
) -> dict[str, Verdict]:
    """Verdicts on these contestants, or on all. Exits if gnsfast is wrong by any back-end."""
    truth = single_samples(problem)
    found = {c.name: judge(c, problem, truth, tolerance) for c in (entered or ALL)}
    where = f"{problem.layer}, T = {problem.T}"
    for name, own in found.items():
        if not name.startswith(GNSFAST.name):
            continue
        if own.complaint or (own.error or 0.0) > ours:
            reason = own.complaint or f"a squared norm is off by {own.error:.1e}"
            raise SystemExit(f"{name} is wrong on {where}: {reason}")
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
    """Two passes of a contestant, of which the second is compared. The first has other weights and
    another order of the samples, so that what it leaves behind is noticed.
    """
    if reason := contestant.missing():
        return Verdict(contestant, reason)
    try:
        other = copy.deepcopy(problem.model)
        scale_weights(other, 2.0)
        session = replace(problem, model=other).prepare(contestant)
        session.batch = tuple(
            t.detach().roll(1, 0).requires_grad_(t.requires_grad) for t in problem.batch
        )
        session.once()
        scale_weights(session.model, 0.5)
        session.batch = problem.batch
        for t in session.batch:
            t.grad = None
        start = time.perf_counter()
        session.run()
        seconds = time.perf_counter() - start
    except Exception as error:  # a package may refuse a model in any way: its words are reported
        return Verdict(contestant, raised(error))
    return compared(contestant, problem.model, session, truth, seconds, tolerance)


def scale_weights(model: nn.Module, factor: float) -> None:
    """In place, as an optimizer changes them; by a power of two, which rounds nothing."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


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
        errors[name] = relative_error(ours, truth.sqnorms[name], total_B)
    wrong = max(errors, key=lambda name: errors[name], default="")
    if wrong and errors[wrong] > tolerance:
        complaints.append(f"{wrong}: a sample's squared norm is off by {errors[wrong]:.1e}")
    complaints += wrong_gradients(session, truth, tolerance)
    complaints += wrong_input_gradients(session, truth, tolerance)
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


def wrong_input_gradients(session: Session, truth: Truth, tolerance: float) -> list[str]:
    """What the layers below would get: to leave it out would save time."""
    for i, want in truth.inputs.items():
        got = session.batch[i].grad
        if got is None:
            return [f"input {i}: no .grad"]
        error = torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)
        if not error <= tolerance:
            return [f"input {i}: .grad is off by {error:.1e}"]
    return []


def spots(B: int) -> list[int]:
    """The first, a middle and the last of B samples."""
    return sorted({0, B // 2, B - 1})


def wrong_at_full_size(session: Session, truth: Truth) -> str:
    """What is wrong with the norms of a whole batch, empty if nothing: the gate saw only a few of
    its samples. ``truth`` is that of its ``spots``. The pass leaves nothing behind.
    """
    some = spots(session.B)
    session.run()
    sqnorms, total_B = session.sqnorms(), torch.stack(list(truth.sqnorms.values())).sum(0)
    for name, want_B in truth.sqnorms.items():
        if name in sqnorms:
            error = relative_error(sqnorms[name][some], want_B, total_B)
            if error > TOLERANCE:
                return f"{name}: at B = {session.B} a squared norm is off by {error:.1e}"
    session.clear()
    return ""


def relative_error(sqnorm_B: Tensor, want_B: Tensor, total_B: Tensor) -> float:
    """The largest of a parameter's samples, infinite for a NaN; ``total_B``: of all parameters."""
    scale_B = torch.maximum(want_B, FLOOR * total_B)
    error_B = (sqnorm_B.detach().double() - want_B).abs() / scale_B
    return error_B.nan_to_num(nan=float("inf")).max().item()


def listed(model: nn.Module, names: set[str]) -> str:
    """Parameters by the layers that they belong to: "9 LayerNorm.weight, 9 LayerNorm.bias"."""
    modules = dict(model.named_modules())
    of = lambda name: type(modules[name.rpartition(".")[0]]).__name__
    counts = Counter(f"{of(name)}.{name.rpartition('.')[2]}" for name in sorted(names))
    return ", ".join(f"{n} {what}" for what, n in counts.items())
