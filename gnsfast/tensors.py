# SPDX-License-Identifier: Apache-2.0
"""Helpers for tensors that every room may use."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.torch_internals import pytree


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(t: Tensor) -> torch.dtype:
    """The dtype of products that need all digits of ``accumulate_dtype``. It is float64 if torch's
    own switch lets float32 matrices be multiplied as tf32 or bfloat16: tensor cores cut off the 13
    bits that tf32 lacks, which would make products of squares too small.
    """
    matmul = (torch.backends.cuda if t.is_cuda else torch.backends.mkldnn).matmul
    coarse = matmul.fp32_precision in ("tf32", "bf16")
    return torch.float64 if coarse else accumulate_dtype(t.dtype)


def wide_bmm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``torch.bmm(a.to(dtype), b.to(dtype))``. Half precision is not widened if tensor cores
    multiply it and torch can write the product in float32.
    """
    if a.dtype.itemsize == 2 and a.is_cuda and not torch.version.hip:
        return torch.bmm(a, b, out_dtype=torch.float32).to(dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


def set_columns(t_RC: Tensor, column_RK: Tensor, value_RK: Tensor) -> None:
    """``t_RC.scatter_(1, column_RK, value_RK)`` for a contiguous ``t_RC``. Columns are not checked:
    a column beyond the row would write to the next row.

    With deterministic algorithms torch copies the strides of a tensor with several dimensions to
    the GPU and waits for the copy, which graph captures forbid. One dimension avoids that.
    """
    first_R1 = torch.arange(len(t_RC), device=t_RC.device)[:, None] * t_RC.shape[1]
    t_RC.view(-1).scatter_(0, (first_R1 + column_RK).flatten(), value_RK.flatten())


def whole(t: Any) -> Any:
    """All of a DTensor, or any other tensor as it is."""
    return t.full_tensor() if is_dtensor(t) else t


def writes(name: str) -> bool:
    """Whether the function of torch with this name writes to its first argument."""
    return name in IN_PLACE if name.endswith("__") else name.endswith("_")


IN_PLACE = frozenset(("__setitem__", "__set__")) | frozenset(
    f"__i{name}__"
    for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
)


PLAIN_TYPES = (Tensor, nn.Parameter)


def is_dtensor(t: object) -> bool:
    """Whether ``t`` is a DTensor, without importing torch.distributed to ask."""
    return type(t) not in PLAIN_TYPES and hasattr(t, "placements")


def local_part(t: Any) -> Any:
    """The part of a DTensor that is on this process, or any other tensor as it is."""
    return t.to_local() if is_dtensor(t) else t


def map_tensors(pick: Callable[[Any], Any], tree: Any, kinds: Any = Tensor) -> Any:
    """``pytree.tree_map_only(kinds, pick, tree)`` that also reaches tensors in dataclasses, in
    plain objects, and in mappings that are not dicts, such as transformers' ``BatchEncoding``. It
    copies these.
    """

    def of(leaf: Any) -> Any:
        if isinstance(leaf, kinds):
            return pick(leaf)
        if isinstance(leaf, MutableMapping):
            whole: Any = copy.copy(leaf)
            for key, value in leaf.items():
                whole[key] = map_tensors(pick, value, kinds)
            return whole
        if names := _fields(leaf):
            whole = copy.copy(leaf)
            for name in names:  # as a frozen one's own __init__ sets them
                object.__setattr__(whole, name, map_tensors(pick, getattr(leaf, name), kinds))
            return whole
        return leaf

    return pytree.tree_map(of, tree)


def tensors_of(tree: Any, kinds: Any = Tensor) -> list[Any]:
    """The tensors that ``map_tensors`` reaches, in its order."""
    if isinstance(tree, kinds):
        return [tree]
    if type(tree) is tuple or type(tree) is list:  # pytree takes 10 µs for one tensor
        parts: Iterable[Any] = tree
    elif type(tree) is dict or isinstance(tree, MutableMapping):
        parts = tree.values()
    elif pytree.tree_is_leaf(tree):
        parts = [getattr(tree, name) for name in _fields(tree)]
    else:
        parts = pytree.tree_leaves(tree)
    return [t for part in parts for t in tensors_of(part, kinds)]


def _fields(leaf: Any) -> list[str]:
    """The fields of a dataclass, or the tensors of a plain object that holds else only numbers and
    text.
    """
    if isinstance(leaf, (type, Tensor, nn.Module)):
        return []
    if dataclasses.is_dataclass(leaf):
        return [field.name for field in dataclasses.fields(leaf)]
    own = getattr(leaf, "__dict__", {})
    is_plain = all(isinstance(value, (Tensor, int, float, str)) for value in own.values())
    return [name for name, value in own.items() if is_plain and isinstance(value, Tensor)]
