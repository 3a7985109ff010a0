# SPDX-License-Identifier: Apache-2.0
"""Batches of which several rows are one sample, in a Trainer."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gnsfast

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

from gnsfast.integrations.token_losses import Rows, not_of_pairs
from gnsfast.integrations.transformers import GNSCallback

pytestmark = pytest.mark.second
PAIRS, T, UPDATES = 4, 6, 12


def pair_loss(model: Any, ids: Tensor) -> Tensor:
    chosen, rejected = model(input_ids=ids).logits[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


class OfPairs(Trainer):
    """As TRL's RewardTrainer: the chosen rows of a batch, then the rejected ones."""

    seen: list[Tensor]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(inputs["input_ids"])
        return pair_loss(model, inputs["input_ids"])


def collate(rows: list[Any]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([r["c"] for r in rows] + [r["r"] for r in rows])}


def train(folder: Path, callback: GNSCallback, accumulation: int = 1) -> OfPairs:
    data = [
        {"c": torch.randint(2, 12, (T,)), "r": torch.randint(22, 32, (T,))}
        for _ in range(PAIRS * UPDATES)
    ]
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    trainer = OfPairs(
        model=LlamaForSequenceClassification(config),
        args=TrainingArguments(
            str(folder),
            max_steps=UPDATES // accumulation,
            per_device_train_batch_size=PAIRS,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.0,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=data,
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.seen = []
    trainer.train()
    return trainer


def truth(trainer: OfPairs, accumulation: int) -> float:
    """tr Σ / |G|² by a float64 loop over single pairs, from the sums over all updates."""
    model, trace, square = copy.deepcopy(trainer.model).double(), 0.0, 0.0
    B = PAIRS * accumulation
    batches = [torch.cat(b) for b in zip(*[iter(trainer.seen)] * accumulation)]
    for ids in batches:
        rows = ids.unflatten(0, (accumulation, 2, PAIRS)).transpose(0, 1).flatten(1, 2)
        grads = [
            torch.autograd.grad(pair_loss(model, rows[:, b]), [*model.parameters()])
            for b in range(B)
        ]
        g = torch.stack([torch.cat([x.flatten() for x in each]) for each in grads])
        mean, of_mean = float(g.square().sum() / B), float(g.mean(0).square().sum())
        square += (B * of_mean - mean) / (B - 1)
        trace += (mean - of_mean) * B / (B - 1)
    return trace / square


@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_pairs(tmp_path: Path, accumulation: int, gradients: str) -> None:
    options: Any = {"budget": None, "on_error": "raise", "gradients": gradients}
    callback = GNSCallback(loss="samples", rows_per_sample=2, **options)
    trainer = train(tmp_path, callback, accumulation)
    scale = callback.compute()
    assert scale.samples == PAIRS * UPDATES
    assert scale.noise_scale == pytest.approx(truth(trainer, accumulation), rel=1e-3)


def test_rows_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    words = r"has 8 rows, but Trainer's batch size is 4.*loss='samples', rows_per_sample=2\)"
    with pytest.raises(gnsfast.ObservationError, match=words):
        train(tmp_path, GNSCallback(loss="samples", on_error="raise"))


def test_a_run_goes_on_without_them(tmp_path: Path) -> None:
    callback = GNSCallback(loss="samples")
    trainer = train(tmp_path, callback)
    assert len(trainer.seen) == trainer.state.global_step == UPDATES
    assert callback.compute().errors == UPDATES and not callback.compute().updates


def test_rows_that_the_user_says_are_samples(tmp_path: Path) -> None:
    callback = GNSCallback(loss="samples", rows_per_sample=1, budget=None, on_error="raise")
    train(tmp_path, callback)
    assert callback.compute().samples == 2 * PAIRS * UPDATES


def test_half_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gnsfast.ObservationError, match="8 rows are no samples of 3 rows each"):
        train(tmp_path, GNSCallback(loss="samples", rows_per_sample=3, on_error="raise"))


@pytest.mark.parametrize("rows", [0, 2.0, True])
def test_rows_that_are_no_count(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows_per_sample must be a whole number"):
        GNSCallback(rows_per_sample=rows)


def test_pairs_in_a_loop() -> None:
    """``take`` says the same of the first batch to an estimator."""
    model = torch.nn.Linear(5, 1)
    gns = gnsfast.GradientNoiseScale(model, take=2)
    x = torch.randn(2 * PAIRS, 5)

    def loss(x: Tensor) -> Tensor:
        chosen, rejected = model(x).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    with gns.update(PAIRS):
        loss(x).backward()
    grads = [torch.autograd.grad(loss(x[b::PAIRS]), [model.weight])[0] for b in range(PAIRS)]
    g = torch.stack(grads).double().flatten(1)
    trace = float(g.var(0).sum())  # the bias has no gradient
    assert gns.compute().trace == pytest.approx(trace, rel=1e-4)


class DPOTrainer(OfPairs):
    """As TRL's: a mean over pairs, unless ``loss_type`` says another."""

    __module__ = "trl.trainer"


@pytest.mark.parametrize(
    ("loss_type", "aux", "message"),
    [
        (["sigmoid", "sft"], False, "loss_type='sft', a mean over the tokens"),
        ("aot", False, "loss_type='aot'.*pairs meet"),
        (["ipo"], True, "router_aux_loss_coef=0"),
        (["ipo", "robust"], False, ""),
    ],
)
def test_losses_of_trl(tmp_path: Path, loss_type: Any, aux: bool, message: str) -> None:
    trainer: Any = train(tmp_path, GNSCallback(loss="samples", rows_per_sample=2))
    trainer.__class__ = DPOTrainer
    trainer.args.loss_type, trainer.aux_loss_enabled = loss_type, aux
    why = not_of_pairs(trainer)
    assert re.search(message, why) if message else not why
    if not message:
        with pytest.raises(ValueError, match="a sample of DPOTrainer has 2 rows"):
            Rows.of(trainer, 1)
        assert Rows.of(trainer, None).a_sample == Rows.of(trainer, 2).a_sample == 2
