# SPDX-License-Identifier: Apache-2.0
"""The formulas in plain PyTorch. They serve as CPU back-end, and every kernel is tested against
them. ``signatures.py`` has the arguments, results and legend of each operator.
"""

from gnsfast.reference.attention import MAX_HEAD_DIM, attention_backward, attention_forward
from gnsfast.reference.conv import conv_norms, conv_wgrad
from gnsfast.reference.embedding import embedding_norms, embedding_wgrad
from gnsfast.reference.linear import linear_norms, linear_wgrad, linked_rows
from gnsfast.reference.norms import norm_backward, norm_backward_aten
from gnsfast.reference.outer import CANCELLED, TILE, even_block
from gnsfast.reference.rows import norm, norm_rows, probe_rows, sqnorm, sum_tokens

__all__ = [
    "CANCELLED",
    "MAX_HEAD_DIM",
    "TILE",
    "attention_backward",
    "attention_forward",
    "conv_norms",
    "conv_wgrad",
    "embedding_norms",
    "embedding_wgrad",
    "even_block",
    "linear_norms",
    "linear_wgrad",
    "linked_rows",
    "norm",
    "norm_rows",
    "norm_backward",
    "norm_backward_aten",
    "probe_rows",
    "sqnorm",
    "sum_tokens",
]
