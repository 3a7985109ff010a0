# SPDX-License-Identifier: Apache-2.0
"""Rows of experts that other ranks hold: transformers gives them an index of num_experts."""

import copy
from typing import Any

import pytest
import torch
from experts import EXPERTS, H, loss_of_rows, make
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import _experts as grouped


def rows_with_strangers() -> tuple[Tensor, ...]:
    """An index of num_experts stands for an expert of another rank."""
    index = torch.tensor([[0, 4], [4, 4], [1, 2], [2, 0], [4, 1], [0, 1]]).view(3, 2, 2)
    return torch.randn(3, 2, H), index, torch.rand(3, 2, 2), torch.randn(3, 2, H)


def loss_without_strangers(experts: nn.Module, batch: Any) -> Tensor:
    """With a weight of zero that no gradient reaches in their place: the eager code of
    transformers 5.17 refuses an index of num_experts.
    """
    x, index, weights, r = batch
    strange = index == EXPERTS
    known = index.masked_fill(strange, 0)
    return loss_of_rows(experts, (x, known, weights.masked_fill(strange, 0.0), r))


def assert_rows(block: nn.Module, plain: nn.Module, data: Any, loss: Any) -> None:
    """The open block's value, input gradients and norms are those of ``loss`` of the plain one."""
    inputs = [data[i].requires_grad_() for i in (0, 2)]
    want = loss(plain, data)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        ours = loss_of_rows(block, data)
        ours.backward()
    torch.testing.assert_close(ours, want)
    for t, gradient in zip(inputs, torch.autograd.grad(want, inputs)):
        torch.testing.assert_close(t.grad, gradient)
    assert_norms(norms, loop_sqnorms(plain, loss, data, 3))


@pytest.mark.parametrize("kernel", [False, True], ids=["eager", "kernel"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_they_count_nowhere(name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped product, which a GPU takes for bfloat16, leaves their rows unwritten."""
    plain = make(name, 2).experts
    block = copy.deepcopy(plain)
    if kernel:
        block.config._experts_implementation = "grouped_mm"
        monkeypatch.setattr(grouped, "_fits_grouped_mm", lambda x, w: True)
    assert_rows(block, plain, rows_with_strangers(), loss_without_strangers)


def test_batched_mm() -> None:
    """As the installed transformers computes them."""
    plain = make("mixtral", 2, experts_implementation="batched_mm").experts
    if hasattr(plain, "_is_expert_parallel"):
        plain._is_expert_parallel = True
    block = copy.deepcopy(plain)
    assert_rows(block, plain, rows_with_strangers(), loss_of_rows)


def test_batched_mm_of_transformers_5_17() -> None:
    """It computes their rows with the last expert, and has no flag that masks them."""

    def with_the_last(experts: nn.Module, batch: Any) -> Tensor:
        x, index, weights, r = batch
        return loss_of_rows(experts, (x, index.clamp(max=EXPERTS - 1), weights, r))

    plain = make("mixtral", 2, experts_implementation="batched_mm").experts
    block = copy.deepcopy(plain)
    vars(block).pop("_is_expert_parallel", None)
    assert_rows(block, plain, rows_with_strangers(), with_the_last)
