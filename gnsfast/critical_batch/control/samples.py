# SPDX-License-Identifier: Apache-2.0
"""Samples in an order that does not depend on the batch size, so that the batch may grow.

Both classes return one endless sequence of samples, epoch after epoch. The seed determines the
order of each epoch. A batch is the next piece of the sequence and may cross the end of an epoch. So
a change of the batch size does not change which samples follow, and one number is the whole
position.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from gnsfast.arguments import whole_number

FORMAT = 1


class _Sequence:
    """The endless sequence of sample numbers, a position in it, and this process's share."""

    def __init__(
        self, num_samples: int, seed: int, shuffle: bool, rank: int, world_size: int
    ) -> None:
        self.num_samples = whole_number("num_samples", num_samples)
        self.seed = whole_number("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.rank = whole_number("rank", rank, 0)
        self.world_size = whole_number("world_size", world_size)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank={rank} must be from 0 to {world_size - 1}, below world_size={world_size}"
            )
        self._epoch, self._order = -1, torch.empty(0)
        self.position = 0

    def _multiple(self, name: str, n: int) -> int:
        """``n`` samples over all processes as an int, which must be a multiple of their number."""
        if (n := whole_number(name, n)) % self.world_size:
            raise ValueError(f"{name}={n} must be a multiple of world_size={self.world_size}")
        return n

    def _share(self, start: int, n: int) -> list[int]:
        """This process's samples among those from ``start`` to ``start + n``."""
        places = range(start + self.rank, start + n, self.world_size)
        return [self._at(place) for place in places]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self.num_samples)
        if not self.shuffle:
            return within
        if epoch != self._epoch:
            # Hashed: under seed + epoch, seeds 0 and 1 would share orders, one epoch apart.
            mixed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
            generator = torch.Generator().manual_seed(mixed)
            self._order = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        return int(self._order[within])

    def _state(self, position: int) -> dict[str, Any]:
        own = {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}
        return {"format": FORMAT, "position": position, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sample after the last one consumed, also in iterators that are already
        open.

        Raises:
            ValueError: for a state with another number of samples, seed or ``shuffle``.
        """
        position = whole_number("position", state.get("position"), 0)
        for name, ours in self._state(position).items():
            if (theirs := state.get(name)) != ours:
                raise ValueError(
                    f"the state was saved with {name}={theirs!r}, but here {name} is {ours!r}: the "
                    "order of the samples would differ"
                )
        self.position = position


class SampleStream(_Sequence):
    """The next samples of a dataset, any number at a time.

    ``draw(4)`` twice gives the samples of ``draw(8)``. It reads in the caller's process; for worker
    processes use a ``DataLoader`` with ``ResizableBatchSampler``.

    Args:
        dataset: with a length and items: a ``torch.utils.data.Dataset`` or a tensor [samples, ...].
        seed: determines the order of every epoch; the global random state is not used.
        collate: makes a batch of a list of samples, by default as a ``DataLoader`` does.
        rank, world_size: this process takes every ``world_size``-th sample. A saved position is
            that of all processes together, so a run may be resumed with another number of them.

    Raises:
        ValueError: for an empty dataset, or a rank that is not below ``world_size``.
        TypeError: for a dataset without a length.

    >>> from gnsfast.critical_batch import SampleStream
    >>> stream = SampleStream(torch.arange(5), shuffle=False)
    >>> stream.draw(3), stream.draw(4)
    (tensor([0, 1, 2]), tensor([3, 4, 0, 1]))
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"a dataset needs __len__ and __getitem__, and {type(dataset).__name__} lacks one"
            )
        super().__init__(len(dataset), seed, shuffle, rank, world_size)
        self.dataset, self.collate = dataset, collate or default_collate

    def draw(self, n: int) -> Any:
        """This process's share of the next ``n`` samples over all processes, as one batch.

        A draw that raises does not change the position.
        """
        n = self._multiple("n", n)
        batch = self.collate(_items(self.dataset, self._share(self.position, n)))
        self.position += n
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position and the sequence it belongs to, as plain types."""
        return self._state(self.position)


def _items(dataset: Any, chosen: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # one read of many samples, as in DataLoader
        return list(dataset.__getitems__(list(chosen)))
    return [dataset[i] for i in chosen]


class ResizableBatchSampler(_Sequence):
    """Batches of sample numbers for ``DataLoader(batch_sampler=...)``, of a size that may change.

    The order is that of ``SampleStream``, and iteration has no end. ``batch_size``, in samples over
    all processes, may be set at any time and holds for the next batch that is *drawn*. Worker
    processes are ahead of training by up to ``num_workers * prefetch_factor`` batches, which keep
    their size, so count the samples of a step by the batches that arrive.

    For the same reason a state holds the samples that training has *consumed*, which only the loop
    knows. A batch that grows by gradient accumulation needs no change of ``batch_size``: load
    micro-batches of one size.

    Raises:
        ValueError: for an invalid count, or a batch size that is not a multiple of ``world_size``.

    >>> from gnsfast.critical_batch import ResizableBatchSampler
    >>> sampler = ResizableBatchSampler(1000, 2)
    >>> loader = iter(torch.utils.data.DataLoader(torch.arange(1000), batch_sampler=sampler))
    >>> len(next(loader))
    2
    >>> sampler.batch_size = 4
    >>> len(next(loader))
    4
    >>> sampler.state_dict(consumed=6)["position"]
    6
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(num_samples, seed, shuffle, rank, world_size)
        self.batch_size = batch_size

    @property
    def batch_size(self) -> int:
        """Samples of the next batch to be drawn, over all processes."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batch_size = self._multiple("batch_size", batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from ``position`` on.

        Batches that workers had drawn ahead are lost with their iterator: load a state before the
        next iterator starts.
        """
        while True:
            start, n = self.position, self._batch_size
            self.position += n
            yield self._share(start, n)

    def state_dict(self, *, consumed: int) -> dict[str, Any]:
        """The position of training, as plain types.

        Args:
            consumed: samples that training has used since its first step, over all processes and
                resumptions: tokens trained divided by tokens per sample.

        Raises:
            ValueError: where fewer samples were drawn.
        """
        if (consumed := whole_number("consumed", consumed, 0)) > self.position:
            raise ValueError(
                f"consumed={consumed} is more than the {self.position} samples that were drawn"
            )
        return self._state(consumed)
