# SPDX-License-Identifier: Apache-2.0
"""``TrainerBatches``: the micro-batches of a Trainer, from any position of its data."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderShard,
    SkipBatchSampler,
    skip_first_batches,
)
from torch.utils.data import BatchSampler, IterableDataset

from gnsfast.critical_batch.branches import random_state, set_random_state


class TrainerBatches:
    """An iterator over micro-batches; after the last one of an epoch comes the next epoch's first.

    Equals iterating the ``get_train_dataloader()`` of a Trainer on one process as ``train()`` does,
    which fetches each micro-batch when the one before is handed out. Random numbers are the same,
    also after ``load_state_dict``: those of the order and, with ``num_workers=0``, of datasets and
    collators (masked language models). Workers that draw random numbers of their own get the same
    order, but not the same numbers.

    Args:
        loader: what ``trainer.get_train_dataloader()`` returned.
        device: ``trainer.args.device``, whose generator is saved too.

    Raises:
        NotImplementedError: for data without a position, for micro-batches of unequal sizes.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        _refuse(loader)
        self.loader, self.device = loader, device
        self.sampler = loader.batch_sampler.sampler
        self.micro_batch: int = loader.batch_sampler.batch_size
        self.per_epoch = len(loader)
        dropped = loader.batch_sampler.drop_last
        self.samples_per_epoch = self.per_epoch * self.micro_batch if dropped else len(self.sampler)
        self.epoch = self.taken = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def left(self) -> int:
        """Micro-batches of the epoch that remain."""
        return self.per_epoch - self.taken

    @property
    def samples(self) -> int:
        """Samples before the position."""
        return self.samples_at(self.epoch, self.taken)

    def samples_at(self, epoch: int, taken: int) -> int:
        """Samples before another position: ``taken`` is less than ``per_epoch``."""
        return epoch * self.samples_per_epoch + taken * self.micro_batch

    def seek(self, epoch: int, taken: int) -> None:
        """Go to micro-batch ``taken`` of an epoch whose order is drawn now."""
        self.epoch, self.taken, self._iterator = epoch, taken, None
        if taken:
            self._start(skip_first_batches(self.loader, taken))

    def skip_to(self, epoch: int, taken: int) -> None:
        """Go forward to a micro-batch and load none of those between. It moves the generators.

        In an epoch that has begun the order stays; that of a later one without a seed is a new one.
        """
        if self._iterator is not None and epoch == self.epoch:
            self.load_state_dict({**self.state_dict(), "taken": taken})
        else:
            self.seek(epoch, taken)

    def __iter__(self) -> "TrainerBatches":
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._start(self.loader)
        batch = self._ahead
        self.taken += 1
        if self.left:
            self._fetch()
        else:
            self.epoch, self.taken, self._iterator = self.epoch + 1, 0, None
        return batch

    def _start(self, loader: Any) -> None:
        self.loader.set_epoch(self.epoch)
        self._before_order = random_state({self.device})
        self._iterator = iter(loader.base_dataloader)
        self._fetch()

    def _fetch(self) -> None:
        assert self._iterator is not None
        self._before_ahead = random_state({self.device})
        self._ahead = next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the generators from before the order and the next batch were drawn."""
        state: dict[str, Any] = {"epoch": self.epoch, "taken": self.taken}
        if self._iterator is not None:
            state |= {"before_order": self._before_order, "before_ahead": self._before_ahead}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of ``state_dict()``. It moves the generators: set them afterwards."""
        self.epoch, self.taken, self._iterator = state["epoch"], state["taken"], None
        if not self.taken:
            return
        set_random_state(state["before_order"], {self.device})
        loader = skip_first_batches(self.loader, self.taken)
        skipping = loader.batch_sampler
        assert isinstance(skipping, SkipBatchSampler)
        skipping.batch_sampler = _SetsState(
            skipping.batch_sampler, self.taken, state["before_ahead"], self.device
        )
        self._start(loader)
        self._before_ahead = state["before_ahead"]


class _SetsState(BatchSampler):
    """Sets the generators when the order is drawn, and just before a micro-batch is fetched."""

    def __init__(
        self, batch_sampler: BatchSampler, index: int, state: dict[str, Any], device: torch.device
    ) -> None:
        self.batch_sampler, self.index = batch_sampler, index
        self.state, self.device = state, device

    def __iter__(self) -> Iterator[list[int]]:
        for k, indices in enumerate(self.batch_sampler):
            if k == self.index:
                set_random_state(self.state, {self.device})
            yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)


def _refuse(loader: Any) -> None:
    """Raise for data whose position cannot be restored."""
    reason = None
    kind = type(getattr(loader, "batch_sampler", None)).__name__
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        reason = "an IterableDataset, which has no position: use a dataset with a length"
    elif type(loader) is not DataLoaderShard:
        reason = (
            f"a get_train_dataloader() that returns a {type(loader).__name__}: return "
            "self.accelerator.prepare(DataLoader(...)), as Trainer does"
        )
    elif kind != "BatchSampler":
        reason = f"a {kind} in the data loader, because its batches may differ in size: remove it"
    elif loader.persistent_workers:
        reason = (
            "dataloader_persistent_workers, which draw random numbers in the first epoch only: set "
            "dataloader_persistent_workers=False"
        )
    if reason is not None:
        raise NotImplementedError(f"TrainerRun does not support {reason}")
    if len(loader) == 0:
        raise ValueError(
            f"TrainerRun: the dataset of {len(loader.dataset)} samples has no full micro-batch, "
            "and dataloader_drop_last drops the rest: use a smaller per_device_train_batch_size"
        )
