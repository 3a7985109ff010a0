# SPDX-License-Identifier: Apache-2.0
"""``GradientNoiseScale``: from the probes and gradients of each update to a noise scale."""

from gnsfast.estimator.estimator import GradientNoiseScale

__all__ = ["GradientNoiseScale"]
