# SPDX-License-Identifier: Apache-2.0
"""The noise scale with Lightning: add the callback.

pip install lightning
python examples/lightning_module.py --steps 100 --out lightning-run
"""

import argparse
from pydoc_data.topics import topics
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

from gnsfast.integrations.lightning import GNSMonitor

CONTEXT = 16


class NextByte(pl.LightningModule):
    """Predicts a byte from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(256, 32),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * CONTEXT, 128),
            torch.nn.GELU(),
            torch.nn.Linear(128, 256),
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.layers(batch[:, :-1]), batch[:, -1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="lightning-run")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))  # Python's language reference
    loader = torch.utils.data.DataLoader(
        text.unfold(0, CONTEXT + 1, 1),  # a view: nothing is copied
        batch_size=64,
        sampler=torch.utils.data.RandomSampler(range(len(text) - CONTEXT)),
    )
    monitor = GNSMonitor()
    trainer = pl.Trainer(
        callbacks=[monitor],
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=pl.loggers.CSVLogger(options.out),
        enable_checkpointing=False,
    )
    trainer.fit(NextByte(), loader)
    print(monitor.compute())


if __name__ == "__main__":
    main()
