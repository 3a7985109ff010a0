# SPDX-License-Identifier: Apache-2.0
"""Every sample once an epoch, in an order that no batch size changes."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gnsfast.critical_batch.control import ResizableBatchSampler, SampleStream

N = 11
ROWS = torch.arange(N)


def drawn(stream: SampleStream, *sizes: int) -> list[int]:
    return [i for n in sizes for i in stream.draw(n).tolist()]


def test_every_sample_once_an_epoch_in_new_orders() -> None:
    order = drawn(SampleStream(ROWS), 4 * N)
    epochs = [order[k : k + N] for k in range(0, 4 * N, N)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    others = drawn(SampleStream(ROWS, seed=1), 4 * N)
    assert not {tuple(e) for e in epochs} & {tuple(others[k : k + N]) for k in range(0, 4 * N, N)}
    assert drawn(SampleStream(ROWS, shuffle=False), N + 3) == [*range(N), 0, 1, 2]


@pytest.mark.parametrize("sizes", [(4, 4), (1,) * 8, (7, 1)])
def test_cuts_change_nothing(sizes: tuple[int, ...]) -> None:
    whole = SampleStream(ROWS)
    expected = drawn(whole, 6, 8, 30)
    assert drawn(SampleStream(ROWS), 6, *sizes, 30) == expected  # 8 of them over the epoch's end


def test_the_global_random_state_is_not_touched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = drawn(SampleStream(ROWS), N)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert drawn(SampleStream(ROWS), N) == first


def test_ranks_share_a_draw() -> None:
    expected = drawn(SampleStream(ROWS), 24)
    ranks = [SampleStream(ROWS, rank=r, world_size=4) for r in range(4)]
    shares = [drawn(stream, 8, 16) for stream in ranks]
    assert [shares[k % 4][k // 4] for k in range(24)] == expected
    cut = SampleStream(ROWS, rank=2, world_size=4)
    assert drawn(cut, *(4,) * 6) == shares[2]
    with pytest.raises(ValueError, match="n=6 must be a multiple of world_size=4"):
        cut.draw(6)
    resumed = SampleStream(ROWS, rank=1, world_size=2)  # another number of processes
    resumed.load_state_dict(ranks[0].state_dict())
    assert drawn(resumed, 6) == drawn(SampleStream(ROWS), 30)[24:][1::2]


def test_state() -> None:
    stream = SampleStream(ROWS, seed=3)
    drawn(stream, 8)
    state = json.loads(json.dumps(stream.state_dict()))
    assert state["position"] == 8
    later = drawn(stream, 5, 20)
    resumed = SampleStream(ROWS, seed=3)
    resumed.load_state_dict(state)
    assert drawn(resumed, 5, 20) == later
    for other, message in (
        (SampleStream(ROWS, seed=4), "saved with seed=3, but here seed is 4"),
        (SampleStream(ROWS[:-1], seed=3), "num_samples=11, but here num_samples is 10"),
        (SampleStream(ROWS, seed=3, shuffle=False), "shuffle=True"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="format=2"):
        resumed.load_state_dict(state | {"format": 2})
    with pytest.raises(ValueError, match="position must be a whole number"):
        resumed.load_state_dict(state | {"position": -1})


class Reads(Dataset[Any]):
    """Counts what is read, and fails once if told to."""

    def __init__(self) -> None:
        self.read: Counter[int] = Counter()
        self.fails = False

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, int]:
        if self.fails:
            raise OSError("disk")
        self.read[i] += 1
        return {"x": i, "y": 2 * i}


def test_batches_are_collated() -> None:
    batch = SampleStream(Reads(), shuffle=False).draw(3)
    assert batch["x"].tolist() == [0, 1, 2] and batch["y"].tolist() == [0, 2, 4]
    assert SampleStream(ROWS, collate=len).draw(5) == 5
    x, y = SampleStream(TensorDataset(ROWS, ROWS + 1), shuffle=False).draw(2)
    assert x.tolist() == [0, 1] and y.tolist() == [1, 2]

    class Many(Reads):
        def __getitems__(self, chosen: list[int]) -> list[dict[str, int]]:
            return [{"x": -i} for i in chosen]

    assert SampleStream(Many(), shuffle=False).draw(3)["x"].tolist() == [0, -1, -2]


def test_a_draw_that_raises_loses_no_sample() -> None:
    data = Reads()
    stream = SampleStream(data)
    data.fails = True
    with pytest.raises(OSError):
        stream.draw(4)
    data.fails = False
    stream.draw(N)
    assert set(data.read.values()) == {1} and len(data.read) == N


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SampleStream([]), "num_samples must be a whole number of at least 1, not 0"),
        (lambda: SampleStream(ROWS, seed=-1), "seed"),
        (lambda: SampleStream(ROWS, rank=2, world_size=2), "rank=2 must be from 0 to 1"),
        (lambda: SampleStream(ROWS).draw(0), "n must be a whole number of at least 1"),
        (lambda: SampleStream(ROWS).draw(2.5), "n must be a whole number"),
        (lambda: ResizableBatchSampler(N, 0), "batch_size"),
        (
            lambda: ResizableBatchSampler(N, 3, world_size=2),
            "batch_size=3 must be a multiple of world_size=2",
        ),
    ],
)
def test_arguments_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_dataset_without_a_length() -> None:
    with pytest.raises(TypeError, match="__len__ and __getitem__, and generator lacks one"):
        SampleStream(i for i in range(3))


def test_sampler_follows_the_stream_at_any_size() -> None:
    expected = drawn(SampleStream(ROWS, seed=2), 30)
    sampler = ResizableBatchSampler(N, 4, seed=2)
    loader = iter(DataLoader(ROWS, batch_sampler=sampler))
    batches = [next(loader).tolist()]
    sampler.batch_size = 8
    batches += [next(loader).tolist(), next(loader).tolist()]
    sampler.batch_size = 10
    batches.append(next(loader).tolist())
    assert [len(b) for b in batches] == [4, 8, 8, 10] and sum(batches, []) == expected
    with pytest.raises(ValueError, match="batch_size"):
        sampler.batch_size = 0
    ranks = [ResizableBatchSampler(N, 6, seed=2, rank=r, world_size=2) for r in range(2)]
    first, second = (next(iter(rank)) for rank in ranks)
    assert [first, second] == [expected[0:6:2], expected[1:6:2]]


def test_workers_draw_ahead_and_a_state_counts_what_was_consumed() -> None:
    expected = drawn(SampleStream(ROWS), 60)
    sampler = ResizableBatchSampler(N, 4)
    loader = iter(DataLoader(ROWS, batch_sampler=sampler, num_workers=1, prefetch_factor=3))
    used = next(loader).tolist()
    sampler.batch_size = 8
    ahead = sampler.position - len(used)
    assert ahead == 3 * 4  # drawn already, at the old size
    sizes = []
    for _ in range(5):
        batch = next(loader).tolist()
        sizes.append(len(batch))
        used += batch
    assert sizes == [4, 4, 4, 8, 8] and used == expected[: len(used)]
    state = json.loads(json.dumps(sampler.state_dict(consumed=len(used))))
    del loader
    resumed = ResizableBatchSampler(N, 8)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == expected[len(used) : len(used) + 8]
    with pytest.raises(ValueError, match="consumed=1000 is more than"):
        sampler.state_dict(consumed=1000)
    with pytest.raises(ValueError, match="seed=0, but here seed is 7"):
        ResizableBatchSampler(N, 8, seed=7).load_state_dict(state)
