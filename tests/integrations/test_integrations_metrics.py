# SPDX-License-Identifier: Apache-2.0
"""Other noise scales than the Euclidean one, in runs of Trainer and of Lightning."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers as hf
from noise_cases import ALWAYS
from test_integrations_lightning import UPDATES, Tiny, by_hand, data, fit
from torch import nn
from trainer_cases import Model, trained, trainer_of

from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.transformers import GNSCallback

BOTH = ("sign", "spectral")


def of_one_matrix(model: nn.Module, name: str) -> torch.optim.Muon:
    return torch.optim.Muon([model.get_parameter(name)], lr=1e-3)


def trainer_with(
    folder: Path, metric: Any, optimizer: Callable[[nn.Module], Any] | None = None, **options: Any
) -> tuple[hf.Trainer, GNSCallback]:
    model, callback = Model(0.0), GNSCallback(**ALWAYS, metric=metric)
    if optimizer is not None:
        options["optimizers"] = optimizer(model), None
    return trainer_of(folder, model=model, callbacks=[callback], **options), callback


def test_trainer_logs_several(tmp_path: Path) -> None:
    trainer, callback = trainer_with(tmp_path, ["adam", *BOTH], logging_steps=18)
    trained(trainer)
    found, logged = callback.compute(), trainer.state.log_history[0]
    assert list(found.others) == ["adam", *BOTH]
    for metric, scale in found.others.items():
        assert scale.updates == 15  # the first has no past, two have one pass
        assert logged[f"gns/{metric}_lo"] == scale.lower
    assert found.spectral.left_out == ("embed.weight", "head.bias", "norm.weight", "norm.bias")


def test_trainer_gives_its_optimizer_where_it_is_a_muon(tmp_path: Path) -> None:
    """Its matrices are then the measured ones; any other optimizer stays out of it."""
    trainer, callback = trainer_with(
        tmp_path, "spectral", lambda m: of_one_matrix(m, "head.weight")
    )
    trained(trainer)
    assert callback.compute().spectral.updates == 15
    trainer, callback = trainer_with(
        tmp_path, "spectral", lambda m: of_one_matrix(m, "embed.weight")
    )
    trained(trainer)
    assert callback.compute().spectral.updates == 15


def test_resumed_trainer_has_the_same_bits(tmp_path: Path) -> None:
    """The running means too, which a file of tensors holds; ``trainer_state.json`` stays small."""
    found = []
    for resume in (None, str(tmp_path / "checkpoint-7")):
        trainer, callback = trainer_with(tmp_path, BOTH, save_strategy="steps", save_steps=7)
        trained(trainer, resume_from_checkpoint=resume)
        found.append(callback.compute())
    assert found[0] == found[1] and found[0].sign.updates == 15
    folder = tmp_path / "checkpoint-7"
    elements = sum(p.numel() for p in trainer.model.parameters())
    assert (folder / "gnsfast.pt").stat().st_size > 4 * elements
    assert "gnsfast.pt" in (text := (folder / "trainer_state.json").read_text())
    assert len(text) < 10_000 and not (folder / "gnsfast.half").exists()


def test_a_moved_checkpoint_and_a_lost_file(tmp_path: Path) -> None:
    """The file is found beside the checkpoint's others, wherever they are; without it the window
    begins anew, and a warning says so.
    """
    trainer, callback = trainer_with(tmp_path, "sign", save_strategy="steps", save_steps=7)
    trained(trainer)
    whole = callback.compute()
    moved = (tmp_path / "checkpoint-7").rename(tmp_path / "elsewhere")
    trainer, callback = trainer_with(tmp_path, "sign")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GNSCallback")
        trained(trainer, resume_from_checkpoint=str(moved))
    assert callback.compute() == whole
    (moved / "gnsfast.pt").unlink()
    trainer, callback = trainer_with(tmp_path, "sign")
    with pytest.warns(UserWarning, match="elsewhere/gnsfast.pt, .* the window begins anew"):
        trained(trainer, resume_from_checkpoint=str(moved))
    assert 0 < callback.compute().updates < whole.updates
    (moved / "gnsfast.pt").write_bytes(b"cut off")
    trainer, _ = trainer_with(tmp_path, "sign")
    with pytest.raises(ValueError, match="elsewhere/gnsfast.pt cannot be read"):
        trained(trainer, resume_from_checkpoint=str(moved))


def test_sign_of_micro_batches(tmp_path: Path) -> None:
    """Of Trainer's accumulation and of Lightning's, by the callbacks' own argument."""
    model = Model(0.0)
    callback = GNSCallback(**ALWAYS, metric="sign")
    trained(trainer_of(tmp_path, model=model, callbacks=[callback]))
    found = callback.compute().sign
    assert found.updates > 5
    monitor = GNSMonitor(**ALWAYS, metric="sign")
    fit(monitor, tmp_path, Tiny())
    assert monitor.compute().sign.updates == UPDATES - 2  # the last has one pass


def test_lightning_measures_several(tmp_path: Path) -> None:
    monitor = GNSMonitor(**ALWAYS, metric=["adam", *BOTH])
    trainer = fit(monitor, tmp_path, Tiny())
    found, truth = monitor.compute(), by_hand(data(2 * UPDATES - 1), metric=BOTH)
    for metric in BOTH:
        assert found.under(metric).updates == UPDATES - 2  # the last has one pass
        ours, theirs = found.under(metric).noise_scale, truth.under(metric).noise_scale
        assert ours == pytest.approx(theirs, rel=1e-4)
        logged = trainer.logged_metrics
        assert logged[f"gns/{metric}_lo"] == pytest.approx(found.under(metric).lower)
        assert (f"gns/{metric}" in logged) == found.under(metric).resolved
    assert found.adam.updates == UPDATES - 2


class OneMatrix(Tiny):
    """Muon trains the last matrix, nothing the others."""

    def configure_optimizers(self) -> Any:
        return of_one_matrix(self, "model.3.weight")

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.zero_grad()


def test_lightning_gives_its_muon(tmp_path: Path) -> None:
    monitor = GNSMonitor(**ALWAYS, metric="spectral")
    fit(monitor, tmp_path, OneMatrix())
    assert list(monitor.compute().spectral.per_module) == ["model.3"]
    all_of_them = GNSMonitor(**ALWAYS, metric="spectral")
    fit(all_of_them, tmp_path, Tiny())
    assert list(all_of_them.compute().spectral.per_module) == ["model.0", "model.3"]


def test_resumed_lightning_has_the_same_numbers(tmp_path: Path) -> None:
    """Also of a run that had ended."""
    every = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    whole, resumed, ended = (GNSMonitor(**ALWAYS, metric=["adam", *BOTH]) for _ in range(3))
    fit(whole, tmp_path, Tiny(), callbacks=[every], enable_checkpointing=True)
    fit(resumed, tmp_path, Tiny(), ckpt=str(tmp_path / "step=5.ckpt"))
    fit(ended, tmp_path, Tiny(), ckpt=str(tmp_path / "step=10.ckpt"))
    assert whole.compute() == resumed.compute() == ended.compute()
