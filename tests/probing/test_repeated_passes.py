# SPDX-License-Identifier: Apache-2.0
"""Passes over modules with several calls that are not one forward and one backward after the other:
checkpoints, exceptions, calls that the loss does not use, and what is refused.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from made import Made
from oracle import assert_norms, loop_sqnorms
from repeated_models import B, D, T, check, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.following import Followed

ObservationError = gnsfast.ObservationError


class Again(nn.Module):
    """A norm and a linear layer, called ``times`` times; ``mode`` says how."""

    def __init__(self, mode: str = "", times: int = 3) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(D), nn.Linear(D, D)
        self.mode, self.times = mode, times

    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x))) + x

    def forward(self, x: Tensor) -> Tensor:
        for k in range(self.times):
            if self.mode == "unused" and k == 1:
                self.step(x)
            elif self.mode == "no grad" and k == 0:
                with torch.no_grad():
                    x = self.step(x)
            elif self.mode in ("reentrant", "checkpoint"):
                x = checkpoint(self.step, x, use_reentrant=self.mode == "reentrant")
            elif self.mode == "one checkpoint" and k == 1:
                x = checkpoint(self.step, x, use_reentrant=False)
            else:
                x = self.step(x)
        return x


def run(model: nn.Module, x: Tensor) -> gnsfast.SampleNorms:
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        square(model, x).backward()
    return norms


def right(model: nn.Module, x: Tensor) -> None:
    """Norms are those of single samples."""
    assert_norms(run(model, x), loop_sqnorms(model, square, x, B))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, T, D)


@pytest.mark.parametrize("mode", ["", "unused", "no grad", "checkpoint", "one checkpoint"])
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "leaf"])
def test_modes(mode: str, leaf: bool, x: Tensor) -> None:
    check(Again(mode), x.clone().requires_grad_(leaf), square)


def test_one_checkpoint_around_all_calls(x: Tensor) -> None:
    """The reentrant kind too: its inner backward pass goes through all calls."""
    model, leaf = Again(), x.clone().requires_grad_()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        checkpoint(model, leaf, use_reentrant=True).square().sum().backward()
    assert_norms(norms, loop_sqnorms(model, square, x, B))


def test_reentrant_checkpoints_are_refused(x: Tensor) -> None:
    """Each has a backward pass of its own, so the first use is over before the second begins."""
    model = Again("reentrant")
    with pytest.raises(ObservationError, match="several times.*set use_reentrant=False"):
        run(model, x.clone().requires_grad_())


def test_no_output_is_used(x: Tensor) -> None:
    """As of a module that is not called."""
    model = Again()
    other = nn.Linear(D, D)
    both = nn.ModuleList([model, other])
    table = gnsfast.learn(both, x, run=lambda x: (model(x), other(x)))
    with gnsfast.per_sample_sqnorms(both, B, table=table) as norms:
        model(x)
        square(other, x).backward()
    assert norms["0.layer.weight"].tolist() == [0.0] * B
    assert model.layer.weight.grad is None


def test_an_output_without_a_gradient(x: Tensor) -> None:
    """Autograd hands the embedding no gradient at all; the other call still counts."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> None:
            return None

    lookup = lambda m, ids: Nothing.apply(m.words(ids)) + m.words(ids).sin()
    model, ids = Made(lookup, words=nn.Embedding(7, D)), torch.randint(0, 7, (B, T))
    right(model, ids)


def test_an_exception_between_two_calls(x: Tensor) -> None:
    """In its own block, and caught within one: the graph of the calls before it is gone."""
    model = Again()
    with pytest.raises(KeyError):
        with gnsfast.per_sample_sqnorms(model, B):
            model.step(model.step(x))
            raise KeyError
    right(model, x)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model.step(x)
        square(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, square, x, B))


def test_an_exception_in_backward(x: Tensor) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            raise KeyError

    model = Again()
    table = gnsfast.learn(model, x)
    with pytest.raises(ObservationError, match="used again after a backward pass of this block"):
        with gnsfast.per_sample_sqnorms(model, B, table=table):
            with pytest.raises(KeyError):
                model.step(Fails.apply(model.step(x))).sum().backward()
            square(model, x).backward()
    right(model, x)


def test_gradient_of_the_inputs_first(x: Tensor) -> None:
    """A backward pass that does not ask for the parameters keeps operands that nobody uses."""

    def asked(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        torch.autograd.grad(3 * value, [x], retain_graph=True)
        return value

    check(Again(), x.clone().requires_grad_(), asked)


def test_accumulation(x: Tensor) -> None:
    """Blocks have calls of their own; ``.grad`` adds up as in torch."""
    model = Again()
    plain = copy.deepcopy(model)
    for part in x, 2 * x, x[:, :2]:
        loop = loop_sqnorms(plain, square, part, B)
        assert_norms(run(model, part), loop)
        square(plain, part).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_estimator(x: Tensor) -> None:
    """p and q of updates of two micro-batches are those of the float64 loop."""
    model = Again()
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum", window=1)
    parts = [x, torch.randn(B, T, D)]
    p = sum(sum(loop_sqnorms(model, square, part, B).values()).sum().item() for part in parts)
    with gns.update():
        for part in parts:
            with gns.microbatch(B):
                square(model, part).backward()
    q = sum(t.grad.double().square().sum().item() for t in model.parameters())
    n, found = 2 * B, gns.compute()
    assert found.trace == pytest.approx((p - q / n) / (n - 1), rel=1e-4)


@pytest.mark.parametrize("calls_of_the_head", [1, 2])
def test_two_lookups_of_a_tied_head(calls_of_the_head: int) -> None:
    """One between two calls of the head, or both before its only call."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(D, D), nn.Linear(D, D, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            if calls_of_the_head == 2:
                return self.head(self.words(ids)) + self.head(self.words(ids).sin())
            return self.head(self.words(ids).sin() + self.words(ids.flip(1)))

    model, ids = Tied(), torch.randint(0, D, (B, T))
    right(model, ids)


def test_nothing_is_left_after_the_block(x: Tensor) -> None:
    """Neither a graph nor operands, also without the garbage collector."""
    model = Again()
    run(model, x)
    gc.disable()
    try:
        with gnsfast.per_sample_sqnorms(model, B):
            first = model.step(x)
            seen = weakref.ref(first)
            square(model, first).backward()
            del first
        with pytest.raises(KeyError):
            with gnsfast.per_sample_sqnorms(model, B):
                other = model.step(x)
                also = weakref.ref(other)
                torch.autograd.grad(model.step(other).sum(), [other])
                del other
                raise KeyError
        assert seen() is None and also() is None
        assert not any(leaf.this_pass.parts for leaf in Followed.of(model).leaves)
    finally:
        gc.enable()
