# SPDX-License-Identifier: Apache-2.0
"""Trainer under FSDP 2 logs the noise scale of one process, and resumes bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from accelerate import PartialState
from accelerate.utils import DistributedType
from noise_cases import ALWAYS
from oracle import loop_sqnorms
from processes import as_launched, each, spawn
from test_integrations_transformers import (
    STEPS,
    N,
    Sample,
    T,
    by_hand,
    check,
    logged,
    samples,
    tiny_gpt,
    trainer_of,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import gnsfast
from gnsfast.integrations.transformers import GNSCallback

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive"),
]
BLOCK = {"transformer_layer_cls_to_wrap": "GPT2Block", "activation_checkpointing": True}


def sharded_trainer(
    folder: Path, data: list[Sample], callback: GNSCallback, **options: Any
) -> hf.Trainer:
    """On a CPU Accelerate leaves FSDP out without a word, so it is told that these are GPUs."""
    as_launched(torch.distributed.get_rank(), OMP_NUM_THREADS="1")
    create = hf.Trainer.create_accelerator_and_postprocess

    def as_on_gpus(trainer: hf.Trainer) -> None:
        PartialState().distributed_type = DistributedType.MULTI_GPU
        create(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.Trainer, "create_accelerator_and_postprocess", as_on_gpus)
        options |= dict(ddp_backend="gloo", fsdp=True, fsdp_config={"version": 2, **BLOCK})
        return trainer_of(tiny_gpt(), data, folder, callback, **options)


def whole_run(rank: int, folder: str) -> None:
    """Tied embeddings, recomputed activations, accumulation, clipping."""
    callback, data = GNSCallback(**ALWAYS), samples(4 * STEPS * N)
    trainer = sharded_trainer(Path(folder), data, callback)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule) and trainer.accelerator.num_processes == 2
    if rank == 0:
        torch.save(logged(trainer), f"{folder}/logs.pt")


def single_samples(rank: int, folder: str) -> None:
    """With equal numbers of labels tr Σ + |G|² is the mean of the squared norms, without bias."""
    data = [{**s, "labels": s["input_ids"]} for s in samples(4 * N)]
    callback = GNSCallback(**ALWAYS)
    sharded_trainer(Path(folder), data, callback, max_steps=1).train()

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        logits, targets = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / targets.shape[1]

    batch = hf.default_data_collator(data)
    sqnorms = loop_sqnorms(tiny_gpt(), loss, batch, len(data))
    mean = float(sum(sqnorms.values()).mean())  # type: ignore[union-attr]
    found = callback.compute()
    assert found.trace + found.grad_sqnorm == pytest.approx(mean, rel=1e-5)


def resumed(rank: int, folder: str) -> None:
    states, data = [], samples(4 * 4 * N)
    options = dict(save_strategy="steps", save_steps=2, max_steps=4)
    for resume in (None, str(Path(folder) / "checkpoint-2")):
        callback = GNSCallback(**ALWAYS, window=3)
        trainer = sharded_trainer(Path(folder), data, callback, **options)
        trainer.train(resume_from_checkpoint=resume)
        assert callback.gns is not None
        states.append(callback.gns.state_dict())
    assert states[0]["measured"] == states[1]["measured"] == 4
    assert torch.equal(states[0]["ring"], states[1]["ring"])


def split_by_hand(rank: int, folder: str) -> None:
    positions = torch.arange(T) + rank * T
    data = [{**sample, "position_ids": positions} for sample in samples(4 * N)]
    with pytest.raises(gnsfast.ObservationError, match="parts of the same samples"):
        sharded_trainer(Path(folder), data, GNSCallback(**ALWAYS)).train()


def test_two_processes(tmp_path: Path) -> None:
    works = whole_run, single_samples, resumed, split_by_hand
    spawn(each, args=(works, (str(tmp_path),)), method="fork")
    data = samples(4 * STEPS * N)
    truth = by_hand(tiny_gpt(), data, causal=True, divided="items", accumulated=4)
    check(torch.load(tmp_path / "logs.pt"), truth)
