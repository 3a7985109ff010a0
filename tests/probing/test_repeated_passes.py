# SPDX-License-Identifier: Apache-2.0
"""Passes over modules with several calls that are not one forward and one backward after the other:
checkpoints, exceptions, calls that the loss does not use, and what is refused.
"""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.combinations import COMPILED, PIPELINE, REPEATED, TENSOR_PARALLEL, reason
from gnsfast.parallel import PipelinePasses

ObservationError = gnsfast.ObservationError
B, T, D = 4, 6, 8


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


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def converted(mode: str = "", **options: Any) -> Again:
    model = Again(mode, **options)
    return model


def run(model: nn.Module, x: Tensor) -> gnsfast.SampleNorms:
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        square(model, x).backward()
    return norms


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, T, D)


@pytest.mark.parametrize("mode", ["", "unused", "no grad", "checkpoint", "one checkpoint"])
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "leaf"])
def test_modes(mode: str, leaf: bool, x: Tensor) -> None:
    model = converted(mode)
    loop = loop_sqnorms(model, square, x, B)
    plain = copy.deepcopy(model)
    square(plain, x).backward()
    assert_norms(run(model, x.clone().requires_grad_(leaf)), loop)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_one_checkpoint_around_all_calls(x: Tensor) -> None:
    """The reentrant kind too: its inner backward pass goes through all calls."""
    model = converted()
    loop = loop_sqnorms(model, square, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        leaf = x.clone().requires_grad_()
        checkpoint(model, leaf, use_reentrant=True).square().sum().backward()
    assert_norms(norms, loop)


def test_reentrant_checkpoints_are_refused(x: Tensor) -> None:
    model = converted("reentrant")
    with pytest.raises(ObservationError, match="3 times.*set use_reentrant=False"):
        run(model, x.clone().requires_grad_())


def test_no_output_is_used(x: Tensor) -> None:
    """As of a module that is not called."""
    model = converted()
    other = nn.Linear(D, D)
    both = nn.ModuleList([model, other])
    with gnsfast.per_sample_sqnorms(both, B) as norms:
        model(x)
        square(other, x).backward()
    assert norms["0.layer.weight"].tolist() == [0.0] * B
    assert model.layer.weight.grad is None


def test_an_output_without_a_gradient(x: Tensor) -> None:
    """Autograd hands the embedding no gradient at all; the other call still counts."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, D)

        def forward(self, ids: Tensor) -> Tensor:
            return Nothing.apply(self.words(ids)) + self.words(ids).sin()

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> None:
            return None

    model, ids = Lookup(), torch.randint(0, 7, (B, T))
    loop = loop_sqnorms(model, square, ids, B)
    assert_norms(run(model, ids), loop)


def test_a_module_named_without_need(x: Tensor) -> None:
    model = converted(times=1)
    loop = loop_sqnorms(model, square, x, B)
    assert_norms(run(model, x), loop)


def test_an_exception_between_two_calls(x: Tensor) -> None:
    """In its own block, and caught within one: the graph of the calls before it is gone."""
    model = converted()
    loop = loop_sqnorms(model, square, x, B)
    with pytest.raises(KeyError):
        with gnsfast.per_sample_sqnorms(model, B):
            model.step(model.step(x))
            raise KeyError
    assert_norms(run(model, x), loop)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model.step(x)
        square(model, x).backward()
    assert_norms(norms, loop)


def test_an_exception_in_backward(x: Tensor) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            raise KeyError

    model = converted()
    loop = loop_sqnorms(model, square, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        with pytest.raises(KeyError):
            model.step(Fails.apply(model.step(x))).sum().backward()
        square(model, x).backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize("replay", [[], ["norm"]], ids=["kernels", "replay"])
def test_gradient_of_the_inputs_first(replay: list[str], x: Tensor) -> None:
    """A backward pass that does not ask for the parameters keeps operands that nobody uses."""
    model = Again()
    loop = loop_sqnorms(model, square, x, B)
    plain = copy.deepcopy(model)
    square(plain, x).backward()
    leaf = x.clone().requires_grad_()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        value = square(model, leaf)
        torch.autograd.grad(3 * value, [leaf], retain_graph=True)
        value.backward()
    assert_norms(norms, loop)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_accumulation(x: Tensor) -> None:
    """Blocks have calls of their own; ``.grad`` adds up as in torch."""
    model = converted()
    plain = copy.deepcopy(model)
    for part in x, 2 * x, x[:, :2]:
        loop = loop_sqnorms(plain, square, part, B)
        assert_norms(run(model, part), loop)
        square(plain, part).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_estimator(x: Tensor) -> None:
    """p and q of updates of two micro-batches are those of the float64 loop."""
    model = converted()
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum", window=1)
    parts = [x, torch.randn(B, T, D)]
    p = sum(sum(loop_sqnorms(model, square, part, B).values()).sum().item() for part in parts)
    for part in parts:
        with gns.microbatch(B):
            square(model, part).backward()
    q = sum(t.grad.double().square().sum().item() for t in model.parameters())
    gns.update()
    n, found = 2 * B, gns.compute()
    assert found.trace == pytest.approx((p - q / n) / (n - 1), rel=1e-4)


@pytest.mark.parametrize("twice", ["backward", "pass"])
def test_two_backward_passes_in_one_block(twice: str, x: Tensor) -> None:
    model = converted()
    with pytest.raises(ObservationError, match="2 times in one block, where all calls"):
        with gnsfast.per_sample_sqnorms(model, B):
            value = square(model, x)
            value.backward(retain_graph=twice == "backward")
            (value if twice == "backward" else square(model, x)).backward()


def test_create_graph_is_refused(x: Tensor) -> None:
    model = converted()
    with pytest.raises(ObservationError, match="create_graph"):
        with gnsfast.per_sample_sqnorms(model, B):
            square(model, x).backward(create_graph=True)
    with pytest.raises(ObservationError, match="create_graph"):  # no gradient of an output has one
        with gnsfast.per_sample_sqnorms(model, B):
            model.layer(model.layer(x)).sum().backward(create_graph=True)


def test_weight_also_used_as_a_tensor(x: Tensor) -> None:
    model = converted()
    with pytest.raises(ObservationError, match=r"layer\.weight.*outside of its module"):
        with gnsfast.per_sample_sqnorms(model, B):
            (square(model, x) + 10 * model.layer.weight.sum()).backward()


def test_operands_that_are_written_to(x: Tensor) -> None:
    """A backward hook that works in place, after the call's own backward has kept the tensor."""
    model = converted(times=2)

    def write(grad: Tensor) -> None:
        kept[0].mul_(2.0)

    kept: list[Tensor] = []
    with pytest.raises(ObservationError, match="layer: .* was changed before"):
        with gnsfast.per_sample_sqnorms(model, B):
            leaf = x.clone().requires_grad_()
            hidden = model.step(leaf)
            hidden.register_hook(write)
            y = model.layer(hidden)
            kept.append(hidden.detach())
            y.sum().backward()


def test_parameters_that_are_replaced(x: Tensor) -> None:
    model = converted()
    with pytest.raises(ObservationError, match="layer: its parameters were replaced"):
        with gnsfast.per_sample_sqnorms(model, B):
            y = model.layer(x)
            model.layer.weight = nn.Parameter(torch.randn(D, D))
            model.layer(y)


def test_lookup_between_two_calls_of_a_tied_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(D, D), nn.Linear(D, D, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids)) + self.head(self.words(ids).sin())

    model = Tied()
    with pytest.raises(ObservationError, match="words: it is looked up after the head"):
        run(model, torch.randint(0, D, (B, T)))


def test_a_tied_embedding_is_exact_without_it() -> None:
    """Its links count its calls, whether it is named or not."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(D, D), nn.Linear(D, D, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids).sin() + self.words(ids.flip(1)))

    model, ids = Tied(), torch.randint(0, D, (B, T))
    loop = loop_sqnorms(model, square, ids, B)
    assert_norms(run(model, ids), loop)


@pytest.mark.parametrize("replay", [[], ["norm"]], ids=["kernels", "replay"])
def test_nothing_is_left_after_the_block(replay: list[str], x: Tensor) -> None:
    """Neither a graph nor operands, also without the garbage collector; copies and pickles work."""
    model = Again()
    left = []

    def watch() -> None:
        left.extend(weakref.ref(m._opened.plan.calls._kept) for m in (model.norm, model.layer))

    gc.disable()
    try:
        with gnsfast.per_sample_sqnorms(model, B):
            watch()
            first = model.step(x)
            seen = weakref.ref(first)
            square(model, first).backward()
            del first
        with pytest.raises(KeyError):
            with gnsfast.per_sample_sqnorms(model, B):
                watch()
                other = model.step(x)
                also = weakref.ref(other)
                torch.autograd.grad(model.step(other).sum(), [other])  # leaves operands behind
                del other
                raise KeyError
        assert seen() is None and also() is None
        assert [each() for each in left] == [None] * 4
    finally:
        gc.enable()
    for twin in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        loop = loop_sqnorms(model, square, x, B)
        assert_norms(run(twin, x), loop)


def test_the_error_names_the_remedy(x: Tensor) -> None:
    model = Again()
    with pytest.raises(ObservationError) as found:
        run(model, x)
    for said in "3 times", "convert(model, repeated=['norm'])", "convert(model, example=batch)":
        assert said in str(found.value)
    run(model, x)
    with pytest.raises(ObservationError, match="3 times"):
        run(model, x)


def test_convert_refuses() -> None:
    attention = nn.TransformerEncoderLayer(D, 2, batch_first=True, dropout=0.0)
    why = reason("in_projection", [REPEATED])
    with pytest.raises(NotImplementedError, match=f"self_attn: {why}.*replay="):
    assert type(attention.linear1) is nn.Linear  # nothing was changed
    gnsfast.configure(attention, repeated=["*"], exclude=["self_attn"])
    with pytest.raises(ValueError, match="repeated: no module has a name that matches 'tower'"):
        Again()
    with pytest.raises(
        ValueError, match="repeated: the modules that match 'dropout' have no parameters"
    ):


def test_compiled_layers_are_refused(x: Tensor) -> None:
    model = converted()
    with pytest.raises(Exception, match=reason("layer_norm", [REPEATED, COMPILED])):
        with gnsfast.per_sample_sqnorms(model, B):
            torch.compile(model, backend="eager", fullgraph=True)(x)


def test_cross_entropy_of_a_repeated_head_is_refused(x: Tensor) -> None:
    model = converted()
    with pytest.raises(NotImplementedError, match="layer: linear_cross_entropy has no norms for"):
        with gnsfast.per_sample_sqnorms(model, B):
            model.layer.cross_entropy(x, torch.zeros(B, T, dtype=torch.int64))


def test_schedules_are_refused() -> None:
    class Stage:
        submod, group_size = converted(), 1

    class Schedule:
        _n_microbatches, _stage, scale_grads = 2, Stage(), True

    with pytest.raises(NotImplementedError, match=f"norm: .*{PIPELINE}"):
        PipelinePasses(Schedule(), 8, alone=True)


def test_table() -> None:
    assert not reason("linear", [REPEATED])
    assert reason("linear", [REPEATED, TENSOR_PARALLEL])
