# SPDX-License-Identifier: Apache-2.0
"""A schedule that is trained: the steps that it counts, and what moves with the batch."""

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from controller_cases import make

from gnsfast.critical_batch import BatchSizeSchedule, ScheduledBatchSize
from gnsfast.critical_batch.control import cosine

LENGTH = 10
CASES = [
    [(0, 4)],
    [(0, 4), (200, 8), (480, 16)],
    [(0, 4), (201, 12)],
    [(0, 4), (1, 8), (2, 16)],  # one is passed by a single step
    [(0, 16), (300, 8), (700, 4)],  # shrinks
    [(0, 4), (5000, 8)],  # beyond the end
]


def schedule_of(thresholds: list[tuple[int, int]], total: int = 2000) -> BatchSizeSchedule:
    return BatchSizeSchedule(thresholds, total, tokens_per_sample=LENGTH)


def train(batch: ScheduledBatchSize, total: int = 2000) -> list[tuple[int, float]]:
    """A loop's steps from where the batch is: sizes, and factors of the learning rate."""
    steps = []
    while batch.tokens < total:
        steps.append((batch.batch_size, batch.lr_factor))
        batch.update(batch.tokens + batch.batch_tokens)
    return steps


@pytest.mark.parametrize("thresholds", CASES)
def test_steps_are_those_that_the_schedule_counts(thresholds: list[tuple[int, int]]) -> None:
    schedule = schedule_of(thresholds)
    batch = ScheduledBatchSize(schedule, micro_batch=2, data_parallel=2)
    steps = train(batch)
    assert [size for size, _ in steps] == [
        stage.batch_size for stage in schedule.stages for _ in range(stage.steps)
    ]
    tokens = 0
    for size, factor in steps:
        assert factor == schedule.lr_factor_at(tokens)
        tokens += size * LENGTH
    assert BatchSizeSchedule.from_decisions(
        batch.decisions or [{"tokens": 0, "old": 4, "new": 4}],
        total_tokens=2000,
        tokens_per_sample=LENGTH,
    ).steps == len(steps)


def test_merrill() -> None:
    """The schedule of OLMo 1B: 89,229 steps, with a learning rate of √2 and 2 times the first."""
    olmo = BatchSizeSchedule([(0, 1024), (168e9, 2048), (503e9, 4096)], 658e9, 4096)
    batch = ScheduledBatchSize(olmo, data_parallel=64, micro_batch=4)
    steps = train(batch, 658 * 10**9)
    assert len(steps) == 89_229 and dict(steps) == {1024: 1.0, 2048: math.sqrt(2), 4096: 2.0}
    assert [d.reason for d in batch.decisions] == [
        "the schedule has 2,048 samples from 168B tokens on",
        "the schedule has 4,096 samples from 503B tokens on",
    ]


def test_hyperparameters_follow() -> None:
    batch = ScheduledBatchSize(schedule_of(CASES[1]), betas="half_life", weight_decay="timescale")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    batch.check_optimizer(optimizer)
    for tokens in (200, 480):
        decision = batch.update(tokens)
        assert decision is not None
        batch.apply(decision, optimizer)
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.02) and group["weight_decay"] == pytest.approx(0.2)
    assert group["betas"] == (0.9, pytest.approx(0.99**4))
    rate = ScheduledBatchSize(schedule_of(CASES[1]))
    shape = rate.lr_lambda(cosine(2000))
    rate.update(480)
    assert shape(0) == pytest.approx(2 * cosine(2000)(480))


def test_an_optimizer_that_could_not_follow_to_the_end() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(0.7, 0.99))
    with pytest.raises(ValueError, match="does not allow a batch 4 times as large"):
        ScheduledBatchSize(schedule_of(CASES[1]), betas="sde").check_optimizer(optimizer)


def test_stride_is_where_both_sizes_end_a_step() -> None:
    batch = ScheduledBatchSize(schedule_of([(0, 4), (100, 12), (200, 16)]), micro_batch=2)
    assert [batch.stride(tokens) for tokens in (0, 99, 100, 200)] == [2, 2, 6, 8]
    batch.update(120)
    assert [batch.stride(tokens) for tokens in (120, 200)] == [6, 24]


def test_resumed_at_every_step() -> None:
    whole = ScheduledBatchSize(schedule_of(CASES[1]), micro_batch=4)
    expected = train(whole)
    for cut in range(0, 2000, 40):
        first = ScheduledBatchSize(schedule_of(CASES[1]), micro_batch=4)
        begun = train(first, cut)
        second = ScheduledBatchSize(schedule_of(CASES[1]), micro_batch=2, data_parallel=2)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert begun + train(second) == expected
        assert second.state_dict()["decisions"] == whole.state_dict()["decisions"]
        assert second.metrics() == {"batch/size": float(expected[-1][0])}


def test_other_states_are_refused_by_name() -> None:
    state = ScheduledBatchSize(schedule_of(CASES[1])).state_dict()
    other = ScheduledBatchSize(schedule_of([(0, 4), (200, 8), (520, 16)]))
    with pytest.raises(
        ValueError, match=r"the state was saved with thresholds=.*change=\['thresholds'\]"
    ):
        other.load_state_dict(state)
    other.load_state_dict(state, change=["thresholds"])
    for change in ({"kind": "batch size controller"}, {"format": 0}):
        with pytest.raises(ValueError, match="reads a 'scheduled batch size' of format 1"):
            other.load_state_dict(state | change)
    linear = ScheduledBatchSize(schedule_of(CASES[1]), lr="linear")
    with pytest.raises(
        ValueError, match="the state was saved with lr='sqrt', but this controller has lr='linear'"
    ):
        linear.load_state_dict(state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro_batch": 3}, "a batch size of 4 cannot be split into micro-batches of 3"),
        ({"micro_batch": 8}, "a multiple of 8"),
        ({"data_parallel": 3}, "batch_size=4 must be a multiple of data_parallel=3"),
        ({"lr": "log"}, "lr must be"),
        ({"lr": "none", "weight_decay": "timescale"}, "pass lr='keep'"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledBatchSize(schedule_of(CASES[1]), **options)


def test_every_size_divides_into_micro_batches() -> None:
    with pytest.raises(ValueError, match="a batch size of 6 cannot be split into micro-batches"):
        ScheduledBatchSize(schedule_of([(0, 4), (100, 6)]))


def test_tokens_that_cannot_be() -> None:
    batch = ScheduledBatchSize(schedule_of(CASES[1]))
    batch.update(400)
    with pytest.raises(ValueError, match="tokens went back from 400 to 399"):
        batch.update(399)
    with pytest.raises(ValueError, match="not steps or samples"):
        batch.update(401)


def test_a_floor_of_beta2_has_no_way_back() -> None:
    """From 0.95, which 0.99 meets, half the batch would be 0.9747: refused before the first step,
    by name; without a floor on the way, or with growth alone, it goes on.
    """
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(0.9, 0.99))
    for sizes, refused in (((8, 64), False), ((8, 16, 8), False), ((8, 64, 8), True)):
        pairs = [(1000 * n, size) for n, size in enumerate(sizes)]
        batch = ScheduledBatchSize(BatchSizeSchedule(pairs, 9000, 10), betas="half_life")
        said = "64 samples puts beta2 on its floor.*betas='keep'"
        with pytest.raises(ValueError, match=said) if refused else nullcontext():
            batch.check_optimizer(optimizer)
    optimizer.param_groups[0]["betas"] = (0.9, 0.96)
    make(betas="half_life").check_optimizer(optimizer)
    with pytest.raises(ValueError, match="32 samples puts beta2 on its floor"):
        make(betas="half_life", min_batch_size=16).check_optimizer(optimizer)
