# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks cpu``: each returns its tables."""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch

from benchmarks import cases, fresh, gate, measure
from benchmarks.cases import LayerCase, Problem
from benchmarks.contestants import GNSFAST, PLAIN, Contestant
from benchmarks.gate import Verdict

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]
ProblemOf = Callable[[int | None], Problem]
"""A problem with at most so many samples, or all."""

SECONDS = 3.0
"""A call on a single layer that takes longer, and thrice as long as plain's, is left out, and
listed.
"""
MORE = 4
"""A shared machine moves the median of 11 rounds by 3 %, which is what gnsfast is to cost."""
BYTES = 2 << 30
"""So is one that would hold more than this in samples' gradients."""


@cache
def verdicts() -> dict[str, Verdict]:
    """Of every contestant on three samples of the small GPT; without gnsfast being right nothing
    is timed.
    """
    return gate.judged(cases.small_gpt(most=3))


def admitted(found: dict[str, Verdict]) -> list[Contestant]:
    for verdict in found.values():
        if verdict.complaint:
            print(f"not timed: {verdict.contestant.name}: {verdict.complaint}", flush=True)
    return [v.contestant for v in found.values() if not v.complaint]


def said_of(verdict: Verdict) -> dict[str, Any]:
    return {"per sample": verdict.contestant.per_sample, "covered": round(verdict.covered, 4)}


def coverage(threads: list[int], rounds: int) -> Tables:
    return {"Coverage": gate.coverage(verdicts())}


def step(threads: list[int], rounds: int) -> Tables:
    """Every contestant's training step beside plain ones, gnsfast's ``MORE`` times as often; memory
    in processes of their own, with the last number of threads.
    """
    rows: Rows = []
    entered = admitted(verdicts())
    for n in threads:
        torch.set_num_threads(n)
        steps = {c.name: cases.training_step(c) for c in entered}
        timings: dict[str, measure.Timing] = {}
        ours = (PLAIN.name, GNSFAST.name)
        counts = {name: MORE * rounds if name in ours else rounds for name in steps}
        for name in dict.fromkeys((GNSFAST.name, *steps)):  # plain's own row is of the most rounds
            if name != PLAIN.name:
                pair = {each: steps[each] for each in (PLAIN.name, name)}
                timings = measure.interleave(pair, counts[name]) | timings
        del steps
        peaks = {}
        if n == threads[-1]:
            peaks = {c.name: fresh.ask("memory", c.name, str(n)) for c in entered}
        for c in entered:
            timing = timings[c.name]
            row = {"threads": n, "contestant": c.name, "rounds": counts[c.name]}
            row |= {"ms": round(timing.milliseconds, 1), "ratio": timing}
            if peaks:
                row["memory"] = round(peaks[c.name] / peaks[PLAIN.name], 3)
            if c is not PLAIN:
                row |= said_of(verdicts()[c.name])
            rows.append(row)
    return {"Whole training step": rows}


def lengths(threads: list[int], rounds: int) -> Tables:
    return compared("Overhead against T", map(linear, cases.OVER_T), threads, rounds)


def batches(threads: list[int], rounds: int) -> Tables:
    return compared("Cost against B", map(linear, cases.OVER_B), threads, rounds)


def layers(threads: list[int], rounds: int) -> Tables:
    problems = [*map(linear, cases.LAYERS), cases.layer_norm, cases.embedding]
    return compared("Single layers", problems, threads, rounds)


def attention(threads: list[int], rounds: int) -> Tables:
    return compared("Attention block", [cases.attention_block], threads, rounds)


def linear(case: LayerCase) -> ProblemOf:
    return partial(cases.linear, case)


def compared(title: str, problems: Iterable[ProblemOf], threads: list[int], rounds: int) -> Tables:
    """All contestants on each problem, with the last number of threads and at least five
    rounds; two to four samples of it are checked first.
    """
    n, rows, skipped = threads[-1], [], []
    torch.set_num_threads(n)
    for problem_of in problems:
        few = problem_of(4)
        found = gate.judged(few if few.T < 256 else problem_of(2))
        problem = problem_of(None)
        about = {"layer": problem.layer, "T": problem.T, "B": problem.B, "threads": n}
        entered, limit = {}, SECONDS
        for verdict in found.values():
            name = verdict.contestant.name
            if reason := skip_reason(verdict, problem, limit):
                skipped.append({**about, "contestant": name, "reason": reason})
                continue
            entered[name] = problem.prepare(verdict.contestant).once
            seconds = measure.wall_seconds(entered[name])
            if verdict.contestant is PLAIN:
                limit = max(SECONDS, 3 * seconds)
            if seconds > limit:
                seconds = measure.wall_seconds(entered[name])  # the first call may be a slow one
            if seconds > limit and verdict.contestant is not GNSFAST:
                del entered[name]
                reason = f"{seconds:.1f} s a call"
                skipped.append({**about, "contestant": name, "reason": reason})
        timings = measure.interleave(entered, max(5, rounds // 3))
        for name, t in timings.items():
            row = {**about, "contestant": name, "ms": round(t.milliseconds, 2), "ratio": t}
            if name != PLAIN.name:
                row |= said_of(found[name])
            rows.append(row)
    return {title: rows, **({f"{title}: left out": skipped} if skipped else {})}


def skip_reason(verdict: Verdict, problem: Problem, limit: float = SECONDS) -> str:
    """Empty, or why a contestant is not timed there; ``limit``: seconds of a call."""
    contestant = verdict.contestant
    if verdict.complaint:
        return verdict.complaint
    if contestant is not PLAIN and not verdict.covered:
        return "covers no parameter of it"
    size = sum(p.numel() * p.element_size() for p in problem.model.parameters()) * problem.B
    if contestant.instantiates and size > BYTES:
        return f"the samples' gradients would take {size / 2**30:.1f} GiB"
    seconds = verdict.seconds / verdict.samples * problem.B
    if contestant.serial and seconds > limit:
        return f"{problem.B} passes of one sample: about {seconds:.0f} s a call"
    return ""


def operator(threads: list[int], rounds: int) -> Tables:
    """dW alone and with norms, each way to write it; with the last number of threads."""
    rows: Rows = []
    torch.set_num_threads(threads[-1])
    for case in cases.OPERATOR:
        check_operator(case)
        timings = measure.interleave(cases.weight_gradients(case), max(5, rounds // 3))
        row: dict[str, Any] = {"weight gradient": case.name, "B": case.B, "threads": threads[-1]}
        row |= {"route": cases.route(case), "plain ms": round(timings["plain"].milliseconds, 2)}
        rows.append(row | {name: t for name, t in timings.items() if name != "plain"})
    return {"The weight gradient alone, as ratios to plain dW": rows}


def check_operator(case: LayerCase) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, case.T, case.I), torch.randn(2, case.T, case.O)
    got = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)[2][0, :2]
    want = [(b.double().T @ a.double()).square().sum() for a, b in zip(x, dy)]
    torch.testing.assert_close(got.double(), torch.stack(want), rtol=1e-5, atol=0.0)


def estimator(threads: list[int], rounds: int) -> Tables:
    """What ``GradientNoiseScale`` takes in a step, without the layers' own share."""
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        run, spent = cases.estimated_step()
        run()
        before, start = spent(), time.perf_counter()
        for _ in range(rounds):
            run()
        seconds, own = time.perf_counter() - start, spent() - before
        row = {"threads": n, "step ms": round(1e3 * seconds / rounds, 1)}
        row |= {"estimator ms": round(1e3 * own / rounds, 2)}
        rows.append({**row, "share %": round(100 * own / seconds, 2)})
    return {"Estimator": rows}


def compile(threads: list[int], rounds: int) -> Tables:
    """First and later steps of a GPT of one layer through ``torch.compile``."""
    rows: Rows = []
    for c in (PLAIN, GNSFAST):
        n = str(threads[-1])
        answer = fresh.ask("compiled", c.name, n, str(rounds), **fresh.NO_CACHE)
        timing = measure.Timing(**answer["timing"])
        row = {"threads": threads[-1], "contestant": c.name}
        row |= {"first step s": round(answer["seconds"], 1), "ms": round(timing.milliseconds, 1)}
        rows.append(row | {"ratio": timing})
    return {"Compile time": rows}


def start(threads: list[int], rounds: int) -> Tables:
    """Medians over fresh processes, which import one after the other."""
    runs = max(3, rounds // 3)
    medians = fresh.medians([fresh.ask("start") for _ in range(runs)])
    return {
        "Start-up time": [
            {"what": what, "runs": runs, "ms": round(1e3 * s, 1)} for what, s in medians.items()
        ]
    }


PARTS: dict[str, Callable[[list[int], int], Tables]] = {
    "coverage": coverage,
    "step": step,
    "lengths": lengths,
    "batches": batches,
    "layers": layers,
    "attention": attention,
    "operator": operator,
    "estimator": estimator,
    "compile": compile,
    "start": start,
}
