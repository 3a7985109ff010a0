# SPDX-License-Identifier: Apache-2.0
"""From each update to a noise scale: ``GradientNoiseScale``, by probes and gradients, and without
probes ``TwoBatchNoiseScale``.
"""

from gnsfast.estimator.estimator import GradientNoiseScale
from gnsfast.estimator.fitting import fitting_metrics, optimizer_for
from gnsfast.estimator.largest import LargestSample
from gnsfast.estimator.two_batches import TwoBatchNoiseScale

__all__ = [
    "GradientNoiseScale",
    "LargestSample",
    "TwoBatchNoiseScale",
    "fitting_metrics",
    "optimizer_for",
]
