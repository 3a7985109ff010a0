# SPDX-License-Identifier: Apache-2.0
"""Forward passes of other projects that bypass gnsfast: their fused losses take a head's weight and
do not call the head.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

PROJECTS = {
    "liger_kernel": "Liger-Kernel",
    "cut_cross_entropy": "Cut Cross-Entropy",
    "trl": "TRL",
}
"""Top-level package -> project. Each replaces the forward of a causal language model or of its
class. In training that forward passes ``lm_head.weight`` to the loss."""

HEAD = "lm_head"


def project_of(module: nn.Module) -> str:
    """The project whose forward the module runs, or an empty string."""
    for forward in _unwrapped(module.forward):
        own = getattr(forward, "__globals__", {}).get("__name__")  # functools.wraps leaves it alone
        for where in (own, getattr(forward, "__module__", None)):
            if (package := (where or "").partition(".")[0]) in PROJECTS:
                return PROJECTS[package]
    return ""


def fused_loss_of(model: nn.Module, path: str) -> str:
    """The project whose forward runs in a module around the head ``path``. Empty if there is none,
    or if ``path`` is not a head.
    """
    *around, last = path.split(".")
    paths = [".".join(around[:depth]) for depth in range(len(around) + 1)] if last == HEAD else []
    return next(filter(None, (project_of(model.get_submodule(p)) for p in paths)), "")


def _unwrapped(forward: Callable[..., Any]) -> Iterator[Any]:
    """A forward, and those that it wraps: autocast, accelerate and Dynamo wrap theirs around it."""
    seen = set()
    layer: Any = forward
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = getattr(layer, "__wrapped__", None) or getattr(layer, "__func__", None)


def notes(model: nn.Module) -> dict[int, str]:
    """Maps the id of each head's weight to a note about the fused loss that will take it."""
    found = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (project := fused_loss_of(model, path)):
            found[id(weight)] = (
                f"in training, {project}'s forward passes this weight to a fused loss and does not "
                f"call {path!r}: use {path}.cross_entropy instead"
            )
    return found
