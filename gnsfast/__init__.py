# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradient norms, and the gradient noise scale, from inside the backward pass."""

from gnsfast import functional
from gnsfast.brute_force import brute_force_noise_scale
from gnsfast.convert import convert
from gnsfast.coverage import Coverage, CoverageRow, coverage
from gnsfast.documents import cu_seqlens
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.estimator import GradientNoiseScale
from gnsfast.modules import Conv1d, Conv2d, Embedding, LayerNorm, Linear, RMSNorm
from gnsfast.multihead_attention import MultiheadAttention
from gnsfast.noise_scale import (
    AdamNoiseScale,
    GroupNoiseScale,
    ModuleNoiseScale,
    NoiseScale,
)
from gnsfast.probes import SampleNorms, per_sample_sqnorms
from gnsfast.verify import Verification, VerifiedParameter, verify

__version__ = "0.1.0.dev0"

__all__ = [
    "AdamNoiseScale",
    "Conv1d",
    "Conv2d",
    "Coverage",
    "CoverageRow",
    "Embedding",
    "GradientNoiseScale",
    "GroupNoiseScale",
    "LayerNorm",
    "Linear",
    "ModuleNoiseScale",
    "MultiheadAttention",
    "NoiseScale",
    "ObservationError",
    "RMSNorm",
    "SampleNorms",
    "SampleShapeError",
    "Verification",
    "VerifiedParameter",
    "__version__",
    "brute_force_noise_scale",
    "convert",
    "coverage",
    "cu_seqlens",
    "functional",
    "per_sample_sqnorms",
    "verify",
]
