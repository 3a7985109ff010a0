# SPDX-License-Identifier: Apache-2.0
"""Small heads, and the loss that torch makes of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.functional import _cross_entropy

B, T, D, V = 3, 6, 5, 300
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of the 300 words, the last one ragged; one sample at a time for the links."""
    monkeypatch.setattr(_cross_entropy, "CHUNK", 0)
    monkeypatch.setattr(_cross_entropy, "LEAST", 128)


def draw(*rows: int) -> Batch:
    """Inputs of that many rows, and labels of which a fifth is ignored."""
    labels = torch.randint(0, V, rows)
    return torch.randn(*rows, D), labels.masked_fill(torch.rand(rows) < 0.2, -100)


def torch_loss(
    head: nn.Module,
    batch: Batch,
    *,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    batch_dim: int = 0,
    **options: Any,
) -> Tensor:
    """What torch makes of the same arguments, with all logits in memory."""
    z, labels = head(batch[0]), batch[1]
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if shift:
        dim = 0 if batch_dim else -1
        ignored = torch.full_like(labels.narrow(dim, 0, 1), options.get("ignore_index", -100))
        labels = torch.cat([labels.narrow(dim, 1, labels.shape[dim] - 1), ignored], dim)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z, labels = z.flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(z, labels, reduction="none", **options)
    kept = labels != options.get("ignore_index", -100)
    loss = loss + torch.where(kept, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss.view(batch[1].shape)
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum()
