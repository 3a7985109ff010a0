# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over the layers of torch and transformers, and the replay of any other."""

from gnsfast.layers.attention_sinks import SinkAttention, owns_sinks
from gnsfast.layers.conv import Conv1d, Conv2d
from gnsfast.layers.drop_in import Converted, DropIn, Opened, SampleLayout, combine, user_class
from gnsfast.layers.embedding import Embedding
from gnsfast.layers.experts import Experts, experts_reason, rows_in_order
from gnsfast.layers.linear import Linear, OutProjection, TransposedLinear
from gnsfast.layers.multihead_attention import ATTENTION, MultiheadAttention
from gnsfast.layers.norms import (
    GemmaRMSNorm,
    LayerNorm,
    LlamaRMSNorm,
    OlmoRMSNorm,
    RMSNorm,
    T5RMSNorm,
)
from gnsfast.layers.replay import Replayed, is_plain, replay_dim
from gnsfast.layers.router import Router, owns_router
from gnsfast.layers.tie import Tie

__all__ = [
    "ATTENTION",
    "Conv1d",
    "Conv2d",
    "Converted",
    "DropIn",
    "Embedding",
    "Experts",
    "GemmaRMSNorm",
    "LayerNorm",
    "Linear",
    "LlamaRMSNorm",
    "MultiheadAttention",
    "OlmoRMSNorm",
    "Opened",
    "OutProjection",
    "RMSNorm",
    "Replayed",
    "Router",
    "SampleLayout",
    "SinkAttention",
    "T5RMSNorm",
    "Tie",
    "TransposedLinear",
    "combine",
    "experts_reason",
    "is_plain",
    "owns_router",
    "owns_sinks",
    "replay_dim",
    "rows_in_order",
    "user_class",
]
