# SPDX-License-Identifier: Apache-2.0
"""Operators whose sums over the samples nobody wants: torch's own functions give the gradients."""

from typing import Any

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.ops import backends, cpu, dtensor, operators
from gnsfast.signatures import LinearWgrad, empty_rows, schema
from gnsfast.tensors import is_dtensor


def norms_alone(operator: Any, a: Any) -> tuple[Tensor, ...]:
    """The results of an operator, whose sums may be empty: for a linear layer no dW is written."""
    plain = isinstance(a, LinearWgrad) and operator is dtensor.linear_wgrad
    if plain and a.weight and a.starts is None and a.ids_BS is None and not is_dtensor(a.dy_BTO):
        none = a.x_BTI.new_empty(0)
        return none, none, _linear_norms(*a), none
    found: tuple[Tensor, ...] = operator(a)
    return found


def _run(*fields: Any) -> Tensor:
    a = LinearWgrad(*fields)
    name = backends.backend(a.dy_BTO.device.type)
    if name in _WRITES_NOTHING:
        return _WRITES_NOTHING[name](a)
    rows: Tensor = operators.linear_wgrad(a)[2]
    return rows


_WRITES_NOTHING = {"cpu": cpu.linear_norms, "reference": reference.linear_norms}
"""Back-ends that make no more than a part of dW at a time. The others drop it."""


def _fake(*fields: Any) -> Tensor:
    a = LinearWgrad(*fields)
    return empty_rows(a.x_BTI, 1 + a.bias, a.samples)


def _registered() -> Any:
    name, library = "linear_norms", operators.library
    arguments = schema("linear_wgrad").split(" -> ")[0].replace("linear_wgrad", name)
    library.define(f"{arguments} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnsfast::{name}", _fake, lib=library)
    return getattr(torch.ops.gnsfast, name).default


_linear_norms = _registered()
