# SPDX-License-Identifier: Apache-2.0
"""A result says which share of the model it is of, wherever it is shown."""

import warnings
from typing import Any

import pytest
import torch
import unseen
from noise_cases import one_update
from torch import Tensor, nn

import gnsfast
from gnsfast.integrations.trackers import metrics


class Partly(nn.Module):
    """A kernel of its own takes a weight of 60 of its 75 trained elements, and the samples meet in
    another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 10))
        self.head, self.frozen = nn.Linear(6, 2), nn.Linear(9, 9)
        self.frozen.requires_grad_(False)
        self.head.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = unseen.linear(x, self.mix)
        out: Tensor = self.head(h) + (self.gain * h.mean()).sum()
        return out


def measured(model: nn.Module, updates: int = 3, **settings: Any) -> gnsfast.NoiseScale:
    gns = gnsfast.GradientNoiseScale(model, **settings)
    for x in torch.randn(updates, 8, 10):
        groups = {"groups": ["a", "b"] * 4} if settings else {}
        with one_update(gns, 8, **groups):
            model(x).square().sum(1).mean().backward()
    return gns.compute()


def test_a_result_says_what_it_is_of() -> None:
    torch.manual_seed(0)
    model = Partly()
    result = measured(model)
    assert result.covered == pytest.approx(12 / 75)
    assert result.covered == pytest.approx(gnsfast.coverage(model).covered_fraction)
    assert result.left_out == ("mix", "gain")
    assert "\nmeasured on 16 % of the trainable elements and " in str(result)
    assert "of the squared gradient norms, without mix, gain" in str(result)
    assert metrics(result)["gns/covered"] == result.covered
    assert 0 < result.covered_norm < 1
    assert metrics(result)["gns/covered_norm"] == result.covered_norm
    assert gnsfast.coverage(model).covered_norm == result.covered_norm


def test_the_share_of_the_squared_norms() -> None:
    """Beside those of single samples: those of a are nine times those of b."""
    model = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})

    def run(x: Tensor) -> Tensor:
        return 3 * x * model["a"] + x * model["b"]

    gnsfast.configure(model, exclude=["a"])
    table = gnsfast.learn(model, torch.randn(5, 4), run=run)
    assert table.covered_fraction == 0.5 and table.covered_norm == pytest.approx(0.1)
    gns = gnsfast.GradientNoiseScale(model, table)
    with gns.update(5):
        run(torch.randn(5, 4)).sum().backward()
    result = gns.compute()
    assert result.covered_norm == gnsfast.coverage(model).covered_norm == table.covered_norm
    assert "50 % of the trainable elements and 10 % of the squared gradient norms" in str(result)


@pytest.mark.parametrize(
    "exclude, covered, left_out",
    [("0", 14 / 80, ("0.weight", "0.bias")), ("0.bias", 74 / 80, ("0.bias",))],
)
def test_what_is_excluded_on_purpose_is_said_without_a_warning(
    exclude: str, covered: float, left_out: tuple[str, ...]
) -> None:
    model = nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gnsfast.configure(model, exclude=[exclude])
    result = measured(model)
    assert result.covered == pytest.approx(covered) and result.left_out == left_out


def test_the_whole_model_needs_no_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 2))
    result = measured(model)
    assert (result.covered, result.covered_norm, result.left_out) == (1.0, 1.0, ())
    assert "trainable elements" not in str(result)
    nothing = gnsfast.GradientNoiseScale(model).compute()
    assert "gns/covered" not in metrics(nothing)


def test_nothing_to_cover_is_no_gap() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (frozen, nn.ReLU(), nn.Sequential(nn.ReLU())):
            assert gnsfast.configure(model) is model
        gnsfast.configure(nn.Linear(2, 2), exclude=["*"])
