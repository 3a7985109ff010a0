# SPDX-License-Identifier: Apache-2.0
"""What makes the host wait for a GPU, seen on a CPU: the operators of a measured step are read."""

from typing import Any

import pytest
import torch
from layers import Tied
from noise_cases import one_update
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gnsfast
from gnsfast import functional
from gnsfast.functional import _cross_entropy as cross_entropy
from gnsfast.ops import backends
from gnsfast.signatures import OPERATORS

aten = torch.ops.aten
TO_THE_HOST = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero)
"""Their result, or its size, is only known once the device is done."""


class NoWaits(TorchDispatchMode):
    """Raises at an operator that waits for the device of its tensors."""

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = fn.overloadpacket
        if what in TO_THE_HOST or what.__name__.startswith(("unique", "_unique")):
            raise RuntimeError(f"{fn} waits for the device")
        # torch sends the strides to the device and waits; of one dimension there are none to send.
        if what in (aten.scatter, aten.scatter_) and args[0].ndim > 1:
            raise RuntimeError(f"in deterministic mode {fn} of {list(args[0].shape)} waits")
        if fn.namespace == "gnsfast":
            with self:  # what it is made of is seen too
                return backends.implementation(what.__name__, "cpu")(
                    OPERATORS[what.__name__](*args)
                )
        return fn(*args, **(kwargs or {}))


def by_logits(model: Tied, ids: Tensor, y: Tensor) -> Tensor:
    return (model(ids).log_softmax(-1) * (y[..., None] == torch.arange(23))).sum()


def by_parts(model: Tied, ids: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    hidden = model.hidden(ids)
    return functional.linear_cross_entropy(hidden, model.head.weight, y, reduction=reduction)


@pytest.mark.second
@pytest.mark.parametrize("loss_of", [by_logits, by_parts])
def test_a_step_never_waits(loss_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Triton kernels, with a table."""
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")
    # Labels out of range are looked for on a CPU alone.
    monkeypatch.setattr(cross_entropy, "_label", lambda label, *args: label)
    model = Tied()
    ids, y = torch.randint(0, 23, (2, 3, 9))
    each = None if loss_of is by_logits else lambda batch: by_parts(model, *batch, "none")
    table = gnsfast.learn(model, (ids, y) if each else ids, run=each)
    gns = gnsfast.GradientNoiseScale(model, table)

    def step() -> None:
        with one_update(gns, 3):
            (loss_of(model, ids, y) / 3).backward()

    step()
    step()
    with NoWaits():
        step()
        step()
    assert gns.compute().updates == 4
