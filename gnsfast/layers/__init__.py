# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over the layers of torch and transformers, and the replay of any other."""

from gnsfast.layers.attention_sinks import SinkAttention, owns_sinks
from gnsfast.layers.begun import Begun, begin_again, begun
from gnsfast.layers.bilinear import Bilinear
from gnsfast.layers.channel_norms import (
    BATCH_NORM,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    OwnGroupNorm,
    SyncBatchNorm,
    batch_statistics_error,
    uses_batch_statistics,
)
from gnsfast.layers.computed import is_parametrized_class, moves_in_a_call, rebased, weight_hooks
from gnsfast.layers.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from gnsfast.layers.copied import Copied, in_place
from gnsfast.layers.document_masks import ATTEND_TO_EACH_OTHER
from gnsfast.layers.drop_in import (
    Converted,
    DropIn,
    Opened,
    SampleLayout,
    Setting,
    combine,
    is_around,
    user_class,
)
from gnsfast.layers.embedding import Embedding, OwnEmbedding
from gnsfast.layers.embedding_bag import EmbeddingBag
from gnsfast.layers.experts import Experts, experts_reason, rows_in_order
from gnsfast.layers.float8 import Float8Linear, is_float8, without_casts
from gnsfast.layers.linear import CastLinear, Linear, OutProjection, TransposedLinear, in_parts
from gnsfast.layers.multihead_attention import ATTENTION, MultiheadAttention
from gnsfast.layers.norms import (
    EPS,
    ChannelsFirstFloat32LayerNorm,
    ChannelsFirstLayerNorm,
    Float32LayerNorm,
    Float32RMSNorm,
    GemmaRMSNorm,
    LayerNorm,
    LlamaRMSNorm,
    NarrowRMSNorm,
    OlmoRMSNorm,
    OwnLayerNorm,
    PlainRMSNorm,
    QwenRMSNorm,
    RMSNorm,
    T5RMSNorm,
    TorchRMSNorm,
    UnitRMSNorm,
    eps_of,
)
from gnsfast.layers.own_forward import OwnForward
from gnsfast.layers.replay import Replayed, is_plain, replay_dim
from gnsfast.layers.router import Router, owns_router
from gnsfast.layers.tie import Tie

__all__ = [
    "ATTENTION",
    "ATTEND_TO_EACH_OTHER",
    "BATCH_NORM",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Begun",
    "Bilinear",
    "CastLinear",
    "ChannelsFirstFloat32LayerNorm",
    "ChannelsFirstLayerNorm",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Converted",
    "Copied",
    "DropIn",
    "Embedding",
    "EPS",
    "EmbeddingBag",
    "Experts",
    "Float32LayerNorm",
    "Float32RMSNorm",
    "Float8Linear",
    "GemmaRMSNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Linear",
    "LlamaRMSNorm",
    "MultiheadAttention",
    "NarrowRMSNorm",
    "OlmoRMSNorm",
    "Opened",
    "OutProjection",
    "OwnEmbedding",
    "OwnForward",
    "OwnGroupNorm",
    "OwnLayerNorm",
    "PlainRMSNorm",
    "QwenRMSNorm",
    "RMSNorm",
    "Replayed",
    "Router",
    "SampleLayout",
    "Setting",
    "SinkAttention",
    "SyncBatchNorm",
    "T5RMSNorm",
    "Tie",
    "TorchRMSNorm",
    "TransposedLinear",
    "UnitRMSNorm",
    "batch_statistics_error",
    "begin_again",
    "begun",
    "combine",
    "eps_of",
    "experts_reason",
    "in_parts",
    "in_place",
    "is_around",
    "is_float8",
    "is_parametrized_class",
    "is_plain",
    "moves_in_a_call",
    "owns_router",
    "owns_sinks",
    "rebased",
    "replay_dim",
    "rows_in_order",
    "user_class",
    "uses_batch_statistics",
    "weight_hooks",
    "without_casts",
]
