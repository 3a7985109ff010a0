# SPDX-License-Identifier: Apache-2.0
"""Models that people write and that once had wrong norms, outputs or state: each parameter is right
or left out by name, in the first batch and in later ones of other sizes.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hostile import D, assert_refused, in_its_batch, linear, per_sample, right_or_named
from made import Made
from oracle import assert_norms
from torch import Tensor, nn

import gnsfast


@pytest.mark.parametrize("run", ["linear", "gain", "einsum", "made"])
def test_complex_parameters_are_left_out(run: str) -> None:
    """Their gradients are torch's."""
    kind = torch.cfloat
    model = {
        "linear": Made(
            lambda s, x: F.linear(x.to(kind), s.w).abs(), w=torch.randn(D, D, dtype=kind)
        ),
        "gain": Made(lambda s, x: (x * s.w).abs(), w=torch.randn(D, dtype=kind)),
        "einsum": Made(
            lambda s, x: torch.fft.irfft(
                torch.einsum("btd,de->bte", torch.fft.rfft(x, dim=1), s.w), dim=1
            ),
            w=torch.randn(D, D, dtype=kind),
        ),
        "made": Made(lambda s, x: (x * torch.view_as_complex(s.w)).abs(), w=torch.randn(D, 2)),
    }[run]
    model.last = linear()
    inner, model.run = model.run, lambda s, x: s.last(inner(s, x))
    assert right_or_named(model, torch.randn(4, 6, D), 4) == {"last.weight", "last.bias"}
    row = next(row for row in gnsfast.coverage(model).rows if row.parameter == "w")
    assert "complex" in row.reason


class BatchMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() if self.training else x


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_samples_that_meet_in_training_mode_only(p: float) -> None:
    """A model with dropout is compared with itself in training mode, with the same draws."""
    model = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(p), linear(), BatchMean(), linear())
    assert right_or_named(model, torch.randn(6, D), 6) <= {"5.weight", "5.bias"}


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = torch.zeros(()), list[float]()

    def add(self, value: Tensor) -> None:
        self.total += value
        self.seen.append(float(value))


class Stateful(nn.Module):
    """A forward pass writes to attributes, containers of containers, objects, buffers and frozen
    parameters, in ways that leave no version too. It collects losses, and adds hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.teacher = linear(), linear(), linear().requires_grad_(False)
        self.cells, self.h = nn.GRU(D, D, batch_first=True), None
        self.register_buffer("book", torch.randn(4, D))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.centre, self.steps, self.seen = torch.zeros(D), 0, [torch.zeros(D)]
        self.counts: dict[str, Any] = {
            "of": [torch.zeros(1), Counter(a=1)],
            "array": numpy.zeros(2),
        }
        self.meter, self.losses, self.caught = Meter(), list[Tensor](), list[Tensor]()
        self.aux = torch.zeros(())

    def forward(self, x: Tensor, calls: Any) -> Tensor:
        if not self.steps:  # as models of transformers
            self.a.register_forward_hook(lambda _m, _x, y: self.caught.append(y))
        self.caught.clear()
        h = self.a(x)
        self.steps += 1
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean((0, 1))
        self.seen[0].add_(1.0)
        self.seen.append(h.detach().mean(0))
        self.teacher.weight.data.mul_(0.9).add_(self.a.weight.data, alpha=0.1)
        with torch.no_grad():
            self.teacher.bias.lerp_(self.a.bias, 0.1)
            self.scale[0] = 0.9 * self.scale[0] + 0.1 * h.norm()
        self.book.data = 0.9 * self.book + 0.1 * h.detach().mean((0, 1))
        self.book.data[0].add_(1.0)
        self.counts["of"][0].add_(1.0)
        self.counts["of"][1]["a"] += 1
        self.counts["array"] += 1
        self.meter.add(h.detach().mean())
        self.losses.append(h.square().flatten(1).sum(1))
        self.aux += h.square().sum()
        calls.count += 1
        calls.means.append(x.detach().mean())
        y, own = self.cells(h, self.h)
        self.h = own.detach()
        y = y + self.teacher(x) / self.scale - self.book.mean(0) + self.centre
        y = y + sum(self.caught) * float(self.counts["array"][0]) / calls.count
        out: Tensor = self.b(y) * min(1.0, self.steps / 20)
        return out


def state_of(model: Any) -> dict[str, Any]:
    counts = model.counts["of"][0], dict(model.counts["of"][1]), model.counts["array"]
    own = model.centre, model.steps, model.seen, counts, vars(model.meter), model.h, model.aux
    return {**model.state_dict(), "own": own, "lists": (len(model.losses), len(model.caught))}


def test_state_is_what_one_pass_leaves() -> None:
    """Of the model and of objects among its arguments, in the pass that learns too."""
    models = [Stateful(), Stateful()]
    models[1].load_state_dict(models[0].state_dict())
    calls = [SimpleNamespace(count=0, means=[]) for _ in models]
    for _ in range(3):
        x = torch.randn(4, 6, D)
        found = []
        for model, own in zip(models, calls):
            model.aux = torch.zeros(())
            with gnsfast.per_sample_sqnorms(model, 4) if model is models[1] else nullcontext():
                y = model(x, own)
                (per_sample(y) + sum(model.losses)).sum().add(model.aux).backward()
            model.losses.clear()
            model.aux = model.aux.detach()
            found.append((y, [p.grad for p in model.parameters() if p.requires_grad]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*map(state_of, models))
        assert vars(calls[0]) == vars(calls[1]) and len(models[1].a._forward_hooks) == 1


class Rounded(nn.Parameter):
    """A parameter that changes what functions of torch compute."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                w = args[1] + ((args[1] * 4).round() / 4 - args[1]).detach()
                return func(args[0], w, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_whose_class_sees_functions_itself() -> None:
    model = nn.Sequential(linear(), linear())
    model[0].weight = Rounded(torch.randn(D, D))
    names = {"0.bias", "1.weight", "1.bias"}
    assert right_or_named(model, torch.randn(4, D), 4) <= names
    assert "Rounded" in gnsfast.coverage(model).rows[0].reason


def test_a_parameter_that_is_replaced_in_a_block() -> None:
    model = nn.Sequential(linear(), linear())
    with (
        pytest.raises(gnsfast.ObservationError, match="replaced"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        model[0].weight = nn.Parameter(torch.randn(D, D))
        model(torch.randn(4, D)).sum().backward()


@pytest.mark.parametrize("between", [torch.tanh, lambda h: h, lambda h: F.layer_norm(h, (D,))])
def test_gradients_of_gradients_are_left_out(between: Callable[[Tensor], Tensor]) -> None:
    """As of forces, which are gradients of an energy. The gradients in a block are torch's."""

    def forces(m: Any, x: Tensor) -> Tensor:
        y = x.clone().requires_grad_()
        energy = m.b(between(m.a(y))).sum()
        return torch.autograd.grad(energy, y, create_graph=True)[0]

    model, x = Made(forces, a=linear(), b=linear(), c=linear()), torch.randn(4, D)
    per_sample(model(x)).sum().backward()
    real = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    with (
        pytest.raises(gnsfast.ObservationError, match="a.weight.*gradient of its gradient"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        per_sample(model(x)).sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, real[n])


def test_parts_that_torch_compiled_to_its_own_script() -> None:
    for own in (torch.jit.script(linear()), torch.jit.trace(linear(), torch.randn(2, D))):
        model = nn.Sequential(own, linear())
        for _ in range(2):
            assert right_or_named(model, torch.randn(4, D), 4) == {"1.weight", "1.bias"}


def test_nothing_of_ours_is_left_in_a_model() -> None:
    """What the old weight norm computes is an attribute; it is a plain tensor after the block."""
    model, kept = nn.utils.weight_norm(linear()), []
    with gnsfast.per_sample_sqnorms(model, 4):
        per_sample(model(torch.randn(4, D))).sum().backward()
        kept.append(model.bias * 2)
    for t in (model.weight, *kept):
        assert type(t) is Tensor and not hasattr(t, "_gnsfast")


MEETINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.tanh,
    "mean": lambda h: h + torch.tanh(h.mean(0, keepdim=True)),
    "shifted": lambda h: 0.7 * h + 0.3 * h.roll(1, 0),
}


@pytest.mark.parametrize("kind", MEETINGS)
def test_a_model_that_returns_its_loss_alone(kind: str) -> None:
    """It proves nothing, and what ``run`` returns of each sample tells whether they meet."""

    def logits(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.last(MEETINGS[kind](torch.tanh(m.first(x))))
        return y

    model = Made(lambda m, x: per_sample(logits(m, x)).mean(), first=linear(), last=linear())
    x, loss = torch.randn(6, D), lambda m, x: m(x)
    assert_refused(model, x, 6, "first.weight: .*no result of the model belongs", loss)
    table = gnsfast.learn(model, x, run=lambda x: logits(model, x))
    if kind == "none":
        found = gnsfast.verify(model, loss, x, table=table)
        assert {row.verdict for row in found.rows} == {"ok"}
    else:
        assert table.proofs.keys() <= {"last.weight", "last.bias"}


def test_a_table_of_parameters_behind_dropout() -> None:
    """Its random numbers are drawn once."""

    def run(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(x + m.drop(m.table)[: x.shape[1]])
        return y

    model = Made(run, a=linear(), table=torch.randn(9, D), drop=nn.Dropout(0.3))
    assert right_or_named(model, torch.randn(4, 6, D), 4) == {"a.weight", "a.bias", "table"}


@pytest.mark.parametrize("bias", [(1,), (), (1, D), None])
def test_weights_of_a_linear_function_in_other_shapes(bias: tuple[int, ...] | None) -> None:
    """A vector in place of a matrix, and a bias that is broadcast."""
    if bias is None:
        model = Made(lambda s, x: F.linear(s.a(x), s.w), a=linear(), w=torch.randn(D))
    else:
        own = {"w": torch.randn(D, D), "b": torch.randn(bias)}
        model = Made(lambda s, x: F.linear(s.a(x), s.w, s.b), a=linear(), **own)
    for B in (4, 5):
        assert len(right_or_named(model, torch.randn(B, 6, D), B)) == 3 + (bias is not None)


def test_replays_in_autocast() -> None:
    """A replay computes in the dtypes of the forward pass."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = m.cells(torch.matmul(m.mix, m.a(x)))[0]
        return y.float()

    own = {"cells": nn.LSTM(D, D, batch_first=True), "mix": torch.randn(6, 6)}
    model, x = Made(run, a=linear(), **own), torch.randn(4, 6, D)
    real = in_its_batch(model, lambda: per_sample(model(x)))
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        per_sample(model(x)).sum().backward()
    assert_norms(norms, real, rtol=5e-2)


def test_parameters_that_are_changed_before_the_model_runs() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())

    def loss(m: Any, x: Tensor) -> Tensor:
        twice = {name: 2 * p for name, p in m.named_parameters()}
        return per_sample(torch.func.functional_call(m, twice, (x,)))

    for _ in range(2):
        assert len(right_or_named(model, torch.randn(4, D), 4, loss)) == 4


@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_batches_that_cannot_be_sliced(kind: str) -> None:
    """An error shows ``take``, by which they are measured or left out by name."""
    if kind == "sparse":
        model = Made(lambda s, x: torch.sparse.mm(x, s.w), w=torch.randn(6, D))
        x = torch.randn(4, 6).relu().to_sparse()
        take = lambda x, samples: torch.stack([x[b] for b in samples])  # noqa: E731
    else:
        model = Made(lambda s, x: torch.nested.to_padded_tensor(s.a(x), 0.0), a=linear())
        parts = [torch.randn(k, D) for k in (3, 5, 2, 4)]
        jagged = lambda parts: torch.nested.nested_tensor(parts, layout=torch.jagged)  # noqa: E731
        x = jagged(parts)
        take = lambda _, samples: jagged([parts[b] for b in samples])  # noqa: E731
    assert_refused(model, x, 4, "take=")
    assert not gnsfast.learn(model, x, take=take, num_samples=4).proofs


LAYERS = {
    "tanh": lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
    "linear": lambda: nn.Sequential(linear(), linear()),
    "norm": lambda: nn.Sequential(linear(), nn.LayerNorm(D), linear()),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3), nn.Flatten()),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("measure", ["norms", "noise scale"])
def test_a_penalty_on_gradients_is_named(layers: str, measure: str) -> None:
    """torch's own error does not say what to do, and there is none where no incoming gradient needs
    one.
    """
    model, x = LAYERS[layers](), torch.randn(4, D, requires_grad=True)
    gns = gnsfast.GradientNoiseScale(model)
    block = gnsfast.per_sample_sqnorms(model, 4) if measure == "norms" else gns.update(4)
    with pytest.raises(gnsfast.ObservationError, match="unit='micro_batch'"), block:
        loss = model(x).sum()
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        (loss + slope.square().sum()).backward()


@pytest.mark.parametrize("held", [True, False])
def test_noise_of_a_generator_of_its_own(held: bool) -> None:
    """A generator that is an argument, or an attribute, is what one pass leaves."""

    def run(m: Any, x: Any) -> Tensor:
        noise = torch.randn(x[0].shape, generator=x[1] or m.generator)
        y: Tensor = m.a(x[0] + noise)
        return y

    own = torch.Generator()
    model, plain = (Made(run, a=linear(), generator=own if held else None) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 6, D), None if held else own
    own.manual_seed(1)
    real, after = plain(x), own.get_state()
    own.manual_seed(1)
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        y = model(x)
        per_sample(y).sum().backward()
    torch.testing.assert_close(y, real)
    assert torch.equal(own.get_state(), after) and len(norms) == 2


def test_a_weight_of_the_loss() -> None:
    """It is made outside of the model, and meets the losses of samples, or their mean."""
    model, x = Made(lambda s, x: s.a(x), a=linear(), log=torch.tensor(0.3)), torch.randn(4, 6, D)
    weighed = lambda m, x: torch.exp(-m.log) * per_sample(m(x)) + m.log  # noqa: E731
    assert right_or_named(model, x, 4, weighed) == {"a.weight", "a.bias"}
    table = gnsfast.learn(model, x, run=lambda x: weighed(model, x))
    assert len(right_or_named(model, x, 4, weighed, table)) == 3
    with (
        pytest.raises(gnsfast.ObservationError, match="log: .* a number of the whole batch"),
        gnsfast.per_sample_sqnorms(model, 4, table=table),
    ):
        (torch.exp(-model.log) * per_sample(model(x)).mean() + model.log).backward()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_a_distribution_whose_scale_is_a_parameter(
    first: bool, outside: bool, shape: tuple[int, ...]
) -> None:
    """``torch.distributions`` broadcast the location and the scale against each other."""

    def logits(m: Any, mean: Tensor, x: Tensor) -> Tensor:
        scale = m.log.exp()
        if first:  # the parameter is the first of both
            return torch.distributions.Laplace(m.at, mean.exp()).log_prob(x) + mean * scale
        return torch.distributions.Normal(mean, scale).log_prob(x + m.at)

    def run(m: Any, x: Tensor) -> Tensor:
        mean: Tensor = m.a(x)
        return mean if outside else logits(m, mean, x)

    def loss(m: Any, x: Tensor) -> Tensor:
        return per_sample(logits(m, m(x), x) if outside else m(x))

    model = Made(run, a=linear(), log=torch.randn(D) * 0.1, at=torch.randn(D))
    x = torch.randn(4, *shape, D)
    whole = (lambda x: logits(model, model(x), x)) if outside else None
    table = gnsfast.learn(model, x, run=whole)
    for B in (4, 5, 2):
        x = torch.randn(B, *shape, D)
        assert len(right_or_named(model, x, B, loss, table)) == 4


def test_parameters_that_are_broadcast_with_constants_alone() -> None:
    """They stay what each sample gets of them."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(m.log, torch.ones(6, D))
        y: Tensor = m.a(x * a.exp() + b)
        return y

    model = Made(run, a=linear(), log=torch.randn(D) * 0.1)
    for B in (4, 6):
        assert len(right_or_named(model, torch.randn(B, 6, D), B)) == 3


def test_why_a_scale_is_left_out() -> None:
    """``broadcast_tensors`` returns data as it is, and writes to none."""

    def run(m: Any, x: Tensor) -> Tensor:
        mean, scale = torch.broadcast_tensors(x[x[:, 0] > 0], m.log)
        return m.a(x) + (mean * scale).mean(0)  # type: ignore[no-any-return]

    model = Made(run, a=linear(), log=torch.randn(D))
    assert "log" not in right_or_named(model, torch.randn(6, D), 6)
    row = next(row for row in gnsfast.coverage(model).rows if row.parameter == "log")
    assert "for the same sample alone" in row.reason


LIKE_DATA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask": lambda m, x: F.linear(x, m.w * m.mask.to(x)),
    "rows of zeros": lambda m, x: F.linear(x, torch.cat([m.w[:5], x.new_zeros(D - 5, D)])),
    "a list": lambda m, x: F.linear(x, m.w * x.new_tensor([*range(1, D + 1)])),
    "ones like a sample": lambda m, x: F.linear(x, m.w * torch.ones_like(x[0, :1])),
    "written to": lambda m, x: F.linear(x, x.new_zeros(D, D).index_copy(0, m.at, m.w[:5])),
    "a token of each sample": lambda m, x: torch.cat([m.w[:1] + x.new_zeros(len(x), 1, D), x], 1),
    "positions of each sample": lambda m, x: x * (m.w[:6] + torch.zeros_like(x)),
    "samples of zeros": lambda m, x: x + F.linear(torch.zeros_like(x) + 1.0, m.w),
}


@pytest.mark.parametrize("kind", LIKE_DATA)
def test_constants_that_are_like_data(kind: str) -> None:
    """The data tell their dtype, or their shape, alone."""
    model = Made(LIKE_DATA[kind], w=torch.randn(D, D))
    model.register_buffer("mask", torch.rand(D, D) < 0.6)
    model.register_buffer("at", torch.arange(5))
    for B in (4, 4, 3):
        assert right_or_named(model, torch.randn(B, 6, D), B) == {"w"}


def test_a_parameter_that_tells_its_dtype() -> None:
    """What has this dtype already is returned as it is, as in Gemma 3n."""
    model = Made(
        lambda m, x: m.a(x).type_as(m.gain).to(m.gain) * m.gain, a=linear(), gain=torch.ones(D)
    )
    assert len(right_or_named(model, torch.randn(4, D), 4)) == 3


def test_similarities_of_samples_that_are_almost_the_same() -> None:
    """Nothing in the results changes with a sample, so the similarities seem to belong to one."""

    def similar(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x)
        return y @ y.T, y

    model, x = Made(similar, a=linear()), 1 + 1e-9 * torch.randn(4, D)
    found = right_or_named(model, x, 4, lambda m, x: per_sample(m(x)[1]))
    assert found == {"a.weight", "a.bias"}


class OwnCheckpoint(torch.autograd.Function):
    """As Megatron-LM's and RevNet's: backward runs the block again, and a backward pass of it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, g)
        return None, x.grad


def test_a_checkpoint_with_a_backward_pass_of_its_own() -> None:
    """No gradient of our passes is added to those of the user's, and no hook tells of one. What is
    inside of it gets its gradient from that pass, so that nothing proves it.
    """
    parts = nn.ModuleDict({"first": linear(), "last": linear()})
    parts["block"] = nn.Sequential(nn.LayerNorm(D), linear(), nn.Tanh())
    plain = Made(lambda s, x: s.of["last"](s.of["block"](s.of["first"](x))), of=parts)
    own = Made(
        lambda s, x: s.of["last"](OwnCheckpoint.apply(s.of["block"], s.of["first"](x))), of=parts
    )
    arrived = Counter[str]()
    for name, p in own.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update([name]))
    for k in range(9):
        x = torch.randn(4 + k // 4, D)
        found = []
        for model in (plain, own):
            arrived.clear()
            with gnsfast.per_sample_sqnorms(model, len(x)) as norms:
                per_sample(model(x)).sum().backward()
            assert {*arrived.values()} == {1}
            found.append(({n: p.grad for n, p in model.named_parameters()}, norms))
            model.zero_grad()
        (grads, real), (own_grads, own_norms) = found
        torch.testing.assert_close(own_grads, grads)
        assert_norms(own_norms, dict(real), rtol=1e-4, names=set(own_norms))
        assert {name.split(".")[1] for name in own_norms} >= {"first", "last"}


class FusedAccumulation(torch.autograd.Function):
    """As Megatron-LM's: the gradient of the weight is added to an attribute of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w.detach().T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.w.main_grad.add_(g.T @ ctx.saved_tensors[0])
        return g @ ctx.w.detach(), None


def test_gradients_in_attributes_of_parameters() -> None:
    model = Made(lambda s, x: s.last(FusedAccumulation.apply(x, s.first.weight)), first=linear())
    model.last = linear()
    sums = model.first.weight.main_grad = torch.zeros(D, D)
    for _ in range(9):
        x = torch.randn(4, D)
        per_sample(model(x)).sum().backward()
        real = sums.clone()
        model.zero_grad()
        sums.zero_()
        with gnsfast.per_sample_sqnorms(model, 4):
            per_sample(model(x)).sum().backward()
        torch.testing.assert_close(sums, real)
        model.zero_grad()
        sums.zero_()


@pytest.mark.parametrize("to", [Tensor.to_sparse_coo, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_parameters_beside_a_sparse_tensor(to: Callable[[Tensor], Tensor]) -> None:
    """As in LightGCN: a sparse graph mixes the rows of a table before the data look some up."""

    def scores(m: Any, x: Tensor) -> Tensor:
        rows = torch.sparse.mm(m.graph, m.table.weight)
        return rows[x[:, 0]] * rows[x[:, 1]]

    model = Made(scores, table=nn.Embedding(9, D), graph=None)
    model.graph = to(torch.randn(9, 9).relu())
    for B in (4, 4, 3):
        assert right_or_named(model, torch.randint(9, (B, 2)), B) == {"table.weight"}


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(9, D), nn.LayerNorm(D), linear()
        self.group, self.heads = nn.GroupNorm(1, 5), nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.group(self.layer(self.norm(self.table(ids))))
        y: Tensor = self.heads(h, h, h, need_weights=False)[0]
        return h + y


@pytest.mark.parametrize("is_first", [True, False], ids=["from the first batch on", "later"])
@pytest.mark.parametrize(
    "name",
    [
        *("linear", "embedding", "layer_norm", "group_norm"),
        *("multi_head_attention_forward", "scaled_dot_product_attention"),
    ],
)
def test_a_function_that_somebody_has_replaced(
    name: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by one that calls it and scales its result: it is called once."""
    model, ids, own = Patched(), torch.randint(0, 9, (6, 5)), getattr(F, name)
    if not is_first:
        right_or_named(model, ids, 6)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        y = own(*args, **kwargs)
        return (1.5 * y[0], y[1]) if isinstance(y, tuple) else 1.5 * y

    monkeypatch.setattr(F, name, scaled)
    for _ in range(2):
        assert len(right_or_named(model, ids, 6)) == 11


def test_a_block_whose_context_is_dropped() -> None:
    """It ends with its owner, and does not end the block of another one."""
    model, x = nn.Sequential(linear(), linear()), torch.randn(4, D)
    first = gnsfast.per_sample_sqnorms(model, 4)
    first.__enter__()
    model(x)
    slab = first._slab
    del first
    slab.close()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        slab.close()
        per_sample(model(x)).sum().backward()
    assert_norms(norms, in_its_batch(model, lambda: per_sample(model(x))))
    dropped = gnsfast.per_sample_sqnorms(model, 4)
    dropped.__enter__()
    del slab, dropped
    assert type(model[0].weight) is nn.Parameter
