# SPDX-License-Identifier: Apache-2.0
"""What runs of branches share: learning rates that are set, buffers that are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards all buffers are as before: those that were written to, and those replaced."""
    held = [(m, dict(m._buffers)) for m in model.modules()]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
