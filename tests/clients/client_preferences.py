# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers of preferences: GNSCallback knows that two rows are one sample."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from gnsfast.integrations.transformers import GNSCallback

SAMPLES, UPDATES = 4, 12
WORDS = {str(number): number for number in range(32)}


def text(least: int, most: int) -> list[str]:
    lengths = torch.randint(3, 9, (SAMPLES * UPDATES,)).tolist()
    return ["".join(f" {w}" for w in torch.randint(least, most, (n,)).tolist()) for n in lengths]


def train(trainer_class: Any, config_class: Any, folder: Path, callback: GNSCallback) -> Any:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    rewards = trainer_class is RewardTrainer
    data: dict[str, list[Any]] = {"prompt": text(2, 32)}
    if trainer_class is KTOTrainer:
        data |= {"completion": text(2, 32), "label": [b % 2 == 0 for b in range(SAMPLES * UPDATES)]}
    else:
        data |= {"chosen": text(2, 12), "rejected": text(22, 32)}

    class Kept(trainer_class):  # type: ignore[misc]
        kept: list[Any] = []

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and model.dtype == torch.float32:
                self.kept.append({k: v.clone() for k, v in inputs.items()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    options: Any = {"train_sampling_strategy": "sequential"} if trainer_class is KTOTrainer else {}
    model = (LlamaForSequenceClassification if rewards else LlamaForCausalLM)(config)
    reference = {} if rewards else {"ref_model": LlamaForCausalLM(config)}
    trainer = Kept(
        model=model,
        args=config_class(
            str(folder),
            max_steps=UPDATES,
            per_device_train_batch_size=SAMPLES,
            learning_rate=0.0,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        callbacks=[callback],
        **reference,
    )
    trainer.train()
    return trainer


def truth(trainer: Any) -> float:
    """tr Σ / |G|² by a float64 loop over single pairs, with TRL's own loss of each."""
    model = copy.deepcopy(trainer.model).double().train()
    trace = square = 0.0
    for inputs in trainer.kept:
        grads = []
        for b in range(SAMPLES):
            one = {
                k: v[b::SAMPLES] if v.ndim and v.shape[0] in (SAMPLES, 2 * SAMPLES) else v
                for k, v in inputs.items()
            }
            loss = trainer.compute_loss(model, one)
            each = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
            grads.append(torch.cat([g.flatten() for g in each if g is not None]))
        g, B = torch.stack(grads), SAMPLES
        mean, of_mean = float(g.square().sum() / B), float(g.mean(0).square().sum())
        square += (B * of_mean - mean) / (B - 1)
        trace += (mean - of_mean) * B / (B - 1)
    return trace / square


@pytest.mark.parametrize(
    ("trainer_class", "config_class"),
    [(RewardTrainer, RewardConfig), (DPOTrainer, DPOConfig)],
    ids=["reward", "dpo"],
)
def test_pairs(trainer_class: Any, config_class: Any, tmp_path: Path) -> None:
    callback = GNSCallback(budget=None, on_error="raise", window=UPDATES)
    trainer = train(trainer_class, config_class, tmp_path, callback)
    scale = callback.compute()
    assert scale.samples == SAMPLES * UPDATES
    assert scale.noise_scale == pytest.approx(truth(trainer), rel=1e-3)


def test_unpaired_preferences(tmp_path: Path) -> None:
    """In KTO a row is a sample. All of a batch share a baseline, through which no gradient flows,
    so a loop over single samples is none of it.
    """
    callback = GNSCallback(budget=None, on_error="raise")
    train(KTOTrainer, KTOConfig, tmp_path, callback)
    assert callback.compute().samples == SAMPLES * UPDATES
