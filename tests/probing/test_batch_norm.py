# SPDX-License-Identifier: Apache-2.0
"""Batch norm by the statistics of the batch ties samples together: no block opens on it."""

import pytest
import torch
from layers import assert_as_loop
from torch import Tensor, nn

import gnsfast

B = 4


class Net(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Linear(5, 6), nn.BatchNorm1d(6, **options)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.bn1(self.first(x))))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def test_refused_until_it_is_frozen() -> None:
    model, x = Net(), torch.randn(B, 5)
    blocks = {
        "norms": lambda: gnsfast.per_sample_sqnorms(model, B),
        "estimator": lambda: gnsfast.GradientNoiseScale(model).update(B),
    }
    for block in blocks.values():
        with pytest.raises(
            gnsfast.ObservationError,
            match=r"^bn1 \(BatchNorm1d\): batch statistics tie the samples together.*Call eval",
        ):
            with block():
                raise AssertionError("the block has opened")
    model.bn1.eval()
    assert_as_loop(model, x, B, square)
    model.train()  # the slab of the frozen model is kept, and so are its eyes
    with pytest.raises(gnsfast.ObservationError, match="bn1"), blocks["norms"]():
        pass


def test_nothing_to_freeze_it_by() -> None:
    model = Net(track_running_stats=False).eval()
    with pytest.raises(gnsfast.ObservationError, match=r"bn1.*use GroupNorm or LayerNorm"):
        with gnsfast.per_sample_sqnorms(model, B):
            pass


def test_without_parameters_and_out_of_reach() -> None:
    """It need not have a norm of its own, nor a gradient that passes it."""
    model = nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    with pytest.raises(gnsfast.ObservationError, match=r"0 \(BatchNorm1d\)"):
        with gnsfast.per_sample_sqnorms(model, B):
            pass


def test_thawed_inside_the_block() -> None:
    model = Net().eval()
    with pytest.raises(gnsfast.ObservationError, match="bn1.*tie the samples"):
        with gnsfast.per_sample_sqnorms(model, B):
            model.train()
            model(torch.randn(B, 5))


def test_what_coverage_and_verify_say() -> None:
    model = Net()
    rows = {r.parameter: r for r in gnsfast.coverage(model).rows}
    assert "batch statistics" in rows["bn1.weight"].reason and not rows["bn1.weight"].static
    assert gnsfast.verify(model, lambda m, x: m(x).square().mean(), torch.randn(B, 5)).ok
    assert gnsfast.coverage(model.eval()).covered_fraction == 1.0


def test_instance_norm_ties_nothing() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(5, 3))
    x = torch.randn(B, 3, 5)
    assert_as_loop(model, x, B, square)


def test_the_estimator_goes_on() -> None:
    model, x = Net(), torch.randn(B, 5)
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    with pytest.raises(gnsfast.ObservationError, match="bn1"), gns.update(B):
        pass
    model.bn1.eval()
    with gns.update(B):
        square(model, x).backward()
    assert gns.compute().updates == 1


def test_a_frozen_batch_norm_that_starts_to_train_inside_the_block() -> None:
    """It has no parameter to be measured, so only the end of the block looks at it again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).eval()
    with pytest.raises(gnsfast.ObservationError, match=r"1 \(BatchNorm1d\): batch statistics tie"):
        with gnsfast.per_sample_sqnorms(model, 3):
            model.train()
            model(torch.randn(3, 4)).square().sum().backward()
