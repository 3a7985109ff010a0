# SPDX-License-Identifier: Apache-2.0
"""What ``convert(model, example=batch)`` refuses by name, and what it puts back."""

import random
import sys
from typing import Any

import numpy
import pytest
import torch
from examples_of_models import B, D, Flattened, NanoGPT, T, assert_right, ids, said
from torch import Tensor, nn

import gnsfast


class Picked(nn.Module):
    """A head on the tokens that a mask picks, or on sorted samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.head = how, nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = torch.tanh(self.up(x_BTD))
        if self.how == "mask":
            mask_BT = x_BTD[..., 0] > 0.7
            picked = x.new_zeros(*mask_BT.shape, 2)
            picked[mask_BT] = self.head(x[mask_BT])
            return picked
        order = x.sum((1, 2)).argsort()
        y: Tensor = self.head(x[order])[order.argsort()]
        return y


@pytest.mark.parametrize("how", ["mask", "sort"])
def test_rows_that_are_not_samples_are_refused_by_name(how: str) -> None:
    torch.manual_seed(1)
    model = Picked(how)
    gnsfast.convert(model, example=torch.randn(B, T, D))
    row = said(model, "head.weight")
    assert not row.static and row.reason.startswith("the data select or sort its rows")
    assert said(model, "up.weight").static


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv1d(D, D, 3), nn.BatchNorm1d(D), nn.Linear(D, 2)

    def forward(self, x_BDT: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.bn(self.conv(x_BDT))).mean(-1))
        return y


def test_batch_norm_that_trains_is_refused_by_name() -> None:
    model, x = Normed(), torch.randn(B, D, T)
    kinds = [type(m) for m in model.modules()]
    mean = model.bn.running_mean.clone()
    with pytest.raises(
        ValueError, match=r"bn \(BatchNorm1d\).*ties its samples together.*model\.bn\.eval"
    ):
        gnsfast.convert(model, example=x)
    assert kinds == [type(m) for m in model.modules()] and torch.equal(model.bn.running_mean, mean)


def test_frozen_batch_norm_is_no_trouble() -> None:
    model, x = Normed(), torch.randn(B, D, T)
    model.bn.eval()
    gnsfast.convert(model, example=x)
    assert said(model, "conv.weight").static and said(model, "out.weight").static


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x_BD: Tensor) -> Tensor:
        x = self.up(x_BD)
        y: Tensor = self.head(x - x.mean(0))
        return y


def test_samples_that_meet_in_the_models_own_code() -> None:
    with pytest.raises(ValueError, match=r"the model \(Contrast\) ties the samples"):
        gnsfast.convert(Contrast(), example=torch.randn(B, D))


def test_everything_is_put_back() -> None:
    model, x = NanoGPT(), ids()
    model.register_buffer("steps", torch.zeros(3))
    model.register_forward_hook(lambda m, i, o: o + 0 * m.steps.add_(1).sum())
    model.mlp.forward = own = model.mlp.forward
    model.ln.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    modes = [m.training for m in model.modules()]
    grads = [p.grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    gnsfast.convert(model, example=x)
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is g for p, g in zip(model.parameters(), grads))
    assert torch.equal(model.steps, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert [n for n, m in model.named_modules() if "forward" in vars(m)] == ["mlp"]
    assert model.mlp.forward is own


@pytest.mark.parametrize(
    "example, match",
    [
        (torch.zeros(B, T, dtype=torch.int64), "all samples are equal"),
        (torch.randint(0, 11, (1, T)), "has size 1 along"),
        ({}, "is a tensor with samples"),
        (lambda: None, "without calling the model"),
    ],
)
def test_examples_that_show_nothing(example: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"example: .*{match}"):
        gnsfast.convert(Flattened(), example=example)


def test_an_example_that_is_no_call() -> None:
    with pytest.raises(TypeError, match="a tensor, a tuple of arguments, a dict"):
        gnsfast.convert(Flattened(), example=3)


def test_a_models_own_error_is_shown_as_it_is() -> None:
    with pytest.raises(IndexError, match="out of range") as error:
        gnsfast.convert(Flattened(), example=ids() + 99)
    assert sys.version_info < (3, 11) or "of the example" in error.value.__notes__[0]


class Hostile(nn.Module):
    """Writes to its parameters, swaps one, freezes another, keeps a state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(11, D, max_norm=0.1), nn.Linear(D, D)
        self.slow = nn.Parameter(torch.ones(D), requires_grad=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.slow.lerp_(self.up.bias, 0.5)
        self.up.bias.data.mul_(0.5)
        y: Tensor = self.up(self.tokens(ids_BT)) + self.slow
        self.up.weight = nn.Parameter(self.up.weight + 1)
        self.tokens.weight.requires_grad_(False)
        self.state = y
        return y


def test_parameters_are_put_back() -> None:
    model = Hostile()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    gnsfast.convert(model, example=ids())
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]), name
    assert model.tokens.weight.requires_grad and not hasattr(model, "state")


class Mixup(nn.Module):
    """Mixes samples, only in training, by a random order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.training:
            x_BD = 0.7 * x_BD + 0.3 * x_BD[torch.randperm(len(x_BD))]
        y: Tensor = self.up(x_BD)
        return y


class Gated(nn.Module):
    """What samples give each other is behind a gate that is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across = nn.Linear(D, D), nn.Linear(D, D)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.up(x_BD) + self.gate * self.across(x_BD - x_BD.mean(0))
        return y


class Loudest(nn.Module):
    """Divides all samples by the loudest number of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.up(x_BD / x_BD.abs().max())
        return y


@pytest.mark.parametrize("kind", [Mixup, Gated, Loudest])
@pytest.mark.parametrize("loudest", range(B))
def test_samples_that_meet_out_of_sight(kind: type[nn.Module], loudest: int) -> None:
    x = torch.randn(B, D)
    x[loudest, 0] = 9.0
    with pytest.raises(ValueError, match="ties the samples of a batch together"):
        gnsfast.convert(kind(), example=x)


class Ragged(nn.Module):
    """Rows of samples of several lengths, which are all full in the example."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.Linear(D, D)

    def forward(self, x_BTD: Tensor, length_B: Tensor) -> Tensor:
        mask_BT = torch.arange(x_BTD.shape[1]) < length_B[:, None]
        if self.how == "slices":
            rows = torch.cat([x[:n] for x, n in zip(x_BTD, length_B.tolist())])
        elif self.how == "mask":
            rows = x_BTD[mask_BT]
        elif self.how == "masked_select":
            rows = x_BTD.masked_select(mask_BT[..., None]).view(-1, D)
        elif self.how == "numpy":
            rows = x_BTD.flatten(0, 1)[torch.from_numpy(mask_BT.flatten().numpy().nonzero()[0])]
        elif self.how == "packed":
            lengths = length_B.cpu()
            rows = nn.utils.rnn.pack_padded_sequence(x_BTD, lengths, batch_first=True).data
        else:
            order = length_B.argsort()
            return self.up(x_BTD[order])[order.argsort()].sum(1)
        y: Tensor = self.up(rows)
        whole = torch.zeros_like(x_BTD).masked_scatter(mask_BT[..., None], y)
        return whole.sum(1) if self.how != "packed" else whole.sum(1) * 0 + y.sum()


@pytest.mark.parametrize("how", ["slices", "mask", "masked_select", "numpy", "packed", "sort"])
def test_rows_that_only_look_regular_in_the_example(how: str) -> None:
    model = Ragged(how)
    try:
        gnsfast.convert(model, example=(torch.randn(B, T, D), torch.full((B,), T)))
    except ValueError as error:
        assert how == "packed" and "ties the samples" in str(error)
        return
    row = said(model, "up.weight")
    if row.route == "replay":  # exact, whatever the lengths
        batch = torch.randn(B, T, D), torch.tensor([T, 2, 1, 3])
        loss = lambda m, b: m(*b).square().sum()  # noqa: E731
        assert_right(model, batch, loss)
    else:
        assert not row.static and "fold" in row.reason, row
