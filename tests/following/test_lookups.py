# SPDX-License-Identifier: Apache-2.0
"""Rows of a table at ids that the data have chosen, such as the biases of the experts of rows that
are sorted by expert: right for each sample, beside single samples in float64.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor

import gnsfast

D, E = 5, 4


def sorted_by_expert(of_rows: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    """A model that sorts rows by expert, as a grouped product needs, and puts them back."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.norm(x).flatten(0, 1)
        ids, order = ((rows[:, 0] * 7).long().abs() % E).sort(stable=True)
        y = of_rows(m, rows[order], ids)
        return torch.zeros_like(rows).index_add(0, order, y).view_as(x)

    return forward


KINDS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "index": lambda m, x, ids: x + m.table[ids],
    "in place": lambda m, x, ids: (x * 2).add_(m.table[ids]).tanh(),
    "from the end": lambda m, x, ids: x * m.table[ids - E],
    "index_select": lambda m, x, ids: x * m.table.index_select(0, ids),
    "columns": lambda m, x, ids: x * m.table[ids, 1:2],
    "embedding": lambda m, x, ids: F.embedding(ids, m.table) * x,
    "numbers": lambda m, x, ids: x * m.scale[ids][:, None],
    "numbers, unsqueezed": lambda m, x, ids: (x * m.scale[ids].unsqueeze(1)).tanh(),
    "narrow": lambda m, x, ids: x + m.narrow[ids],
    "twice": lambda m, x, ids: (x * m.table[ids]).tanh() + m.table[ids],
    "of arithmetic": lambda m, x, ids: x + (2 * m.table)[ids],
}


@pytest.mark.parametrize("B", [1, 2, 5])
@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_ids(kind: str, gradients: str, B: int) -> None:
    """Each way to look rows of a table up, and to let them meet rows that are sorted."""
    model = Made(
        sorted_by_expert(KINDS[kind]),
        norm=torch.nn.LayerNorm(D),
        table=torch.randn(E, D),
        scale=torch.rand(E) + 0.5,
        narrow=torch.randn(E, 1),
    )
    x, r = torch.randn(B, 6, D), torch.randn(B, 6, D)

    def loss(m: Any, batch: Any) -> Tensor:
        return (m(batch[0]) * batch[1]).square().sum()

    plain = copy.deepcopy(model)
    loss(plain, (x, r)).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        p.requires_grad_(q.grad is not None)
    with gnsfast.per_sample_sqnorms(model, B, audit="always", gradients=gradients) as norms:
        loss(model, (x, r)).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    assert_norms(norms, loop_sqnorms(model, loss, (x, r), B))
