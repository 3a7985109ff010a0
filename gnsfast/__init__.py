# SPDX-License-Identifier: Apache-2.0
"""Measures per-sample gradient norms and the gradient noise scale inside the backward pass."""

from gnsfast import functional
from gnsfast.configure import configure
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.estimator import GradientNoiseScale, LargestSample
from gnsfast.functional import cu_seqlens
from gnsfast.layers import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Bilinear,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    EmbeddingBag,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    Linear,
    MultiheadAttention,
    RMSNorm,
    SyncBatchNorm,
)
from gnsfast.noise_scale import (
    AdamNoiseScale,
    ClusterNoiseScale,
    Flag,
    GroupNoiseScale,
    ModuleNoiseScale,
    NoiseScale,
    brute_force_noise_scale,
    flag,
)
from gnsfast.probing import SampleNorms, Verification, VerifiedParameter, per_sample_sqnorms, verify
from gnsfast.table import Coverage, CoverageRow, Table, coverage, learn

__version__ = "0.1.0"

__all__ = [
    "AdamNoiseScale",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Bilinear",
    "ClusterNoiseScale",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Coverage",
    "CoverageRow",
    "Embedding",
    "EmbeddingBag",
    "Flag",
    "GradientNoiseScale",
    "GroupNoiseScale",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LargestSample",
    "LayerNorm",
    "Linear",
    "ModuleNoiseScale",
    "MultiheadAttention",
    "NoiseScale",
    "ObservationError",
    "RMSNorm",
    "SampleNorms",
    "SampleShapeError",
    "SyncBatchNorm",
    "Table",
    "Verification",
    "VerifiedParameter",
    "__version__",
    "brute_force_noise_scale",
    "configure",
    "coverage",
    "cu_seqlens",
    "flag",
    "functional",
    "learn",
    "per_sample_sqnorms",
    "verify",
]
