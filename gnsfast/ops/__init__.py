# SPDX-License-Identifier: Apache-2.0
"""The operators, also on DTensors, and the implementation that each device runs."""

from gnsfast.ops import backends, cpu, extension
from gnsfast.ops.by_group import Groups, by_group
from gnsfast.ops.dtensor import embedding_wgrad as sharded_embedding_wgrad
from gnsfast.ops.dtensor import linear_wgrad, norm_backward
from gnsfast.ops.norms_alone import norms_alone
from gnsfast.ops.operators import (
    attention_backward,
    attention_forward,
    conv_wgrad,
    embedding_wgrad,
)

__all__ = [
    "Groups",
    "attention_backward",
    "attention_forward",
    "backends",
    "by_group",
    "conv_wgrad",
    "cpu",
    "embedding_wgrad",
    "extension",
    "linear_wgrad",
    "norm_backward",
    "norms_alone",
    "sharded_embedding_wgrad",
]
