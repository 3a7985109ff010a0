# SPDX-License-Identifier: Apache-2.0
"""Random models of transformers, as small as their configurations allow, with a batch each."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

B, T, V = 3, 7, 23
Batch = dict[str, Tensor]


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def text() -> Batch:
    return {"input_ids": tokens(B, T), "labels": tokens(B, T)}


SMALL: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
ENCODER: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
)


def gpt2() -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(config), text()


def llama() -> tuple[nn.Module, Batch]:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), text()


def qwen3() -> tuple[nn.Module, Batch]:
    config = hf.Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=True)
    return hf.Qwen3ForCausalLM(config), text()


def gemma() -> tuple[nn.Module, Batch]:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, head_dim=4)), text()


def olmo2() -> tuple[nn.Module, Batch]:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL, pad_token_id=0)), text()


EXPERTS: dict[str, Any] = dict(
    num_experts_per_tok=2,
    pad_token_id=0,
    experts_implementation="eager",  # grouped_mm has no float64
)


def mixtral() -> tuple[nn.Module, Batch]:
    config = hf.MixtralConfig(**{**SMALL, **EXPERTS, "num_hidden_layers": 1}, num_local_experts=4)
    return hf.MixtralForCausalLM(config), text()


def qwen3_moe() -> tuple[nn.Module, Batch]:
    """One layer with experts, one without."""
    config = hf.Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=4, num_experts=4, moe_intermediate_size=12, mlp_only_layers=[1]
    )
    return hf.Qwen3MoeForCausalLM(config), text()


def gpt_oss(**options: Any) -> tuple[nn.Module, Batch]:
    """One layer sees everything, one a window."""
    config = hf.GptOssConfig(
        **SMALL,
        **EXPERTS,
        head_dim=4,
        sliding_window=3,
        num_local_experts=3,
        eos_token_id=0,
        **{"attn_implementation": "eager", **options},
    )
    return hf.GptOssForCausalLM(config), text()


def bert() -> tuple[nn.Module, Batch]:
    config = hf.BertConfig(vocab_size=V, max_position_embeddings=32, **ENCODER)
    return hf.BertForMaskedLM(config), text()


def vit() -> tuple[nn.Module, Batch]:
    config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=5, **ENCODER)
    batch = {"pixel_values": torch.randn(B, 3, 16, 16), "labels": torch.randint(0, 5, (B,))}
    return hf.ViTForImageClassification(config), batch


def t5() -> tuple[nn.Module, Batch]:
    config = hf.T5Config(
        vocab_size=V,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), {
        "input_ids": tokens(B, T),
        "labels": tokens(B, 5),
    }


def mamba() -> tuple[nn.Module, Batch]:
    config = hf.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4)
    return hf.MambaForCausalLM(config), text()


def whisper() -> tuple[nn.Module, Batch]:
    config = hf.WhisperConfig(
        vocab_size=V,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=16,
        num_mel_bins=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": torch.randn(B, 4, 16), "labels": tokens(B, 6)}
    return hf.WhisperForConditionalGeneration(config), batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    f.__name__: f
    for f in (gpt2, llama, qwen3, gemma, olmo2, bert, vit, t5, mamba, whisper)
    + (mixtral, qwen3_moe, gpt_oss)
}

ADAPTED = {
    "gpt2": ["c_attn", "c_proj", "wte"],
    "bert": ["query", "value"],
    "vit": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
    "mamba": ["in_proj"],
}


def scattered(model: nn.Module) -> nn.Module:
    """Away from the zeros and ones of initialisation, in eval mode: no dropout."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """A sum over samples of each sample's mean loss, whatever the model's own reduction."""
    options = {} if "pixel_values" in batch else {"use_cache": False}
    loss: Tensor = model(**batch, **options).loss
    return loss * len(batch["labels"])
