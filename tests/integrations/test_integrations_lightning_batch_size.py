# SPDX-License-Identifier: Apache-2.0
"""A batch size that grows in Lightning: the same steps as a hand-written loop's."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import controller_cases
import lightning.pytorch as pl
import pytest
import torch
from test_integrations_lightning import QUIET, Loader, Manual, Tiny, data

from gnsfast.critical_batch.control import BatchSizeController
from gnsfast.critical_batch.rules import Rules
from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.lightning_batch_size import BatchSizeCallback
from gnsfast.integrations.trackers import JSONLTracker

PER_EPOCH, EPOCHS = 13, 4
RULES = Rules("sqrt", "half_life", "timescale")
SETTINGS = {**QUIET, "accumulate_grad_batches": 2, "max_epochs": EPOCHS, "log_every_n_steps": 3}


class Told(controller_cases.Told, GNSMonitor):
    """Its places are batches of 8."""

    at_first, per_place, state_key = 32.0, 8, "GNSMonitor"


class Epochs(Loader):
    """Lightning leaves an iterator after its last batch, so that the next one begins anew."""

    def __iter__(self) -> Iterator[Any]:
        self.position %= len(self.batches)
        return super().__iter__()


class Scheduled(Tiny):
    """Decays by optimizer steps, or by epochs; or has no schedule."""

    def __init__(self, interval: str = "") -> None:
        super().__init__()
        self.interval, self.losses, self.rates = interval, [], []

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in self.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if not self.interval:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def decay(step: int) -> float:
    return 0.97**step


def controller_of(**changes: Any) -> BatchSizeController:
    settings: dict[str, Any] = {
        "batch_size": 16,
        "factor": 1.0,
        "tokens_per_sample": 1,
        "total_tokens": 8 * PER_EPOCH * EPOCHS,
        "max_batch_size": 64,
        "calibrate": 0.0,
        "patience": 1,
        "check_every": 1,
        "micro_batch": 8,
        **vars(RULES),
    }
    return BatchSizeController(**settings | changes)


def fit(
    folder: Path,
    module: Any,
    places: list[int],
    *,
    ckpt: Any = None,
    controller: Any = None,
    tracker: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, BatchSizeController]:
    controller = controller or controller_of()
    gns = Told(controller, places, tracker=tracker, **options.pop("gns", {}))
    others = options.pop("callbacks", [])
    callbacks = [*others, gns, BatchSizeCallback(controller, gns)]
    loader = options.pop("loader", None) or Epochs(data(PER_EPOCH))
    settings = {**SETTINGS, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(callbacks=callbacks, default_root_dir=folder, **settings)
        trainer.fit(module, loader, ckpt_path=ckpt)
    return trainer, controller


def by_hand(interval: str, grown: dict[int, int]) -> tuple[Any, list[float], list[float]]:
    """A loop in which the batch doubles after these batches; losses and learning rates."""
    module = Scheduled()
    optimizer = module.configure_optimizers()
    rate, accumulation, steps, losses, rates = 1e-2, 2, 0, [], []
    for epoch in range(EPOCHS):
        for k, batch in enumerate(data(PER_EPOCH), 1):
            loss = Tiny.training_step(module, batch, 0)
            losses.append(loss.item())
            (loss / accumulation).backward()
            if k % accumulation and k < PER_EPOCH:
                continue
            factor = (accumulation / 2) ** 0.5
            at = {"step": steps, "epoch": epoch, "": 0}[interval]
            for group in optimizer.param_groups:
                group["lr"] = rate * decay(at) * factor
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            steps = epoch * 7 + (7 if k == PER_EPOCH else k // 2)
            if epoch * PER_EPOCH + k in grown:
                accumulation *= 2
                assert accumulation == grown[epoch * PER_EPOCH + k]
                RULES.apply(optimizer, 2, lr=False)
    return module, losses, rates


@pytest.mark.parametrize("interval", ["", "step", "epoch"])
@pytest.mark.parametrize(
    ("places", "grown"),
    [
        ([0], {4: 4}),  # from the first place that both sizes divide
        ([8, 26], {12: 4, 34: 8}),  # within epochs
        ([12, 21], {13: 4, 26: 8}),  # at the ends of epochs, whose last steps are short
    ],
)
def test_growth(tmp_path: Path, interval: str, places: list[int], grown: Any) -> None:
    module = Scheduled(interval)
    trainer, controller = fit(tmp_path, module, places)
    changes = [(d.tokens // 8, d.new // 8) for d in controller.decisions if d.new != d.old]
    assert dict(changes) == grown
    truth, losses, rates = by_hand(interval, grown)
    assert module.losses == pytest.approx(losses, rel=1e-5)
    assert module.rates == pytest.approx(rates, rel=1e-12)
    for a, b in zip(module.parameters(), truth.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    k = 2 ** len(grown)
    for group in trainer.optimizers[0].param_groups:
        assert group["betas"] == (0.9, pytest.approx(0.999**k))
        own = 0.1 * k**0.5 if group["params"][0].ndim > 1 else 0.0
        assert group["weight_decay"] == pytest.approx(own)
    assert trainer.accumulate_grad_batches == 2 and trainer.global_step == len(rates)


@pytest.mark.parametrize("interval", ["", "step"])
def test_resumed_at_every_checkpoint(tmp_path: Path, interval: str) -> None:
    """The right batch size, learning rate, betas and weight decay; the same bits."""
    every = pl.callbacks.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_on_train_epoch_end=False
    )
    whole = Scheduled(interval)
    options: dict[str, Any] = {"callbacks": [every], "enable_checkpointing": True}
    _, controller = fit(tmp_path, whole, [8, 26], **options)
    found = sorted(tmp_path.glob("*.ckpt"))
    assert len(found) > 3
    for path in found:
        module = Scheduled(interval)
        _, again = fit(tmp_path, module, [8, 26], ckpt=str(path))
        assert again.state_dict() == controller.state_dict()
        assert module.losses == whole.losses[len(whole.losses) - len(module.losses) :]
        assert module.rates == whole.rates[len(whole.rates) - len(module.rates) :]
        assert all(map(torch.equal, module.parameters(), whole.parameters()))


class Saves(pl.Callback):
    """At the end of the step after which the batch grows, before other callbacks have seen it."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "grows.ckpt")


def test_saved_by_an_earlier_callback(tmp_path: Path) -> None:
    whole, resumed = Scheduled("step"), Scheduled("step")
    _, controller = fit(tmp_path, whole, [8, 26], callbacks=[Saves()])
    assert [d.tokens for d in controller.decisions if d.new != d.old][0] == 8 * 12  # six steps
    _, again = fit(tmp_path, resumed, [8, 26], ckpt=str(tmp_path / "grows.ckpt"))
    assert again.state_dict() == controller.state_dict() and resumed.losses == whole.losses[12:]


def test_tracker_gets_decisions(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    fit(tmp_path, Scheduled(), [10], tracker=tracker)
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    decisions = [line for line in lines if line.get("kind") == "decision"]
    assert [(d["old"], d["new"]) for d in decisions][1:] == [(16, 32), (32, 32)]
    logged = [line for line in lines if "kind" not in line]
    assert logged[0]["batch/size"] == 16.0 and logged[-1]["batch/size"] == 32.0


def test_another_fit(tmp_path: Path) -> None:
    """After an error the accumulation is the first again; a used controller is refused."""

    class Fails(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(self.losses) == 20:
                raise MemoryError("here")
            return super().training_step(batch, batch_idx)

    controller = controller_of()
    callback = BatchSizeCallback(controller, Told(controller, [1]))
    trainer = pl.Trainer(callbacks=[callback, callback.gns], **SETTINGS)
    with pytest.raises(MemoryError):
        trainer.fit(Fails(), Epochs(data(PER_EPOCH)))
    assert controller.batch_size == 32 and trainer.accumulate_grad_batches == 2
    with pytest.raises(ValueError, match="so it has controlled another run"):
        fit(tmp_path, Scheduled(), [1], controller=controller)


class Stepwise(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class Plain(Scheduled):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_refusals(tmp_path: Path) -> None:
    for module, options, match in (
        (Manual(), {"accumulate_grad_batches": 1}, "manual optimization"),
        (Stepwise(), {}, "the schedule StepLR: use a LambdaLR"),
        (Scheduled(), {"max_steps": 5}, "max_steps, which counts"),
        (
            Scheduled(),
            {"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]},
            "StochasticWeightAveraging, which sets accumulate_grad_batches",
        ),
        (
            Scheduled(),
            {
                "accumulate_grad_batches": 1,
                "callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 2})],
            },
            "GradientAccumulationScheduler, which",
        ),
        (Scheduled(), {"loader": iter(data(3))}, "data without a length"),
    ):
        with pytest.raises(NotImplementedError, match=f"BatchSizeCallback does not.*{match}"):
            fit(tmp_path, module, [1], **options)
    for changes, match in (
        ({"total_tokens": 10**6}, "has 416: 4 epochs of 104 samples with tokens_per_sample=1"),
        ({"micro_batch": 4}, "batch_size=16, but the Trainer has 8"),
        (
            {"micro_batch": 4, "batch_size": 8, "max_batch_size": 32},
            "has 8 samples, but the controller has micro_batch=4",
        ),
        ({"data_parallel": 2}, "data_parallel=2, but the Trainer has 1"),
        ({"max_batch_size": 128}, "a batch size of 128 is more than the 104 samples of an epoch"),
    ):
        with pytest.raises(ValueError, match=match):
            fit(tmp_path, Scheduled(), [1], controller=controller_of(**changes))
    plain = Plain()
    with pytest.raises(ValueError, match="SGD has no betas"):
        fit(tmp_path, plain, [1])
    assert plain.losses == []  # before the first step, not at the first growth
    given = controller_of()
    given.lr_lambda(lambda tokens: 1.0)
    with pytest.raises(ValueError, match="and controller.lr_lambda does so too"):
        fit(tmp_path, Scheduled(), [1], controller=given)


class Halves(Scheduled):
    """Each of two processes takes every second batch."""

    def train_dataloader(self) -> Epochs:
        whole = data(2 * PER_EPOCH + 1)[:-1]
        return Epochs(whole[self.trainer.global_rank :: self.trainer.world_size])


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    """As one that accumulates twice as many batches."""
    total = {"total_tokens": 16 * PER_EPOCH * EPOCHS}
    two = controller_of(**total, data_parallel=2)
    one = controller_of(**total)
    ours, theirs = Halves("step"), Halves("step")
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork", "accumulate_grad_batches": 1}
    fit_without_loader(tmp_path, ours, two, JSONLTracker(tmp_path / "two.jsonl"), **options)
    fit_without_loader(tmp_path, theirs, one, JSONLTracker(tmp_path / "one.jsonl"))
    lines = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("two", "one")]
    records = [[json.loads(line) for line in each] for each in lines]
    decisions = [[r for r in each if r.get("kind") == "decision"] for each in records]
    assert decisions[0] == decisions[1] and [d["new"] for d in decisions[0]] == [16, 32, 32]
    for a, b in zip(*[[r for r in each if "kind" not in r] for each in records]):
        assert a["batch/size"] == b["batch/size"] and a["step"] == b["step"]
        assert a["gns/trace"] == pytest.approx(b["gns/trace"], rel=1e-3)


def fit_without_loader(
    folder: Path, module: Any, controller: Any, tracker: Any, **options: Any
) -> None:
    gns = Told(controller, [10], tracker=tracker)
    callbacks = [gns, BatchSizeCallback(controller, gns)]
    trainer = pl.Trainer(callbacks=callbacks, default_root_dir=folder, **SETTINGS | options)
    trainer.fit(module)
    tracker.close()
