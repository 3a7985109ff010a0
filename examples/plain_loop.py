# SPDX-License-Identifier: Apache-2.0
"""The noise scale in a loop of your own, as JSON lines. Needs torch and nothing else.

python examples/plain_loop.py --steps 200 --out run.jsonl
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

import gnsfast
from gnsfast.integrations.trackers import JSONLTracker, metrics

CONTEXT, MICROBATCH, ACCUMULATED, LOG_EVERY = 64, 16, 2, 10


class Bigrams(torch.nn.Module):
    """Predicts each byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 64)
        self.hidden, self.head = torch.nn.Linear(64, 128), torch.nn.Linear(128, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.gelu(self.hidden(self.embed(ids))))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="run.jsonl")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))  # Python's language reference
    model = Bigrams()
    gns = gnsfast.GradientNoiseScale(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tracker = JSONLTracker(options.out)

    for step in range(1, options.steps + 1):
        with gns.update():
            for _ in range(ACCUMULATED):
                starts = torch.randint(len(text) - CONTEXT, (MICROBATCH, 1))
                batch = text[starts + torch.arange(CONTEXT)]
                with gns.microbatch(MICROBATCH, scale=1 / ACCUMULATED):
                    logits = model(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                    (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0 or step == options.steps:  # compute() waits for the device
            per_step = ACCUMULATED * MICROBATCH * (CONTEXT - 1)
            found = metrics(gns.compute(), tokens=step * per_step, batch_tokens=per_step)
            tracker.log({"loss": loss.item(), **found}, step)
    tracker.close()
    print(gns.compute())


if __name__ == "__main__":
    main()
