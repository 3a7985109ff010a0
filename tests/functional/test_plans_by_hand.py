# SPDX-License-Identifier: Apache-2.0
"""Plans that no layer can follow are refused in forward; groups keep one weight's gradient."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from gnsfast import functional
from gnsfast.functional import Plan
from gnsfast.ops import operators

B, D = 3, 4
STARTS = torch.tensor([0, 2, 3, 5])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"starts": STARTS, "batch_dim": 1}, "need batch_dim=0"),
        ({"starts": STARTS, "experts": 1}, "layer_norm takes neither experts"),
        ({"transposed": True}, "layer_norm takes neither experts nor a transposed weight"),
    ],
    ids=["documents, sequence first", "experts", "transposed"],
)
def test_refused(fields: dict[str, Any], said: str) -> None:
    x, w = torch.randn(5, D), torch.ones(D, requires_grad=True)
    with pytest.raises(ValueError, match=said):
        functional.layer_norm(x, (D,), w, None, torch.zeros(1, B + 2), Plan(**fields))


def test_groups_hold_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's dW is added up before the next one is made."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(a: Any) -> Any:
        nonlocal most
        found = linear_wgrad(a)
        alive.append(weakref.ref(found[0]))
        most = max(most, sum(each() is not None for each in alive))
        return found

    linear_wgrad = operators.linear_wgrad
    monkeypatch.setattr(operators, "linear_wgrad", counted)
    w, probe = torch.randn(2, D, requires_grad=True), torch.zeros(1, 8 + 2 + 8, requires_grad=True)
    plan = Plan(groups=functional.Groups.of(*torch.arange(8).split(1)))
    functional.linear(torch.randn(8, D), w, None, probe, plan).sum().backward()
    assert len(alive) == 8 and most <= 3
