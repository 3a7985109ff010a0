# SPDX-License-Identifier: Apache-2.0
"""``gnsfast plan``: what published laws and the user's measurements say about a batch size, and its
costs."""

import math
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import whole_number
from gnsfast.cli.measurements import Measurements, read_measurements
from gnsfast.cli.options import Point, Positive, Span, Whole
from gnsfast.critical_batch import laws
from gnsfast.critical_batch.laws import Cost, fit_power_law, from_twenty_percent, trade_off
from gnsfast.interval import Interval

DOUBLINGS = range(-3, 4)
ZHANG_OPTIMAL = 256 * 512
"""Tokens of B_opt in Zhang et al.'s rule (``laws.twenty_percent``)."""
LEAST_POINTS = 3
"""The fewest measurements from which a fit has an interval."""
CONTEXT = 4096
"""Tokens in a sample where neither ``--context`` nor a measurement says it."""
SHARES = 0.1, 2.0
"""One measurement stands for the whole run if it was taken between these shares of the run. The
critical batch size grows about as the root of the tokens, so such a measurement is within a factor
of 2.2 of the run's mean."""


@dataclass(frozen=True)
class Options:
    """Batch sizes are in samples.

    Args:
        tokens: Tokens of the run: 20B, 1.5e9.
        params: Parameters of the model. Without --tokens, 20 tokens for each.
        context: Tokens in a sample (as --measured says, or 4096).
        batch: Planned batch size, in samples.
        b_crit: Critical batch size in samples, VALUE[:LOWER:UPPER]: b/a of steps = a + b/batch.
        b_twenty_percent: The same by Zhang's 20 % rule, instead of --b-crit.
        loss: Loss in nats per token, for the laws that use it.
        gpus: GPUs that train the planned batch.
        tokens_per_second: Tokens per second that you measured on one GPU.
        gpu_hour_price: Price of one GPU for an hour, in any currency.
        gpu_watts: Power that one GPU draws, for the energy.
        measured: Critical batch sizes that you measured: a CSV file with the columns
            tokens,value,tokens_per_sample, a JSONL file, or a run folder.
        whole_runs: Each value in --measured is that of a whole run.
        optimal_at: Optimal batch size that you measured, TOKENS:SAMPLES, for Power Lines.
        critical_at: Critical batch size that you measured, TOKENS:SAMPLES, for Power Lines.
        experts: The model is a mixture of experts, and --params counts what one token uses.
    """

    tokens: Positive | None = None
    params: Positive | None = None
    context: Whole | None = None
    batch: Whole | None = None
    b_crit: Span | None = None
    b_twenty_percent: Span | None = None
    loss: Positive | None = None
    gpus: Whole | None = None
    tokens_per_second: Positive | None = None
    gpu_hour_price: Positive | None = None
    gpu_watts: Positive | None = None
    measured: str | None = None
    whole_runs: bool = False
    optimal_at: Point | None = None
    critical_at: Point | None = None
    experts: bool = False


def examine(options: Options) -> dict[str, Any]:
    """Everything that ``show`` prints and ``--json`` writes; batch sizes are in samples."""
    params, tokens, batch = options.params, options.tokens, options.batch
    if tokens is None:
        if params is None:
            raise ValueError(
                "plan needs --tokens, or --params, from which it assumes 20 tokens per parameter"
            )
        tokens = laws.chinchilla_tokens(params)
    if options.experts and params is None:
        raise ValueError("--experts says what --params counts: pass --params too")
    if options.whole_runs and options.measured is None:
        raise ValueError("--whole-runs describes the values in --measured: pass --measured too")
    own = None if options.measured is None else read_measurements(options.measured)
    context = _context(options, own)
    more = [
        through(at[0], at[1] * context)
        for at, through in (
            (options.optimal_at, laws.power_lines_optimal),
            (options.critical_at, laws.power_lines_critical),
        )
        if at is not None
    ]
    found = laws.predictions(
        tokens, params=params, loss=options.loss, experts=options.experts, more=more
    )
    measured = None if own is None else _fitted(options, own, tokens)
    return {
        "kind": "plan",
        "tokens": tokens,
        "params": params,
        "chinchilla": options.tokens is None,
        "context": context,
        "batch": batch,
        "laws": [_law(p, context, batch) for p in found],
        "ranges": {
            quantity: {"tokens": span, "samples": [t / context for t in span]}
            for quantity, span in laws.ranges(found).items()
        },
        "measured": measured,
        "trade_off": _trade_off(options, tokens, context, measured),
    }


def _law(p: laws.Prediction, context: int, batch: int | None) -> dict[str, Any]:
    said = "quantity", "argument", "fitted", "formula", "source", "note"
    return {
        "law": p.law.name,
        **{name: getattr(p.law, name) for name in said},
        "at": p.value,
        "extrapolated": p.extrapolated,
        "tokens": p.batch_tokens,
        "samples": p.batch_tokens / context,
        "planned_over_it": None if batch is None else batch * context / p.batch_tokens,
    }


def _context(options: Options, measured: Measurements | None) -> int:
    """The tokens in a sample. ``--context`` and the measurements must agree on it."""
    given = options.context
    if measured is None:
        return given or CONTEXT
    if measured.tokens_per_sample is None:
        if given is None:
            raise ValueError(
                f"{options.measured} does not say how many tokens its samples have: pass "
                "--context, or add a column tokens_per_sample"
            )
        return given
    own = whole_number("tokens_per_sample", measured.tokens_per_sample)
    if given is not None and given != own:
        raise ValueError(
            f"--context is {given}, but the samples of {options.measured} have {own} tokens: drop "
            "--context"
        )
    return own


def _fitted(options: Options, own: Measurements, tokens: float) -> dict[str, Any]:
    """The power law through the user's measurements, and its value at ``tokens``. With fewer than
    ``LEAST_POINTS`` measurements, the one that is nearest in tokens.

    ``whole_run`` is the critical batch size of a run of ``tokens``, or None where the measurements
    do not say it. For measurements within a run it is the mean of the law over the run.
    """
    points, whole = own.points, options.whole_runs
    found: dict[str, Any] = {"path": options.measured, "points": len(points)}
    found |= {"left_out": own.left_out, "doubtful": own.doubtful, "of_whole_runs": whole}
    if len(points) < LEAST_POINTS:
        near = min(points, key=lambda p: abs(math.log(max(p.tokens, 1) / tokens)))
        stands = SHARES[0] <= near.tokens / tokens <= SHARES[1]
        found |= {"samples": near.critical, "whole_run": near.critical if stands else None}
        return found | {"at": near.tokens, "said": None}
    try:
        law = fit_power_law([p.tokens for p in points], [p.critical.value for p in points])
        of_run = law.predict(tokens) if whole else law.mean_until(tokens)
    except ValueError as error:
        raise ValueError(f"{options.measured}: {error}") from None
    return found | {
        "whole_run": of_run,
        "at": tokens,
        "exponent": law.exponent,
        "prefactor": law.prefactor,
        "said": str(law),
        "samples": law.predict(tokens),
        "range": [law.least, law.largest],
        "extrapolated": law.extrapolated(tokens),
    }


def _critical(
    options: Options, tokens: float, context: int, measured: dict[str, Any] | None
) -> tuple[Interval, str] | None:
    """The critical batch size that costs follow from, and who says it; None where nobody does."""
    if options.b_crit is not None and options.b_twenty_percent is not None:
        raise ValueError(
            "--b-crit and --b-twenty-percent both state the critical batch size: pass one of them"
        )
    if options.b_crit is not None:
        return options.b_crit, "--b-crit"
    if (stated := options.b_twenty_percent) is not None:
        optimal = ZHANG_OPTIMAL / context
        return Interval(*(from_twenty_percent(e, optimal) for e in stated)), "--b-twenty-percent"
    if measured is not None and measured["whole_run"] is not None:
        return measured["whole_run"], "your measurements"
    timed = options.gpus, options.tokens_per_second, options.gpu_hour_price, options.gpu_watts
    if any(each is not None for each in timed):
        remedy = "pass --b-crit or --measured"
        if measured is not None:
            share = measured["at"] / tokens
            remedy = (
                f"pass --b-crit. The one that you measured after {share:.2g} of the run's "
                "tokens does not hold for the whole run"
            )
        raise ValueError(f"costs need a critical batch size: {remedy}")
    return None


def _trade_off(
    options: Options, tokens: float, context: int, measured: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The costs of batch sizes around the planned one, or around B_crit if none is planned."""
    stated = _critical(options, tokens, context, measured)
    if stated is None:
        return None
    (critical, origin), batch, gpus = stated, options.batch, options.gpus
    speed, price, watts = options.tokens_per_second, options.gpu_hour_price, options.gpu_watts
    needed = {"--gpus": gpus, "--tokens-per-second": speed, "--batch": batch}
    missing = [name for name, value in needed.items() if value is None]
    if missing and (gpus or speed or price or watts):
        raise ValueError(f"times, prices and energy also need {', '.join(missing)}")
    costs = trade_off(
        critical,
        _batch_sizes(batch, critical, gpus),
        tokens=tokens,
        tokens_per_sample=context,
        batch_size=batch,
        gpus=gpus,
        tokens_per_second=speed,
        gpu_hour_price=price,
    )
    return {
        "b_crit": critical,
        "from": origin,
        "waste": None if batch is None else _waste(critical, batch, costs, watts),
        "costs": [vars(cost) for cost in costs],
    }


def _waste(
    critical: Interval, batch: int, costs: list[Cost], watts: float | None
) -> dict[str, Any]:
    """The tokens that the planned batch trains beyond those that a small batch needs. They are
    E - E_min, which is the share B / (B + B_crit) of E.
    """
    [cost] = [each for each in costs if each.batch_size == batch]
    value, most, least = (batch / (batch + c) for c in critical)
    share = Interval(value, least, most)

    def part(of: Interval | None, factor: float = 1.0) -> Interval | None:
        return None if of is None else Interval(*(s * of.value * factor for s in share))

    return {
        "share": share,
        "tokens": part(cost.tokens),
        "gpu_hours": part(cost.gpu_hours),
        "money": part(cost.money),
        "kwh": None if watts is None else part(cost.gpu_hours, watts / 1000),
    }


def _batch_sizes(batch: int | None, critical: Interval, gpus: int | None) -> list[int]:
    """Doublings around ``batch``, or else around B_crit, that need whole samples and whole GPUs."""
    middle = batch or 2 ** max(0, round(math.log2(critical.value)))
    sizes = [middle * 2**k if k >= 0 else middle / 2**-k for k in DOUBLINGS]
    whole_gpus = [b for b in sizes if not gpus or not batch or gpus * b % batch == 0]
    return [int(b) for b in whole_gpus if b == int(b)]
