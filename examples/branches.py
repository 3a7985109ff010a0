# SPDX-License-Identifier: Apache-2.0
"""The critical batch size of a run, measured by branches. Needs torch and nothing else.

python examples/branches.py --out one
gnsfast branch examples/branches.py:make_run --checkpoint one/checkpoint --tokens 400000 --out two
"""

import argparse
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F

from gnsfast.critical_batch.branches import TorchRun, measure_critical_batch

CONTEXT = 64


class Bigrams(torch.nn.Module):
    """Predicts each byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 64)
        self.hidden, self.head = torch.nn.Linear(64, 128), torch.nn.Linear(128, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.gelu(self.hidden(self.embed(ids))))
        return logits


class Windows:
    """Windows of a text at random, by a generator whose state is the data position."""

    def __init__(self, text: torch.Tensor, seed: int) -> None:
        self.text, self.generator = text, torch.Generator().manual_seed(seed)

    def draw(self, n: int) -> torch.Tensor:
        starts = torch.randint(len(self.text) - CONTEXT, (n, 1), generator=self.generator)
        return self.text[starts + torch.arange(CONTEXT)]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_run() -> TorchRun:
    """The run before its first step, on Python's language reference."""
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    train, held_out = text[: len(text) // 10 * 9], text[len(text) // 10 * 9 :]
    model = Bigrams()
    samples = Windows(held_out, seed=1).draw(256)
    return TorchRun(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss_of,
        Windows(train, seed=0),
        batch_size=16,
        tokens_per_sample=CONTEXT - 1,
        evaluate=lambda model: loss_of(model, samples).item(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="before the checkpoint")
    parser.add_argument("--tokens", type=int, default=200_000, help="of each branch")
    parser.add_argument("--loss", default="evaluate", choices=["train", "evaluate"])
    parser.add_argument("--out", default="branches")
    options = parser.parse_args()

    run = make_run()
    for _ in range(options.steps):
        run.step()
    result = measure_critical_batch(
        run, folder=options.out, delta_tokens=options.tokens, loss=options.loss
    )
    print(result)
    if result.resolved and not result.doubts:
        result.factor("adam").save(f"{options.out}/factor.json")


if __name__ == "__main__":
    main()
