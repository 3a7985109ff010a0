# SPDX-License-Identifier: Apache-2.0
"""Keeps the samples with the largest gradients: who makes the spikes."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.estimator.records import Pass, Update, Window, kept
from gnsfast.estimator.side import Block, Setup, Side
from gnsfast.following import Facts
from gnsfast.parallel import gathered

NAMED = 3
"""In so many parameters a sample is said to stand out."""


class LargestSample(NamedTuple):
    """A sample with a large gradient.

    ``id`` is what ``microbatch(ids=...)`` named it, else (update, process, micro-batch, place), all
    from 0. ``update`` is the number of its update. ``sqnorm`` is the squared norm of its share of
    the gradient, ``share`` its part in the sum of these over the update, ``times_median`` how many
    times as large it is as the median of its update on its process. ``parameters`` are those in
    which it exceeds the median sample of its micro-batch by most.
    """

    id: Any
    update: int
    sqnorm: float
    share: float
    times_median: float
    parameters: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """One JSON object. An id that JSON has no form for becomes its text."""
        return self._asdict() | {"id": plain(self.id)}


class Candidates(NamedTuple):
    """What a pass left: the names of its samples and their squared norms, the places of the K
    largest, and by how much these exceed the median of all in each parameter.
    """

    ids: Any
    sqnorm_B: Tensor
    place_K: Tensor
    excess_KP: Tensor


class Record(NamedTuple):
    """What is kept of an update: the names of the samples of each pass, and a row for each of the
    largest: its squared norm, its pass and its place there, and by how much it stands out in each
    parameter.
    """

    update: int
    total: Tensor
    median: Tensor
    ids: list[Any]
    rows_K: Tensor


class Largest(Side):
    """The largest samples of the newest updates. They stay on the device until somebody asks."""

    name = "largest"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        settings, processes = setup.settings, setup.processes
        if processes.tensor > 1:
            raise ValueError(
                "keep_largest needs all norms of a sample on one process, and with tensor "
                "parallelism each has a part. Leave keep_largest out."
            )
        self._world, self._rank = processes.world, setup.rank
        self.width = self._world + 1  # the largest of each process, and the sum of all
        self._records: deque[Record] = deque(maxlen=settings.window)
        self._known: dict[int, tuple[float, list[LargestSample]]] = {}  # those of all processes
        self._loaded_share = math.nan
        self._block = Block(0, 0)

    def open(self, block: Block) -> Mapping[str, Facts]:
        """Raises ValueError if ids have no order, or are not as many as samples."""
        if isinstance(block.ids, (set, frozenset, Mapping, str)):
            raise ValueError("ids must be a list or a tensor with a name for each sample, in order")
        if block.ids is not None and len(block.ids) != block.num_samples:
            raise ValueError(
                f"ids has length {len(block.ids)}, but num_samples is {block.num_samples}"
            )
        self._block = block
        return {}

    def passed(self) -> Candidates:
        slab, block = self.setup.slab, self._block
        B, device = block.num_samples, self.setup.device
        rows = [slab.rows_of(leaf)[:1, :B].to(device) for leaf in slab.leaves]
        rows_PB = torch.cat(rows) if rows else torch.zeros(0, B, device=device)
        sqnorm_B = rows_PB.sum(0, dtype=torch.float64)
        place_K = sqnorm_B.topk(min(self.setup.settings.keep_largest, B)).indices
        excess_KP = (rows_PB[:, place_K] - rows_PB.nanmedian(1, keepdim=True).values).T
        ids = kept(block.ids) if isinstance(block.ids, Tensor | None) else list(block.ids)
        return Candidates(ids, sqnorm_B, place_K, excess_KP)

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The largest squared norm of the update, and the sum."""
        names, sqnorms, rows = [], [], []
        for a, each in enumerate(passes):
            ids, sqnorm_B, place_K, excess_KP = each.left[self.name]
            # Backward has multiplied each gradient by the factor of a gradient scaler.
            factor = 1.0 if each.loss_scale is None else each.loss_scale.double() ** -2
            sqnorm_B, place = sqnorm_B * factor, place_K.double()
            where = torch.stack([sqnorm_B[place_K], torch.full_like(place, a), place], 1)
            names.append(ids)
            sqnorms.append(sqnorm_B)
            rows.append(torch.cat([where, excess_KP * factor], 1))
        all_N, rows_K = torch.cat(sqnorms), torch.cat(rows)
        most = min(self.setup.settings.keep_largest, len(rows_K))
        rows_K = rows_K[rows_K[:, 0].topk(most).indices]
        total, median = all_N.where(all_N.isfinite(), 0.0).sum(), all_N.nanmedian()
        self._records.append(Record(self._block.update, total, median, names, rows_K))
        return rows_K[0, 0], total

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        found = torch.zeros(self.width, dtype=torch.float64, device=device)
        largest, total = update.left[self.name]
        found[self._rank], found[-1] = largest.to(device), total.to(device)
        return found

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        return {"largest": self._share(numbers)}

    def _share(self, numbers: Tensor) -> float:
        """The largest share of the newest update. A state that was loaded has no numbers."""
        if not len(numbers) or numbers[-1].isnan().all():
            return self._loaded_share
        largest, total = numbers[-1, :-1].max().item(), numbers[-1, -1].item()
        return largest / total if total else math.nan

    def leave_out(self, names: Sequence[str]) -> None:
        self._records.clear()

    def state(self, numbers: Tensor) -> dict[str, Any]:
        """With several processes this is a collective."""
        updates = [
            (update, total, [tuple(each._replace(id=plain(each.id))) for each in own])
            for update, (total, own) in self._updates().items()
        ]
        return {self.name: {"updates": updates, "share": self._share(numbers)}}

    def load(self, state: dict[str, Any]) -> None:
        saved = state.get(self.name, {})  # a run that kept none saved none
        for update, total, own in saved.get("updates", ()):
            self._known[update] = total, [LargestSample(*each) for each in own]
        self._loaded_share = saved.get("share", math.nan)

    def largest(self, k: int | None) -> list[LargestSample]:
        """The k samples with the largest share of their update, among those of all processes."""
        samples = [
            each._replace(share=each.sqnorm / (total or 1.0))
            for total, own in self._updates().values()
            for each in own
        ]
        return sorted(samples, key=_size, reverse=True)[:k]

    def _updates(self) -> dict[int, tuple[float, list[LargestSample]]]:
        """The sum of all squared norms of each update of the window, and its largest samples, of
        all processes. Each tells the others only what is new since the last call.
        """
        names, found = [leaf.name for leaf in self.setup.slab.leaves], self._known
        here = [(r.update, r.total.item(), self._samples(r, names)) for r in self._records]
        for own in [here] if self._world == 1 else gathered(here, self.setup.settings.group):
            for update, total, samples in own:
                before, others = found.get(update, (0.0, []))
                found[update] = before + total, others + samples
        self._records.clear()
        newest = [*found][-self.setup.settings.window :]
        self._known = {update: found[update] for update in newest}
        return self._known

    def _samples(self, record: Record, names: list[str]) -> list[LargestSample]:
        """The samples of a record, whose shares are not known yet."""
        found, median = [], record.median.item()
        for sqnorm, *where in record.rows_K.tolist():
            (a, place), excess = map(int, where[:2]), where[2:]
            ids = record.ids[a]
            own = (record.update, self._rank, a, place) if ids is None else ids[place]
            most = torch.tensor(excess).topk(min(NAMED, len(names))).indices.tolist()
            found.append(
                LargestSample(
                    own.tolist() if isinstance(own, Tensor) else own,
                    record.update,
                    sqnorm,
                    0.0,
                    sqnorm / median if median else math.inf,
                    tuple(names[p] for p in most if not excess[p] <= 0),  # NaN too
                )
            )
        return found


def plain(name: Any) -> Any:
    """An id as checkpoints and logs can hold it: numbers, text, lists and tuples of these. Of
    anything else, such as a path, it is the text.
    """
    if type(name) in (str, int, float, bool, type(None)):
        return name
    if isinstance(name, list | tuple):
        kind = list if isinstance(name, list) else tuple
        return kind(map(plain, name))
    found = name.tolist() if hasattr(name, "tolist") else name  # of NumPy, or of torch
    return str(name) if type(found) is type(name) else plain(found)


def _size(sample: LargestSample) -> float:
    """Its share. What is no number comes first: it spoils the whole update."""
    return sample.share if math.isfinite(sample.share) else math.inf
