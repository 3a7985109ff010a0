# SPDX-License-Identifier: Apache-2.0
"""What a look at a model must leave as it was: buffers, gradients, modes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Gradients, which are None inside, buffers and training flags are afterwards as before."""
    grads = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    for p, _ in grads:
        p.grad = None
    try:
        with kept_buffers(model):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for module, training in modes:
            module.training = training
