# SPDX-License-Identifier: Apache-2.0
"""``gnsfast plan``: what published laws and the user's measurements say about a batch size, and its
costs."""

import math
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import finite_or_none, whole_number
from gnsfast.cli.measurements import Measurements, read_measurements
from gnsfast.critical_batch import laws
from gnsfast.critical_batch.counts import parse_count, parse_number
from gnsfast.critical_batch.laws import Interval, PowerLaw, fit_power_law, trade_off

DOUBLINGS = range(-3, 4)
LEAST_POINTS = 3
"""That a fit with an interval needs."""


@dataclass(frozen=True)
class Options:
    """The options as the user wrote them."""

    tokens: str | None
    params: str | None
    context: str
    batch: str | None
    b_crit: str | None
    loss: str | None
    gpus: str | None
    tokens_per_second: str | None
    gpu_hour_price: str | None
    measured: str | None
    optimal_at: str | None
    critical_at: str | None


def examine(options: Options) -> dict[str, Any]:
    """Everything that ``show`` prints and ``--json`` writes; batch sizes are in samples."""
    params = _optional(options.params, "--params")
    tokens = _optional(options.tokens, "--tokens")
    chinchilla = tokens is None and params is not None
    if tokens is None:
        if params is None:
            raise ValueError("plan needs --tokens, or --params for 20 tokens a parameter")
        tokens = laws.chinchilla_tokens(params)
    context = whole_number("--context", parse_count(options.context, "--context"))
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
    found = laws.predictions(tokens, params=params, loss=loss, more=more)
    measured = _fitted(options.measured, tokens) if options.measured is not None else None
    return {
        "kind": "plan",
        "tokens": tokens,
        "params": params,
        "chinchilla": chinchilla,
        "context": context,
        "batch": batch,
        "laws": [_law(p, context) for p in found],
        "ranges": {
            quantity: {"tokens": list(span), "samples": [t / context for t in span]}
            for quantity, span in laws.ranges(found).items()
        },
        "measured": measured,
        "trade_off": _trade_off(options, tokens, context, batch, measured),
    }


def _law(p: laws.Prediction, context: int) -> dict[str, Any]:
    law = p.law
    return {
        "law": law.name,
        "quantity": law.quantity,
        "tokens": p.batch_tokens,
        "samples": p.batch_tokens / context,
        "argument": law.argument,
        "at": p.value,
        "fitted": law.fitted,
        "extrapolated": p.extrapolated,
        "formula": law.formula,
        "source": law.source,
        "note": law.note,
    }


def _fitted(path: str, tokens: float) -> dict[str, Any]:
    """The power law through the user's measurements, and its value at ``tokens``. With fewer than
    ``LEAST_POINTS``, the measurement that is nearest in tokens.
    """
    read: Measurements = read_measurements(path)
    points = read.points
    found: dict[str, Any] = {"path": path, "points": len(points)}
    found |= {"left_out": read.left_out, "doubtful": read.doubtful}
    if len(points) < LEAST_POINTS:
        near = min(points, key=lambda p: abs(math.log(max(p.tokens, 1) / tokens)))
        found["samples"] = _finite(Interval(near.value, near.lower, near.upper))
        return found | {"at": near.tokens, "said": None}
    try:
        law: PowerLaw = fit_power_law([p.tokens for p in points], [p.value for p in points])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found | {
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
    """What batch sizes around the planned one cost, or without one around B_crit."""
    if options.b_crit is not None:
        critical, origin = _interval(options.b_crit), "--b-crit"
    elif measured is not None:
        span = measured["samples"]
        upper = math.inf if span["upper"] is None else span["upper"]
        critical, origin = Interval(span["value"], span["lower"], upper), "your measurements"
    else:
        timed = options.gpus, options.tokens_per_second, options.gpu_hour_price
        if any(text is not None for text in timed):
            raise ValueError("costs need a critical batch size: --b-crit or --measured")
        return None
    gpus = None
    if options.gpus is not None:
        gpus = whole_number("--gpus", parse_count(options.gpus, "--gpus"))
    speed = _optional(options.tokens_per_second, "--tokens-per-second")
    price = _optional(options.gpu_hour_price, "--gpu-hour-price")
    needed = {"--gpus": gpus, "--tokens-per-second": speed, "--batch": batch}
    missing = [name for name, value in needed.items() if value is None]
    if missing and (gpus or speed or price):
        raise ValueError(f"times and prices also need {', '.join(missing)}")
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
        "costs": [
            {name: _finite(v) if isinstance(v, Interval) else v for name, v in vars(c).items()}
            for c in costs
        ],
    }


def _batch_sizes(batch: int | None, critical: Interval, gpus: int | None) -> list[int]:
    """Doublings around ``batch``, else around B_crit, of whole samples on whole GPUs."""
    middle = batch or 2 ** max(0, round(math.log2(critical.value)))
    sizes = [middle * 2**k if k >= 0 else middle / 2**-k for k in DOUBLINGS]
    whole_gpus = [b for b in sizes if not gpus or not batch or gpus * b % batch == 0]
    return [int(b) for b in whole_gpus if b == int(b)]


def _interval(text: str) -> Interval:
    """From "4096" or "4096:2048:8192", the value and its interval."""
    parts = [_positive(part, "--b-crit") for part in text.split(":")]
    if len(parts) not in (1, 3):
        raise ValueError(f"--b-crit is {text!r}, but must be VALUE or VALUE:LOWER:UPPER")
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
    """For JSON, which has no number for what is infinite."""
    return {k: finite_or_none(v) for k, v in interval._asdict().items()}
