# SPDX-License-Identifier: Apache-2.0
"""The options of a model: what is left out."""

from collections.abc import Iterable

from torch import nn

from gnsfast.following import Followed, set_excluded, unwrapped


def configure(model: nn.Module, *, exclude: Iterable[str] = ()) -> nn.Module:
    """Set what is left out of ``model``. Returns ``model``, which stays as it is. What was learnt
    of it is forgotten.

    Args:
        exclude: patterns (``fnmatch``) of parameters, and of modules with all their parameters,
            that get no norms. A second call replaces those of the first.

    Raises:
        ValueError: for a pattern that matches nothing.

    >>> model = gnsfast.configure(torch.nn.Linear(5, 2), exclude=["bias"])
    >>> [row.static for row in gnsfast.coverage(model).rows]
    [True, False]
    """
    inner = unwrapped(model)
    set_excluded(inner, exclude)
    Followed.forget(inner)
    return model
