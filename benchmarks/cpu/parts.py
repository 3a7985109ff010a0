# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks cpu``: each returns its tables."""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from benchmarks import contestants, measure, record
from benchmarks.contestants import GNSFAST, PLAIN, Contestant, cases, gate
from benchmarks.contestants.cases import LayerCase, Problem
from benchmarks.contestants.gate import Verdict
from benchmarks.cpu import fresh
from benchmarks.record import Rows, Tables

ProblemOf = Callable[[int | None], Problem]
"""A problem with at most this number of samples, or all."""

SECONDS = 3.0
"""A contestant whose call on a single layer takes longer than this and than three of plain's is
left out, and listed.
"""
BYTES = 2 << 30
"""So is one whose samples' gradients would take more than this."""
MORE = 4
"""A shared machine moves the median of 11 rounds by 4 %, as much as gnsfast may cost."""


@cache
def verdicts(threads: int) -> dict[str, Verdict]:
    """Of every contestant on the small GPT as it is timed; if gnsfast is wrong, nothing is timed.
    Other numbers of threads take other routes through the layers.
    """
    torch.set_num_threads(threads)
    return gate.judged(cases.small_gpt())


def admitted(found: dict[str, Verdict]) -> list[Contestant]:
    for verdict in found.values():
        if verdict.complaint:
            print(f"not timed: {verdict.contestant.name}: {verdict.complaint}", flush=True)
    return [v.contestant for v in found.values() if not v.complaint]


def norms_of(verdict: Verdict) -> dict[str, Any]:
    return {"per sample": verdict.contestant.per_sample, "covered": round(verdict.covered, 4)}


def coverage(threads: list[int], rounds: int) -> Tables:
    return {"Coverage": gate.coverage(verdicts(threads[-1]))}


def step(threads: list[int], rounds: int) -> Tables:
    """Every contestant's training step beside plain ones, gnsfast's ``MORE`` times as often; memory
    in processes of their own, with the last number of threads.
    """
    rows: Rows = []
    for n in threads:
        entered = admitted(verdicts(n))
        torch.set_num_threads(n)
        steps = {c.name: cases.training_step(c) for c in entered}
        timings: dict[str, measure.Timing] = {}
        beside: dict[str, float] = {}
        ours = (PLAIN.name, GNSFAST.name)
        counts = {name: MORE * rounds if name in ours else rounds for name in steps}
        for name in dict.fromkeys((GNSFAST.name, *steps)):  # plain's own row is of the most rounds
            if name != PLAIN.name:
                pair = {each: steps[each] for each in (PLAIN.name, name)}
                found = measure.interleave(pair, counts[name])
                beside[name] = found[PLAIN.name].milliseconds
                timings = found | timings
        del steps
        peaks = {}
        if n == threads[-1]:
            ask = lambda c: fresh.ask("memory", c.name, str(n))  # noqa: B023
            peaks = {
                c.name: statistics.median(ask(c) for _ in range(MORE * 3 if c.name in ours else 3))
                for c in entered
            }
        for c in entered:
            timing = timings[c.name]
            row = {"threads": n, "contestant": c.name, "rounds": counts[c.name]}
            row |= {"ms": round(timing.milliseconds, 1), "ratio": timing}
            if c is not PLAIN:
                row["plain ms"] = round(beside[c.name], 1)  # of the same rounds
            if peaks:
                row["memory"] = round(peaks[c.name] / peaks[PLAIN.name], 3)
            if c is not PLAIN:
                row |= norms_of(verdicts(n)[c.name])
            rows.append(row)
    return {"Whole training step": rows}


def autocast(threads: list[int], rounds: int) -> Tables:
    """gnsfast's training step beside plain's in bfloat16, where float64 is no measure of the norms:
    passes of single samples at the same precision are.
    """
    torch.set_num_threads(threads[-1])
    problem = replace(cases.small_gpt(), loss_of=cases.autocast_loss)
    check_autocast(problem)
    rows: Rows = []
    for n in threads:
        torch.set_num_threads(n)
        both = (PLAIN, GNSFAST)
        steps = {c.name: cases.training_step(c, None, cases.autocast_loss) for c in both}
        for name, timing in measure.interleave(steps, MORE * rounds).items():
            row = {"threads": n, "contestant": name, "rounds": MORE * rounds}
            rows.append(row | {"ms": round(timing.milliseconds, 1), "ratio": timing})
    return {"Whole training step under autocast(bfloat16)": rows}


def convolutions(threads: list[int], rounds: int) -> Tables:
    """The pass of a convolutional net by gnsfast, and by single samples, beside plain's."""
    entered = PLAIN, GNSFAST, contestants.named("loop of single samples")
    rows: Rows = []
    for channels, size in cases.IMAGES:
        torch.set_num_threads(threads[-1])
        for verdict in gate.judged(cases.convolutions(channels, size), entered).values():
            if verdict.complaint:
                raise SystemExit(f"{verdict.contestant.name}: {verdict.complaint}")
        check_autocast(cases.convolutions(channels, size, autocast=True))
        for n, autocast in product(threads, (False, True)):
            torch.set_num_threads(n)
            problem = cases.convolutions(channels, size, autocast)
            passes = {c.name: problem.prepare(c).once for c in entered}
            row = {"channels": channels, "image": f"{size} x {size}", "threads": n}
            row |= {"dtype": "bfloat16" if autocast else "float32", "rounds": MORE * rounds}
            timings = measure.interleave(passes, MORE * rounds)
            row["plain ms"] = round(timings.pop(PLAIN.name).milliseconds, 1)
            rows.append(row | timings)
    return {"Convolutions 3 x 3, as ratios to plain": rows}


def check_autocast(problem: Problem) -> None:
    """Every norm, and gradient, within ``HALF`` of single samples'."""
    truth = gate.single_samples(problem, dtype=torch.float32)
    if complaint := gate.judge(GNSFAST, problem, truth, HALF).complaint:
        raise SystemExit(f"gnsfast under autocast: {complaint}")


HALF = 1e-2
"""A few roundings of bfloat16 which do not average out: the small GPT's norms differ by 1e-3."""


def lengths(threads: list[int], rounds: int) -> Tables:
    return compared("Overhead against T", map(linear, cases.OVER_T), threads, rounds)


def batches(threads: list[int], rounds: int) -> Tables:
    return compared("Cost against B", map(linear, cases.OVER_B), threads, rounds)


def layers(threads: list[int], rounds: int) -> Tables:
    problems = [*map(linear, cases.LAYERS), cases.layer_norm, cases.embedding, cases.tiny]
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
        truth = gate.single_samples(problem, gate.spots(problem.B))
        about = {"layer": problem.layer, "T": problem.T, "B": problem.B, "threads": n}
        entered, limit = {}, SECONDS
        for verdict in found.values():
            name = verdict.contestant.name
            if reason := skip_reason(verdict, problem, limit):
                skipped.append({**about, "contestant": name, "reason": reason})
                continue
            session = problem.prepare(verdict.contestant)
            if wrong := gate.wrong_at_full_size(session, truth):
                if verdict.contestant is GNSFAST:
                    raise SystemExit(f"{name} is wrong on {problem.layer}: {wrong}")
                skipped.append({**about, "contestant": name, "reason": wrong})
                continue
            entered[name] = session.once
            seconds = measure.wall_seconds(entered[name])
            if verdict.contestant is PLAIN:
                limit = max(SECONDS, 3 * seconds)
            if seconds > limit:
                seconds = measure.wall_seconds(entered[name])  # the first call may be a slow one
            if seconds > limit and verdict.contestant is not GNSFAST:
                del entered[name]
                reason = f"{seconds:.1f} s a call"
                skipped.append({**about, "contestant": name, "reason": reason})
        fewer = max(5, rounds // 3)
        for name, t in measure.interleave(entered, fewer).items():
            row = {**about, "contestant": name, "rounds": fewer}
            row |= {"ms": round(t.milliseconds, 2), "ratio": t}
            if name != PLAIN.name:
                row |= norms_of(found[name])
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
        ways = cases.weight_gradients(case)
        check_operator(case, ways)
        timings = measure.interleave(ways, max(5, rounds // 3))
        row: dict[str, Any] = {"weight gradient": case.name, "B": case.B, "threads": threads[-1]}
        row |= {"route": cases.route(case), "plain ms": round(timings["plain"].milliseconds, 2)}
        rows.append(row | {name: t for name, t in timings.items() if name != "plain"})
    return {"The weight gradient alone, as ratios to plain dW": rows}


def check_operator(case: LayerCase, ways: dict[str, Callable[[], Any]]) -> None:
    """dW of each way against plain's, and its norms of three samples against float64."""
    x_BTI, dy_BTO = cases.operands(case)
    some = gate.spots(case.B)
    want = [(dy_BTO[b].double().T @ x_BTI[b].double()).square().sum() for b in some]
    plain = ways["plain"]()
    for name, run in ways.items():
        if name != "plain":
            dw, sqnorm_B = run()
            off = torch.linalg.vector_norm(dw - plain) / torch.linalg.vector_norm(plain)
            if not off <= 1e-5:
                raise SystemExit(f"{name}: dW of {case.name} is off by {off:.1e}")
            rtol = 1e-5 if name == GNSFAST.name else gate.TOLERANCE
            got = sqnorm_B[some].double()
            torch.testing.assert_close(got, torch.stack(want), rtol=rtol, atol=0.0)


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
    "autocast": autocast,
    "convolutions": convolutions,
    "lengths": lengths,
    "batches": batches,
    "layers": layers,
    "attention": attention,
    "operator": operator,
    "start": start,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=tuple(PARTS))
    record.add_argument(parser)
    parser.set_defaults(error=parser.error)


def run(options: argparse.Namespace) -> None:
    """Part by part into a record with a provisional name, so that an interrupted run keeps its
    parts and replaces no whole record. A part that raises becomes a row.
    """
    if min(options.threads) < 1:
        options.error(f"--threads {' '.join(map(str, options.threads))}: 1 or more")
    if options.rounds < 5:
        options.error(f"{options.rounds} rounds have no quartiles: --rounds 5 or more")
    some = options.only if set(options.only) != set(PARTS) else ()
    words = ["--threads", *options.threads, "--rounds", options.rounds]
    words += ["--only", *some] if some else []
    about = "-".join(["cpu", *some]), " ".join(map(str, ["python -m benchmarks cpu", *words]))
    tables: Tables = {}
    broken: list[str] = []
    threads = list(dict.fromkeys(options.threads))
    for part in options.only:
        start = time.perf_counter()
        try:
            found = PARTS[part](threads, options.rounds)
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            broken.append(part)
            found = {part: [{"part": part, "result": record.raised(error)}]}
        print(f"\n{part}: {time.perf_counter() - start:.0f} s", flush=True)
        record.show(found, record.INTERLEAVED)
        tables |= found
        if options.record:
            record.write_unfinished(*about, tables, options.record)
    if options.record:
        print(f"\nwritten: {record.write_whole(*about, tables, options.record)}")
    if broken:
        raise SystemExit(f"failed: {', '.join(broken)}; see above")
