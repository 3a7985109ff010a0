# SPDX-License-Identifier: Apache-2.0
"""Rows of experts that other ranks hold: transformers gives them an index of num_experts."""

import copy
from typing import Any

import pytest
import torch
from experts import EXPERTS, H, OfRows, loss_of_rows, make
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import _experts as grouped


def rows_with_strangers() -> tuple[Tensor, ...]:
    """An index of num_experts stands for an expert of another rank."""
    index = torch.tensor([[0, 4], [4, 4], [1, 2], [2, 0], [4, 1], [0, 1]]).view(3, 2, 2)
    return torch.randn(3, 2, H), index, torch.rand(3, 2, 2), torch.randn(3, 2, H)


def loss_without_strangers(model: nn.Module, batch: Any) -> Tensor:
    """With a weight of zero that no gradient reaches in their place: the eager code of
    transformers 5.17 refuses an index of num_experts.
    """
    x, index, weights, r = batch
    strange = index == EXPERTS
    known = index.masked_fill(strange, 0)
    return loss_of_rows(model, (x, known, weights.masked_fill(strange, 0.0), r))


def assert_rows(plain: nn.Module, data: Any, loss: Any) -> None:
    """The open model's value, input gradients and norms are those of ``loss`` of the plain one."""
    model, inputs = copy.deepcopy(plain), [data[i].requires_grad_() for i in (0, 2)]
    want = loss_of_rows(plain, data)
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        ours = loss_of_rows(model, data)
        ours.backward()
    torch.testing.assert_close(ours, want)
    for t, gradient in zip(inputs, torch.autograd.grad(want, inputs)):
        torch.testing.assert_close(t.grad, gradient)
    plain.experts.config._experts_implementation = "eager"
    loop = loop_sqnorms(plain, loss, data, 3)
    assert_norms(norms, loop)


@pytest.mark.parametrize("kernel", [False, True], ids=["mm", "kernel"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_they_count_nowhere(name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped product, which a GPU takes for bfloat16, leaves their rows unwritten."""
    plain = OfRows(make(name, 2, experts_implementation="grouped_mm").experts)
    if not hasattr(plain.experts, "_is_expert_parallel"):
        pytest.skip("this transformers has no experts on other ranks")
    plain.experts._is_expert_parallel = True
    if kernel:
        monkeypatch.setattr(grouped, "_fits_grouped_mm", lambda x, w: True)
    assert_rows(plain, rows_with_strangers(), loss_without_strangers)


def test_batched_mm() -> None:
    plain = OfRows(make("mixtral", 2, experts_implementation="batched_mm").experts)
    if not hasattr(plain.experts, "_is_expert_parallel"):
        pytest.skip("this transformers has no experts on other ranks")
    plain.experts._is_expert_parallel = True
    assert_rows(plain, rows_with_strangers(), loss_without_strangers)
