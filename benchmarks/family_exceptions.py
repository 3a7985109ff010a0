# SPDX-License-Identifier: Apache-2.0
"""What single architectures need beside the table of sizes, by their class."""

from collections.abc import Callable
from typing import Any

import torch

STAGES = {"depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
"""Two stages, of which the first has windows that shift."""

SPECIAL: dict[str, dict[str, Any]] = {
    "BitForImageClassification": {"num_groups": 4},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "DonutSwinForImageClassification": STAGES,
    "EfficientNetForImageClassification": {"hidden_dim": 2560, "depth_coefficient": 1.0},
    "EsmForMaskedLM": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 2},
    "FunnelForMaskedLM": {"block_sizes": (1, 1, 1)},
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "LevitForImageClassification": {"image_size": 64, "patch_size": 16},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MobileViTV2ForImageClassification": {"image_size": 64},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NystromformerForMaskedLM": {"num_landmarks": 4, "segment_means_seq_len": 8},
    "PerceiverForMaskedLM": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "max_position_embeddings": 7,
    },
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerForMaskedLM": {
        "attn_layers": ("local", "lsh"),
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "SwinForImageClassification": STAGES,
    "Swinv2ForImageClassification": STAGES,
    "Wav2Vec2BertForCTC": {"vocab_size": 32},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
    "XmodForMaskedLM": {"default_language": "en_XX"},
}
"""Settings of their configurations."""

TRAINING = {"ReformerForMaskedLM"}
"""Those that compute gradients in training mode alone; their dropout is off."""


def features(T: int, width: int) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"input_features": torch.randn(3, T, width)}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ASTForAudioClassification": lambda c: {
        "input_values": torch.randn(3, c.max_length, c.num_mel_bins)
    },
    "DiaForConditionalGeneration": lambda c: {
        "decoder_input_ids": torch.randint(16, 48, (3, 5, c.decoder_config.num_channels))
    },
    "MoonshineForConditionalGeneration": lambda c: {"input_values": torch.randn(3, 3000)},
    "NystromformerForMaskedLM": lambda c: {"input_ids": torch.randint(16, 48, (3, 8))},
    "PerceiverForMaskedLM": lambda c: {"inputs": torch.randint(16, 48, (3, 7))},
    "ReformerForMaskedLM": lambda c: {"input_ids": torch.randint(16, 48, (3, 64))},
    "SeamlessM4TForSpeechToText": features(40, 32),
    "SeamlessM4Tv2ForSpeechToText": features(40, 32),
    "Wav2Vec2BertForCTC": features(40, 32),
    "WhisperForConditionalGeneration": lambda c: {
        "input_features": torch.randn(3, 16, 2 * c.max_source_positions)
    },
}
"""Inputs, by their configurations."""
