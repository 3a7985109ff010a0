# SPDX-License-Identifier: Apache-2.0
"""Finds a route to the per-sample norms of each module, or the reason why there is none."""

from gnsfast.conversion.converter import convert
from gnsfast.conversion.coverage_table import Coverage, CoverageRow, coverage
from gnsfast.conversion.fused_losses import fused_loss_of, project_of

__all__ = [
    "Coverage",
    "CoverageRow",
    "convert",
    "coverage",
    "fused_loss_of",
    "project_of",
]
