# SPDX-License-Identifier: Apache-2.0
"""Samples in an order that does not depend on the batch size, so that the batch may grow.

Both classes hand out one endless row of samples: epoch after epoch, each in an order of its own
that the seed decides. A batch is the next piece of it, also over the end of an epoch, so how a run
was cut into batches changes no later sample, and one number says where it stands.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from gnsfast.arguments import whole

FORMAT = 1


class _Order:
    """The endless row of sample numbers, and this process's share of a piece of it."""

    def __init__(
        self, num_samples: int, seed: int, shuffle: bool, rank: int, world_size: int
    ) -> None:
        self.num_samples, self.seed = whole("num_samples", num_samples), whole("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.rank, self.world_size = whole("rank", rank, 0), whole("world_size", world_size)
        if self.rank >= self.world_size:
            raise ValueError(f"rank {rank} is not one of world_size={world_size} processes")
        self._epoch, self._order = -1, torch.empty(0)

    def whole_share(self, name: str, n: int) -> int:
        """``n`` samples over all processes, as an int that divides among them."""
        if (n := whole(name, n)) % self.world_size:
            raise ValueError(f"{name}={n} does not divide among world_size={self.world_size}")
        return n

    def share(self, start: int, n: int) -> list[int]:
        """Of the samples ``start`` to ``start + n`` of the row those of this process."""
        places = range(start + self.rank, start + n, self.world_size)
        return [self._at(place) for place in places]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self.num_samples)
        if not self.shuffle:
            return within
        if epoch != self._epoch:
            # Hashed: with seed + epoch two runs would have the same orders, an epoch apart.
            mixed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
            generator = torch.Generator().manual_seed(mixed)
            self._order = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        return int(self._order[within])

    def state(self, position: int) -> dict[str, Any]:
        return {"format": FORMAT, "position": position, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}

    def position(self, state: dict[str, Any]) -> int:
        """Where a state stands; ValueError for one of another row."""
        for name, ours in {"format": FORMAT, **self._identity()}.items():
            if (theirs := state.get(name)) != ours:
                raise ValueError(f"the state has {name}={theirs!r}, this one has {ours!r}")
        return whole("position", state.get("position"), 0)


class SampleStream:
    """The next samples of a dataset, as many at a time as asked for.

    ``draw(4)`` twice gives the samples of ``draw(8)``. It reads in the caller's process; for worker
    processes take a ``DataLoader`` with ``ResizableBatchSampler``.

    Args:
        dataset: has a length and items, as ``torch.utils.data.Dataset`` or a tensor [samples, ...].
        seed: of the orders of all epochs; the global random state is not touched.
        collate: makes a batch of a list of samples, by default as a ``DataLoader`` does.
        rank, world_size: this process's share is every ``world_size``-th sample. A saved position
            is that of all processes, so a run may go on with another number of them.

    Raises:
        ValueError: for an empty dataset, or a rank outside of the world.
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
            raise TypeError(f"{type(dataset).__name__} has no length and items to draw from")
        self.dataset, self.collate = dataset, collate or default_collate
        self._order = _Order(len(dataset), seed, shuffle, rank, world_size)
        self.position = 0

    def draw(self, n: int) -> Any:
        """The next ``n`` samples over all processes: this one's share of them as one batch.

        A draw that raises leaves the position where it was.
        """
        n = self._order.whole_share("n", n)
        chosen = self._order.share(self.position, n)
        batch = self.collate(_items(self.dataset, chosen))
        self.position += n
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in; plain types."""
        return self._order.state(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the sample after the last one drawn.

        Raises:
            ValueError: for a dataset of another length, another seed or another order.
        """
        self.position = self._order.position(state)


def _items(dataset: Any, chosen: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # as DataLoader does: one read of many
        return list(dataset.__getitems__(list(chosen)))
    return [dataset[i] for i in chosen]


class ResizableBatchSampler:
    """Batches of sample numbers for ``DataLoader(batch_sampler=...)``, of a size that may change.

    The order is ``SampleStream``'s, and iteration has no end. ``batch_size``, samples over all
    processes, may be set at any time and holds for the next batch that is *drawn*: worker processes
    are ahead of training by up to ``num_workers * prefetch_factor`` batches, which keep their size.
    Count the samples of a step by what arrived, not by what was asked for.

    For the same reason a state is that of the samples *consumed*, which only the loop knows. To
    grow the batch by accumulation nothing here changes: load micro-batches of one size.

    Raises:
        ValueError: for counts that cannot be, or a batch that does not divide among processes.

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
        self._order = _Order(num_samples, seed, shuffle, rank, world_size)
        self.batch_size = batch_size
        self.position = 0

    @property
    def batch_size(self) -> int:
        """Samples of the next batch to be drawn, over all processes."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batch_size = self._order.whole_share("batch_size", batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """From ``position`` on. An iterator that is dropped takes with it what workers had drawn
        ahead: load a state before the next one starts.
        """
        while True:
            start, n = self.position, self._batch_size
            self.position += n
            yield self._order.share(start, n)

    def state_dict(self, *, consumed: int) -> dict[str, Any]:
        """Where training stands.

        Args:
            consumed: samples that training has used since its first step, over all processes and
                resumptions: tokens trained over tokens per sample.

        Raises:
            ValueError: for more than were drawn.
        """
        if (consumed := whole("consumed", consumed, 0)) > self.position:
            raise ValueError(f"consumed={consumed}, but only {self.position} samples were drawn")
        return self._order.state(consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last sample consumed; iterators that are open go on from there too.

        Raises:
            ValueError: for another number of samples, another seed or another order.
        """
        self.position = self._order.position(state)
