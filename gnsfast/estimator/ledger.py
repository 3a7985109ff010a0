# SPDX-License-Identifier: Apache-2.0
"""Keeps the numbers of the newest updates on the host, and the updates that still wait for their
arithmetic.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gnsfast.estimator.budget import Pace
from gnsfast.estimator.numbers import Numbers
from gnsfast.estimator.records import Update, Window
from gnsfast.torch_internals import pytree

MOST = 64
"""So many passes may wait for their arithmetic. After that it is done as soon as the device has
finished them, so a run that never asks for its numbers is not held up."""


LAG = 2
"""Nothing waits for numbers of an update so long ago, and all processes decide by the same ones."""


class Ledger:
    """The vectors of the newest ``window`` updates, in ``ring``, and the sum of all flags."""

    def __init__(self, window: int, numbers: Numbers) -> None:
        self.ring = torch.zeros(window, numbers.window.width, dtype=torch.float64, device="cpu")
        self.flags = torch.zeros(numbers.flags.width, dtype=torch.float64, device="cpu")
        self.count = 0  # updates in the ring so far
        self._on_host = not torch.cuda.is_available()
        self._numbers, self._at_once = numbers, numbers.processes.world > 1
        self._waiting: list[Any] = []
        self._passes = 0
        self._paces = deque[Transfer]()
        self._coming: Transfer | None = None
        self._arrived: list[Any] = []  # on the host

    def add(self, update: Update) -> Pace:
        """Add an update, and return the pace of all processes. Several processes sum their numbers
        at this point, and the pace is that of ``LAG`` updates ago, which has arrived.
        """
        pace = update.pace
        if self._at_once:
            *vectors, shared = self._numbers([update])
            self._waiting.append(vectors)
            self._paces.append(Transfer(shared))
            late = self._paces.popleft() if len(self._paces) > LAG else None
            pace = Pace() if late is None else Pace(*late.result()[0].tolist())
        else:
            self._waiting.append(update)
        self._passes += len(update.passes)
        if self._coming is None and self._passes >= MOST:
            self._send()
            if self._on_host:
                self._take()
        elif self._coming is not None and self._coming.arrived():
            self._take()
        return pace

    def clear(self) -> None:
        """Forget all updates and flags."""
        self.settle()
        self.ring.zero_()
        self.flags.zero_()
        self.count = 0

    def settle(self) -> None:
        """Do the arithmetic of all updates. This waits for the device."""
        self._take()
        self._send()
        self._take()

    def window(self) -> Window:
        """The numbers of the newest updates, oldest first. This waits for the device."""
        self.settle()
        size = len(self.ring)
        newest = [k % size for k in range(max(0, self.count - size), self.count)]
        return self._numbers.window.split(self.ring[newest])

    def _send(self) -> None:
        if self._on_host:  # to look for tensors of a device takes 0.1 ms an update
            self._arrived += self._waiting
        else:
            self._coming = Transfer(self._waiting)
        self._waiting, self._passes = [], 0

    def _take(self) -> None:
        """Add what has arrived. All updates stay if their arithmetic is interrupted."""
        if self._coming is not None:
            self._arrived += self._coming.result()
            self._coming = None
        if not self._arrived:
            return
        if self._at_once:
            vectors, flags = map(torch.cat, zip(*self._arrived))
        else:
            vectors, flags, _ = self._numbers(self._arrived)
        newest = vectors[-len(self.ring) :]
        count = self.count + len(vectors)
        self.ring[torch.arange(count - len(newest), count) % len(self.ring)] = newest
        self.flags += flags.sum(0)
        self.count, self._arrived = count, []


class Transfer:
    """Sends all tensors in ``what`` to the host, with one copy for each device."""

    def __init__(self, what: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten(what)
        far: dict[torch.device, list[int]] = {}
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                far.setdefault(leaf.device, []).append(k)
        self._copies = []
        for device, own in far.items():
            flat = torch.cat([self._leaves[k].reshape(-1).double() for k in own])
            copy = flat.to("cpu", non_blocking=True)
            self._copies.append((own, copy, torch.cuda.current_stream(device).record_event()))

    def arrived(self) -> bool:
        """Whether the copies are complete."""
        return all(event.query() for _, _, event in self._copies)

    def result(self) -> Any:
        """``what`` on the host. This waits for the device."""
        for own, copy, event in self._copies:
            event.synchronize()
            sizes = [self._leaves[k].numel() for k in own]
            for k, part in zip(own, copy.split(sizes)):
                leaf = self._leaves[k]
                self._leaves[k] = part.view(leaf.shape).to(leaf.dtype)
        return pytree.tree_unflatten(self._leaves, self._spec)
