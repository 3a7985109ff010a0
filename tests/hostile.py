# SPDX-License-Identifier: Apache-2.0
"""Measures a batch of a model of the tests of ``following``, and compares all that it finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_norms
from torch import Tensor, nn

import gnsfast

D = 8
Model = Callable[[Any, Tensor], Tensor]


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def per_sample(y: Tensor) -> Tensor:
    """A loss of each sample, none of whose gradients cancels."""
    weight = torch.linspace(0.5, 1.5, y[0].numel()).to(y.dtype).view_as(y[0])
    return (y.square() * weight + y * weight.flip(-1)).flatten(1).sum(1)


def in_its_batch(model: nn.Module, losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Each sample's squared norms of the gradient of its own loss, in the graph of the batch."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    loss_B = losses()
    grads = [
        torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, materialize_grads=True)
        for loss in loss_B
    ]
    return {
        n: torch.stack([own[k].double().square().sum() for own in grads])
        for k, (n, _) in enumerate(named)
    }


Loss = Callable[[Any, Any], Tensor]


def right_or_named(
    model: nn.Module,
    x: Any,
    B: int,
    loss: Loss | None = None,
    table: gnsfast.Table | None = None,
    ordered: bool = True,
) -> set[str]:
    """Measure a batch. Outputs, gradients and norms are torch's, or if the samples are not
    ``ordered`` the sums of the norms; the parameters with norms.
    """

    def losses() -> Tensor:
        return per_sample(model(x)) if loss is None else loss(model, x)

    torch.manual_seed(5)
    real = in_its_batch(model, losses)
    torch.manual_seed(5)
    plain = losses()
    plain.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    own = plain
    try:
        with gnsfast.per_sample_sqnorms(model, B, audit="always", table=table) as norms:
            own = losses()
            own.sum().backward()
    except gnsfast.ObservationError as error:
        assert any(n in str(error) for n, _ in model.named_parameters()), str(error)
        return set()
    finally:
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6)
        for n, p in model.named_parameters():
            if grads[n] is not None and p.grad is not None:
                torch.testing.assert_close(p.grad, grads[n], rtol=1e-4, atol=1e-5)
        model.zero_grad()
    found = {n: own if ordered else own.sum(0, keepdim=True) for n, own in norms.items()}
    real = {n: own if ordered else own.sum(0, keepdim=True) for n, own in real.items()}
    assert_norms(found, real, rtol=1e-3, names=set(norms))
    return set(norms)


def over_batches(
    model: nn.Module,
    batches: list[Any],
    B: int,
    loss: Loss | None = None,
    table: gnsfast.Table | None = None,
) -> list[set[str]]:
    """The parameters with norms in each batch of B samples, or if that is 0 of as many as it has,
    all of which are right. It ends at an error.
    """
    found = []
    for x in batches:
        found.append(right_or_named(model, x, B or len(x), loss, table))
        if not found[-1]:
            break
    return found


def assert_refused(model: nn.Module, x: Any, B: int, why: str, loss: Loss | None = None) -> None:
    """Measuring a batch without a table ends with an error that says ``why``."""
    with (
        pytest.raises((gnsfast.ObservationError, gnsfast.SampleShapeError), match=why),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        (per_sample(model(x)) if loss is None else loss(model, x)).sum().backward()
    model.zero_grad()
