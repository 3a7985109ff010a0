# SPDX-License-Identifier: Apache-2.0
"""What runs of branches share: learning rates that are set, buffers that a state lacks."""

from typing import Any

from torch import Tensor, nn


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set a parameter group's learning rate; a tensor, which a captured step reads, stays."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` leaves out."""
    held = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name not in held}
