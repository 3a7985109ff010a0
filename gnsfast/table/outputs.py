# SPDX-License-Identifier: Apache-2.0
"""What a loss function makes its number of: the results of the modules that it calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


@contextmanager
def outermost() -> Iterator[list[Any]]:
    """A list of what the modules return that are called meanwhile, but by no other module."""
    outputs: list[Any] = []
    depth = 0

    def enter(module: Any, args: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: Any, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            outputs.append(output)

    first = register_module_forward_pre_hook(enter)
    last = register_module_forward_hook(leave, always_call=True)
    try:
        yield outputs
    finally:
        first.remove()
        last.remove()
