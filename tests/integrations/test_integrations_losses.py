# SPDX-License-Identifier: Apache-2.0
"""Losses, batches and Trainers that GNSCallback cannot follow are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from noise_cases import ALWAYS
from test_integrations_transformers import STEPS, N, Plain, T, by_hand, samples, trainer_of
from torch import Tensor, nn

from gnsfast.integrations.token_losses import COMPARED, RuleSearch
from gnsfast.integrations.transformers import GNSCallback

Sample = dict[str, Tensor]


def equal(count: int) -> list[Sample]:
    """Two labels of each sample are -100."""
    found = samples(count)
    return [{**s, "labels": torch.where(torch.arange(T) < 2, -100, s["input_ids"])} for s in found]


def train(model: nn.Module, data: list[Sample], folder: Path, **options: Any) -> GNSCallback:
    callback = GNSCallback(**ALWAYS)
    trainer_of(model, data, folder, callback, **options).train()
    return callback


class Sentences(Plain):
    """A mean over samples of their token means."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        each_BT = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"logits": logits, "loss": (each_BT.sum(1) / (labels != -100).sum(1)).mean()}


def test_mean_of_means_behind_equal_lengths(tmp_path: Path) -> None:
    """Two updates of samples of one length do not settle a rule."""
    data = equal(4 * N) + samples(4 * N)
    with pytest.raises(ValueError, match="the loss of a later micro-batch"):
        train(Sentences(), data, tmp_path)
    assert train(Sentences(), equal(4 * N), tmp_path, max_steps=2).compute().updates == 2


class Warm(Plain):
    """Adds what no sample owns, from its seventh pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))  # what the first batch shows adds nothing

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] * (1.01 if self.passes >= 7 else 1.0)}


def test_auxiliary_loss_that_warms_up(tmp_path: Path) -> None:
    """It is seen after the next log, that of step 4."""
    model = Warm()
    with pytest.raises(ValueError, match="adds an auxiliary loss"):
        train(model, samples(2 * STEPS * N), tmp_path, logging_steps=4)
    assert model.passes == 9


class Counted(hf.Trainer):
    """Of its losses, those with outputs are compared."""

    compared: list[bool]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        self.compared.append(return_outputs)
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


@pytest.mark.parametrize("settled", [True, False])
def test_losses_are_compared_where_that_is_said(tmp_path: Path, settled: bool) -> None:
    data = (samples if settled else equal)(2 * STEPS * N)
    args = trainer_of(Plain(), data, tmp_path, logging_steps=5).args
    trainer = Counted(Plain(), args, train_dataset=data, callbacks=[GNSCallback(**ALWAYS)])
    trainer.compared = []
    trainer.train()
    first = 1 if settled else COMPARED
    after = {10, 20}  # two micro-batches a step, a log every five
    assert trainer.compared == [k < first or k in after for k in range(2 * STEPS)]


def test_rules_are_ruled_out() -> None:
    """What a single micro-batch of a window cannot tell, a later one does; what tells nothing
    (no labels, a loss that overflowed) rules nothing out.
    """
    torch.manual_seed(0)
    search = RuleSearch()
    found = []
    for window, valid in ((1, 5), (1, 0), (1, 5), (2, 5), (1, 5)):
        logits, labels = torch.randn(2, T, 7), torch.randint(0, 7, (2, T))
        labels[0, valid:], labels[1, :] = -100, (-100 if valid == 0 else 3)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / max(1, int((labels != -100).sum()))
        if len(found) == 2:
            loss = loss * torch.inf
        items = window * int((labels != -100).sum())
        rule = search.compare(
            loss, {"logits": logits}, {"labels": labels}, items, smoothing=0.0, first="tokens"
        )
        found.append((rule.loss, rule.items))
        assert search.due == (len(found) < 4)
    assert found == [("tokens", True)] * 3 + [("tokens", False)] * 2


def test_rounding_of_a_small_loss() -> None:
    """A model that has learnt its data is not refused for float32's rounding."""
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (2, T))
    logits = 1e-3 * torch.randn(2, T, 7) + 13 * F.one_hot(labels, 7)
    loss = F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()) * (1 + 1e-3)
    assert loss < 1e-4
    rule = RuleSearch().compare(
        loss, {"logits": logits}, {"labels": labels}, None, smoothing=0.0, first="tokens"
    )
    assert rule.loss == "tokens"


class Bare(hf.Trainer):
    """As plain Trainer takes it."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return model(**inputs)["loss"]


class Open(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Tensor:
        return model(**inputs)["loss"]


@pytest.mark.parametrize("kind", [Bare, Open])
def test_compute_loss_of_fewer_arguments(tmp_path: Path, kind: type[hf.Trainer]) -> None:
    data = samples(2 * STEPS * N)
    args = trainer_of(Plain(), data, tmp_path, max_steps=2).args
    for loss in ("auto", "tokens"):
        callback = GNSCallback(**ALWAYS, loss=loss)
        trainer = kind(Plain(), args, train_dataset=data, callbacks=[callback])
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(data)
        if loss == "auto":
            with pytest.raises(ValueError, match=rf"{kind.__name__} .*GNSCallback\(loss="):
                trainer.train()
        else:
            trainer.train()
    plain = train(Plain(), data, tmp_path, max_steps=2)
    assert callback.compute() == plain.compute() and plain.compute().updates == 2


class Placed(Plain):
    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


def test_positions_of_padded_rows(tmp_path: Path) -> None:
    """Padded on the left, position 1 in the padding."""
    data = []
    for s in samples(2 * STEPS * N):
        mask = (s["labels"] != -100).long()
        positions = (mask.cumsum(0) - 1).masked_fill(mask == 0, 1)
        data.append({**s, "attention_mask": mask, "position_ids": positions})
    found = train(Placed(), data, tmp_path).compute()
    truth = by_hand(Plain(), data, causal=False, divided="window")
    assert found.noise_scale == pytest.approx(truth.noise_scale, rel=1e-5)


def test_refusals_by_name(tmp_path: Path) -> None:
    data = samples(2 * N)
    model = Plain()
    with pytest.raises(NotImplementedError, match="a second GNSCallback"):
        trainer_of(model, data, tmp_path, GNSCallback(**ALWAYS), GNSCallback(**ALWAYS)).train()
    trainer = trainer_of(model, data, tmp_path, GNSCallback(**ALWAYS))
    model._tp_size = 2  # as transformers marks a model loaded with tp_plan
    with pytest.raises(NotImplementedError, match=r"a layer spread over processes .*'tp': 2"):
        trainer.train()


class Freezes(hf.TrainerCallback):
    def __init__(self, gns_callback: GNSCallback, parameter: nn.Parameter) -> None:
        self.gns_callback, self.parameter = gns_callback, parameter

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.parameter.requires_grad_(False)
            self.gns_callback.gns.reset()


def test_freezing_during_training(tmp_path: Path) -> None:
    model, callback = Plain(), GNSCallback(**ALWAYS)
    data, freezes = samples(2 * STEPS * N), Freezes(callback, model.embed.weight)
    trainer_of(model, data, tmp_path, callback, freezes).train()
    found = callback.compute()
    assert found.updates == STEPS - 4 and list(found.per_module) == ["head"]
