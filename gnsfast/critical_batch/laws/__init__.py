# SPDX-License-Identifier: Apache-2.0
"""Published and fitted laws of batch sizes, schedules, and what a batch size costs."""

from gnsfast.critical_batch.laws import exports
from gnsfast.critical_batch.laws.aligned import aligned_changes
from gnsfast.critical_batch.laws.costs import (
    Cost,
    from_twenty_percent,
    steps_share,
    tokens_share,
    trade_off,
    twenty_percent,
)
from gnsfast.critical_batch.laws.json_lines import JsonLines, read_records
from gnsfast.critical_batch.laws.power_law import PowerLaw, fit_power_law, student_t
from gnsfast.critical_batch.laws.published import (
    CRITICAL,
    CRITICAL_20,
    DEEPSEEK,
    KAPLAN,
    LAWS,
    LING_EXPERTS,
    MINICPM,
    OPTIMAL,
    STEP_LAW,
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
from gnsfast.critical_batch.laws.schedule import SAME_COMPUTE, BatchSizeSchedule, Saved, headline
from gnsfast.interval import Interval

__all__ = [
    "BatchSizeSchedule",
    "CRITICAL",
    "CRITICAL_20",
    "Cost",
    "DEEPSEEK",
    "Interval",
    "JsonLines",
    "KAPLAN",
    "LAWS",
    "LING_EXPERTS",
    "Law",
    "MINICPM",
    "OPTIMAL",
    "PowerLaw",
    "Prediction",
    "SAME_COMPUTE",
    "STEP_LAW",
    "Saved",
    "ZHANG_FIXED_DATA",
    "ZHANG_PARAMS",
    "ZHANG_TOKENS",
    "aligned_changes",
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
