# SPDX-License-Identifier: Apache-2.0
"""Lightning's logged noise scale is that of a hand-written loop over the same batches."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from controller_cases import Lines
from noise_cases import ALWAYS, in_updates
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gnsfast
from gnsfast.integrations import measuring
from gnsfast.integrations.lightning import GNSMonitor, is_measured
from gnsfast.integrations.trackers import JSONLTracker

I, N, UPDATES = 6, 8, 10
QUIET: dict[str, Any] = {
    **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}
"""Of a trainer that shows and keeps nothing."""


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(I, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))
        self.skip: int | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        return None if batch_idx == self.skip else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(count: int) -> list[list[Tensor]]:
    """The last batch is a short one."""
    generator = torch.Generator().manual_seed(2)
    return [
        [
            torch.randn(n, I, generator=generator),
            (torch.rand(n, generator=generator) < 0.1).long(),
        ]
        for n in [N] * (count - 1) + [N - 3]
    ]


class Loader:
    """Goes on where a checkpoint says; Lightning saves and loads its state."""

    def __init__(self, batches: list[list[Tensor]]) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit(
    monitor: GNSMonitor,
    folder: Path,
    module: pl.LightningModule,
    *,
    ckpt: Any = None,
    **options: Any,
) -> pl.Trainer:
    options = {
        **QUIET,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1e-3,
        "max_epochs": 1,
        "log_every_n_steps": UPDATES,
        "logger": pl.loggers.CSVLogger(str(folder)),
        **options,
    }
    callbacks = [monitor, *options.pop("callbacks", [])]
    own = type(module).train_dataloader is not pl.LightningModule.train_dataloader
    loader = None if own else Loader(data(2 * UPDATES - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(callbacks=callbacks, default_root_dir=folder, **options)
        trainer.fit(module, loader, DataLoader(data(2), batch_size=None), ckpt_path=ckpt)
    return trainer


def lengths(batch: list[Tensor]) -> Tensor:
    return 1 + 3 * batch[1]


def by_hand(
    batches: list[list[Tensor]],
    accumulated: int = 2,
    tokens: Any = None,
    metric: Any = None,
    window: int = 64,
) -> gnsfast.NoiseScale:
    module = Tiny()
    optimizer = module.configure_optimizers()
    table = gnsfast.learn(module, tuple(batches[0]), run=lambda batch: module.model(batch[0]))
    gns = gnsfast.GradientNoiseScale(module, table, metric=metric, window=window)
    for passes in in_updates(batches, accumulated):  # the last may be of one, divided by 2 too
        with gns.update():
            for batch in passes:
                counts = None if tokens is None else tokens(batch)
                with gns.microbatch(len(batch[0]), tokens=counts, scale=1 / accumulated):
                    (module.training_step(batch, 0) / accumulated).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return gns.compute()


def test_accumulation_and_clipping(tmp_path: Path) -> None:
    tracker = Lines()
    trainer = fit(GNSMonitor(**ALWAYS, tracker=tracker, per_module=True), tmp_path, Tiny())
    truth = by_hand(data(2 * UPDATES - 1))
    assert truth.resolved and truth.updates == UPDATES
    expected = {
        "gns/b_simple": truth.noise_scale,
        "gns/b_simple_lo": truth.lower,
        "gns/b_simple_hi": truth.upper,
        "gns/trace": truth.trace,
        "gns/grad_sq": truth.grad_sqnorm,
        "gns/layer/model.3": truth.per_module["model.3"].noise_scale,
    }
    [(step, found)] = tracker.seen
    assert step == UPDATES
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
        assert float(trainer.logged_metrics[name]) == pytest.approx(value, rel=1e-5), name
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "gns/b_simple" in rows


class Logs(Tiny):
    """Logs in each step, and calls its part by a method of its own."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        return super().training_step(batch, batch_idx)


def test_learning_logs_nothing(tmp_path: Path) -> None:
    trainer = fit(GNSMonitor(**ALWAYS), tmp_path, Logs())
    assert trainer.logged_metrics["steps"] == 2 * UPDATES - 1


class Bare(Tiny):
    """Calls no module, and returns its logits where it is ``open``."""

    def __init__(self, is_open: bool) -> None:
        super().__init__()
        self.is_open = is_open

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        first, last = self.model[0], self.model[3]
        h = F.linear(batch[0], first.weight, first.bias).tanh()
        logits = F.linear(h, last.weight, last.bias)
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits} if self.is_open else loss


def test_a_step_that_calls_no_module(tmp_path: Path) -> None:
    with pytest.raises(gnsfast.SampleShapeError, match="neither training_step nor a module"):
        fit(GNSMonitor(**ALWAYS), tmp_path, Bare(False))
    monitor = GNSMonitor(**ALWAYS)
    fit(monitor, tmp_path, Bare(True))
    assert monitor.compute().left_out == ("model.2.weight", "model.2.bias")


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    """It leaves out what the first batch would prove."""
    module, (x, _) = Tiny(), data(1)[0]
    first = lambda x: module.model[0](x)
    monitor = GNSMonitor(**ALWAYS, table=gnsfast.learn(module, x, run=first))
    fit(monitor, tmp_path, module)
    assert monitor.compute().updates == UPDATES
    assert monitor.compute().left_out == tuple(
        f"model.{name}" for name in ("2.weight", "2.bias", "3.weight", "3.bias")
    )


def test_gradient_scaler(tmp_path: Path) -> None:
    """update() comes after Lightning has unscaled; the scaler's factor changes nothing."""
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
        if scaler is None:
            plugin.scaler = None
        monitor = GNSMonitor(**ALWAYS)
        fit(monitor, tmp_path, Tiny(), plugins=[plugin])
        results.append(monitor.compute())
    assert results[0].updates == UPDATES
    assert results[1].noise_scale == pytest.approx(results[0].noise_scale, rel=2e-2)
    assert results[1].trace == pytest.approx(results[0].trace, rel=2e-2)


def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    every = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    whole, resumed = GNSMonitor(**ALWAYS, window=7), GNSMonitor(**ALWAYS, window=7)
    fit(whole, tmp_path, Tiny(), callbacks=[every], enable_checkpointing=True)
    fit(resumed, tmp_path, Tiny(), ckpt=str(tmp_path / "step=4.ckpt"))
    ours, theirs = resumed.gns.state_dict(), whole.gns.state_dict()
    assert ours["measured"] == UPDATES
    assert torch.equal(ours["ring"], theirs["ring"])
    assert torch.equal(ours["flags"], theirs["flags"])
    assert {**ours, "ring": 0, "flags": 0} == {**theirs, "ring": 0, "flags": 0}


@pytest.mark.parametrize("skip", [4, 5])
def test_skipped_step(tmp_path: Path, skip: int) -> None:
    """A training_step that returns None, as an update's first or last, costs that update alone."""
    monitor, module = GNSMonitor(**ALWAYS), Tiny()
    module.skip = skip
    fit(monitor, tmp_path, module)
    assert monitor.compute().updates == UPDATES - 1


class Ends(Tiny):
    """Every epoch, in the middle of its third update."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_epoch_that_ends_in_the_middle_of_an_update(tmp_path: Path) -> None:
    monitor = GNSMonitor(**ALWAYS)
    fit(monitor, tmp_path, Ends(), max_epochs=2)
    assert monitor.compute().updates == 4


def test_checkpoint_in_the_middle_of_an_update(tmp_path: Path) -> None:
    """That update is not measured; the run goes on."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if args[-1] == 6:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    monitor = GNSMonitor(**ALWAYS)
    fit(monitor, tmp_path, Tiny(), callbacks=[Save()])
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=True)["callbacks"]["GNSMonitor"]
    assert saved["measured"] == 3
    assert monitor.compute().updates == UPDATES - 1


class Shared(Tiny):
    """Each process takes every second batch."""

    def train_dataloader(self) -> Loader:
        return Loader(data(4 * UPDATES)[:-1][self.trainer.global_rank :: 2])


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    options = dict(devices=2, strategy="ddp_fork", log_every_n_steps=UPDATES - 1)
    monitor = GNSMonitor(**ALWAYS, tracker=JSONLTracker(tmp_path / "run.jsonl"))
    fit(monitor, tmp_path, Shared(), max_steps=UPDATES - 1, **options)
    truth = by_hand(data(4 * UPDATES)[: 4 * (UPDATES - 1)], 4)
    [line] = (tmp_path / "run.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["gns/updates"] == truth.updates == UPDATES - 1
    assert found["batch/size"] == 4 * N
    assert found["gns/b_simple"] == pytest.approx(truth.noise_scale, rel=1e-5)
    assert found["gns/trace"] == pytest.approx(truth.trace, rel=1e-5)
    assert found["gns/grad_sq"] == pytest.approx(truth.grad_sqnorm, rel=1e-5)


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="manual optimization"):
        fit(
            GNSMonitor(**ALWAYS),
            tmp_path,
            Manual(),
            gradient_clip_val=None,
            accumulate_grad_batches=1,
        )
    with pytest.raises(ValueError, match="window"):
        fit(GNSMonitor(**ALWAYS, window=0), tmp_path, Tiny())
    with pytest.raises(NotImplementedError, match="a second GNSMonitor"):
        fit(GNSMonitor(**ALWAYS), tmp_path, Tiny(), callbacks=[Another()])
    options = dict(accumulate_grad_batches=1, gradient_clip_val=None)
    with pytest.raises(NotImplementedError, match="torch.optim.LBFGS, which calls its closure"):
        fit(GNSMonitor(**ALWAYS), tmp_path, Optimized(torch.optim.LBFGS), **options)
    with pytest.raises(gnsfast.ObservationError, match="one batch had two backward passes"):
        fit(GNSMonitor(**ALWAYS), tmp_path, Optimized(TwiceSGD), **options)


class Another(GNSMonitor):
    """Lightning itself refuses two callbacks of one class that have a state."""


class TwiceSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Optimized(Tiny):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=1e-2)


class Headed(Tiny):
    """The first tensor of its batches is not of samples."""

    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [torch.ones(3), *batch]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return super().training_step(batch[1:], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch[1:], batch_idx)


def test_first_tensor_that_is_not_of_samples(tmp_path: Path) -> None:
    with pytest.raises(gnsfast.SampleShapeError, match=r"pass GNSMonitor\(batch_size=lambda batch"):
        fit(GNSMonitor(**ALWAYS), tmp_path, Headed())
    monitor, plain = (
        GNSMonitor(**ALWAYS, batch_size=lambda batch: len(batch[1])),
        GNSMonitor(**ALWAYS),
    )
    fit(monitor, tmp_path, Headed())
    fit(plain, tmp_path, Tiny())
    assert monitor.compute() == plain.compute()


def test_finished_run_is_resumed(tmp_path: Path) -> None:
    """Nothing is left to train: what the checkpoint holds is what there is; a new fit() begins
    anew.
    """
    monitor, resumed, path = GNSMonitor(**ALWAYS), GNSMonitor(**ALWAYS), tmp_path / "end.ckpt"
    fit(monitor, tmp_path, Tiny()).save_checkpoint(path)
    fit(resumed, tmp_path, Tiny(), ckpt=str(path))
    assert resumed.compute() == monitor.compute() and monitor.compute().updates == UPDATES
    fit(resumed, tmp_path, Tiny(), max_steps=3)
    assert resumed.compute().updates == 3


def test_counts_of_tokens_and_samples(tmp_path: Path) -> None:
    """Arguments that read the batch are those of a hand-written microbatch."""
    counted: list[int] = []

    def batch_size(batch: list[Tensor]) -> int:
        counted.append(len(batch[0]))
        return counted[-1]

    monitor = GNSMonitor(**ALWAYS, batch_size=batch_size, tokens=lengths)
    fit(monitor, tmp_path, Tiny())
    truth = by_hand(data(2 * UPDATES - 1), tokens=lengths)
    assert counted == [len(x) for x, _ in data(2 * UPDATES - 1)]
    assert monitor.compute().noise_scale == pytest.approx(truth.noise_scale, rel=1e-5)
    assert monitor.compute().trace == pytest.approx(truth.trace, rel=1e-5)


def test_the_first_batch_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For parts of samples, in every training once."""
    seen: list[Any] = []
    monkeypatch.setattr(measuring, "refuse_parts", seen.append)
    monitor = GNSMonitor(**ALWAYS)
    for trainings in (1, 2):
        fit(monitor, tmp_path, Tiny())
        assert len(seen) == trainings and len(seen[-1][0]) == N


@pytest.mark.parametrize(
    ("name", "measured"),
    [("SingleDeviceStrategy", True), ("DDPStrategy", True), ("FSDPStrategy", False)],
)
def test_strategies(name: str, measured: bool) -> None:
    """Also those that are made of a known one, and not those that accumulate by themselves."""
    kind = getattr(pl.strategies, name)
    own = type("Own", (kind,), {})
    assert is_measured(object.__new__(kind)) == is_measured(object.__new__(own)) == measured
    accumulates = type("Accumulates", (kind,), {"handles_gradient_accumulation": True})
    assert not is_measured(object.__new__(accumulates))
