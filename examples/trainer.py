# SPDX-License-Identifier: Apache-2.0
"""The noise scale with transformers' Trainer: add the callback.

pip install 'transformers[torch]' tensorboard
python examples/trainer.py --steps 100 --out trainer-run
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gnsfast.integrations.transformers import GNSCallback

CONTEXT = 64


def windows() -> list[dict[str, torch.Tensor]]:
    """Python's language reference as bytes, cut into pieces."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="trainer-run")
    parser.add_argument("--report-to", default="none", help="tensorboard, wandb, ...")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    callback = GNSCallback()
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=10,
            include_num_input_tokens_seen="all",
            save_strategy="no",
            report_to=options.report_to,
        ),
        train_dataset=windows(),
        callbacks=[callback],
    )
    trainer.train()
    print(callback.compute())


if __name__ == "__main__":
    main()
