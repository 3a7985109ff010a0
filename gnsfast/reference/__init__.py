# SPDX-License-Identifier: Apache-2.0
"""The formulas in plain PyTorch: the CPU back-end, and the yardstick for every faster kernel."""

from gnsfast.reference.attention import (
    MAX_HEAD_DIM,
    Parameters,
    Pattern,
    attention_backward,
    attention_forward,
    new_token_major,
)
from gnsfast.reference.conv import conv_wgrad
from gnsfast.reference.embedding import embedding_wgrad
from gnsfast.reference.linear import (
    in_projection_wgrad,
    linear_route,
    linear_wgrad,
    linear_wgrad_tied,
)
from gnsfast.reference.metric import (
    embedding_wgrad_metric,
    linear_wgrad_metric,
    metric_sqnorm,
    norm_backward_metric,
    one_token_metric,
    root_metric,
)
from gnsfast.reference.norms import (
    affine_wgrad,
    layer_norm_backward,
    rms_norm_backward,
    rms_norm_products,
)
from gnsfast.reference.rows import probe_row, sqnorm, sqnorm_rows, sum_tokens, sum_wgrad, with_sum
from gnsfast.reference.segments import embedding_wgrad_segments, linear_wgrad_segments, segment_sums

__all__ = [
    "MAX_HEAD_DIM",
    "Parameters",
    "Pattern",
    "affine_wgrad",
    "attention_backward",
    "attention_forward",
    "conv_wgrad",
    "embedding_wgrad",
    "embedding_wgrad_metric",
    "embedding_wgrad_segments",
    "in_projection_wgrad",
    "layer_norm_backward",
    "linear_route",
    "linear_wgrad",
    "linear_wgrad_metric",
    "linear_wgrad_segments",
    "linear_wgrad_tied",
    "metric_sqnorm",
    "new_token_major",
    "norm_backward_metric",
    "one_token_metric",
    "probe_row",
    "rms_norm_backward",
    "rms_norm_products",
    "root_metric",
    "segment_sums",
    "sqnorm",
    "sqnorm_rows",
    "sum_tokens",
    "sum_wgrad",
    "with_sum",
]
