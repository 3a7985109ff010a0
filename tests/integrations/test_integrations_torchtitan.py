# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer measured, with stand-ins for the few classes of it that are used;
``tests/clients`` runs torchtitan itself.
"""

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import _linear

STEPS, ACCUMULATED, N, T, WORDS = 6, 2, 4, 8, 256


class Loss:
    """Sums over tokens, divided by those of the whole batch."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: Any = None

    def __call__(self, logits: Tensor, labels: Tensor, valid: Tensor, **others: Any) -> Any:
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return summed / valid, {}


class Chunked(Loss):
    """Calls the head on each half of the sequence, with a backward pass of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        pass

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = lm_head

    def __call__(self, hidden: Tensor, labels: Tensor, valid: Any = None, **others: Any) -> Any:
        leaf = hidden.detach().requires_grad_()
        total = torch.zeros(())
        for h, y in zip(leaf.chunk(2, 1), labels.chunk(2, 1)):
            loss = Loss.__call__(self, self.lm_head(h), y, valid)[0]
            loss.backward()
            total = total + loss.detach()
        return (hidden * leaf.grad).sum() * 1.0 + (total - (hidden * leaf.grad).sum().detach()), {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.lm_head, self.skips = nn.Linear(8, WORDS, bias=False), False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.embed(ids)).tanh()
        return x if self.skips else self.lm_head(x)


@dataclass
class Switches:
    disable_cuda_graphs: bool = True


class Trainer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        loss: Any = field(default_factory=Loss.Config)
        training: Any = field(default_factory=Switches)
        pipelines: bool = False

    def __init__(self, config: Any) -> None:
        model = Model()
        self.model_parts, self.device = [model], torch.device("cpu")
        kind = {Loss.Config: Loss, Chunked.Config: Chunked}
        self.loss_fn = kind.get(type(config.loss), config.loss.owner)()
        if isinstance(self.loss_fn, Chunked):
            self.loss_fn.set_lm_head(model.lm_head)
            model.skips = True
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.parallel_dims = types.SimpleNamespace(pp_enabled=config.pipelines)
        self.gradient_accumulation_steps, self.step, self.ntokens_seen = ACCUMULATED, 0, 0
        self.logged: dict[int, Any] = {}
        logger = types.SimpleNamespace(log=lambda found, step: self.logged.update({step: found}))
        self.metrics_processor = types.SimpleNamespace(
            should_log=lambda step: step % 3 == 0, logger=logger
        )

    def post_dataloading_process(self, inputs: Any, labels: Tensor) -> Any:
        self.ntokens_seen += labels.numel()
        return inputs["input"], labels, {}

    def forward_backward_step(self, **given: Any) -> Tensor:
        inputs, labels, _ = self.post_dataloading_process(given["input_dict"], given["labels"])
        loss: Tensor = self.loss_fn(
            self.model_parts[0](inputs), labels, given["global_valid_tokens"]
        )[0]
        loss.backward()
        return loss

    def train_step(self, data: Iterator[tuple[Tensor, Tensor]]) -> None:
        self.optimizer.zero_grad()
        batches = [next(data) for _ in range(self.gradient_accumulation_steps)]
        valid = sum((y != -100).sum() for _, y in batches)
        for x, y in batches:
            self.forward_backward_step(input_dict={"input": x}, labels=y, global_valid_tokens=valid)
        nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1e-3)
        self.optimizer.step()

    def train(self) -> None:
        data = batches()
        for self.step in range(1, STEPS + 1):
            self.train_step(data)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences of unequal numbers of labels."""
    generator = torch.Generator().manual_seed(2)
    while True:
        words = torch.randint(0, 12, (N, T + 1), generator=generator)
        labels = words[:, 1:].clone()
        for row, length in enumerate(torch.randint(2, T, (N,), generator=generator).tolist()):
            labels[row, length:] = -100
        yield words[:, :-1], labels


def derive(source: Any, target: Any, **deltas: Any) -> Any:
    names = {f.name for f in fields(source)} & {f.name for f in fields(target)}
    return target(**{name: getattr(source, name) for name in names} | deltas)


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    parts = {
        "components.loss": {"IGNORE_INDEX": -100, "ChunkedLossWrapper": Chunked},
        "config.override": {"derive": derive},
        "trainer": {"Trainer": Trainer},
    }
    for name in ("torchtitan", "torchtitan.components", "torchtitan.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, holds in parts.items():
        module = types.ModuleType(f"torchtitan.{name}")
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.delitem(sys.modules, "gnsfast.integrations.torchtitan", raising=False)
    yield importlib.import_module("gnsfast.integrations.torchtitan")
    sys.modules.pop("gnsfast.integrations.torchtitan", None)


def made(titan: Any, config: Any) -> Any:
    config.loss.owner = titan.HeadLoss
    is_measured = isinstance(config, titan.Measured.Config)
    return titan.Measured(config) if is_measured else Trainer(config)


def by_hand(has_head: bool) -> gnsfast.NoiseScale:
    """A loop that has no chunks."""
    trainer = Trainer(Trainer.Config())
    [model] = trainer.model_parts
    if not has_head:
        gnsfast.configure(model, exclude=["lm_head"])
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    data = batches()
    for _ in range(STEPS):
        update = [next(data) for _ in range(ACCUMULATED)]
        valid = sum((y != -100).sum() for _, y in update)
        with gns.update():
            for x, y in update:
                counts = (y != -100).sum(1)
                with gns.microbatch(N, tokens=counts, scale=1 / valid):
                    trainer.loss_fn(model(x), y, valid)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return gns.compute()


@pytest.mark.parametrize("loss", [Loss, Chunked])
@pytest.mark.parametrize("head", [False, True])
def test_as_by_hand(titan: Any, loss: Any, head: bool) -> None:
    config = Trainer.Config(loss=loss.Config())
    ours = made(titan, titan.measured(config, head=head, budget=0.0, on_error="raise"))
    ours.train()
    has_head = head or loss is Loss
    truth, found = by_hand(has_head), ours.compute()
    assert found.updates == STEPS and found.errors == 0
    assert found.trace == pytest.approx(truth.trace, rel=1e-4)
    assert found.grad_sqnorm == pytest.approx(truth.grad_sqnorm, rel=1e-4)
    assert ("lm_head.weight" in found.left_out) == (not has_head)
    assert sorted(ours.logged) == [3, 6]
    assert ours.logged[6]["gns/trace"] == found.trace
    assert ours.ntokens_seen == STEPS * ACCUMULATED * N * T


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("planted")


@pytest.mark.parametrize("loss", [Loss, Chunked])
@pytest.mark.parametrize("fault", ["nothing", "learning", "a kernel"])
def test_same_bits(
    titan: Any, loss: Any, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """By default, and where gnsfast fails."""
    caplog.set_level(logging.WARNING, "gnsfast")
    plain = made(titan, Trainer.Config(loss=loss.Config()))
    if fault == "learning":
        monkeypatch.setattr(titan, "learn", broken)
    ours = made(titan, titan.measured(Trainer.Config(loss=loss.Config()), budget=0.0))
    if fault == "a kernel":
        monkeypatch.setattr(_linear._Linear, "apply", broken)
    plain.train()
    ours.train()
    [a], [b] = plain.model_parts, ours.model_parts
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    told = [r for r in caplog.records if "planted" in r.message]
    assert len(told) == (fault != "nothing")
    assert ours.compute().errors == 0 if fault == "nothing" else ours.compute().errors >= 1


def test_defaults(titan: Any) -> None:
    config = titan.measured(Trainer.Config())
    assert (config.budget, config.gradients, config.on_error) == (0.02, "torch", "skip")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"training": Switches(False)}, "disable_cuda_graphs=True"),
        ({"pipelines": True}, "pipeline_parallel_degree=1"),
    ],
)
def test_refused(titan: Any, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(NotImplementedError, match=line):
        titan.Measured(titan.measured(Trainer.Config(**changed)))


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    sys.modules.pop("gnsfast.integrations.torchtitan", None)
    with pytest.raises(ImportError, match="pip install torchtitan"):
        importlib.import_module("gnsfast.integrations.torchtitan")
