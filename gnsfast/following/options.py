# SPDX-License-Identifier: Apache-2.0
"""The options of a model, which it carries: parameters that are left out."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

EXCLUDED = "excluded"


def set_excluded(model: nn.Module, patterns: Iterable[str]) -> None:
    """Leave out the parameters that ``patterns`` match, and all of the modules that they match.

    Raises:
        ValueError: for a single string, and for a pattern that matches nothing trainable.
    """
    if isinstance(patterns, str):
        raise ValueError(f"exclude must be a list of patterns: exclude=[{patterns!r}]")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    excluded: set[int] = set()
    for pattern in patterns:
        matching = {id(p) for name, p in parameters.items() if fnmatchcase(name, pattern)}
        for name, module in modules.items():
            if fnmatchcase(name, pattern):
                matching |= {id(p) for p in module.parameters()}
        if not matching:
            raise ValueError(
                f"exclude: {pattern!r} matches no parameter and no module with parameters. The "
                f"modules are {_some(modules)}"
            )
        excluded |= matching
    names = frozenset(name for name, p in parameters.items() if id(p) in excluded)
    vars(model)["_gnsfast_excluded"] = names


def excluded_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are left out."""
    names: frozenset[str] = vars(model).get("_gnsfast_excluded", frozenset())
    return names


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names if name]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
