# SPDX-License-Identifier: Apache-2.0
"""The formulas in plain PyTorch. They serve as CPU back-end, and every kernel is tested against
them. ``signatures.py`` has the arguments, results and legend of each operator.
"""

from gnsfast.reference.attention import MAX_HEAD_DIM, attention_backward, attention_forward
from gnsfast.reference.conv import conv_wgrad, unfold
from gnsfast.reference.embedding import embedding_wgrad, sample_sums
from gnsfast.reference.linear import in_projection_wgrad, linear_wgrad, linked_rows
from gnsfast.reference.linear_grams import linear_grams
from gnsfast.reference.linear_squares import linear_squares
from gnsfast.reference.metric import one_token_metric, root_metric
from gnsfast.reference.norms import norm_backward, norm_backward_aten, normed_input
from gnsfast.reference.outer import CANCELLED
from gnsfast.reference.rows import metric_sqnorm, norm, norm_rows, probe_rows, sqnorm, sum_tokens

__all__ = [
    "CANCELLED",
    "MAX_HEAD_DIM",
    "attention_backward",
    "attention_forward",
    "conv_wgrad",
    "embedding_wgrad",
    "in_projection_wgrad",
    "linear_grams",
    "linear_squares",
    "linear_wgrad",
    "linked_rows",
    "metric_sqnorm",
    "norm",
    "norm_rows",
    "norm_backward",
    "norm_backward_aten",
    "normed_input",
    "one_token_metric",
    "probe_rows",
    "root_metric",
    "sample_sums",
    "sqnorm",
    "sum_tokens",
    "unfold",
]
