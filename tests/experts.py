# SPDX-License-Identifier: Apache-2.0
"""Blocks of experts of transformers for tests, small and with unequal routing."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral_code
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

H, F = 16, 12
EXPERTS = 4
EAGER = {"experts_implementation": "eager"}


def config(cls: Any, K: int, **options: Any) -> Any:
    names = "num_experts" if cls is hf.Qwen3MoeConfig else "num_local_experts"
    width = "moe_intermediate_size" if cls is hf.Qwen3MoeConfig else "intermediate_size"
    sizes = {"hidden_size": H, width: F, names: EXPERTS, "num_experts_per_tok": K}
    return cls(**sizes, **{**EAGER, **options})


BLOCKS: dict[str, Any] = {
    "mixtral": lambda K, **o: mixtral_code.MixtralSparseMoeBlock(config(hf.MixtralConfig, K, **o)),
    "qwen3_moe": lambda K, **o: qwen3_moe.Qwen3MoeSparseMoeBlock(config(hf.Qwen3MoeConfig, K, **o)),
    "gpt_oss": lambda K, **o: gpt_oss.GptOssMLP(config(hf.GptOssConfig, K, **o)),
}
ROUTER = {"mixtral": "gate", "qwen3_moe": "gate", "gpt_oss": "router"}


def make(name: str, K: int, **options: Any) -> nn.Module:
    """Expert 3 gets no token, and expert 2 none of a sample whose second feature is large."""
    block: nn.Module = BLOCKS[name](K, **options)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(0.3 * torch.randn_like(p))
        router = block.get_submodule(ROUTER[name])
        router.weight[3, 0] = -20.0
        router.weight[2, :2] = torch.tensor([0.0, -20.0])
    return block


class OfRows(nn.Module):
    """Experts by themselves; the index and the weights of every row are given."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.experts(*(t.flatten(0, 1) for t in (x, index, weights)))
        return y.view_as(x)


def loss_of_rows(model: nn.Module, batch: Any) -> Tensor:
    *given, r = batch
    return (model(*given) * r).sum()
