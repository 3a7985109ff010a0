# SPDX-License-Identifier: Apache-2.0
"""Laws of batch sizes: those published, one fitted to measurements, and what a batch size costs.

The published laws disagree by large factors and do not all predict the same quantity. Use their
range.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gnsfast.arguments import check_positive, whole_number
from gnsfast.counts import short_count
from gnsfast.critical_batch import exports as exports
from gnsfast.critical_batch.json_lines import JsonLines as JsonLines
from gnsfast.critical_batch.json_lines import read_records as read_records
from gnsfast.critical_batch.schedule import SAME_COMPUTE as SAME_COMPUTE
from gnsfast.critical_batch.schedule import BatchSizeSchedule as BatchSizeSchedule
from gnsfast.critical_batch.schedule import Saved as Saved
from gnsfast.critical_batch.schedule import aligned_changes as aligned_changes
from gnsfast.critical_batch.schedule import headline as headline
from gnsfast.interval import Interval as Interval

CRITICAL = "critical batch size (b/a)"
"""b/a of S(B) = a + b/B. This batch size takes twice the fewest steps and twice the fewest tokens
to a loss."""

CRITICAL_20 = "critical batch size (20 % rule)"
"""Zhang et al.'s: 20 % more steps than if steps fell as 1/B from the optimal batch size on."""

OPTIMAL = "optimal batch size"
"""The batch size with the lowest loss for given parameters and tokens."""

TOKENS, PARAMS, FLOPS, LOSS = "tokens", "parameters", "FLOPs", "loss"


@dataclass(frozen=True)
class Law:
    """batch size in tokens = ``prefactor`` · (``argument`` / ``unit``) ** ``exponent``.

    ``quantity`` is what it predicts: ``CRITICAL``, ``CRITICAL_20`` or ``OPTIMAL``. ``fitted`` is
    the fitted range of the argument, None where the paper does not say.
    """

    name: str
    quantity: str
    argument: str
    prefactor: float
    exponent: float
    unit: float
    fitted: tuple[float, float] | None
    source: str
    formula: str
    note: str = ""

    def batch_tokens(self, value: float) -> float:
        """The batch size in tokens at ``value`` of the argument.

        >>> from gnsfast.critical_batch.laws import ZHANG_TOKENS
        >>> f"{ZHANG_TOKENS.batch_tokens(20e9):.3g}"
        '1.23e+06'
        """
        check_positive(**{self.argument: value})
        return float(self.prefactor * (value / self.unit) ** self.exponent)

    def extrapolated(self, value: float) -> float | None:
        """The factor by which ``value`` is beyond the fitted range: 1 within it, None if unknown.

        >>> from gnsfast.critical_batch.laws import ZHANG_TOKENS
        >>> f"{ZHANG_TOKENS.extrapolated(500e9):.0f}"
        '21'
        """
        if self.fitted is None:
            return None
        return max(1.0, value / self.fitted[1], self.fitted[0] / value)


ZHANG = "Zhang et al. 2025 (arXiv 2410.21676), C4, Adam, samples of 512 tokens, 85M to 1.2B"

ZHANG_TOKENS = Law(
    name="Zhang, tokens",
    quantity=CRITICAL_20,
    argument=TOKENS,
    prefactor=22.91 * 512,
    exponent=0.47,
    unit=1e6,
    fitted=(1.7e9, 24e9),
    source=ZHANG,
    formula="22.91 D^0.47 samples of 512, D in millions",
)

ZHANG_PARAMS = replace(
    ZHANG_TOKENS,
    name="Zhang, parameters",
    argument=PARAMS,
    prefactor=93.20 * 512,
    fitted=(85e6, 1.2e9),
    formula="93.20 N^0.47 samples of 512, N in millions",
    note="at 20 tokens a parameter",
)

ZHANG_FIXED_DATA = replace(
    ZHANG_PARAMS,
    name="Zhang, parameters at fixed data",
    prefactor=621.34 * 512,
    exponent=0.087,
    formula="621.34 N^0.087 samples of 512, N in millions",
    note="for 3B tokens, the data of a 151M model: parameters alone matter little",
)

STEP_LAW = Law(
    name="Step Law",
    quantity=OPTIMAL,
    argument=TOKENS,
    prefactor=0.58,
    exponent=0.571,
    unit=1.0,
    fitted=(2e9, 100e9),
    source="Li et al. 2025 (arXiv 2503.04715), 60M to 1B parameters, AdamW",
    formula="0.58 D^0.571 tokens",
)

DEEPSEEK = Law(
    name="DeepSeek",
    quantity=OPTIMAL,
    argument=FLOPS,
    prefactor=0.2920,
    exponent=0.3271,
    unit=1.0,
    fitted=(1e17, 2e19),
    source="DeepSeek LLM 2024 (arXiv 2401.02954), section 3.1, AdamW",
    formula="0.292 C^0.327 tokens",
    note="C without embeddings, with attention; 6 N D leaves attention out",
)

KAPLAN = Law(
    name="Kaplan",
    quantity=CRITICAL,
    argument=LOSS,
    prefactor=2.1e8,
    exponent=-1 / 0.21,
    unit=1.0,
    fitted=None,
    source="Kaplan et al. 2020 (arXiv 2001.08361), section 5.1, WebText2, Adam",
    formula="2.1e8 / L^(1/0.21) tokens",
    note="L in nats a token, of their tokenizer and data",
)

MINICPM = Law(
    name="MiniCPM",
    quantity=OPTIMAL,
    argument=LOSS,
    prefactor=1.21e9,
    exponent=-6.24,
    unit=1.0,
    fitted=None,
    source="Hu et al. 2024 (arXiv 2404.06395), section 3.2, C4, 9M to 170M parameters, cosine",
    formula="1.21e9 / L^6.24 tokens",
    note="L in nats a token, of their tokenizer, on C4; the fewest tokens to that loss",
)

LING_EXPERTS = Law(
    name="Ling, experts",
    quantity=OPTIMAL,
    argument=FLOPS,
    prefactor=0.0694,
    exponent=0.3644,
    unit=1.0,
    fitted=(3e17, 3e20),
    source="Tian et al. 2025 (arXiv 2507.17702), eq. 3: mixtures of experts, 4 of 64 and a shared "
    "one, AdamW, warmup-stable-decay",
    formula="0.0694 C^0.3644 tokens",
    note="C of the parameters that a token uses, without embeddings",
)

LAWS = (ZHANG_TOKENS, ZHANG_PARAMS, STEP_LAW, DEEPSEEK, KAPLAN, MINICPM)
"""The laws that ``predictions`` uses for a dense model."""

POWER_LINES = "Bergsma et al. 2025 (arXiv 2505.13738), exponent; prefactor by your measurement"


def power_lines_optimal(tokens: float, batch_tokens: float) -> Law:
    """Power Lines' B_opt ∝ D^0.383 through one optimal batch size that you measured.

    The published prefactor holds for the authors' data and models only. So your own measurement
    sets it: after ``tokens`` the optimal batch size was ``batch_tokens``.

    >>> from gnsfast.critical_batch.laws import power_lines_optimal
    >>> f"{power_lines_optimal(10e9, 500e3).batch_tokens(80e9):.3g}"
    '1.11e+06'
    """
    return _through("Power Lines, optimal", OPTIMAL, 0.383, tokens, batch_tokens, "D")


def power_lines_critical(tokens: float, batch_tokens: float) -> Law:
    """Power Lines' B_crit ∝ D_min^0.462 through one critical batch size that you measured.

    ``tokens`` is D_min, which a small batch needs to the same loss: D = D_min (1 + B / B_crit).

    >>> from gnsfast.critical_batch.laws import power_lines_critical
    >>> f"{power_lines_critical(10e9, 2e6).batch_tokens(80e9):.3g}"
    '5.23e+06'
    """
    return _through("Power Lines, critical", CRITICAL, 0.462, tokens, batch_tokens, "D_min")


def _through(
    name: str, quantity: str, exponent: float, tokens: float, batch_tokens: float, symbol: str
) -> Law:
    check_positive(tokens=tokens, batch_tokens=batch_tokens)
    formula = f"{short_count(batch_tokens)} ({symbol} / {short_count(tokens)})^{exponent} tokens"
    fitted = (tokens, tokens)
    return Law(name, quantity, TOKENS, batch_tokens, exponent, tokens, fitted, POWER_LINES, formula)


def power_lines_timescale(tokens: float, params: float) -> float:
    """AdamW's best timescale τ = B / (η λ D) = 1.084 (D / N)^-0.527, as a share of the run.

    With batch size B and D in tokens it gives the weight decay λ = B / (η τ D).

    Source: Bergsma et al. 2025 (arXiv 2505.13738).

    >>> from gnsfast.critical_batch.laws import power_lines_timescale
    >>> f"{power_lines_timescale(20e9, 1e9):.3f}"
    '0.224'
    """
    check_positive(tokens=tokens, params=params)
    return float(1.084 * (tokens / params) ** -0.527)


def chinchilla_tokens(params: float) -> float:
    """The compute-optimal number of tokens for a model: D = 20 N.

    Source: Hoffmann et al. 2022 (arXiv 2203.15556).

    >>> from gnsfast.critical_batch.laws import chinchilla_tokens
    >>> chinchilla_tokens(70e9)
    1400000000000.0
    """
    return 20.0 * params


@dataclass(frozen=True)
class Prediction:
    """The batch size in tokens that ``law`` gives at ``value`` of its argument."""

    law: Law
    value: float
    batch_tokens: float
    extrapolated: float | None


def predictions(
    tokens: float,
    *,
    params: float | None = None,
    loss: float | None = None,
    experts: bool = False,
    more: Iterable[Law] = (),
) -> list[Prediction]:
    """The prediction of every law whose argument is given; C is taken as 6 N D.

    Zhang et al.'s law in parameters holds at 20 tokens per parameter; it is left out below 10 and
    above 40.

    Args:
        tokens: D, the tokens of the run.
        params: N, the parameters without embeddings.
        loss: the loss at the point of interest, in nats per token.
        experts: the model is a mixture of experts, and ``params`` counts what one token uses.
            Ling's law then takes the place of DeepSeek's, which holds for dense models.
        more: further laws, such as those through your own measurements.

    >>> from gnsfast.critical_batch.laws import predictions
    >>> for p in predictions(20e9, params=1e9):
    ...     print(f"{p.law.name}: {p.batch_tokens:.3g} tokens, the {p.law.quantity}")
    Zhang, tokens: 1.23e+06 tokens, the critical batch size (20 % rule)
    Zhang, parameters: 1.23e+06 tokens, the critical batch size (20 % rule)
    Step Law: 4.42e+05 tokens, the optimal batch size
    DeepSeek: 1.08e+06 tokens, the optimal batch size
    """
    known = {TOKENS: tokens, PARAMS: params, LOSS: loss}
    known[FLOPS] = 6 * params * tokens if params is not None else None
    found = []
    own = (LING_EXPERTS if experts and law is DEEPSEEK else law for law in LAWS)
    for law in (*own, *more):
        value = known[law.argument]
        if law is ZHANG_PARAMS and params is not None and not 10 <= tokens / params <= 40:
            continue
        if value is not None:
            found.append(Prediction(law, value, law.batch_tokens(value), law.extrapolated(value)))
    return found


def ranges(found: Iterable[Prediction]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest predicted batch size in tokens, for each quantity.

    >>> from gnsfast.critical_batch.laws import predictions, ranges
    >>> low, high = ranges(predictions(20e9, params=1e9))["optimal batch size"]
    >>> f"{low:.3g} to {high:.3g}"
    '4.42e+05 to 1.08e+06'
    """
    spans: dict[str, tuple[float, float]] = {}
    for p in found:
        low, high = spans.get(p.law.quantity, (p.batch_tokens, p.batch_tokens))
        spans[p.law.quantity] = (min(low, p.batch_tokens), max(high, p.batch_tokens))
    return spans


def student_t(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t for a whole number of degrees of freedom, in float64.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4: the finite series of the distribution in
    θ = arctan(t / √ν), solved by bisection.

    >>> from gnsfast.critical_batch.laws import student_t
    >>> f"{student_t(0.95, 1):.3f} {student_t(0.95, 10):.3f}"
    '12.706 2.228'
    """
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(theta: float, freedom: int) -> float:
    """P(|T| < t) with θ = arctan(t / √ν)."""
    odd = freedom % 2
    sine, cosine = math.sin(theta), math.cos(theta)
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * cosine * cosine
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


@dataclass(frozen=True)
class PowerLaw:
    """y = ``prefactor`` · x ** ``exponent``, fitted to ``points`` measurements.

    ``residual`` is the standard deviation of ln y about the line; ``least`` and ``largest`` are the
    smallest and largest measured x.
    """

    exponent: Interval
    prefactor: Interval
    points: int
    confidence: float
    residual: float
    least: float
    largest: float
    _mean: float
    _square: float

    def predict(self, x: float) -> Interval:
        """y at ``x``, with an interval for a new measurement there.

        The interval includes the scatter of one measurement and the errors of both coefficients,
        but not that the law may not hold outside ``least`` to ``largest``.
        """
        check_positive(x=x)
        value = math.log(self.prefactor.value) + self.exponent.value * math.log(x)
        distance = (math.log(x) - self._mean) ** 2 / self._square
        spread = self.residual * math.sqrt(1 + 1 / self.points + distance)
        return _exp(value, student_t(self.confidence, self.points - 2) * spread)

    def mean_until(self, x: float) -> Interval:
        """The mean of y over all values from 0 to ``x``, with an interval as that of ``predict``.

        With the exponent b the mean is ``prefactor`` · x ** b / (1 + b). To first order in the
        errors of both coefficients, that is a multiple of y at x · exp(-1 / (1 + b)).

        Raises:
            ValueError: for an exponent of -1 or less, which has no mean from 0.
        """
        b = self.exponent.value
        if b <= -1:
            raise ValueError(
                f"the fitted power law has the exponent {b:.3g}, and its mean over a run is finite "
                "only for an exponent above -1"
            )
        there = self.predict(x * math.exp(-1 / (1 + b)))
        share = math.exp(b / (1 + b)) / (1 + b)
        return there.times(share)

    def extrapolated(self, x: float) -> float:
        """The factor by which ``x`` is beyond the measured range; 1 within it."""
        return max(1.0, x / self.largest, self.least / x)

    def __str__(self) -> str:
        e, p = self.exponent, self.prefactor
        return (
            f"{p.value:.4g} · x^{e.value:.3f} ({self.confidence:.0%}: exponent {e.lower:.3f} to "
            f"{e.upper:.3f}, prefactor {p.lower:.3g} to {p.upper:.3g}), {self.points} points"
        ).replace("%", " %")


def fit_power_law(x: Sequence[float], y: Sequence[float], *, confidence: float = 0.95) -> PowerLaw:
    """Fit y = a · x ** b by least squares of ln y on ln x.

    The intervals use Student's t with n - 2 degrees of freedom, for errors of y that are
    independent, relative and of one size. Three points leave one degree of freedom, so that the
    intervals are wide.

    Raises:
        ValueError: for fewer than three points, different lengths, a value that is not positive and
            finite (the message names it), and x that are all equal.

    Source: Draper & Smith, Applied Regression Analysis, 3rd edition (1998), chapters 1 and 3.

    >>> from gnsfast.critical_batch import fit_power_law
    >>> law = fit_power_law([1e9, 4e9, 16e9, 64e9], [105, 195, 410, 790])
    >>> print(law)
    0.003978 · x^0.490 (95 %: exponent 0.441 to 0.540, prefactor 0.00127 to 0.0124), 4 points
    >>> f"{law.predict(128e9).value:.0f}"
    '1111'
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must be of one length, not {len(x)} and {len(y)}")
    if len(x) < 3:
        raise ValueError(f"a power law needs at least 3 measurements, not {len(x)}")
    for name, values in (("x", x), ("y", y)):
        wrong = [v for v in values if not 0 < v < math.inf]
        if wrong:
            raise ValueError(f"{name} holds {wrong[0]}: a power law needs positive, finite values")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    if max(x) == min(x):
        raise ValueError(f"every x is {x[0]}: the exponent needs measurements at different x")
    log_x, log_y = ([math.log(v) for v in values] for values in (x, y))
    points, mean = len(x), statistics.fmean(log_x)
    square = math.fsum((u - mean) ** 2 for u in log_x)
    b, origin = statistics.linear_regression(log_x, log_y)
    rest = math.fsum((v - origin - b * u) ** 2 for u, v in zip(log_x, log_y))
    residual = math.sqrt(rest / (points - 2))
    error = student_t(confidence, points - 2) * residual
    of_exponent = error / math.sqrt(square)
    return PowerLaw(
        Interval(b, b - of_exponent, b + of_exponent),
        _exp(origin, error * math.sqrt(1 / points + mean**2 / square)),
        points,
        confidence,
        residual,
        least=min(x),
        largest=max(x),
        _mean=mean,
        _square=square,
    )


def _exp(value: float, half: float) -> Interval:
    """exp(value ± half), infinite where float64 overflows."""
    values = (value, value - half, value + half)
    return Interval(*(math.exp(v) if v < 709 else math.inf for v in values))


# Steps against tokens. To one loss, S steps of B samples see E = S B samples. With the critical
# batch size B_crit = b/a of S(B) = a + b/B they obey (S / S_min - 1)(E / E_min - 1) = 1, that is
# S = S_min (1 + B_crit / B) and E = E_min (1 + B / B_crit): McCandlish et al. 2018
# (arXiv 1812.06162), section 2. B_crit drifts while a model trains, and warmup-stable-decay
# schedules bend the curve (arXiv 2601.05034), so these costs are a guide between measured points.


def steps_share(batch_size: float, critical: float) -> float:
    """S / S_min = 1 + B_crit / B.

    >>> from gnsfast.critical_batch.laws import steps_share, tokens_share
    >>> steps_share(256, 1024), tokens_share(256, 1024)
    (5.0, 1.25)
    """
    check_positive(batch_size=batch_size, critical=critical)
    return 1 + critical / batch_size


def tokens_share(batch_size: float, critical: float) -> float:
    """E / E_min = 1 + B / B_crit."""
    check_positive(batch_size=batch_size, critical=critical)
    return 1 + batch_size / critical


def twenty_percent(critical: float, optimal: float) -> float:
    """Zhang et al.'s critical batch size from b/a: B* = 0.2 B_crit + 1.2 B_opt.

    If steps fell as 1/B from B_opt on, there would be (a + b/B_opt) B_opt / B of them. At B* there
    are 20 % more: a + b/B* = 1.2 (a + b/B_opt) B_opt / B*.

    Source: Zhang et al. 2025 (arXiv 2410.21676): B* = b/(5a) + 1.2 B_opt, with B_opt = 256 samples
    of 512 tokens.

    >>> from gnsfast.critical_batch.laws import from_twenty_percent, twenty_percent
    >>> twenty_percent(4096, 256), from_twenty_percent(1126.4, 256)
    (1126.4, 4096.0)
    """
    check_positive(critical=critical, optimal=optimal)
    return 0.2 * critical + 1.2 * optimal


def from_twenty_percent(twenty: float, optimal: float) -> float:
    """b/a from Zhang et al.'s critical batch size: B_crit = 5 (B* - 1.2 B_opt).

    Raises:
        ValueError: for a B* of at most 1.2 B_opt, which no b/a gives.
    """
    check_positive(twenty=twenty, optimal=optimal)
    if twenty <= 1.2 * optimal:
        raise ValueError(
            f"the critical batch size by the 20 % rule is {twenty:g}, but must be above 1.2 B_opt "
            f"= {1.2 * optimal:g}"
        )
    return 5 * (twenty - 1.2 * optimal)


@dataclass(frozen=True)
class Cost:
    """The cost of training with ``batch_size`` samples to the planned loss.

    The interval of B_crit gives each value its own. ``days``, ``gpus`` and ``gpu_hours`` are None
    without a throughput, and ``money`` without a price.
    """

    batch_size: int
    steps: Interval
    tokens: Interval
    gpus: float | None = None
    days: Interval | None = None
    gpu_hours: Interval | None = None
    money: Interval | None = None


def trade_off(
    critical: Interval,
    batch_sizes: Sequence[int],
    *,
    tokens: float,
    tokens_per_sample: int,
    batch_size: int | None = None,
    gpus: int | None = None,
    tokens_per_second: float | None = None,
    gpu_hour_price: float | None = None,
) -> list[Cost]:
    """The cost of reaching the planned loss with each of ``batch_sizes``.

    The samples per GPU stay constant: a batch twice as large runs on twice the GPUs, each as fast
    as before.

    Args:
        critical: B_crit (b/a) in samples, with its interval; ``upper`` may be infinite.
        tokens: the tokens that the plan trains with ``batch_size`` samples. Without ``batch_size``,
            they are E_min, the tokens that a very small batch needs to reach the loss.
        gpus: the number of GPUs that train a batch of ``batch_size``.
        tokens_per_second: the measured throughput of one GPU.
        gpu_hour_price: the price of one GPU for an hour, in any currency.

    Raises:
        ValueError: for a number that is not positive, a throughput without ``gpus`` and
            ``batch_size``, or a price without a throughput.

    >>> from gnsfast.critical_batch.laws import Interval
    >>> from gnsfast.critical_batch import trade_off
    >>> [cost] = trade_off(
    ...     Interval(4096, 2048, 8192), [4096], tokens=20e9, tokens_per_sample=2048, batch_size=1024
    ... )
    >>> f"{cost.tokens.value:.3g} tokens, {cost.tokens.lower:.3g} to {cost.tokens.upper:.3g}"
    '3.2e+10 tokens, 2.67e+10 to 4e+10'
    """
    whole_number("tokens_per_sample", tokens_per_sample)
    check_positive(tokens=tokens, lower=critical.lower, critical=critical.value)
    if not critical.lower <= critical.value <= critical.upper:
        raise ValueError(
            f"the critical batch size {critical.value:g} is outside of its interval, "
            f"{critical.lower:g} to {critical.upper:g}"
        )
    timed = {"gpus": gpus, "tokens_per_second": tokens_per_second, "batch_size": batch_size}
    if gpus is not None or tokens_per_second is not None:
        missing = [name for name, value in timed.items() if value is None]
        if missing:
            raise ValueError(f"days and GPU-hours also need {' and '.join(missing)}")
    elif gpu_hour_price is not None:
        raise ValueError("gpu_hour_price also needs gpus and tokens_per_second")
    given = {**timed, "gpu_hour_price": gpu_hour_price}
    check_positive(**{name: value for name, value in given.items() if value is not None})
    costs = []
    for b in batch_sizes:
        whole_number("a batch size", b)
        values = [tokens * _ratio(b, batch_size, c) for c in critical]
        seen = Interval(values[0], min(values), max(values))
        steps = seen.times(1 / (b * tokens_per_sample))
        if gpus is None or tokens_per_second is None or batch_size is None:
            costs.append(Cost(b, steps, seen))
            continue
        used = gpus * b / batch_size
        hours = seen.times(1 / tokens_per_second / 3600)
        money = None if gpu_hour_price is None else hours.times(gpu_hour_price)
        costs.append(Cost(b, steps, seen, used, hours.times(1 / used / 24), hours, money))
    return costs


def _ratio(b: float, planned: float | None, critical: float) -> float:
    """Tokens at ``b`` divided by those at the planned batch size, or by E_min without one."""
    if math.isinf(critical):
        return 1.0
    return tokens_share(b, critical) / (tokens_share(planned, critical) if planned else 1.0)
