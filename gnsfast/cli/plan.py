# SPDX-License-Identifier: Apache-2.0
"""``gnsfast plan``: what published laws and the user's measurements say about a batch size, and its
costs."""

import math
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import finite_or_none, whole_number
from gnsfast.cli.measurements import Measurements, read_measurements
from gnsfast.counts import parse_count, parse_number
from gnsfast.critical_batch import laws
from gnsfast.critical_batch.laws import (
    Cost,
    Interval,
    PowerLaw,
    fit_power_law,
    from_twenty_percent,
    trade_off,
)

DOUBLINGS = range(-3, 4)
ZHANG_OPTIMAL = 256 * 512
"""Tokens of B_opt in Zhang et al.'s rule (``laws.costs.twenty_percent``)."""
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
    """The options as the user wrote them."""

    tokens: str | None
    params: str | None
    context: str | None
    batch: str | None
    b_crit: str | None
    b_twenty_percent: str | None
    loss: str | None
    gpus: str | None
    tokens_per_second: str | None
    gpu_hour_price: str | None
    gpu_watts: str | None
    measured: str | None
    whole_runs: bool
    optimal_at: str | None
    critical_at: str | None
    experts: bool = False


def examine(options: Options) -> dict[str, Any]:
    """Everything that ``show`` prints and ``--json`` writes; batch sizes are in samples."""
    params = _optional(options.params, "--params")
    tokens = _optional(options.tokens, "--tokens")
    chinchilla = tokens is None and params is not None
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
    batch = None
    if options.batch is not None:
        batch = whole_number("--batch", parse_count(options.batch, "--batch"))
    more = []
    for text, name, through in (
        (options.optimal_at, "--optimal-at", laws.power_lines_optimal),
        (options.critical_at, "--critical-at", laws.power_lines_critical),
    ):
        if text is not None:
            more.append(through(*_point(text, name, context)))
    loss = _optional(options.loss, "--loss")
    found = laws.predictions(tokens, params=params, loss=loss, experts=options.experts, more=more)
    measured = None if own is None else _fitted(options, own, tokens)
    return {
        "kind": "plan",
        "tokens": tokens,
        "params": params,
        "chinchilla": chinchilla,
        "context": context,
        "batch": batch,
        "laws": [_law(p, context, batch) for p in found],
        "ranges": {
            quantity: {"tokens": list(span), "samples": [t / context for t in span]}
            for quantity, span in laws.ranges(found).items()
        },
        "measured": measured,
        "trade_off": _trade_off(options, tokens, context, batch, measured),
    }


def _law(p: laws.Prediction, context: int, batch: int | None) -> dict[str, Any]:
    law = p.law
    return {
        "law": law.name,
        "quantity": law.quantity,
        "tokens": p.batch_tokens,
        "samples": p.batch_tokens / context,
        "planned_over_it": None if batch is None else batch * context / p.batch_tokens,
        "argument": law.argument,
        "at": p.value,
        "fitted": law.fitted,
        "extrapolated": p.extrapolated,
        "formula": law.formula,
        "source": law.source,
        "note": law.note,
    }


def _context(options: Options, measured: Measurements | None) -> int:
    """The tokens in a sample. ``--context`` and the measurements must agree on it."""
    given = None
    if options.context is not None:
        given = whole_number("--context", parse_count(options.context, "--context"))
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
        found["samples"] = _finite(Interval(near.value, near.lower, near.upper))
        stands = SHARES[0] <= near.tokens / tokens <= SHARES[1]
        found["whole_run"] = found["samples"] if stands else None
        return found | {"at": near.tokens, "said": None}
    try:
        law: PowerLaw = fit_power_law([p.tokens for p in points], [p.value for p in points])
        of_run = law.predict(tokens) if whole else law.mean_until(tokens)
    except ValueError as error:
        raise ValueError(f"{options.measured}: {error}") from None
    return found | {
        "whole_run": _finite(of_run),
        "at": tokens,
        "exponent": _finite(law.exponent),
        "prefactor": _finite(law.prefactor),
        "said": str(law),
        "samples": _finite(law.predict(tokens)),
        "range": [law.least, law.largest],
        "extrapolated": law.extrapolated(tokens),
    }


def _trade_off(
    options: Options,
    tokens: float,
    context: int,
    batch: int | None,
    measured: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """The costs of batch sizes around the planned one, or around B_crit if none is planned."""
    if options.b_crit is not None and options.b_twenty_percent is not None:
        raise ValueError(
            "--b-crit and --b-twenty-percent both state the critical batch size: pass one of them"
        )
    if options.b_crit is not None:
        critical, origin = _interval(options.b_crit, "--b-crit"), "--b-crit"
    elif options.b_twenty_percent is not None:
        origin = "--b-twenty-percent"
        found, optimal = _interval(options.b_twenty_percent, origin), ZHANG_OPTIMAL / context
        critical = Interval(*(from_twenty_percent(each, optimal) for each in found))
    elif measured is not None and (span := measured["whole_run"]) is not None:
        upper = math.inf if span["upper"] is None else span["upper"]
        critical, origin = Interval(span["value"], span["lower"], upper), "your measurements"
    else:
        timed = options.gpus, options.tokens_per_second, options.gpu_hour_price, options.gpu_watts
        if any(text is not None for text in timed):
            remedy = "pass --b-crit or --measured"
            if measured is not None:
                share = measured["at"] / tokens
                remedy = (
                    f"pass --b-crit. The one that you measured after {share:.2g} of the run's "
                    "tokens does not hold for the whole run"
                )
            raise ValueError(f"costs need a critical batch size: {remedy}")
        return None
    gpus = None
    if options.gpus is not None:
        gpus = whole_number("--gpus", parse_count(options.gpus, "--gpus"))
    speed = _optional(options.tokens_per_second, "--tokens-per-second")
    price = _optional(options.gpu_hour_price, "--gpu-hour-price")
    watts = _optional(options.gpu_watts, "--gpu-watts")
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
        "b_crit": _finite(critical),
        "from": origin,
        "waste": _waste(critical, batch, costs, watts),
        "costs": [
            {name: _finite(v) if isinstance(v, Interval) else v for name, v in vars(c).items()}
            for c in costs
        ],
    }


def _waste(
    critical: Interval, batch: int | None, costs: list[Cost], watts: float | None
) -> dict[str, Any] | None:
    """The tokens that the planned batch trains beyond those that a small batch needs. They are
    E - E_min, which is the share B / (B + B_crit) of E.
    """
    if batch is None:
        return None
    [cost] = [each for each in costs if each.batch_size == batch]
    share = Interval(
        *(batch / (batch + c) for c in (critical.value, critical.upper, critical.lower))
    )

    def part(of: Interval | None, factor: float = 1.0) -> dict[str, float | None] | None:
        return None if of is None else _finite(Interval(*(s * of.value * factor for s in share)))

    return {
        "share": _finite(share),
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


def _interval(text: str, name: str) -> Interval:
    """From "4096" or "4096:2048:8192", the value and its interval."""
    parts = [_positive(part, name) for part in text.split(":")]
    if len(parts) not in (1, 3):
        raise ValueError(f"{name} is {text!r}, but must be VALUE or VALUE:LOWER:UPPER")
    return Interval(*parts) if len(parts) == 3 else Interval(*parts * 3)


def _point(text: str, name: str, context: int) -> tuple[float, float]:
    """From "3B:512", tokens and samples, the tokens and the batch size in tokens."""
    tokens, colon, samples = text.partition(":")
    if not colon:
        raise ValueError(f"{name} is {text!r}, but must be TOKENS:SAMPLES, such as 3B:512")
    return _positive(tokens, name), _positive(samples, name) * context


def _optional(text: str | None, name: str) -> float | None:
    return None if text is None else _positive(text, name)


def _positive(text: str, name: str) -> float:
    value = float(parse_number(text, name))
    if value == 0:
        raise ValueError(f"{name} is 0, but must be positive")
    return value


def _finite(interval: Interval) -> dict[str, float | None]:
    """The interval for JSON, which has no number for infinity."""
    return {k: finite_or_none(v) for k, v in interval._asdict().items()}
