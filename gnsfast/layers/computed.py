# SPDX-License-Identifier: Apache-2.0
"""Weights that a module computes from other parameters: by torch's parametrizations during the
forward pass, or by its older hooks (pruning, weight norm, spectral norm) before it.
"""

from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

OF_CLASS = {"__dict__", "__weakref__"}
"""The names that Python itself puts into the namespace of a class."""


def weight_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    """The tensors that torch's older hooks put into a module before each call, with the hooks."""
    found: list[tuple[str, Any]] = []
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            found.append((hook.name, hook))
        elif isinstance(hook, BasePruningMethod):
            found.append((hook._tensor_name, hook))
    return found


def is_parametrized_class(cls: type) -> bool:
    """Whether torch made this class of a module when it was parametrized."""
    own = vars(cls).get("__getstate__")
    return getattr(own, "__module__", "") == parametrize.__name__


def moves_in_a_call(module: nn.Module) -> bool:
    """Whether a spectral norm is updated several times in each call. Torch's recurrent layers and
    attention read their weights several times, and each read updates it.
    """
    looks = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
    parts = module.modules() if looks else ()
    return any(isinstance(part, parametrizations._SpectralNorm) for part in parts)


def rebased(cls: type, base: type) -> type:
    """A parametrized class over another base class, which ``remove_parametrizations`` restores."""
    return type(cls.__name__, (base,), {n: v for n, v in vars(cls).items() if n not in OF_CLASS})
