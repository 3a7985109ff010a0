# SPDX-License-Identifier: Apache-2.0
"""From each update to a noise scale: ``GradientNoiseScale``, by probes and gradients."""

from gnsfast.estimator.estimator import GradientNoiseScale
from gnsfast.estimator.fitting import fitting_metrics, optimizer_for
from gnsfast.estimator.largest import LargestSample

__all__ = [
    "GradientNoiseScale",
    "LargestSample",
    "fitting_metrics",
    "optimizer_for",
]
