# SPDX-License-Identifier: Apache-2.0
"""Restores what a measurement must not change in a model: buffers, gradients, modes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers at the end, those that were written to and those that were replaced."""
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
    """Restore gradients, buffers and training flags at the end; inside, gradients are None."""
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
