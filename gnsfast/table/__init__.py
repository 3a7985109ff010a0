# SPDX-License-Identifier: Apache-2.0
"""Learns once, from a batch, where the samples are in each call, and proves the norms: a table."""

from gnsfast.table.batch_hook import BatchHook
from gnsfast.table.coverage import Coverage, CoverageRow, coverage
from gnsfast.table.learn import learn
from gnsfast.table.samples import Take
from gnsfast.table.table import PROVEN, Table

__all__ = [
    "PROVEN",
    "BatchHook",
    "Coverage",
    "CoverageRow",
    "Table",
    "Take",
    "coverage",
    "learn",
]
