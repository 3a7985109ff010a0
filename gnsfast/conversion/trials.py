# SPDX-License-Identifier: Apache-2.0
"""Passes in which each sample uses its own copies of parameters."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from gnsfast.functional import Copies, Use
from gnsfast.layers import in_place

SHIFT = 0.03
"""How much the copies of neighbouring samples differ, relative to a parameter's largest value."""

Wanted = Mapping[str, Collection[str]]
"""Module -> the names of its parameters."""


class Copying:
    """Puts copies in the place of parameters in one pass over ``samples``. With ``shifted`` each
    sample has different copies, which are the same in every pass.
    """

    def __init__(self, wanted: Wanted, samples: list[int], shifted: bool) -> None:
        self.uses = {path: Use(len(samples), None, {}) for path in wanted}
        self._wanted, self.samples, self._shifted = wanted, samples, shifted
        self._made: dict[str, dict[str, Tensor]] = {}

    def around(self, path: str, module: nn.Module) -> AbstractContextManager[None]:
        """The context in which a call of a module runs."""
        if path not in self._wanted:
            return nullcontext()
        if path not in self._made:
            own = dict(module.named_parameters())
            self._made[path] = {
                name: Copies.of(self._copies(own[name]), self.uses[path], frozenset((name,)))
                for name in self._wanted[path]
            }
        return in_place(module, self._made[path])

    def _copies(self, p: Tensor) -> Tensor:
        p = p.detach()
        if not self._shifted or not p.numel():
            return p.expand(len(self.samples), *p.shape)
        size = p.abs().max()
        step = SHIFT * torch.where(size > 0, size, 1.0)
        return torch.stack([p + step * (1 + b) for b in self.samples])


def failures(wanted: Wanted, passes: Collection[Copying]) -> dict[str, dict[str, str]]:
    """For each module, the parameters that these passes could not follow, and why."""
    found: dict[str, dict[str, str]] = {}
    for path, names in wanted.items():
        own = found[path] = {}
        uses = [each.uses[path] for each in passes]
        kinds = [{*use.seen.items()} for use in uses]
        for name in names:
            why = next(filter(None, ((use.failed or {}).get(name) for use in uses)), "")
            if not all(name in use.used for use in uses):
                why = why or "its module does not read it by its name"
            elif any(kind != kinds[0] for kind in kinds):
                why = why or "its use depends on the number of samples"
            if why:
                own[name] = why
    return found
