# SPDX-License-Identifier: Apache-2.0
"""Runs whose batch size a controller grows by one of the noise scales, beside constant batches, at
equal tokens.

Every run trains ``TOKENS`` with a cosine that the optimizer's rule scales by the batch size. A
noise scale's factor is the geometric mean of the ratios that branches found for this optimizer at
this width, so that all of them mean the same critical batch size (CBS) on average and differ in
when they reach it.
"""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.record import Rows
from benchmarks.studies.geometry_runs import BATCH, OPTIMIZERS, Study, cached
from benchmarks.studies.geometry_tables import Point, geometric_mean, logs
from gnsfast.cli import tiny_gpt
from gnsfast.critical_batch.branches import TorchRun
from gnsfast.critical_batch.control import BatchSizeController, cosine
from gnsfast.critical_batch.rules import Rules

STEPS = 2400
"""Of the smallest batch."""
TOKENS = STEPS * BATCH * tiny_gpt.CONTEXT
CONSTANT = (8, 16, 32, 64)
SEEDS = (1, 2)
"""Of weights and data; the branches come from a run of seed 0."""
EVALUATIONS = 48
TOLERANCE = 0.02
"""A run has reached the smallest batch's final loss within this, as branches do."""

shape = cosine(TOKENS, warm_up=TOKENS // 50, final=0.1)


def constant(study: Study, name: str, seed: int, batch_size: int) -> dict[str, Any]:
    factor = Rules(OPTIMIZERS[name].rule).lr_factor(batch_size / BATCH)
    run = study.run(name, seed=seed, rate=lambda tokens: factor * shape(tokens))
    run.batch_size = batch_size
    return trained(run)


def controlled(study: Study, name: str, seed: int, metric: str, factor: float) -> dict[str, Any]:
    controller = BatchSizeController(
        BATCH,
        factor=factor,
        metric=metric,
        tokens_per_sample=tiny_gpt.CONTEXT,
        total_tokens=TOKENS,
        max_batch_size=CONSTANT[-1],
        lr=OPTIMIZERS[name].rule,
        calibrate=0.02,
        check_every=TOKENS // 100,
    )
    run = study.run(name, seed=seed, rate=controller.lr_lambda(shape))
    run.gns = study.gns(name, run, metric=[m for m in [metric] if m != "euclidean"])
    return trained(run, controller)


def trained(run: TorchRun, controller: BatchSizeController | None = None) -> dict[str, Any]:
    """Evaluation losses over the run with the steps taken so far, and where the batch grew."""
    steps, losses, grown = 0, [], []
    assert run.evaluate is not None
    while run.tokens < TOKENS:
        run.step()
        steps += 1
        decision = controller and run.gns and controller.update(run.tokens, run.gns.compute)
        if decision and decision.new != decision.old:
            run.batch_size = decision.new
            grown.append(f"{decision.new} at {decision.tokens / TOKENS:.0%}")
        if run.tokens >= (len(losses) + 1) * TOKENS / EVALUATIONS:
            losses.append([run.tokens, steps, run.evaluate()])
    return {"steps": steps, "losses": losses, "grown": ", ".join(grown) or "-"}


def reached(losses: list[list[float]], target: float) -> tuple[float, float]:
    """Tokens and steps at the first evaluation with at most the target's loss; infinite without."""
    at = ((tokens, steps) for tokens, steps, loss in losses if loss <= target)
    return next(at, (math.inf, math.inf))


def factors(name: str, width: int, points: list[Point]) -> dict[str, float]:
    """The factor of each noise scale that branches at this width give for the optimizer."""
    own = [p for p in points if (p.optimizer, p.width) == (name, width)]
    each = {m: logs(own, m) for m in ("euclidean", *OPTIMIZERS[name].metrics)}
    return {m: geometric_mean(pairs) for m, pairs in each.items() if pairs}


def contestants(
    study: Study, name: str, points: list[Point]
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What trains each run of an optimizer with a seed."""
    found: dict[str, Callable[[int], dict[str, Any]]] = {
        f"constant {size}": lambda seed, size=size: constant(study, name, seed, size)
        for size in CONSTANT
    }
    for metric, factor in factors(name, study.width, points).items():
        found[f"{factor:.3g} x {metric}"] = lambda seed, metric=metric, factor=factor: controlled(
            study, name, seed, metric, factor
        )
    return found


def tables(study: Study, names: list[str], points: list[Point]) -> dict[str, Rows]:
    """Means over the seeds, and each run."""
    rows, each = [], []
    for name in names:
        runs: dict[str, list[dict[str, Any]]] = {}
        for label, train in contestants(study, name, points).items():
            for seed in SEEDS:
                path = f"controlled-{name}-{study.width}-{label.replace(' ', '-')}-{seed}.json"
                done = cached(study.folder / path, lambda train=train, seed=seed: train(seed))
                runs.setdefault(label, []).append(done)
                each.append({"optimizer": name, "batch size": label, "seed": seed, **row(done)})
                print(each[-1], flush=True)
        rows += summary(name, runs)
    title = f"Controlled runs, width {study.width}, {TOKENS:,} tokens"
    return {f"{title}: means over seeds ± standard deviation": rows, f"{title}: each": each}


def row(done: dict[str, Any]) -> dict[str, Any]:
    return {"loss": f"{done['losses'][-1][-1]:.4f}", "steps": done["steps"], "grown": done["grown"]}


def summary(name: str, runs: dict[str, list[dict[str, Any]]]) -> Rows:
    """Each contestant's loss and steps at equal tokens, each difference between runs of one seed:
    to the smallest batch, and to a constant batch of as many steps. Then the share of the smallest
    batch's tokens and steps after which its final loss is reached.
    """
    finals = {label: [d["losses"][-1][-1] for d in done] for label, done in runs.items()}
    base = finals[f"constant {BATCH}"]
    constants = [label for label in runs if label.startswith("constant")]
    rows = []
    for label, done in runs.items():
        front = []
        for i, each in enumerate(done):
            at = [(runs[c][i]["steps"], finals[c][i]) for c in constants]
            front.append(finals[label][i] - interpolated(at, each["steps"]))
        least = [reached(d["losses"], b + TOLERANCE) for d, b in zip(done, base)]
        steps = statistics.fmean(d["steps"] for d in done)
        rows.append(
            {
                "optimizer": name,
                "batch size": label,
                "loss": spread(finals[label], ".4f"),
                f"loss - {BATCH}'s": spread([x - b for x, b in zip(finals[label], base)], "+.4f"),
                "steps": spread([d["steps"] for d in done], ",.0f"),
                "steps saved": f"{1 - steps / STEPS:.0%}",
                "loss - constant of as many steps": spread(front, "+.4f"),
                "tokens to equal loss": share([tokens / TOKENS for tokens, _ in least]),
                "steps to equal loss": share([steps / STEPS for _, steps in least]),
            }
        )
    return rows


def interpolated(at: list[tuple[float, float]], steps: float) -> float:
    """The loss after ``steps`` between those of constant batches, linear in the logarithm."""
    for (x, left), (y, right) in pairwise(sorted(at)):
        if x <= steps <= y:
            return left + (right - left) * math.log(steps / x) / math.log(y / x)
    raise ValueError(f"{steps} steps are not between those of the constant batches, {sorted(at)}")


def spread(values: list[float], digits: str) -> str:
    """Mean ± standard deviation over the seeds."""
    return f"{statistics.fmean(values):{digits}} ± {statistics.stdev(values):{digits.strip('+')}}"


def share(values: list[float]) -> str:
    """The mean, least and largest over the seeds; how many did not get there."""
    if missing := sum(map(math.isinf, values)):
        return f"not reached by {missing} of {len(values)}"
    return f"{statistics.fmean(values):.0%} ({min(values):.0%} to {max(values):.0%})"
