# SPDX-License-Identifier: Apache-2.0
"""OLMo-core's trainer measured, with stand-ins for the few classes of it that are used;
``tests/clients`` runs OLMo-core itself.
"""

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import _linear

STEPS, ROWS, AT_ONCE, T, WORDS = 6, 9, 4, 8, 32
"""The last micro-batch of a step is smaller."""


@dataclass
class Callback:
    trainer = None

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)  # type: ignore[attr-defined]


class Model(nn.Module):
    vocab_size = WORDS

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.inner(self.embed(ids)).tanh())
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Module:
    label_ignore_index, max_sequence_length, rank_microbatch_size = -100, T, AT_ONCE * T

    def __init__(self) -> None:
        self.model, self.device = Model(), torch.device("cpu")
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @contextmanager
    def _train_microbatch_context(self, index: int, count: int) -> Iterator[None]:
        yield

    def train_batch(self, batch: dict[str, Tensor], dry_run: bool = False) -> None:
        ids, labels = batch["input_ids"], labels_of(batch)
        batch["labels"] = labels
        total = tokens_of(batch)
        parts = [*zip(ids.split(AT_ONCE), labels.split(AT_ONCE))]
        for index, (x, y) in enumerate(parts):
            with self._train_microbatch_context(index, len(parts)):
                (self.model(x, y) / total).backward()


class Trainer:
    metrics_collect_interval = 3

    def __init__(self, callback: Any = None, skips: int | None = None) -> None:
        self.train_module, self.callbacks = Module(), [] if callback is None else [callback]
        self.global_step = self.global_train_tokens_seen = 0
        self.skips, self.recorded = skips, dict[tuple[int, str], float]()
        for c in self.callbacks:
            c.trainer = self

    def record_metric(self, name: str, value: float) -> None:
        self.recorded[self.global_step, name] = value

    def tell(self, event: str, *args: Any) -> None:
        for c in self.callbacks:
            getattr(c, event)(*args)

    def fit(self) -> None:
        module = self.train_module
        self.tell("pre_train")
        module.train_batch(next(batches()), dry_run=True)
        module.optim.zero_grad()
        for self.global_step, batch in zip(range(1, STEPS + 1), batches()):
            self.tell("pre_step", batch)
            if self.global_step != self.skips:
                module.train_batch(batch)
                self.tell("pre_optim_step")
                nn.utils.clip_grad_norm_(module.model.parameters(), 1e-3)
                module.optim.step()
                module.optim.zero_grad()
            for c in self.callbacks:
                c.saved = c.state_dict()  # as a checkpoint after the batch
            self.tell("post_step")
        self.tell("close")


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"].masked_fill(~batch["label_mask"], -100)
    labels = labels.masked_fill(~batch["instance_mask"][:, None], -100)
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    counted = (batch["labels"] != -100).sum()
    return counted + (~batch["instance_mask"]).sum() * T


def batches() -> Iterator[dict[str, Tensor]]:
    """Masked labels, and in each batch one row that does not count."""
    generator = torch.Generator().manual_seed(2)
    while True:
        words = torch.randint(0, 12, (ROWS, T), generator=generator)
        mask = torch.rand(ROWS, T, generator=generator) < 0.8
        rows = torch.arange(ROWS) != 5
        yield {"input_ids": words, "label_mask": mask, "instance_mask": rows}


@pytest.fixture
def olmo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("olmo_core", "olmo_core.train", "olmo_core.train.callbacks"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules["olmo_core.train.callbacks"])["Callback"] = Callback
    monkeypatch.delitem(sys.modules, "gnsfast.integrations.olmo_core", raising=False)
    yield importlib.import_module("gnsfast.integrations.olmo_core")
    sys.modules.pop("gnsfast.integrations.olmo_core", None)


def by_hand() -> gnsfast.NoiseScale:
    module = Module()
    gns = gnsfast.GradientNoiseScale(
        module.model, gnsfast.learn(module.model, torch.arange(16).view(2, 8)), loss_reduction="sum"
    )
    for _, batch in zip(range(STEPS), batches()):
        batch["labels"] = labels = labels_of(batch)
        parts = zip(batch["input_ids"].split(AT_ONCE), labels.split(AT_ONCE))
        total = tokens_of(batch)
        with gns.update():
            for x, y in parts:
                with gns.microbatch(len(x), tokens=(y != -100).sum(1), scale=1 / total):
                    (module.model(x, y) / total).backward()
        nn.utils.clip_grad_norm_(module.model.parameters(), 1e-3)
        module.optim.step()
        module.optim.zero_grad()
    return gns.compute()


def test_as_by_hand(olmo: Any) -> None:
    callback = olmo.GNSCallback(budget=None, on_error="raise", per_module=True)
    trainer = Trainer(callback)
    trainer.fit()
    truth, result = by_hand(), callback.compute()
    assert result.updates == STEPS and result.samples == truth.samples
    assert result.trace == pytest.approx(truth.trace, rel=1e-4)
    assert result.grad_sqnorm == pytest.approx(truth.grad_sqnorm, rel=1e-4)
    assert {step for step, _ in trainer.recorded} == {3, 6}
    assert trainer.recorded[6, "gns/trace"] == result.trace
    assert "_train_microbatch_context" not in vars(trainer.train_module)


def test_steps_to_skip(olmo: Any) -> None:
    """A step that is not trained is no update, and the checkpoint after it is whole."""
    callback = olmo.GNSCallback(budget=None, on_error="raise")
    Trainer(callback, skips=3).fit()
    assert callback.compute().updates == STEPS - 1


def test_resumes(olmo: Any) -> None:
    first, second = (olmo.GNSCallback(budget=None, on_error="raise") for _ in range(2))
    assert first.state_dict() == {}
    Trainer(first).fit()
    second.load_state_dict(first.saved)
    Trainer(second).fit()
    assert second.compute().updates == 2 * STEPS


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("planted")


FAULTS = ["nothing", "learning", "what a batch holds", "a kernel", "the log"]


@pytest.mark.parametrize("fault", FAULTS)
def test_same_bits(
    olmo: Any, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, and where gnsfast fails."""
    caplog.set_level(logging.WARNING, "gnsfast")
    callback = olmo.GNSCallback(budget=None)
    plain, ours = Trainer(), Trainer(callback)
    places = {
        "learning": (olmo, "learn"),
        "what a batch holds": (olmo.GNSCallback, "_count"),
        "a kernel": (_linear._Linear, "apply"),
        "the log": (olmo.GNSCallback, "_newly_largest"),
    }
    if fault == "a kernel":  # after learning
        begin = callback.pre_step
        monkeypatch.setattr(
            callback,
            "pre_step",
            lambda batch: (monkeypatch.setattr(*places[fault], broken), begin(batch)),
        )
    elif fault != "nothing":
        monkeypatch.setattr(*places[fault], broken)
    ours.fit()
    plain.fit()
    weights = [trainer.train_module.model.state_dict() for trainer in (plain, ours)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    told = [r for r in caplog.records if "planted" in r.message]
    assert len(told) == (fault != "nothing")
    assert (callback.gns.compute().errors >= 1) == (fault != "nothing")


def test_defaults(olmo: Any) -> None:
    callback = olmo.GNSCallback()
    assert (callback.budget, callback.gradients, callback.on_error) == (0.02, "torch", "skip")


def test_another_module(olmo: Any) -> None:
    callback = olmo.GNSCallback()
    callback.trainer = types.SimpleNamespace(train_module=types.SimpleNamespace())
    with pytest.raises(NotImplementedError, match="use a TransformerTrainModule"):
        callback.pre_train()


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "olmo_core", None)
    sys.modules.pop("gnsfast.integrations.olmo_core", None)
    with pytest.raises(ImportError, match="pip install ai2-olmo-core"):
        importlib.import_module("gnsfast.integrations.olmo_core")
