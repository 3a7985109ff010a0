# SPDX-License-Identifier: Apache-2.0
"""Published laws of batch sizes. They disagree by large factors and do not all predict the same
quantity. Use their range.

``fits.py`` and ``costs.py`` have the laws that are fitted and what a batch size costs. Their names
are here too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gnsfast.arguments import check_positive
from gnsfast.counts import short_count
from gnsfast.critical_batch import exports as exports
from gnsfast.critical_batch.costs import Cost as Cost
from gnsfast.critical_batch.costs import from_twenty_percent as from_twenty_percent
from gnsfast.critical_batch.costs import steps_share as steps_share
from gnsfast.critical_batch.costs import tokens_share as tokens_share
from gnsfast.critical_batch.costs import trade_off as trade_off
from gnsfast.critical_batch.costs import twenty_percent as twenty_percent
from gnsfast.critical_batch.fits import PowerLaw as PowerLaw
from gnsfast.critical_batch.fits import fit_power_law as fit_power_law
from gnsfast.critical_batch.fits import student_t as student_t
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
