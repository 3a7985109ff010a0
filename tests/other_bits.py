# SPDX-License-Identifier: Apache-2.0
"""``pytest -p other_bits``: this processor stands for another one, whose library adds in another
order than gnsfast's kernels. Gradients of float32 differ in their last bits from those that they
have here, always in the same way. A test that fails takes them for torch's own.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from gnsfast import reference
from gnsfast.ops import cpu

GRADIENTS = {"linear_wgrad": 2, "in_projection_wgrad": 2, "norm_backward": 3, "embedding_wgrad": 1}
"""The first results of an operator, beside its probe rows."""


def pytest_configure() -> None:
    for module in (cpu, reference):
        for name, gradients in GRADIENTS.items():
            setattr(module, name, moved(module, name, gradients))


def moved(module: ModuleType, name: str, gradients: int) -> Callable[[Any], Any]:
    exact = getattr(module, name)

    def operator(a: Any) -> Any:
        results = exact(a)
        for gradient in results[:gradients]:
            gradient.mul_(1 + 2.0**-20)  # which no half precision holds
        return results

    return operator
