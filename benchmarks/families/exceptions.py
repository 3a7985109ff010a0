# SPDX-License-Identifier: Apache-2.0
"""What single architectures need beside the table of sizes, by their class."""

from collections.abc import Callable
from typing import Any

import torch

STAGES = {"depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
"""Two stages, of which the first has windows that shift."""

LATENTS = {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}

SPECIAL: dict[str, dict[str, Any]] = {
    "AlignModel": {"projection_dim": 64},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": ROPE}},
    "CvtForImageClassification": {"depth": (1, 2, 3)},
    "DiaForConditionalGeneration": {"decoder_config": {"num_channels": 1}, "delay_pattern": [0]},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "ShieldGemma2ForImageClassification": {
        **{"mm_tokens_per_image": 16, "yes_token_index": 20, "no_token_index": 21}
    },
    "ZambaForCausalLM": HYBRID,
    "Zamba2ForCausalLM": HYBRID,
    "BitForImageClassification": {"num_groups": 4},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
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
    "NystromformerForMaskedLM": {
        **{"num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 5}
    },
    "PerceiverForImageClassificationLearned": {**LATENTS, "image_size": 8},
    "PerceiverForMaskedLM": {**LATENTS, "max_position_embeddings": 7},
    "Qwen4ExpForCausalLM": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2},
    },
    "ReformerForMaskedLM": {
        **{"attn_layers": ("local", "lsh"), "num_buckets": 4, "hash_seed": 0},
        **{"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 16)},
        **{f"{kind}_attn_chunk_length": 4 for kind in ("local", "lsh")},
        **{f"{kind}_attention_probs_dropout_prob": 0.0 for kind in ("local", "lsh")},
        "hidden_dropout_prob": 0.0,
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


SINGLE = {"FSMTForConditionalGeneration", "Inkling2ForCausalLM", "MraForMaskedLM"}
"""Those that cannot compute in float64: their loop over single samples is of float32."""


def features(T: int, width: int) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"input_features": torch.randn(3, T, width)}


def patches(config: Any) -> dict[str, Any]:
    side = config.vision_config.patch_size
    return {
        "pixel_values": torch.randn(3, 16, 3 * side * side),
        "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
        "spatial_shapes": torch.full((3, 2), 4),
    }


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "GraniteSpeech5ForCTC": features(40, 64),
    "KyutaiSpeechToTextForConditionalGeneration": lambda c: {
        "input_ids": torch.randint(16, 48, (3, 7, c.num_codebooks + 1))
    },
    "Pop2PianoForConditionalGeneration": features(40, 32),
    "ShieldGemma2ForImageClassification": lambda c: {
        "input_ids": torch.full((3, 17), c.image_token_index).index_fill(1, torch.tensor(16), 20)
    },
    "Siglip2ForImageClassification": patches,
    "Siglip2Model": patches,
    "SpeechEncoderDecoderModel": lambda c: {
        "input_features": None,
        "input_values": torch.randn(3, 400),
    },
    "ASTForAudioClassification": lambda c: {
        "input_values": torch.randn(3, c.max_length, c.num_mel_bins)
    },
    "DiaForConditionalGeneration": lambda c: {
        "decoder_input_ids": torch.randint(16, 48, (3, 5, c.decoder_config.num_channels))
    },
    "MoonshineForConditionalGeneration": lambda c: {"input_values": torch.randn(3, 3000)},
    "NystromformerForMaskedLM": lambda c: {"input_ids": torch.randint(16, 48, (3, 8))},
    "PerceiverForMaskedLM": lambda c: {"inputs": torch.randint(16, 48, (3, 7)), "input_ids": None},
    "ReformerForMaskedLM": lambda c: {"input_ids": torch.randint(16, 48, (3, 64))},
    "SeamlessM4TForSpeechToText": features(40, 32),
    "SeamlessM4Tv2ForSpeechToText": features(40, 32),
    "Wav2Vec2BertForCTC": features(40, 32),
    "WhisperForConditionalGeneration": lambda c: {
        "input_features": torch.randn(3, 16, 2 * c.max_source_positions)
    },
}
"""Inputs, by their configurations."""
