# SPDX-License-Identifier: Apache-2.0
"""One update after the other: from probes and gradients to a noise scale."""

from gnsfast.estimator.estimator import GradientNoiseScale

__all__ = [
    "GradientNoiseScale",
]
