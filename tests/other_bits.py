# SPDX-License-Identifier: Apache-2.0
"""``pytest -p other_bits``: this processor stands for another one, whose library adds in another
order than gnsfast's kernels. Every other element of a gradient in float32 is larger by 2^-21 than
here, the others smaller. A test that fails takes a gradient for torch's own to the last bit.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gnsfast import reference
from gnsfast.ops import cpu

GRADIENTS = {"linear_wgrad": 2, "norm_backward": 3, "embedding_wgrad": 1}
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
            if gradient.dtype == torch.float32:
                flat = gradient.detach().reshape(-1)
                flat[::2] *= 1 + 2.0**-21
                flat[1::2] *= 1 - 2.0**-21
                gradient.copy_(flat.view_as(gradient))
        return results

    return operator
