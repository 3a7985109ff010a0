# SPDX-License-Identifier: Apache-2.0
"""Contestants side by side on a GPU: first each against single samples in float64, then a whole
step of GPT-2, and single linear layers in bfloat16 as T and B grow.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import contestants
from benchmarks.contestants import GNSFAST, PLAIN, Contestant, cases, gate
from benchmarks.contestants.cases import LayerCase, Problem
from benchmarks.contestants.gate import Verdict
from benchmarks.contestants.sessions import Gnsfast
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.backends import OURS, forced, present
from benchmarks.gpu.operators import TOKENS, clock, route, wall_clock
from benchmarks.gpu.step import SMALL, gpt_problem, release, side_by_side, warm_up
from benchmarks.measure import Clock
from benchmarks.networks import GPT2
from benchmarks.record import Growing, Rows, Tables, first_line, raised

LAYERS = (
    ("GPT-2 up", 768, 3072),
    ("Llama-3-8B out", 4096, 4096),
    ("Llama-3-8B up", 4096, 14336),
)
OVER_T = [LayerCase(*layer, T, TOKENS) for layer in LAYERS for T in (1, 8, 64, 128, 256, 512, 2048)]
OVER_T += [LayerCase(*layer, 8192, TOKENS) for layer in LAYERS]
OVER_B = [
    LayerCase(*layer, T, T * B)
    for layer, T in zip(LAYERS[::2], (1024, 2048))
    for B in (1, 2, 4, 8, 16, 32)
]
MODES = (False, True)
"""Eager and compiled."""
ROUNDS, FEWER = 9, 7
"""Of a whole step, and of a layer."""
SERIAL = 64
"""More samples than this are not passed one by one."""

HALF = 2e-2
"""Largest relative error at bfloat16, whose own numbers are off by up to 4e-3. Under autocast on a
CPU the loop of single samples is off by 5e-3 too, Opacus's ghost norms by 1.1e-2.
"""


def session_on(backend: str) -> type[Gnsfast]:
    class OnBackend(Gnsfast):
        def run(self) -> None:
            with forced(backend):
                super().run()

    return OnBackend


def entered(device: str) -> list[Contestant]:
    """Plain first; gnsfast by each of its back-ends."""
    ours = [
        replace(GNSFAST, name=OURS[backend], session=session_on(backend))
        for backend in present(device, "triton", "cuda", "reference")
    ]
    others = [c for c in contestants.ALL if c not in (PLAIN, GNSFAST)]
    return [PLAIN, *ours, *others]


class UntiedGPT2(GPT2):
    """GPT-2 with a head of its own, 163M parameters: most contestants take no tied weight."""

    tied = False


def peers(device: str) -> Iterator[Tables]:
    """Forward and backward that leave gradients and norms: every contestant that is right, in
    float32 and under autocast, which is timed.
    """
    growing = Growing()
    found, cast = checked(device, entered(device), partial(SMALL["gpt2"], device))
    growing.tables["Coverage"] = gate.coverage(found)
    growing.tables["Coverage, autocast"] = gate.coverage(cast)
    yield growing.tables
    problem = gpt_problem(UntiedGPT2, device, autocast=True)

    def rows_of(contestant: Contestant) -> Rows:
        rows = timed(problem, [contestant], ROUNDS, device, wall_clock(device))
        if contestant is not PLAIN:
            about = {"per sample": contestant.per_sample}
            about["covered"] = found[contestant.name].covered
            rows = [row | about for row in rows]
        return rows

    right = [v.contestant for v in cast.values() if not v.complaint]
    yield from growing.over("Whole step, peers", right, rows_of)


def checked(
    device: str, those: list[Contestant], problem_of: Callable[[bool], Problem]
) -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    """Verdicts in float32 and, for those right there, under autocast (``problem_of(True)``)."""
    found = gate.judged(problem_of(False), those)
    right = [v.contestant for v in found.values() if not v.complaint]
    return found, gate.judged(problem_of(True), right, HALF, HALF)


def step(device: str) -> Iterator[Tables]:
    """Whole training steps, plain and measured, eager and compiled: bf16 autocast, AdamW. Before,
    gnsfast's back-ends are checked on a small model of the same layers.
    """

    @functools.cache
    def right(name: str) -> None:
        those = [c for c in entered(device) if c.name in OURS.values()]
        checked(device, those, partial(SMALL[name], device))

    def rows_of(case: tuple[str, bool]) -> Rows:
        right(case[0])
        try:
            return gpu_step.beside_plain(*case, device)
        finally:
            torch._dynamo.reset()
            release()

    cases_ = itertools.product(gpu_step.PROBLEMS, MODES)
    yield from Growing().over("Whole training step", cases_, rows_of)


def timed(
    problem: Problem, right: list[Contestant], rounds: int, device: str, seconds_of: Clock
) -> Rows:
    """Each contestant in turns with plain, both alone on the device, on the same batch: the whole
    one or, if memory does not suffice, half of it, a quarter, ...
    """
    rows: Rows = []
    warm_up(device)
    for contestant in right:
        about = {"layer": problem.layer, "T": problem.T}
        B, failed = problem.B, ""
        if contestant.serial and B > SERIAL:
            B, failed = 0, f"{B} passes of one sample each: not timed"
        while B:
            try:
                beside = beside_plain(first(problem, B), contestant, rounds, device, seconds_of)
                rows.append({**about, "B": B, **beside})
                break
            except torch.OutOfMemoryError as error:
                failed = failed or f"out of memory: {first_line(error)}"
                B //= 2
            except Exception as error:  # a package may refuse a model in any way
                B, failed = 0, raised(error)
            finally:
                release()
        if failed:
            rows.append({**about, "B": problem.B, "contestant": contestant.name, "failed": failed})
    return rows


def first(problem: Problem, B: int) -> Problem:
    """The first B samples; their batch is a leaf again."""
    batch = tuple(t[:B].detach().requires_grad_(t.requires_grad) for t in problem.batch)
    return replace(problem, batch=batch)


def beside_plain(
    problem: Problem, contestant: Contestant, rounds: int, device: str, seconds_of: Clock
) -> dict[str, Any]:
    """One interleaved run; memory: the peak of a model and its second pass."""
    prepare = {c.name: lambda c=c: problem.prepare(c).once for c in (PLAIN, contestant)}
    return side_by_side(prepare, device, rounds, seconds_of)[-1]


def curves(device: str) -> Iterator[Tables]:
    """Single linear layers, forward and backward with the input's gradient."""
    found = Growing()
    yield from found.over("Overhead against T", OVER_T, partial(curve, device))
    yield from found.over("Cost against B", OVER_B, partial(curve, device))


def curve(device: str, case: LayerCase) -> Rows:
    # In the dtype and by the route that are timed; more than two samples where that needs them.
    few = replace(case, tokens=case.T * min(case.B, 2))
    while few.B < case.B and route(few, device) != route(case, device):
        few = replace(case, tokens=2 * few.tokens)
    problem_of = partial(cases.linear, bias=False, device=device, dtype=torch.bfloat16)
    found = gate.judged(problem_of(few), entered(device), HALF, gate.TOLERANCE).values()
    right = [
        v.contestant for v in found if not v.complaint and (v.covered or v.contestant is PLAIN)
    ]
    rows = timed(problem_of(case), right, FEWER, device, clock(device))
    print(f"{case.name}, B = {case.B}: {len(rows)} rows", flush=True)
    return rows
