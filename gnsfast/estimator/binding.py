# SPDX-License-Identifier: Apache-2.0
"""The parameters that an observer was made for, which must stay what they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.tensors import is_dtensor


class Binding:
    """Which module holds which parameter, and which are trained, at the first micro-batch.

    Args:
        model: the model.
        at_rest: its parameters by name, those of FSDP2 as the optimizer has them.
    """

    def __init__(self, model: nn.Module, at_rest: Mapping[str, Any]) -> None:
        of = dict(zip(map(id, model.parameters()), at_rest.values()))
        self._owners: list[tuple[dict[str, Any], str, Tensor]] = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and not is_dtensor(of[id(p)])  # FSDP2 swaps those in and out
        ]
        self._all = list(at_rest.values())
        self._trained = self._signature()

    def _signature(self) -> list[tuple[bool, torch.device]]:
        return [(p.requires_grad, p.device) for p in self._all]

    def check(self) -> None:
        """Raise if parameters are others than at the first micro-batch."""
        replaced = any(owner.get(key) is not p for owner, key, p in self._owners)
        if replaced or self._signature() != self._trained:
            raise ObservationError(
                "Parameters were frozen, unfrozen, moved or replaced since the first micro-batch, "
                "so old and new measurements cannot be averaged. Call gns.reset()."
            )
