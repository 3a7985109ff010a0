# SPDX-License-Identifier: Apache-2.0
"""Training steps so narrow that only the host's work and the launches count."""

from benchmarks.models import GPT


class NarrowGPT2(GPT):
    """The layers of GPT-2: 12 blocks, the head tied to the embedding."""

    B, T, vocabulary = 4, 16, 512

    def __init__(self) -> None:
        super().__init__(width=32, heads=2, layers=12)
        self.head.weight = self.tokens.weight
