# SPDX-License-Identifier: Apache-2.0
"""What published and fitted laws say of a batch size, and what it costs."""

from gnsfast.critical_batch.laws import exports
from gnsfast.critical_batch.laws.costs import (
    Cost,
    from_twenty_percent,
    steps_share,
    tokens_share,
    trade_off,
    twenty_percent,
)
from gnsfast.critical_batch.laws.power_law import Interval, PowerLaw, fit_power_law, student_t
from gnsfast.critical_batch.laws.published import (
    CRITICAL,
    DEEPSEEK,
    KAPLAN,
    LAWS,
    OPTIMAL,
    POWER_LINES,
    STEP_LAW,
    ZHANG,
    ZHANG_FIXED_DATA,
    ZHANG_PARAMS,
    ZHANG_TOKENS,
    Law,
    Prediction,
    chinchilla_tokens,
    power_lines_critical,
    power_lines_optimal,
    power_lines_timescale,
    predictions,
    ranges,
)
from gnsfast.critical_batch.laws.run_records import read_records
from gnsfast.critical_batch.laws.schedule import SAME_COMPUTE, BatchSizeSchedule, Saved, headline

__all__ = [
    "BatchSizeSchedule",
    "CRITICAL",
    "Cost",
    "DEEPSEEK",
    "Interval",
    "KAPLAN",
    "LAWS",
    "Law",
    "OPTIMAL",
    "POWER_LINES",
    "PowerLaw",
    "Prediction",
    "SAME_COMPUTE",
    "STEP_LAW",
    "Saved",
    "ZHANG",
    "ZHANG_FIXED_DATA",
    "ZHANG_PARAMS",
    "ZHANG_TOKENS",
    "chinchilla_tokens",
    "exports",
    "fit_power_law",
    "from_twenty_percent",
    "headline",
    "power_lines_critical",
    "power_lines_optimal",
    "power_lines_timescale",
    "predictions",
    "ranges",
    "read_records",
    "steps_share",
    "student_t",
    "tokens_share",
    "trade_off",
    "twenty_percent",
]
