# SPDX-License-Identifier: Apache-2.0
"""Keeps the slabs of one model, one for each number of samples, while the model stays the same."""

from typing import Any

from torch import nn

from gnsfast.layers import DropIn
from gnsfast.probing.slab import NO_SIDES, ProbeSlab, Sides

SLABS = 8
"""How many slabs are kept. A run with more different numbers of samples makes slabs again."""


class Slabs:
    """The slabs of one model, by their number of samples. A copy of this object is empty, so that a
    copy of a model does not share slabs with the model.
    """

    def __init__(self) -> None:
        self._facts: list[Any] = []
        self._slabs: dict[tuple[int, Sides], ProbeSlab] = {}

    @staticmethod
    def of(model: nn.Module) -> "Slabs":
        """The slabs that the model carries."""
        slabs: Slabs = vars(model).setdefault("_gnsfast_slabs", Slabs())
        return slabs

    def refresh(self, model: nn.Module) -> bool:
        """Forget the slabs after any change of the model's modules or parameters, or of what
        ``convert`` decided about them. Returns whether there was a change.
        """
        facts = _facts(model)
        if facts == self._facts:
            return False
        self._facts = facts
        self._slabs.clear()
        return True

    def slab(self, model: nn.Module, num_samples: int, sides: Sides = NO_SIDES) -> ProbeSlab:
        """The slab for ``num_samples`` samples, of the model as it was at the last ``refresh``."""
        key = num_samples, sides
        slab = self._slabs.pop(key, None) or ProbeSlab(model, num_samples, sides)
        self._slabs[key] = slab  # the newest comes last
        if len(self._slabs) > SLABS:
            del self._slabs[next(iter(self._slabs))]
        return slab

    def __deepcopy__(self, memo: Any) -> "Slabs":
        return Slabs()

    def __reduce__(self) -> Any:
        return Slabs, ()


def _facts(model: nn.Module) -> list[Any]:
    """What a slab is made from. Slabs keep the parameters alive, so no id is used twice."""
    facts: list[Any] = []
    seen, stack = set(), [model]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        facts += id(module), module.__class__, *module._modules
        if isinstance(module, DropIn):
            facts.append(module.gnsfast.decided)
        for name, p in module._parameters.items():
            if p is not None:
                facts += name, id(p), p.requires_grad, p.device
        stack += (m for m in module._modules.values() if m is not None)
    return facts
