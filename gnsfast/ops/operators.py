# SPDX-License-Identifier: Apache-2.0
"""The operators, registered with torch from their signatures. Each takes one argument, its
signature. All but ``attention_forward`` run in the backward pass, and none is differentiable.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.ops import backends
from gnsfast.signatures import OPERATORS, NormBackward, schema
from gnsfast.torch_internals import dispatch_modes, is_profiled

is_compiling = torch.compiler.is_compiling
library = torch.library.Library("gnsfast", "DEF")
Operator = Callable[[Any], Any]


def _registered(name: str) -> Operator:
    return registered(name, OPERATORS[name], schema(name), lambda a: a.results())


def registered(name: str, signature: Any, text: str, results: Operator) -> Operator:
    """The operator of a back-end's function ``name``, of schema ``text``. ``results`` are those
    of its fake.
    """
    # Library.define + impl costs 5 µs a call, torch.library.custom_op 12 µs.
    library.define(text, tags=(torch.Tag.pt2_compliant_tag,))
    on = {device: backends.implementation(name, device) for device in ("cpu", "cuda")}
    for device, run in on.items():
        dispatched = lambda *fields, run=run: run(signature._make(fields))
        library.impl(name, dispatched, device.upper())
    fake = lambda *fields: results(signature(*fields))
    torch.library.register_fake(f"gnsfast::{name}", fake, lib=library)
    overload = getattr(torch.ops.gnsfast, name).default

    def operator(a: Any) -> Any:
        # This avoids the dispatcher, which takes 5 µs, where it would not change the call.
        # For a subclass, such as the result of a collective under way, it makes a plain tensor.
        plain = type(a[0]) is Tensor and type(a[1]) is Tensor
        if plain and not (is_compiling() or dispatch_modes() or is_profiled()):
            if run := on.get(a[0].device.type):
                return run(a)
        return overload(*a)

    return operator


linear_wgrad = _registered("linear_wgrad")
embedding_wgrad = _registered("embedding_wgrad")
conv_wgrad = _registered("conv_wgrad")
attention_forward = _registered("attention_forward")
attention_backward = _registered("attention_backward")
_norm_backward = _registered("norm_backward")


def norm_backward(a: NormBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator, or plain aten while compiling, which Inductor can fuse with its neighbours.
    Documents (``starts``) always use the operator, because aten would need a graph for each set of
    lengths.
    """
    if is_compiling() and a.starts is None:
        return reference.norm_backward_aten(a)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _norm_backward(a)
    return results
