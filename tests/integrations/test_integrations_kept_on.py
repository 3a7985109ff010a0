# SPDX-License-Identifier: Apache-2.0
"""Callbacks as they are by default: training has the same bits, and no error of gnsfast ends it."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_integrations_lightning import QUIET, Loader, Tiny, data
from trainer_cases import trainer_of, weights

from gnsfast.functional import _linear
from gnsfast.integrations import lightning, transformers
from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.transformers import GNSCallback
from gnsfast.noise_scale import statistics


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("planted")


FAULTS = {
    "nothing": None,
    "what a batch holds": ((transformers.Rows, "samples"), (GNSMonitor, "samples")),
    "learning": ((transformers.Rule, "counts"), (lightning, "learn")),
    "a kernel": ((_linear._Linear, "apply"), (_linear._Linear, "apply")),
    "the numbers": ((statistics, "decay_weights"), (statistics, "decay_weights")),
    "the log": ((transformers.GNSCallback, "_newly_largest"), (GNSMonitor, "_newly_largest")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trainer(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gnsfast")
    options: dict[str, Any] = dict(max_steps=8, logging_steps=2, save_strategy="no")
    plain = trainer_of(tmp_path, **options)
    plain.train()
    callback = GNSCallback(loss="causal")
    measured = trainer_of(tmp_path, callbacks=[callback], **options)
    if FAULTS[fault] is not None:
        monkeypatch.setattr(*FAULTS[fault][0], broken)
    measured.train()
    ours, theirs = weights(measured), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    told = [r for r in caplog.records if "Training goes on" in r.message]
    assert len(told) == (fault != "nothing")
    assert all("planted" in r.message for r in told)
    monkeypatch.undo()
    if fault == "nothing":
        result = callback.compute()
        assert result.updates + result.skipped == 3 and not result.errors
    else:
        assert callback.compute().errors >= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_lightning(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gnsfast")
    results = []
    for callbacks in ([], [monitor := GNSMonitor()]):
        if callbacks and FAULTS[fault] is not None:
            monkeypatch.setattr(*FAULTS[fault][1], broken)
        options = {**QUIET, "accumulate_grad_batches": 2, "max_epochs": 1, "log_every_n_steps": 2}
        module = Tiny()
        trainer = pl.Trainer(callbacks=callbacks, default_root_dir=tmp_path, **options)
        torch.manual_seed(3)
        trainer.fit(module, Loader(data(16)))
        results.append(module.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    told = [r for r in caplog.records if "Training goes on" in r.message]
    assert len(told) == (fault != "nothing")
    assert all("planted" in r.message for r in told)
    monkeypatch.undo()
    if fault == "nothing":
        assert monitor.compute().updates == 3 and monitor.compute().errors == 0
    else:
        assert monitor.compute().errors >= 1
