# SPDX-License-Identifier: Apache-2.0
"""Changes that wait for a step of either size to end, beside the rules replayed step by step."""

import random

import pytest

from gnsfast.critical_batch import BatchSizeSchedule, exports
from gnsfast.critical_batch.schedule import aligned_changes

LENGTH = 10


def schedule_of(thresholds: list[tuple[int, int]], total: int = 4000) -> BatchSizeSchedule:
    return BatchSizeSchedule(thresholds, total, tokens_per_sample=LENGTH)


def olmo_cores(schedule: BatchSizeSchedule) -> list[tuple[int, int]]:
    """OLMo-core's own rule at every step: the latest target that is due, once the batches so far
    are a multiple of target / present size; its loader then counts batches of the new size.
    """
    size, tokens, batches, changes = schedule.thresholds[0][1], 0, 0, []
    while tokens < schedule.total_tokens:
        target = [to for at, to in schedule.thresholds if at <= tokens][-1]
        assert max(target, size) % min(target, size) == 0  # as OLMo-core's callback
        if target < size or (target > size and batches % (target // size) == 0):
            changes.append((tokens // LENGTH, target))
            batches, size = batches * size // target, target
        tokens, batches = tokens + size * LENGTH, batches + 1
    return changes


@pytest.mark.parametrize(
    ("thresholds", "late", "changes"),
    [
        ([(0, 4), (90, 16)], [1], [(16, 16)]),
        ([(0, 4), (50, 8), (70, 32)], [None, 6], [(32, 32)]),  # 8 waits, and is left out
        ([(0, 4), (50, 16), (90, 64)], [None, 13], [(64, 64)]),
        ([(0, 4), (50, 8), (100, 4)], [0, 0], [(8, 8), (16, 4)]),
        ([(0, 4), (90, 8), (100, 4)], [None, None], []),  # back to 4 before 8 is there
        ([(0, 4), (3950, 64)], [None], []),  # the run ends before
    ],
)
def test_olmo_core(
    thresholds: list[tuple[int, int]], late: list[int | None], changes: list[tuple[int, int]]
) -> None:
    schedule = schedule_of(thresholds)
    assert olmo_cores(schedule) == changes
    assert exports.olmo_core_late(schedule) == late


def test_any_schedule() -> None:
    rng = random.Random(0)
    left_out = 0
    for _ in range(2000):
        size, pairs = 2 ** rng.randrange(4), []
        for at in (0, *sorted(rng.sample(range(1, 5000), rng.randrange(1, 5)))):
            pairs.append((at, size))
            size = rng.choice([s for s in (1, 2, 4, 8, 16, 32, 64) if s != size])
        schedule = schedule_of(pairs)
        found = aligned_changes(schedule)
        made = [(c.samples, c.new) for c in found if c.samples is not None]
        assert made == olmo_cores(schedule), pairs
        left_out += len(found) > len(made)
    assert 200 < left_out < 1800


def test_olmo_core_cannot_leave_out_a_size_between() -> None:
    """From 4 to 12 to 6 would do, but 12 still waits when 6 is due."""
    with pytest.raises(ValueError, match="still trains 4 samples at 60 tokens, .*from 4 to 6"):
        exports.olmo_core(schedule_of([(0, 4), (50, 12), (60, 6)]))
    assert exports.olmo_core(schedule_of([(0, 4), (50, 12), (600, 6)]))["batch_sizes"][2] == 60
