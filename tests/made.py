# SPDX-License-Identifier: Apache-2.0
"""Modules that a test needs once."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Made(nn.Module):
    """Of parts by name, where a tensor becomes a parameter; its forward is ``run`` of itself
    and the inputs.
    """

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if type(part) is Tensor else part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)
