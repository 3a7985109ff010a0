# SPDX-License-Identifier: Apache-2.0
"""A factor of another run, in runs of Trainer and of Lightning."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from noise_cases import ALWAYS
from test_integrations_batch_size import growing
from test_integrations_lightning import QUIET
from test_integrations_lightning_batch_size import (
    PER_EPOCH,
    Epochs,
    Scheduled,
    controller_of,
    data,
    fit,
    pl,
)
from torch import nn
from trainer_cases import T, trained, trainer_of

from gnsfast.critical_batch import CriticalBatchFactor, RunIdentity
from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.transformers import GNSCallback, identity


def measured(model: nn.Module, tokens_per_sample: int) -> CriticalBatchFactor:
    run = RunIdentity.of(
        model, torch.optim.AdamW(model.parameters()), tokens_per_sample=tokens_per_sample
    )
    return CriticalBatchFactor(1.0, 0.5, 2.0, "euclidean", "branches", run)


def test_trainer(tmp_path: Path) -> None:
    ours = measured(growing(tmp_path, [])[0].model, T)
    for run, said in (
        (replace(ours.run, model="of 7 elements"), "model of 7 elements and not of "),
        (replace(ours.run, optimizer="Muon"), "optimizer Muon and not AdamW"),
    ):
        other = replace(ours, run=run)
        trainer, _ = growing(tmp_path, [], controller={"factor": other})
        with pytest.raises(ValueError, match=f"another run, with {said}"):
            trained(trainer)
        assert trainer.seen == []
    trained(growing(tmp_path, [], controller={"factor": ours})[0])
    trained(growing(tmp_path, [], controller={"factor": other.for_other_run()})[0])


def test_lightning(tmp_path: Path) -> None:
    ours = measured(module := Scheduled(), 1)
    other = replace(ours, run=replace(ours.run, model="of 7 elements"))
    with pytest.raises(ValueError, match="another run, with model of 7 elements and not of "):
        fit(tmp_path, module, [], controller=controller_of(factor=other))
    assert module.losses == []
    fit(tmp_path, module, [], controller=controller_of(factor=ours))
    assert module.losses


def test_flags(tmp_path: Path) -> None:
    """A factor that only speaks of the batch size is of this run too."""
    other = measured(nn.Linear(2, 2), T)
    refused = "another run, with model of 6 elements .*not of "
    trainer = trainer_of(tmp_path, max_steps=1, callbacks=[GNSCallback(**ALWAYS, factor=other)])
    with pytest.raises(ValueError, match=refused):
        trained(trainer)
    again = trainer_of(
        tmp_path, max_steps=1, callbacks=[GNSCallback(**ALWAYS, factor=other.for_other_run())]
    )
    trained(again)
    monitored = pl.Trainer(callbacks=[GNSMonitor(**ALWAYS, factor=other)], **QUIET)
    with pytest.raises(ValueError, match=refused):
        monitored.fit(module := Scheduled(), Epochs(data(PER_EPOCH)))
    assert module.losses == []


def test_what_flags_cannot_compare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trainer does not know the context; a controller beside the flags does."""
    here = RunIdentity.of(trainer_of(tmp_path).model, data="c4", tokens_per_sample=T)
    ours = CriticalBatchFactor(1.0, 0.5, 2.0, "euclidean", "branches", here)
    said = "with {}. Nothing compares that, because it is unknown of this run"
    trained(trainer_of(tmp_path, max_steps=1, callbacks=[GNSCallback(**ALWAYS, factor=ours)]))
    [record] = [r.getMessage() for r in caplog.records if "Nothing compares" in r.getMessage()]
    assert said.format(f"data='c4', tokens_per_sample={T}") in record
    caplog.clear()
    trained(growing(tmp_path, [], gns={"factor": ours})[0])
    [record] = [r.getMessage() for r in caplog.records if "Nothing compares" in r.getMessage()]
    assert said.format("data='c4'") in record
    other = replace(ours, run=replace(here, tokens_per_sample=3 * T))
    trainer, _ = growing(tmp_path, [], gns={"factor": other})
    with pytest.raises(ValueError, match=f"with tokens per sample {3 * T} and not {T} "):
        trained(trainer)
    module, controlled = Scheduled(), controller_of()
    other = measured(module, 5)
    with pytest.raises(ValueError, match="with tokens per sample 5 and not 1 "):
        fit(tmp_path, module, [], controller=controlled, gns={"factor": other})


def test_flags_beside_a_controller(tmp_path: Path) -> None:
    """The flag's ``cbs/*`` are not among the controller's, and the grown batch is judged."""
    trainer, controller = growing(tmp_path, [20], gns={"factor": 1e6}, logging_steps=1)
    trained(trainer)
    assert controller.batch_size > 4
    logs = [line for line in trainer.state.log_history if "batch/flag" in line]
    assert logs and all(line["batch/flag"] == -1.0 for line in logs)
    assert all(value < 1000 for line in logs for key, value in line.items() if "cbs/" in key)


def test_the_data_of_a_trainer() -> None:
    """Known where it is a dataset of ``datasets`` that was loaded by name."""
    model = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))
    for info, name in (
        (SimpleNamespace(dataset_name="wikitext", config_name="raw"), "wikitext/raw"),
        (SimpleNamespace(dataset_name="c4", config_name=None), "c4"),
        (SimpleNamespace(dataset_name=None, config_name=None), None),
    ):
        trainer.train_dataset = SimpleNamespace(info=info)
        assert identity(trainer).data == name
    trainer.train_dataset = [1, 2]
    assert identity(trainer) == RunIdentity.of(model, trainer.optimizer)
