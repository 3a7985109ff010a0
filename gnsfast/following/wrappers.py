# SPDX-License-Identifier: Apache-2.0
"""The user's model inside torch's wrappers."""

from torch import nn

from gnsfast.torch_internals import compiled_module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, with the user's names."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := compiled_module(model), nn.Module):
            model = inner
        else:
            return model
