# SPDX-License-Identifier: Apache-2.0
"""Models so narrow that only the host's work and the launches count."""

import torch
from torch import Tensor, nn

from benchmarks.models import GPT


class NarrowGPT2(GPT):
    """The layers of GPT-2: 12 blocks, the head tied to the embedding."""

    B, T, vocabulary = 4, 16, 512

    def __init__(self, layers: int = 12) -> None:
        super().__init__(width=32, heads=2, layers=layers)
        self.head.weight = self.tokens.weight


class Perceptron(nn.Sequential):
    """32-64-8, as the README's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


def labelled() -> tuple[Tensor, Tensor]:
    """A batch of the perceptron's."""
    return torch.randn(16, 32), torch.randint(0, 8, (16,))


def perceptron_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
