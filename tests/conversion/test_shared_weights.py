# SPDX-License-Identifier: Apache-2.0
"""Weights that several modules share without a link: ``coverage`` says which replay covers them."""

import re

import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, D = 4, 5


class Twins(nn.Module):
    """Two layers with one weight, inside of a list, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.layers[0](x).tanh())
        return y


def squares(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().sum()


def test_the_replay_that_is_named_covers_them() -> None:
    model, x = nn.Sequential(Twins(), nn.Linear(D, 3)), torch.randn(B, D)
    loop = loop_sqnorms(model, squares, x, B)
    (row,) = (r for r in gnsfast.coverage(gnsfast.convert(model)).rows if not r.static)
    assert row.parameter == "0.layers.0.weight"
    named = re.search(r"by '0\.layers\.0', '0\.layers\.1'\. .*replay=\['(.*)'\]\) cov", row.reason)
    assert named is not None and "runs 2 layers again for each sample" in row.reason
    gnsfast.convert(model, replay=[named[1]])
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    assert_norms(norms, loop)


def test_no_replay_is_named_that_would_draw_again() -> None:
    model = nn.Sequential(Twins(), nn.Linear(D, 3))
    model[0].dropout = nn.Dropout(0.5)
    (row,) = (r for r in gnsfast.coverage(gnsfast.convert(model)).rows if not r.static)
    assert row.reason == "it is shared by '0.layers.0', '0.layers.1'"


def test_no_replay_is_named_of_a_module_without_a_forward() -> None:
    model = nn.ModuleDict({"a": nn.Conv1d(D, D, 1), "b": nn.Conv1d(D, D, 1)})
    model["b"].weight = model["a"].weight
    (row,) = (r for r in gnsfast.coverage(gnsfast.convert(model)).rows if not r.static)
    assert row.reason == "it is shared by 'a', 'b'"


def test_a_name_that_reads_as_a_pattern() -> None:
    model, x = nn.Sequential(), torch.randn(B, D)
    model.add_module("b[1]", Twins())
    loop = loop_sqnorms(model, squares, x, B)
    (row,) = (r for r in gnsfast.coverage(gnsfast.convert(model)).rows if not r.static)
    named = re.search(r"replay=\['(.*)'\]\) cov", row.reason)
    assert named is not None
    gnsfast.convert(model, replay=[named[1]])
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    assert_norms(norms, loop)
