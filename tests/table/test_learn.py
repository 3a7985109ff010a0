# SPDX-License-Identifier: Apache-2.0
"""What learning costs, what it leaves as it was, and when it happens."""

import gc
import random
import threading
import weakref
from typing import Any

import numpy
import pytest
import torch
from hostile import D, linear, per_sample, right_or_named
from made import Made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.following import Followed
from gnsfast.following import model as following_model

B, T = 4, 6


def counted(model: nn.Module) -> list[int]:
    """How many samples the first layer got in each of its calls."""
    sizes: list[int] = []
    model[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    return sizes


def layers() -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), linear())


def test_the_passes_of_learning() -> None:
    """Two of shapes, one whether it draws random numbers, one measured, each sample alone, and one
    of the whole batch.
    """
    model = layers()
    sizes = counted(model)
    gnsfast.learn(model, torch.randn(64, T, D))
    assert sizes == [3, 4, 3, 3, 1, 1, 1, 64]


@pytest.mark.parametrize("how", ["table", "first batch"])
def test_a_training_step_runs_the_model_once(how: str) -> None:
    model, x = layers(), torch.randn(16, D)
    sizes = counted(model)
    gns = gnsfast.GradientNoiseScale(model, gnsfast.learn(model, x) if how == "table" else None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for k in range(40):
        learns = k == 0 and how != "table"
        sizes.clear()
        with gns.update(16):
            per_sample(model(torch.randn(16, D))).mean().backward()
        assert sizes == [3, 4, 3, 3, 1, 1, 1, 16, 16] if learns else sizes == [16]
        optimizer.step()
        optimizer.zero_grad()
    assert gns.compute().updates == 40


def test_training_mode_is_proven_once() -> None:
    """A model whose samples meet there alone is measured in evaluation mode. In training mode the
    bias behind the mean is, which does not depend on it.
    """

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    for between, n in ((nn.Tanh(), 4), (Mean(), 1)):
        model = nn.Sequential(linear(), between, linear()).eval()
        sizes = counted(model)
        assert len(right_or_named(model, torch.randn(6, D), 6)) == 4
        model.train()
        assert len(right_or_named(model, torch.randn(6, D), 6)) == n
        sizes.clear()
        for mode in (True, False, True):
            model.train(mode)
            with gnsfast.per_sample_sqnorms(model, 6):
                per_sample(model(torch.randn(6, D))).sum().backward()
        assert sizes == [6] * 3


class Plain(nn.Module):
    """Layers, a buffer that counts, a batch norm that only evaluates, and what draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.norm, self.drop = nn.BatchNorm1d(T), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(3))
        self.slow = nn.Parameter(torch.ones(D), requires_grad=False)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = 0.01 * torch.rand(D, generator=self.generator) + random.random()
        x = self.norm(self.first(x) + noise + float(numpy.random.rand()))
        y: Tensor = self.last(self.drop(x) * self.slow)
        return y


@pytest.mark.parametrize("how", ["learn", "block", "both"])
def test_nothing_is_changed(how: str) -> None:
    """Hooks, gradients, modes, buffers, values and all random numbers are as without a table."""
    outcomes = []
    for measured in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model, x = Plain(), torch.randn(B, T, D)
        model.norm.eval()
        model.norm.running_mean.normal_()
        seen: list[str] = []
        for p in model.parameters():
            p.grad = torch.ones_like(p)
            if p.requires_grad:
                p.register_hook(lambda g, seen=seen: seen.append("gradient"))
                p.register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append("accumulated")
                )
        grads = [p.grad for p in model.parameters()]
        modes = [m.training for m in model.modules()]
        hooks = [{**vars(m)} for m in model.modules()]
        table = gnsfast.learn(model, x) if measured and how != "block" else None
        assert hooks == [{**vars(m)} for m in model.modules()]
        if measured and how != "learn":
            with gnsfast.per_sample_sqnorms(model, B, table=table):
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        assert modes == [m.training for m in model.modules()]
        assert all(p.grad is g for p, g in zip(model.parameters(), grads))
        draws = torch.rand(3), random.random(), numpy.random.rand(), model.generator.get_state()
        whole = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        outcomes.append((whole, draws, seen, model.calls))
    (plain, drawn, hooks, _), (own, drawn_too, hooks_too, calls) = outcomes
    assert hooks == hooks_too and calls.tolist() == [1, 1, 1]
    assert torch.equal(drawn[0], drawn_too[0]) and torch.equal(drawn[3], drawn_too[3])
    assert drawn[1:3] == drawn_too[1:3]
    for a, b in zip(plain, own):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_learn_refuses() -> None:
    model, x = linear(), torch.randn(4, D)
    with pytest.raises(ValueError, match="no samples"):
        gnsfast.learn(model, ())
    with pytest.raises(gnsfast.SampleShapeError, match=r"5 samples.*\[4, 8\].*take="):
        gnsfast.learn(model, x, num_samples=5)
    with pytest.raises(gnsfast.ObservationError, match="A block is open"):
        with gnsfast.per_sample_sqnorms(model, 4):
            gnsfast.learn(model, x)
    norm = nn.BatchNorm1d(D)
    with pytest.raises(gnsfast.ObservationError, match="batch statistics tie the samples"):
        gnsfast.learn(norm, x)
    assert gnsfast.learn(norm.eval(), x).proofs


def test_two_threads_that_learn() -> None:
    """Both are in the middle of it at the same time. Checkpoints compute again after it."""
    both, waiting = threading.Barrier(2, timeout=60), {0, 1}  # each once: learning restores models
    errors: list[BaseException] = []

    def run(m: Any, x: Tensor) -> Tensor:
        if m.number in waiting:
            waiting.remove(m.number)
            both.wait()
        y: Tensor = checkpoint(lambda t: m.b(t.tanh()), m.a(x), use_reentrant=False)
        return y

    models = [Made(run, a=linear(), b=linear(), number=number) for number in range(2)]

    def learn(model: nn.Module) -> None:
        try:
            assert len(gnsfast.learn(model, torch.randn(4, D)).proofs) == 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    calls: list[int] = []
    models[0].b.register_forward_pre_hook(lambda *_: calls.append(1))
    models[0](torch.randn(4, D)).sum().backward()
    assert len(calls) == 2


class Child(nn.Linear):
    """Knows its parent, as the modules of FSDP2 do."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__(D, D)
        vars(self)["parent"] = parent


@pytest.mark.parametrize("how", ["learn", "block"])
def test_a_model_that_was_measured_is_freed(how: str) -> None:
    model = nn.Sequential(linear())
    model.append(Child(model))
    if how == "learn":
        table = gnsfast.learn(model, torch.randn(4, D))
        assert table.proofs
    else:
        with gnsfast.per_sample_sqnorms(model, 4):
            per_sample(model(torch.randn(4, D))).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_model_is_closed_when_it_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), torch.randn(4, D)

    def fails() -> None:
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(following_model, "prepare_compiler", fails)
        for start in (
            lambda: gnsfast.per_sample_sqnorms(model, 4).__enter__(),
            lambda: gnsfast.learn(model, x),
        ):
            with pytest.raises(RuntimeError, match="no compiler"):
                start()
            assert not Followed.of(model).is_open
            assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert len(right_or_named(model, x, 4)) == 4


class InOrder(nn.Linear):
    """Takes the longest sample first, as a packed sequence has it."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < x[:, 0].max():
            raise ValueError("lengths must be sorted")
        return super().forward(x)


def test_a_model_that_takes_samples_in_one_order() -> None:
    x = torch.randn(4, D)
    x[:, 0] = torch.tensor([4.0, 2.0, 3.0, 2.0])
    with pytest.raises(gnsfast.ObservationError, match="in any order .*sorted.*take="):
        gnsfast.learn(InOrder(D, D), x)


@pytest.mark.parametrize("passes", range(7))
@pytest.mark.parametrize("kind", [gnsfast.ObservationError, gnsfast.SampleShapeError])
def test_an_error_of_gnsfast_is_shown_as_it_is(kind: type[Exception], passes: int) -> None:
    """In whichever pass it is raised. One of the model's own is a reason why nothing is proven."""
    model, left = nn.Sequential(linear()), [passes]

    def run(x: Tensor) -> Any:
        if not left[0]:
            raise kind("a line to write")
        left[0] -= 1
        return model(x)

    with pytest.raises(kind, match="^a line to write"):
        gnsfast.learn(model, torch.randn(4, D), run=run)


def test_documents_are_learnt() -> None:
    """A table of packed documents serves blocks of others, without another look at the model."""
    model = nn.Sequential(nn.Embedding(20, D), nn.GELU(), linear())
    starts = torch.tensor([0, 4, 9, 15, 20], dtype=torch.int32)
    table = gnsfast.learn(model, torch.randint(20, (2, 10)), cu_seqlens=starts)
    assert table.has_ragged and table.proofs.keys() == {"0.weight", "2.weight", "2.bias"}
    calls: list[int] = []
    model[1].register_forward_pre_hook(lambda *_: calls.append(1))
    ids, starts = torch.randint(20, (2, 8)), torch.tensor([0, 5, 16], dtype=torch.int32)
    with gnsfast.per_sample_sqnorms(model, 2, table=table, cu_seqlens=starts) as norms:
        model(ids).square().sum().backward()
    assert calls == [1]
    for b, document in enumerate(ids.flatten().split([5, 11])):
        model.zero_grad()
        model(document).square().sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(norms[name][b], p.grad.square().sum())


@pytest.mark.parametrize("rows", [1, 2])
def test_results_of_next_tokens(rows: int) -> None:
    """Models that return losses of next tokens have one result less in each row than tokens."""

    class NextTokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, D), nn.Linear(D, 9)

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.head(self.embed(ids))[:, :-1]
            return nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")

    ids = torch.randint(9, (rows, 12 // rows))
    table = gnsfast.learn(NextTokens(), ids, cu_seqlens=torch.tensor([0, 2, 5, 6, 9, 12]))
    assert table.covered_fraction == 1 and not table.left_out


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_nearly_alike(seed: int) -> None:
    """Two rows of a sample, and a head whose rows hardly differ: it alone would not show whose."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, D), nn.Linear(D, 1, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(1 + 1e-5 * self.embed(ids)[:, -1])

    torch.manual_seed(seed)
    table = gnsfast.learn(Scores(), torch.randint(9, (8, 3)), take=2)
    assert not table.left_out
    assert str(table).count("interleaved rows of dimension 0") == 2


class Normalised(nn.Module):
    """A layer behind statistics of the batch, by a function or by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            x = nn.functional.batch_norm(x, None, None, training=True)
        elif self.how == "in training":
            mean, deviation = torch.zeros(D), torch.ones(D)
            x = nn.functional.batch_norm(x, mean, deviation, training=self.training)
        elif self.training:
            x = x - x.mean(0)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("how", ["function", "in training", "by hand"])
def test_statistics_of_the_batch_before_a_layer(how: str) -> None:
    """Samples meet where nobody has learnt anything yet, so no gradient shows it."""
    table = gnsfast.learn(Normalised(how), torch.randn(8, D) + 0.5)
    assert "samples meet" in table.left_out["layer.weight"]


def test_a_first_batch_that_is_not_finite() -> None:
    """Nothing is learnt from it, and the next one shows the model."""
    model = linear()
    gns = gnsfast.GradientNoiseScale(model, gradients="torch", on_error="skip")
    for k in range(4):
        x = torch.randn(6, D)
        x[1] *= torch.nan if k == 0 else 1.0
        with gns.update(6):
            per_sample(model(x)).mean().backward()
    result = gns.compute()
    assert (result.updates, result.errors) == (3, 1)
