# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over the layers of torch and transformers, and the replay of any other."""

from gnsfast.layers.attention_sinks import SinkAttention, owns_sinks
from gnsfast.layers.conv import Conv1d, Conv2d
from gnsfast.layers.drop_in import Probed, SampleLayout, Tie, combine
from gnsfast.layers.embedding import Embedding
from gnsfast.layers.experts import Experts, experts_reason, rows_in_order
from gnsfast.layers.linear import Linear, TransposedLinear
from gnsfast.layers.multihead_attention import MultiheadAttention
from gnsfast.layers.norms import (
    GemmaRMSNorm,
    LayerNorm,
    LlamaRMSNorm,
    OlmoRMSNorm,
    RMSNorm,
    T5RMSNorm,
)
from gnsfast.layers.replay import Looped
from gnsfast.layers.router import Router, owns_router

__all__ = [
    "Conv1d",
    "Conv2d",
    "Embedding",
    "Experts",
    "GemmaRMSNorm",
    "LayerNorm",
    "Linear",
    "LlamaRMSNorm",
    "Looped",
    "MultiheadAttention",
    "OlmoRMSNorm",
    "Probed",
    "RMSNorm",
    "Router",
    "SampleLayout",
    "SinkAttention",
    "T5RMSNorm",
    "Tie",
    "TransposedLinear",
    "combine",
    "experts_reason",
    "owns_router",
    "owns_sinks",
    "rows_in_order",
]
