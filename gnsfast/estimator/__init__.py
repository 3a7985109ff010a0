# SPDX-License-Identifier: Apache-2.0
"""``GradientNoiseScale`` turns the probes and gradients of each update into a noise scale."""

from gnsfast.estimator.estimator import GradientNoiseScale
from gnsfast.estimator.fitting import fitting_metrics, optimizer_for

__all__ = ["GradientNoiseScale", "fitting_metrics", "optimizer_for"]
