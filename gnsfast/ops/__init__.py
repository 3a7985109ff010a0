# SPDX-License-Identifier: Apache-2.0
"""Each operator's signature, and which implementation a device runs."""

from gnsfast.ops import backends, dtensor, extension
from gnsfast.ops.operators import (
    attention_backward,
    attention_forward,
    conv_wgrad,
    embedding_wgrad,
    embedding_wgrad_metric,
    embedding_wgrad_segments,
    in_projection_wgrad,
    layer_norm_backward,
    linear_wgrad,
    linear_wgrad_metric,
    linear_wgrad_segments,
    linear_wgrad_tied,
    norm_backward_metric,
    rms_norm_backward,
    segment_sums,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "backends",
    "conv_wgrad",
    "dtensor",
    "embedding_wgrad",
    "embedding_wgrad_metric",
    "embedding_wgrad_segments",
    "extension",
    "in_projection_wgrad",
    "layer_norm_backward",
    "linear_wgrad",
    "linear_wgrad_metric",
    "linear_wgrad_segments",
    "linear_wgrad_tied",
    "norm_backward_metric",
    "rms_norm_backward",
    "segment_sums",
]
