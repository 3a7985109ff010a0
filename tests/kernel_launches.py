# SPDX-License-Identifier: Apache-2.0
"""What an operator launches on a GPU, counted without one; and programs in another order."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class _Aten(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        if not view and name not in NO_LAUNCH:
            self.names.append(f"aten.{name}")
        return func(*args, **(kwargs or {}))


def launched(call: Callable[[], Any]) -> list[str]:
    """The aten operators that fill memory, and the Triton kernels, in their order."""
    names: list[str] = []

    @triton.jit
    def any_kernel():
        pass

    of_kernels, patch = type(any_kernel), pytest.MonkeyPatch()
    run = of_kernels.run

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **kwargs)

    with patch.context() as during, _Aten(names):
        during.setattr(of_kernels, "run", named)
        call()
    return names


def count_launches(call: Callable[[], Any]) -> int:
    """How many kernels a call launches, torch's and Triton's, which do nothing here. Views and
    ``empty`` are none.
    """
    from triton.runtime.interpreter import GridExecutor

    from benchmarks.budgets.launches import Launches

    torch.use_deterministic_algorithms(False)  # which fills what is empty
    with pytest.MonkeyPatch.context() as patch, Launches() as found:
        patch.setattr(GridExecutor, "__call__", lambda *args, **kw: found.triton(1, 1, 1))
        call()
    return found.counts.total()


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Triton's interpreter runs the programs of every launch in another order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_index, orders = builder.set_grid_idx, {}

    def shuffled(x: int, y: int, z: int) -> None:
        X, Y, Z = builder.grid_dim
        if (X, Y, Z) not in orders:
            orders[X, Y, Z] = random.Random(seed).sample(range(X * Y * Z), X * Y * Z)
        other = orders[X, Y, Z][(x * Y + y) * Z + z]
        set_index(other // (Y * Z), other // Z % Y, other % Z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", shuffled)
        yield


@contextmanager
def reads_within(*tensors: torch.Tensor) -> Iterator[None]:
    """Triton's interpreter refuses to read what is not an element of these tensors, or between two
    of one. A mask may be wrong and its result right, for what is read is then not stored.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    spans = [
        (t.data_ptr(), sum((n - 1) * step for n, step in zip(t.shape, t.stride())) * t.itemsize)
        for t in tensors
    ]
    load = builder.create_masked_load

    def checked(at: Any, mask: Any, *args: Any) -> Any:
        address = at.data[mask.data].astype("int64")
        inside = [(address >= first) & (address <= first + size) for first, size in spans]
        assert sum(inside).all(), "a read outside of the tensors"
        return load(at, mask, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", checked)
        yield
