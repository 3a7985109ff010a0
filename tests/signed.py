# SPDX-License-Identifier: Apache-2.0
"""A module of operators, called with the fields of their signatures."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from gnsfast.signatures import OPERATORS


class Signed:
    """``Signed(module).linear_wgrad(x, dy, ...)`` is ``module.linear_wgrad(LinearWgrad(x, ...))``.

    What the module's operator is, it is at each call: a test may put another in its place.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature: Any = OPERATORS[name]
        return lambda *args, **more: getattr(self.module, name)(signature(*args, **more))
