# SPDX-License-Identifier: Apache-2.0
"""Which route each module of a model has, and why the others have none."""

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
