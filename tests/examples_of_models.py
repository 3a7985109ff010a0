# SPDX-License-Identifier: Apache-2.0
"""Models whose layers hold their samples in several ways, and the judge of their norms."""

from collections.abc import Callable
from typing import Any

import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, D = 4, 6, 5
Loss = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, x: Any) -> Tensor:
    """A loss that is a sum over samples."""
    y = model(**x) if isinstance(x, dict) else model(x)
    y = y if isinstance(y, Tensor) else y[0]
    return (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape).to(y.dtype)).square().sum()


def by_token(model: nn.Module, x_TBD: Tensor) -> Tensor:
    """The same for a sequence-first model."""
    return model(x_TBD).square().sum()


def assert_right(
    model: nn.Module, x: Any, loss: Loss = squares, batch_dim: int = 0, num_samples: int = B
) -> None:
    """Every trainable parameter has norms, and each is right."""
    with gnsfast.per_sample_sqnorms(model, num_samples) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, loss, x, num_samples, batch_dim=batch_dim))


def said(model: nn.Module, parameter: str) -> gnsfast.CoverageRow:
    return next(r for r in gnsfast.coverage(model).rows if r.parameter == parameter)


class NanoGPT(nn.Module):
    """nanoGPT's embeddings, with a position index that has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, D), nn.Embedding(2 * T, D)
        self.mlp, self.drop = nn.Linear(D, D), nn.Dropout(0.5)
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x = self.wte(ids_BT) + self.wpe(positions_T)
        logits: Tensor = self.head(self.ln(x + self.drop(torch.tanh(self.mlp(x)))))
        return logits


class Flattened(nn.Module):
    """OPT's way: all rows of the batch as one list."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.tokens, self.fc, self.norm = nn.Embedding(11, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.interleaved = interleaved

    def forward(self, ids_BT: Tensor) -> Tensor:
        ids = ids_BT.t() if self.interleaved else ids_BT
        x = self.norm(self.fc(self.tokens(ids.flatten())))
        x = x.unflatten(0, ids.shape)
        return x.transpose(0, 1) if self.interleaved else x


def ids() -> Tensor:
    return torch.randint(0, 11, (B, T))
