# SPDX-License-Identifier: Apache-2.0
"""A small model trained with a growing batch, stopped in the middle, goes on to the same bits."""

import io
from typing import Any

import pytest
import torch
from noise_cases import draw, make
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import gnsfast
from gnsfast.critical_batch.control import BatchSizeController, SampleStream, wsd

MICRO, LENGTH, TOTAL = 4, 5, 6000
[(X, Y)] = draw(1, 100)  # so that an epoch ends in the middle of a step


class Run:
    """All that a checkpoint holds."""

    def __init__(self) -> None:
        self.model = make()
        self.gns = gnsfast.GradientNoiseScale(self.model, window=16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.controller = BatchSizeController(
            8,
            factor=20.0,  # makes the batch grow soon
            tokens_per_sample=LENGTH,
            total_tokens=TOTAL,
            max_batch_size=32,
            check_every=100,
            betas="half_life",
            micro_batch=MICRO,
        )
        shape = wsd(TOTAL, warm_up=500, decay=1000)
        self.scheduler = LambdaLR(self.optimizer, self.controller.lr_lambda(shape))
        self.stream = SampleStream(TensorDataset(X, Y), seed=9)
        self.rates: list[tuple[int, int, float]] = []  # tokens, batch size, learning rate

    def train(self, until: int) -> None:
        while self.controller.tokens < until:
            self.step()

    def step(self) -> None:
        parts, tokens = self.controller.accumulation, self.controller.tokens
        [group] = self.optimizer.param_groups
        self.rates.append((tokens, self.controller.batch_size, group["lr"]))
        with self.gns.update():
            for _ in range(parts):
                x, y = self.stream.draw(MICRO)
                with self.gns.microbatch(MICRO, scale=1 / parts):
                    loss = torch.nn.functional.cross_entropy(self.model(x), y)
                    (loss / parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        trained = tokens + self.controller.batch_tokens
        decision = self.controller.update(trained, self.gns.compute)
        self.scheduler.step()
        if decision is not None:
            self.controller.apply(decision, self.optimizer)

    def parts(self) -> dict[str, Any]:
        names = ("model", "gns", "optimizer", "controller", "scheduler", "stream")
        return {name: getattr(self, name) for name in names}

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])


@pytest.fixture(scope="module")
def whole() -> Run:
    run = Run()
    run.train(TOTAL)
    return run


def test_grows_with_all_that_belongs_to_it(whole: Run) -> None:
    changes = [(d.old, d.new) for d in whole.controller.decisions if d.old != d.new]
    assert changes == [(8, 16), (16, 32)]
    assert whole.stream.position * LENGTH == whole.controller.tokens
    [group] = whole.optimizer.param_groups
    assert group["betas"] == (0.9, pytest.approx(0.999**4))
    half = Run()
    half.load(whole.saved())
    assert half.scheduler.get_last_lr() == [group["lr"]]


@pytest.mark.parametrize("cut", [40, 2000])
def test_resumed_to_the_same_bits(whole: Run, cut: int) -> None:
    first, second = Run(), Run()
    first.train(cut)
    second.load(first.saved())
    second.train(TOTAL)
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs)
    assert repr(second.controller.decisions) == repr(whole.controller.decisions)  # they hold NaN
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_learning_rate_is_a_shape_in_tokens_times_the_factor(whole: Run) -> None:
    shape = wsd(TOTAL, warm_up=500, decay=1000)
    assert {batch for _, batch, _ in whole.rates} == {8, 16, 32}
    for tokens, batch, rate in whole.rates:
        expected = 0.01 * shape(tokens) * (batch / 8) ** 0.5
        assert rate == pytest.approx(expected, rel=1e-12, abs=1e-15)
