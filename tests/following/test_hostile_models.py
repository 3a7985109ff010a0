# SPDX-License-Identifier: Apache-2.0
"""Models that people write and that once had wrong norms, outputs or state: each parameter is right
or left out by name, in the first batch and in later ones of other sizes.
"""

import gc
import logging
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from made import Made
from oracle import assert_norms
from processes import spawn
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gnsfast

D = 8
Model = Callable[[Any, Tensor], Tensor]


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def per_sample(y: Tensor) -> Tensor:
    """A loss of each sample, none of whose gradients cancels."""
    weight = torch.linspace(0.5, 1.5, y[0].numel()).to(y.dtype).view_as(y[0])
    return (y.square() * weight + y * weight.flip(-1)).flatten(1).sum(1)


def in_its_batch(model: nn.Module, losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Each sample's squared norms of the gradient of its own loss, in the graph of the batch."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    loss_B = losses()
    grads = [
        torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, materialize_grads=True)
        for loss in loss_B
    ]
    return {
        n: torch.stack([own[k].double().square().sum() for own in grads])
        for k, (n, _) in enumerate(named)
    }


def right_or_named(
    model: nn.Module, x: Any, B: int, loss: Callable[[Any, Any], Tensor] | None = None
) -> set[str]:
    """Measure a batch. Outputs, gradients and norms are torch's; the parameters with norms."""

    def losses() -> Tensor:
        return per_sample(model(x)) if loss is None else loss(model, x)

    torch.manual_seed(5)
    real = in_its_batch(model, losses)
    torch.manual_seed(5)
    plain = losses()
    plain.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    own = plain
    try:
        with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
            own = losses()
            own.sum().backward()
    except gnsfast.ObservationError as error:
        assert any(n in str(error) for n, _ in model.named_parameters()), str(error)
        return set()
    finally:
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6)
        for n, p in model.named_parameters():
            if grads[n] is not None and p.grad is not None:
                torch.testing.assert_close(p.grad, grads[n], rtol=1e-4, atol=1e-5)
        model.zero_grad()
    assert_norms(norms, real, rtol=1e-3, names=set(norms))
    return set(norms)


def experts_with_tables(m: Any, x: Tensor) -> Tensor:
    """Each row has an expert, with a scale from a table, as in gpt-oss."""
    rows, at = x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1])
    expert = (rows[:, 0] * 4).long().abs() % 8
    chosen = rows[at] * m.scale[expert]
    out = torch.zeros_like(rows)
    for e in range(8):
        own = (expert == e).nonzero()[:, 0]
        out = out.index_add(0, own, chosen[own] @ m.w[e])
    return out.view_as(x)


@pytest.mark.parametrize("B", [2, 3, 4, 5, 8])
def test_rows_of_a_table_are_no_samples(B: int) -> None:
    """Ids of experts look like rows of samples where their number is a multiple of the samples."""
    model = Made(experts_with_tables, scale=torch.rand(8, D) + 0.5, w=torch.randn(8, D, D))
    right_or_named(model, torch.randn(3, 6, D), 3)
    right_or_named(model, torch.randn(B, 6, D), B)


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


def longer_loop(m: Any, x: Tensor) -> Tensor:
    memory, h = m.w(x.transpose(0, 1)).mean(0), x[:, 0]
    for _ in range(x.shape[1]):
        h = torch.tanh(m.w(h) + memory)
    return h


def test_a_loop_that_is_longer_than_in_the_first_batch() -> None:
    """Its first step is a product [T, B, D], and each further one a product [B, D], B == D."""
    model = Made(longer_loop, w=linear())
    assert right_or_named(model, torch.randn(D, 6, D), D)
    right_or_named(model, torch.randn(D, 9, D), D)


class BatchMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() if self.training else x


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_samples_that_meet_in_training_mode_only(p: float) -> None:
    """A model with dropout is compared with itself in training mode, with the same draws."""
    model = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(p), linear(), BatchMean(), linear())
    assert right_or_named(model, torch.randn(6, D), 6) <= {"5.weight", "5.bias"}


def layers_of_states(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.cells(x, m.h.expand(2, len(x), D).contiguous())[0]
    return y


def mask_tokens(m: Any, x: Tensor) -> Tensor:
    h = x.transpose(0, 1)
    even = torch.arange(len(h))[:, None, None] % 2 == 0
    y: Tensor = m.a(torch.where(even, h, m.token.expand(h.shape[0], h.shape[1], D)))
    return y.transpose(0, 1)


def test_as_many_copies_as_samples_along_another_dimension() -> None:
    """The example has shown which dimension of the copies holds the samples."""
    gru = nn.GRU(D, D, 2, batch_first=True)
    model = Made(layers_of_states, cells=gru, h=torch.randn(1, 1, D))
    for B in (4, 2):
        assert "h" in right_or_named(model, torch.randn(B, 6, D), B)
    model = Made(mask_tokens, a=linear(), token=torch.randn(1, 1, D))
    for B in (4, 6):
        assert "token" in right_or_named(model, torch.randn(B, 6, D), B)


class Centre(nn.Module):
    """A running mean that is an attribute, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.centre, self.steps, self.seen = linear(), torch.zeros(D), 0, [torch.zeros(D)]
        self.norm: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        self.seen[0].add_(1.0)
        self.seen.append(h.detach().mean(0))
        self.norm["last"] = float(self.centre.norm())
        self.steps += 1
        return (h - self.centre) * min(1.0, self.steps / 20)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.h = nn.GRU(D, D, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.cells(x, self.h)
        self.h = h.detach()
        return y


def test_attributes_are_what_one_pass_leaves() -> None:
    """Numbers, tensors, lists and dictionaries that a model holds are restored after each look."""
    torch.manual_seed(1)
    plain, x = Centre(), torch.randn(4, 6, D)
    own = Centre()
    own.load_state_dict(plain.state_dict())
    with gnsfast.per_sample_sqnorms(own, 4):
        y = own(x)
        per_sample(y).sum().backward()
    torch.testing.assert_close(y, plain(x))
    assert own.steps == 1 and own.norm == plain.norm and len(own.seen) == 2
    torch.testing.assert_close(own.seen[0], plain.seen[0])
    torch.testing.assert_close(own.centre, plain.centre)
    model = Stateful()
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(model, 4):
            per_sample(model(x)).sum().backward()


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.losses = linear(), linear(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.losses.append(h.square().flatten(1).sum(1))
        y: Tensor = self.b(h.tanh())
        return y


def test_losses_that_a_model_collects() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        own = per_sample(model(x)) + sum(model.losses)
        model.losses.clear()
        return own

    assert len(right_or_named(Collects(), torch.randn(4, 6, D), 4, loss)) == 4


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.b = linear(), nn.Parameter(torch.zeros(1)), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(x)
        r = self.a(h).tanh()
        y: Tensor = h + self.gate * (r - r.mean(0))
        return y


def test_a_gate_that_opens_late() -> None:
    """A parameter is proven after the batch that gives it its first gradient, however late."""
    model = Gated()
    for _ in range(5):
        with gnsfast.per_sample_sqnorms(model, 4):
            per_sample(model(torch.randn(4, D))).sum().backward()
    nn.init.ones_(model.gate)
    with gnsfast.per_sample_sqnorms(model, 4):
        per_sample(model(torch.randn(4, D))).sum().backward()
    with (
        pytest.raises(gnsfast.ObservationError, match="a.weight"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        per_sample(model(torch.randn(4, D))).sum().backward()


def order_of(x: Any) -> list[int]:
    lengths = x[1].tolist()
    return sorted(range(len(lengths)), key=lambda k: -lengths[k])


def by_list(m: Any, x: Any) -> Tensor:
    order = order_of(x)
    back = [order.index(k) for k in range(len(order))]
    y: Tensor = m.a(x[0][order]).tanh() @ m.w
    return y[back]


def by_array(m: Any, x: Any) -> Tensor:
    order = numpy.array(order_of(x))
    y: Tensor = m.a(x[0][order]).tanh() @ m.w
    return y[order.argsort()]


def by_gather(m: Any, x: Any) -> Tensor:
    order = x[1].argsort(descending=True, stable=True)
    y = torch.take_along_dim(x[0], order[:, None, None].expand_as(x[0]), 0)
    y = m.a(y).tanh() @ m.w
    return y.gather(0, order.argsort()[:, None, None].expand_as(y))


@pytest.mark.parametrize("run", [by_list, by_array, by_gather])
def test_samples_sorted_by_their_lengths(run: Model) -> None:
    """The first batch has equal lengths, so that the order shows nothing."""
    model = Made(run, a=linear(), w=torch.randn(D, D))
    x = torch.randn(4, 6, D)
    right_or_named(model, (x, torch.full((4,), 6)), 4)
    right_or_named(model, (x, torch.tensor([2, 6, 5, 1])), 4)


def test_uses_outside_of_the_model() -> None:
    """Without an example only one dimension of as many entries as samples shows them."""

    def tied(model: Any, x: Tensor) -> Tensor:
        return F.linear(model(x), model.a.weight).square().sum((0, 2))

    model = Made(lambda s, x: s.b(x.transpose(0, 1)), a=linear(), b=linear())
    assert "b.weight" in right_or_named(model, torch.randn(6, 6, D), 6, tied) or True
    names = right_or_named(model, torch.randn(4, 6, D), 4, tied)
    assert names <= {"b.weight", "b.bias"}

    def masked(model: Any, x: Tensor) -> Tensor:
        h = model(x)
        mask = torch.zeros(h.shape[:2], dtype=torch.bool)
        mask[0, :2] = mask[1, :2] = True
        own = F.linear(h[mask], model.head).square().sum(1)
        return torch.zeros(len(x)).index_add(0, mask.nonzero()[:, 0], own)

    model = Made(lambda s, x: s.b(x), b=linear(), head=torch.randn(D, D))
    assert right_or_named(model, torch.randn(4, 6, D), 4, masked) == {"b.weight", "b.bias", "head"}

    def parts(model: Any, x: Tensor) -> Tensor:
        return model["last"](model["first"](x).transpose(0, 1)).square().sum((0, 2))

    for T in (8, 6):
        model = nn.ModuleDict({"first": linear(), "last": linear()})
        right_or_named(model, torch.randn(8, T, D), 8, parts)


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


def class_token(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.a(torch.cat([m.token.expand(len(x), -1, -1), x], 1))
    return y


def put(m: Any, x: Tensor) -> Tensor:
    at = torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)
    y: Tensor = m.a(x.index_put(at, m.token[0, 0]))
    return y


@pytest.mark.parametrize("run", [class_token, put])
def test_a_last_batch_of_one_sample(run: Model) -> None:
    model = Made(run, a=linear(), token=torch.randn(1, 1, D))
    known = right_or_named(model, torch.randn(4, 6, D), 4)
    assert known >= {"a.weight", "a.bias"}
    assert right_or_named(model, torch.randn(1, 6, D), 1) == known


def test_parts_that_torch_compiled_to_its_own_script() -> None:
    for own in (torch.jit.script(linear()), torch.jit.trace(linear(), torch.randn(2, D))):
        model = nn.Sequential(own, linear())
        for _ in range(2):
            assert right_or_named(model, torch.randn(4, D), 4) == {"1.weight", "1.bias"}


def graphs(m: Any, x: Any) -> Tensor:
    """A batch of graphs in the form of PyG: all nodes, the graph of each, and edges."""
    nodes, graph, edges = x
    h = m.a(nodes).tanh()
    h = m.b(h.index_add(0, edges[1], h[edges[0]]))
    return torch.zeros(int(graph.max()) + 1, D).index_add(0, graph, h)


@pytest.mark.parametrize("B", [4, D])
def test_a_batch_of_graphs_is_refused_by_name(B: int) -> None:
    n = torch.arange(B * 6)
    x = torch.randn(B * 6, D), n // 6, torch.stack([n, n // 6 * 6 + (n + 1) % 6])
    model = Made(graphs, a=linear(), b=linear())
    with (
        pytest.raises((gnsfast.ObservationError, gnsfast.SampleShapeError)),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        per_sample(model(x)).sum().backward()


def test_nothing_of_ours_is_left_in_a_model() -> None:
    """What the old weight norm computes is an attribute; it is a plain tensor after the block."""
    model, kept = nn.utils.weight_norm(linear()), []
    with gnsfast.per_sample_sqnorms(model, 4):
        per_sample(model(torch.randn(4, D))).sum().backward()
        kept.append(model.bias * 2)
    for t in (model.weight, *kept):
        assert type(t) is Tensor and not hasattr(t, "_gnsfast")


def test_a_loss_of_the_model_in_which_samples_meet(caplog: pytest.LogCaptureFixture) -> None:
    """A log line and the table tell of it; the outputs are proven."""

    def balanced(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x)
        share = m.router(x).softmax(-1)
        load = F.one_hot(share.argmax(-1), D).float().mean((0, 1))
        return (load * share.mean((0, 1))).sum() + y.square().mean(), y + share

    model = Made(balanced, a=linear(), router=linear())
    with caplog.at_level(logging.WARNING, "gnsfast"), gnsfast.per_sample_sqnorms(model, 4):
        model(torch.randn(4, 6, D))[0].backward()
    assert "own loss" in caplog.text
    shown = gnsfast.coverage(model)
    assert not shown.proof and "samples meet" in shown.proof_of_loss and "own loss" in str(shown)


class Teacher(nn.Module):
    """A frozen teacher, a code book and a centre that forward updates in ways that leave no
    version, and state in containers of containers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.teacher = linear(), linear().requires_grad_(False)
        self.register_buffer("book", torch.randn(4, D))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.counts: dict[str, Any] = {
            "of": [torch.zeros(1), Counter(a=1)],
            "array": numpy.zeros(2),
        }

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.teacher.weight.data.mul_(0.9).add_(self.a.weight.data, alpha=0.1)
        with torch.no_grad():
            self.teacher.bias.lerp_(self.a.bias, 0.1)
            self.scale[0] = 0.9 * self.scale[0] + 0.1 * h.norm()
        self.book.data = 0.9 * self.book + 0.1 * h.detach().flatten(0, -2).mean(0)
        self.book.data[0].add_(1.0)
        self.counts["of"][0].add_(1.0)
        self.counts["of"][1]["a"] += 1
        self.counts["array"] += 1
        return h + self.teacher(x) / self.scale - self.book.mean(0) + float(self.counts["array"][0])


def test_state_that_a_forward_pass_writes_to() -> None:
    plain, x = Teacher(), torch.randn(4, 6, D)
    own = deepcopy(plain)
    with gnsfast.per_sample_sqnorms(own, 4):
        y = own(x)
        per_sample(y).sum().backward()
    torch.testing.assert_close(y, plain(x))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(own.state_dict()[key], value)
    assert own.counts["of"][1] == plain.counts["of"][1] == Counter(a=2)
    assert float(own.counts["of"][0]) == 1 and own.counts["array"].tolist() == [1, 1]


def test_nothing_of_a_look_stays_alive() -> None:
    """Functions that save their result would hold their graph."""
    model = nn.Sequential(linear(), nn.Tanh(), nn.Softmax(-1), linear())
    gnsfast.configure(model, example=torch.randn(4, 6, D))
    alive = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert alive() is None


def test_a_batch_that_is_not_finite_says_nothing() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 4
    bad = torch.randn(5, 6, D)
    bad[0, 0, 0] = torch.nan
    with gnsfast.per_sample_sqnorms(model, 5):
        per_sample(model(bad)).sum().backward()
    model.zero_grad()
    assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 4


def test_evaluation_mode_first() -> None:
    """Training mode is proven by its own first batch."""
    model = nn.Sequential(linear(), BatchMean(), linear()).eval()
    assert len(right_or_named(model, torch.randn(6, D), 6)) == 4
    assert right_or_named(model.train(), torch.randn(6, D), 6) <= {"2.weight", "2.bias"}


def test_large_batches_that_meet_in_training_mode_only() -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        h = m.drop(m.a(x))
        if m.training and len(x) > 3:
            h = h + h.roll(len(x) // 2, 0)
        y: Tensor = m.b(h)
        return y

    model = Made(mixed, a=linear(), b=linear(), drop=nn.Dropout(0.2))
    assert right_or_named(model, torch.randn(8, D), 8) <= {"b.weight", "b.bias"}


def test_a_table_of_parameters_behind_dropout() -> None:
    """Its random numbers are drawn once."""

    def run(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(x + m.drop(m.table)[: x.shape[1]])
        return y

    model = Made(run, a=linear(), table=torch.randn(9, D), drop=nn.Dropout(0.3))
    assert right_or_named(model, torch.randn(4, 6, D), 4) == {"a.weight", "a.bias", "table"}


def some_layers(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        if not (m.training and float(torch.rand(())) < 0.5):
            x = x + F.dropout(torch.tanh(layer(x)), 0.1, m.training)
    return x


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_skipped_at_random(seed: int) -> None:
    """Evaluation mode shows those that the first batch did not use."""
    torch.manual_seed(seed)
    model = Made(some_layers, layers=nn.ModuleList([linear() for _ in range(6)]))
    for _ in range(3):
        assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 12


def test_compiled_code_has_the_layouts_of_the_first_batch() -> None:
    """No hook tells there when the model runs."""
    turned = lambda m, x: m.a(m.a(x.transpose(0, 1)).tanh().transpose(0, 1))
    model = Made(lambda m, x: F.linear(turned(m, x), m.w * 2), a=linear(), w=torch.randn(D, D))
    compiled = torch.compile(model, backend="eager")
    for B, T in ((4, 6), (4, 6), (5, 6), (8, 8)):
        x = torch.randn(B, T, D)
        real = in_its_batch(model, lambda: per_sample(model(x)))  # noqa: B023
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            per_sample(compiled(x)).sum().backward()
        model.zero_grad()
        assert_norms(norms, real, rtol=1e-3)


def experts_of_real_tokens(m: Any, x: Any) -> Tensor:
    """The tokens that are no padding go to two experts."""
    h, mask = m.a(x[0]), x[1]
    rows = h[mask]
    expert = (rows[:, 0] * 4).long().abs() % 2
    out = torch.zeros_like(rows)
    for e in range(2):
        own = (expert == e).nonzero()[:, 0]
        out = out.index_add(0, own, m.experts[e](rows[own]))
    return torch.zeros_like(h).masked_scatter(mask[..., None].expand_as(h), out)


def experts_by_where(m: Any, ids: Tensor) -> Tensor:
    """As in Mixtral: the rows of an expert are the tokens at which a mask is set."""
    x = m.norm(m.table(ids)).flatten(0, 1)
    weight, chosen = m.router(x).softmax(-1).topk(2)
    mask, out = F.one_hot(chosen, len(m.experts)).permute(2, 1, 0), torch.zeros_like(x)
    for expert, own in zip(m.experts, mask):
        k, at = torch.where(own)
        if len(at):
            rows = x[None, at].reshape(-1, D)
            out.index_add_(0, at, expert(rows) * weight[at, k, None])
    return out.view(*ids.shape, D)


def experts_by_slices(m: Any, ids: Tensor) -> Tensor:
    """As in DeepSeek's code: the rows are sorted by expert, and each gets a slice of them."""
    x = m.norm(m.table(ids)).flatten(0, 1)
    weight, chosen = m.router(x).softmax(-1).topk(2)
    order = chosen.flatten().argsort()
    rows, parts, start = x[order // 2], [], 0
    for expert, n in zip(m.experts, chosen.flatten().bincount(minlength=len(m.experts)).tolist()):
        if n:
            parts.append(expert(rows[start : start + n]))
            start += n
    y = torch.zeros_like(rows).index_copy(0, order, torch.cat(parts)).view(-1, 2, D)
    return (y * weight[..., None]).sum(1).view(*ids.shape, D)


@pytest.mark.parametrize("run", [experts_by_where, experts_by_slices])
@pytest.mark.parametrize("B, T, seed", [(4, 3, 0), (4, 4, 1), (2, 5, 2), (3, 2, 3)])
def test_many_experts_that_get_few_rows(run: Model, B: int, T: int, seed: int) -> None:
    """Some get none in a batch, one of each sample, or the same first token of all."""
    torch.manual_seed(seed)
    experts = nn.ModuleList(nn.Sequential(linear(), nn.SiLU(), linear()) for _ in range(16))
    parts = {"table": nn.Embedding(9, D), "norm": nn.LayerNorm(D), "router": nn.Linear(D, 16)}
    model = Made(run, experts=experts, **parts)
    batches = [torch.randint(9, (B, T)) for _ in range(9)]
    for ids in batches[:-1]:
        ids[:, 0] = 1
    found = over_batches(model, batches, B)
    assert [*map(len, found)] == [len([*model.parameters()])] * 9


def test_rows_that_are_chosen_from_chosen_rows() -> None:
    """The first batch has no padding. In the next one each sample has four tokens on average."""
    model = Made(experts_of_real_tokens, a=linear(), experts=nn.ModuleList([linear(), linear()]))
    mask = torch.ones(4, 6, dtype=torch.bool)
    assert len(right_or_named(model, (torch.randn(4, 6, D), mask), 4)) == 6
    mask = torch.arange(6) < torch.tensor([2, 4, 6, 4])[:, None]
    assert not right_or_named(model, (torch.randn(4, 6, D), mask), 4)


@pytest.mark.parametrize(
    "last",
    [
        lambda h: h[-1],
        lambda h: h.unbind(0)[-1],
        lambda h: h[torch.tensor([7, 0, 2, 7]), torch.arange(4)],
    ],
)
def test_the_last_step_of_a_sequence_outside_of_the_model(last: Callable[[Tensor], Tensor]) -> None:
    """The steps lie along dimension 0, and their number is a multiple of that of the samples."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return per_sample(F.linear(last(model(x)), model.head))

    model = Made(lambda s, x: s.a(x.transpose(0, 1)), a=linear(), head=torch.randn(D, D))
    assert len(right_or_named(model, torch.randn(4, 8, D), 4, loss)) == 3


def test_a_list_as_an_index_of_a_table() -> None:
    """Rows that occur twice are no piece of the table."""
    model = Made(lambda s, x: s.a(x) + s.table[[0, 1, 1, 2]], a=linear(), table=torch.randn(3, D))
    assert "table" in right_or_named(model, torch.randn(5, 4, D), 5)


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


def characters(m: Any, x: Tensor) -> Tensor:
    """A recurrent layer reads each of T words of a sample."""
    B, T = x.shape[:2]
    h = m.cells(x.reshape(B * T, D, 1))[1]
    y: Tensor = m.a(h[0].view(B, T, D))
    return y


def test_recurrent_layers_whose_sequences_are_parts_of_samples() -> None:
    model = Made(characters, a=linear(), cells=nn.GRU(1, D, batch_first=True))
    for B, T in ((4, 6), (5, 3)):
        assert len(right_or_named(model, torch.randn(B, T, D), B)) == 6


def packed_sequences(m: Any, x: Any) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x[0], x[1], batch_first=True, enforce_sorted=False)
    y, _ = nn.utils.rnn.pad_packed_sequence(m.cells(packed)[0], batch_first=True, total_length=6)
    last: Tensor = m.a(y)
    return last


def test_a_layer_behind_packed_sequences() -> None:
    """torch puts them back into the order of the samples."""
    model = Made(packed_sequences, a=linear(), cells=nn.GRU(D, D))
    for lengths in ([6, 6, 6, 6], [2, 6, 1, 4]):
        x = torch.randn(4, 6, D), torch.tensor(lengths)
        assert right_or_named(model, x, 4) == {"a.weight", "a.bias"}


def test_attention_that_others_have_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nn.MultiheadAttention`` then calls theirs, in a block too."""
    real = F.scaled_dot_product_attention
    model = Made(lambda s, x: s.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(D, 2))
    model.a.batch_first = True
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: 2 * real(*a, **k))
    assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 4


def test_a_first_batch_that_was_interrupted() -> None:
    """The next one is then the first."""
    model, x = nn.Sequential(linear(), nn.Tanh(), linear()), torch.randn(4, D)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt), gnsfast.per_sample_sqnorms(model, 4):
        model(x)
    hook.remove()
    assert len(right_or_named(model, x, 4)) == 4
    assert not gnsfast.coverage(model).proof


def two_orders(m: Any, x: Any) -> Tensor:
    """A layer takes the rows of samples one after the other, some times, and interleaved once."""
    h, times = x
    B, T, _ = h.shape
    for _ in range(int(times[0])):
        h = m.a(h.reshape(B * T, D)).tanh().view(B, T, D)
    y: Tensor = m.a(h.transpose(0, 1).reshape(T * B, D)).view(T, B, D)
    return y.transpose(0, 1)


def test_a_loop_that_is_shorter_than_in_the_first_batch() -> None:
    """The last function is then in the place of one whose samples lie in another order."""
    model, x = Made(two_orders, a=linear()), torch.randn(4, 6, D)
    assert len(right_or_named(model, (x, torch.full((4,), 2)), 4)) == 2
    assert not right_or_named(model, (x, torch.full((4,), 1)), 4)


def test_parameters_that_are_changed_before_the_model_runs() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())

    def loss(m: Any, x: Tensor) -> Tensor:
        twice = {name: 2 * p for name, p in m.named_parameters()}
        return per_sample(torch.func.functional_call(m, twice, (x,)))

    for _ in range(2):
        assert len(right_or_named(model, torch.randn(4, D), 4, loss)) == 4


@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_batches_that_cannot_be_sliced(kind: str) -> None:
    """They run, and what is not followed is named."""
    if kind == "sparse":
        model = Made(lambda s, x: torch.sparse.mm(x, s.w), w=torch.randn(6, D))
        x = torch.randn(4, 6).relu().to_sparse()
    else:
        model = Made(lambda s, x: torch.nested.to_padded_tensor(s.a(x), 0.0), a=linear())
        parts = [torch.randn(k, D) for k in (3, 5, 2, 4)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    real = per_sample(model(x))
    with pytest.raises(gnsfast.ObservationError), gnsfast.per_sample_sqnorms(model, 4):
        y = per_sample(model(x))
        y.sum().backward()
    torch.testing.assert_close(y, real)


class Gates(nn.Module):
    """Blocks behind gates, which open one after the other. Samples meet in the last block."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear() for _ in range(n)])
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates):
            r = block(x).tanh()
            x = x + gate * (r - r.mean(0) if block is self.blocks[-1] else r)
        return x


def test_many_gates_that_open_late() -> None:
    """Each that opens is proven, however many there are."""
    model = Gates(4)
    for gate in model.gates:
        for _ in range(2):
            with gnsfast.per_sample_sqnorms(model, 4):
                per_sample(model(torch.randn(4, D))).sum().backward()
        nn.init.ones_(gate)
    with gnsfast.per_sample_sqnorms(model, 4):
        per_sample(model(torch.randn(4, D))).sum().backward()
    model.zero_grad()
    assert not right_or_named(model, torch.randn(4, D), 4)


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_as_many_positions_as_samples(shape: tuple[int, ...]) -> None:
    """They are the same for all samples, as is the mask that hides later tokens."""

    def run(m: Any, x: Any) -> Tensor:
        h = m.words(x[0]) + m.positions(x[1])
        y: Tensor = m.a(F.scaled_dot_product_attention(m.q(h), h, h, attn_mask=x[2]))
        return y

    tables = {"words": nn.Embedding(9, D), "positions": nn.Embedding(9, D)}
    model = Made(run, a=linear(), q=linear(), **tables)
    hidden = torch.ones(6, 6).triu(1) > 0
    for B, mask in ((6, ~hidden), (4, ~hidden), (6, torch.zeros(6, 6).masked_fill(hidden, -1e9))):
        x = torch.randint(0, 9, (B, 6)), torch.arange(6).view(shape), mask
        assert len(right_or_named(model, x, B)) == 6


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
    block = gnsfast.per_sample_sqnorms(model, 4) if measure == "norms" else gns.microbatch(4)
    with pytest.raises(gnsfast.ObservationError, match="TwoBatchNoiseScale"), block:
        loss = model(x).sum()
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        (loss + slope.square().sum()).backward()


def at(order: Tensor, x: Tensor) -> Tensor:
    return order.view(-1, *(1,) * (x.ndim - 1)).expand_as(x)


ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, order: torch.index_select(x, dim=0, index=order),
    "gather": lambda x, order: torch.gather(x, dim=-2, index=at(order, x)),
    "take_along_dim": lambda x, order: x.take_along_dim(at(order, x), dim=0),
    "embedding": lambda x, order: F.embedding(order, x),
    "index_copy": lambda x, order: torch.zeros_like(x).index_copy(0, order.argsort(), x),
    "index_put": lambda x, order: torch.zeros_like(x).index_put((order.argsort(),), x),
    "scatter": lambda x, order: torch.zeros_like(x).scatter(0, at(order.argsort(), x), x),
    "columns": lambda x, order: x.T[:, order].T,
}


@pytest.mark.parametrize("kind", ORDERS)
def test_samples_sorted_by_any_function(kind: str) -> None:
    """The first batch has equal lengths, so that the order shows nothing."""

    def run(m: Any, x: Any) -> Tensor:
        order = x[1].argsort(descending=True, stable=True)
        y = F.linear(m.a(ORDERS[kind](x[0], order)).tanh(), m.w)
        last: Tensor = m.b(ORDERS[kind](y, order.argsort()))
        return last

    model = Made(run, a=linear(), b=linear(), w=torch.randn(D, D))
    for lengths in ([6, 6, 6, 6], [2, 6, 5, 1]):
        x = torch.randn(4, D), torch.tensor(lengths)
        assert right_or_named(model, x, 4) >= {"b.weight", "b.bias"}


def by_list_of_columns(m: Any, x: Any) -> Tensor:
    order = order_of(x)
    back = [order.index(k) for k in range(len(order))]
    y = F.linear(m.a(x[0].transpose(0, 1)[:, order]).tanh(), m.w)
    return y[:, back].transpose(0, 1)


def test_a_list_that_sorts_samples_along_another_dimension() -> None:
    """It is not measured in part: no sample gets the norm of another."""
    model, x = Made(by_list_of_columns, a=linear(), w=torch.randn(D, D)), torch.randn(4, 6, D)
    right_or_named(model, (x, torch.full((4,), 6)), 4)
    right_or_named(model, (x, torch.tensor([2, 6, 5, 1])), 4)


def wide(ids: Tensor) -> Tensor:
    return ids.reshape(-1, 1).expand(-1, D)


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "getitem": lambda table, ids: table[ids],
    "flat": lambda table, ids: table[ids.flatten()].view(*ids.shape, D),
    "index_select": lambda table, ids: table.index_select(0, ids.flatten()).view(*ids.shape, D),
    "gather": lambda table, ids: table.gather(0, wide(ids)).view(*ids.shape, D),
    "take_along_dim": lambda table, ids: table.take_along_dim(wide(ids), 0).view(*ids.shape, D),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_rows_of_a_table_at_ids_of_the_data(kind: str, rows: int, shape: tuple[int, ...]) -> None:
    """One id for each sample or token does not sort samples, of parameters or constants."""

    def run(m: Any, x: Any) -> Tensor:
        h = m.a(x[0]) + ROWS[kind](m.table, x[1]) + ROWS[kind](m.held.buffer, x[1])
        y: Tensor = m.b(h.tanh() * m.g)
        return y

    held = nn.Module()
    held.register_buffer("buffer", torch.randn(rows, D))
    own = {"table": torch.randn(rows, D), "g": torch.rand(D)}
    model = Made(run, a=linear(), b=linear(), held=held, **own)
    for B in (6, 4, 6, 3):
        x = torch.randn(B, *shape, D), torch.randint(rows, (B, *shape))
        assert len(right_or_named(model, x, B)) == 6


class Same(torch.autograd.Function):
    """A kernel that is no function of torch, so that a look does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().copy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numbers": lambda x, order: x[torch.arange(len(x))[order]],
    "function": lambda x, order: Same.apply(x)[order],
    "put": lambda x, order: torch.zeros(len(x), D).index_copy(0, order.argsort(), x),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_samples_sorted_by_way_of_constants(kind: str) -> None:
    """The first batches have equal lengths, so that the order shows nothing."""

    def run(m: Any, x: Any) -> Tensor:
        order = x[1].argsort(descending=True, stable=True)
        y: Tensor = m.b(HIDDEN[kind](m.a(x[0]).tanh(), order).tanh() * m.g)
        return y[order.argsort()]

    model = Made(run, a=linear(), b=linear(), g=torch.rand(D))
    for lengths in ([6, 6, 6, 6],) * 2 + ([2, 6, 5, 1],):
        x = torch.randn(4, D), torch.tensor(lengths)
        right_or_named(model, x, 4)


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


class Meets(nn.Module):
    """Its running mean is that of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        mean = h.detach().mean((0, 1))
        dist.all_reduce(mean)
        self.mean.lerp_(mean, 0.1)
        return h


def of_other_lengths(rank: int) -> None:
    model = Meets()
    for T in (6, 6 + rank, 8):
        with gnsfast.per_sample_sqnorms(model, 4):
            per_sample(model(torch.randn(4, T, D))).sum().backward()


@pytest.mark.dist
def test_a_model_that_needs_other_processes() -> None:
    """No process proves it again by itself, since the others would be missing."""
    spawn(of_other_lengths)


@pytest.mark.parametrize("mean", [False, True])
def test_a_weight_of_the_loss(mean: bool) -> None:
    """It is made before the model runs, and meets the losses of samples, or their mean."""
    model, x = Made(lambda s, x: s.a(x), a=linear(), log=torch.tensor(0.3)), torch.randn(4, 6, D)
    if not mean:
        weighed = lambda m, x: torch.exp(-m.log) * per_sample(m(x)) + m.log  # noqa: E731
        assert len(right_or_named(model, x, 4, weighed)) == 3
        return
    with (
        pytest.raises(gnsfast.ObservationError, match="log: .* before the mean"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        (torch.exp(-model.log) * per_sample(model(x)).mean() + model.log).backward()


def over_batches(model: nn.Module, batches: list[Any], B: int) -> list[set[str]]:
    """The parameters with norms in each batch of B samples, or if that is 0 of as many as it has,
    all of which are right. It ends at an error.
    """
    found = []
    for x in batches:
        found.append(right_or_named(model, x, B or len(x)))
        if not found[-1]:
            break
    return found


def when_lengths_differ(m: Any, x: Any) -> Tensor:
    """Sorts only where it must, as before a function that takes sorted sequences."""
    h, lengths = x
    if len({*lengths.tolist()}) == 1:
        return m.b(m.a(h).tanh())  # type: ignore[no-any-return]
    order = torch.tensor(order_of(x))
    y: Tensor = m.b(m.a(h[order]).tanh()[order.argsort()])
    return y


def by_permutation_matrix(m: Any, x: Any) -> Tensor:
    P = F.one_hot(x[1].argsort(descending=True, stable=True), len(x[1])).to(x[0].dtype)
    y: Tensor = m.b(P.T @ m.a(P @ x[0]).tanh())
    return y


def by_two_sorts(m: Any, x: Any) -> Tensor:
    """The second sort is no reverse of the first one."""
    first = x[1].argsort(descending=True, stable=True)
    second = (x[1][first] % 3).argsort(stable=True)
    h = m.a(x[0][first][second]).tanh()
    y: Tensor = m.b(h[second.argsort()][first.argsort()])
    return y


SORTS = when_lengths_differ, by_permutation_matrix, by_two_sorts


@pytest.mark.parametrize("run", SORTS)
def test_samples_that_are_sorted_in_later_batches(run: Model) -> None:
    """The first batch has equal lengths, and shows nothing of an order."""
    model = Made(run, a=linear(), b=linear())
    lengths = torch.full((6,), 6), torch.tensor([2, 6, 5, 1, 4, 3])
    found = over_batches(model, [(torch.randn(6, D), own) for own in lengths], 6)
    assert len(found[0]) == 4 or found[0] == {"b.weight", "b.bias"}
    assert found[1] <= {"b.weight", "b.bias"}


@pytest.mark.parametrize("first", [2, 3, 6, 20])
def test_an_order_that_changes_late(first: int) -> None:
    """At growing intervals a batch shows that no sample has the norm of another."""
    model = Made(when_lengths_differ, a=linear(), b=linear())
    equal, others = torch.full((5,), 6), torch.tensor([2, 6, 5, 1, 4])
    for k in range(1, 65):
        lengths = equal if k < first else others
        try:
            with gnsfast.per_sample_sqnorms(model, 5):
                per_sample(model((torch.randn(5, D), lengths))).sum().backward()
        except gnsfast.ObservationError as error:
            assert "a.weight" in str(error) and "order" in str(error)
            assert first <= k < 4 * first
            return
    raise AssertionError("no batch has shown it")


class Mixes(nn.Module):
    """Mixes hidden states of samples in some of the later batches, as manifold mixup does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.steps = linear(), linear(), 0
        self.random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        self.steps += 1
        if self.steps > 4 and self.random.random() < 0.5:
            h = 0.7 * h + 0.3 * h.roll(1, 0)
        y: Tensor = self.b(h)
        return y


def test_samples_that_are_mixed_in_some_later_batches() -> None:
    model = Mixes()
    with pytest.raises(gnsfast.ObservationError, match=r"a\.weight.*samples meet"):
        for _ in range(520):
            with gnsfast.per_sample_sqnorms(model, 4):
                per_sample(model(torch.randn(4, D))).sum().backward()


def test_what_later_batches_cost() -> None:
    """One pass of batch number 2, 8, 32, ..."""
    model, x, lengths = nn.Sequential(linear(), nn.GELU(), linear()), torch.randn(16, D), []
    model[0].register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))
    gnsfast.configure(model, example=x)
    lengths.clear()
    for _ in range(199):
        with gnsfast.per_sample_sqnorms(model, 16):
            per_sample(model(x)).sum().backward()
    assert lengths == [16] * (199 + 4)


def test_a_captured_pass_is_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would wait for the device, which no CUDA graph takes up."""
    model, x, lengths = nn.Sequential(linear(), nn.GELU(), linear()), torch.randn(16, D), []
    model[0].register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))
    gnsfast.configure(model, example=x)
    lengths.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        with gnsfast.per_sample_sqnorms(model, 16):
            per_sample(model(x)).sum().backward()
    assert lengths == [16] * 3


REPEATED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "expand": lambda w, x: w[None].expand(len(x), -1, -1),
    "repeat": lambda w, x: w.repeat(len(x), 1, 1),
    "tile": lambda w, x: torch.tile(w, (len(x), 1, 1)),
    "stack": lambda w, x: torch.stack([w] * len(x)),
    "cat": lambda w, x: torch.cat([w[None]] * len(x)),
    "repeat_interleave": lambda w, x: w[None].repeat_interleave(len(x), 0),
    "ones": lambda w, x: torch.ones(len(x), 1, 1) * w,
    "einsum": lambda w, x: torch.einsum("b,td->btd", torch.ones(len(x)), w),
    "heads": lambda w, x: w.repeat(2 * len(x), 1, 1).unflatten(0, (-1, 2)).mean(1),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_parameter_that_is_repeated_for_each_sample(kind: str) -> None:
    """By any function, and at any place among others."""

    def run(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(torch.cat([REPEATED[kind](m.token, x), x], 1))
        return y

    model = Made(run, a=linear(), token=torch.randn(2, D))
    for B in (4, 5, 2):
        assert right_or_named(model, torch.randn(B, 6, D), B) == {"a.weight", "a.bias", "token"}


def test_copies_of_a_model_that_takes_pairs() -> None:
    """Another number of samples shows how many copies there are."""

    def run(m: Any, x: Tensor) -> Tensor:
        pairs = x.unflatten(0, (-1, 2)).flatten(0, 1)
        y: Tensor = m.a(torch.cat([m.token.expand(len(x), -1, -1), pairs], 1))
        return y

    model = Made(run, a=linear(), token=torch.randn(1, 2, D))
    for B in (6, 4):
        assert len(right_or_named(model, torch.randn(B, 6, D), B)) == 3


def of_lists(m: Any, x: Any) -> Tensor:
    h, lengths, scales = x
    mask = torch.arange(h.shape[1]) < torch.tensor(lengths)[:, None]
    y: Tensor = m.a(h * mask[..., None]) * torch.tensor(scales)[:, None, None]
    return y


def test_lists_of_numbers_beside_a_batch() -> None:
    """Each number belongs to a sample, and is compared with it."""
    model = Made(of_lists, a=linear())
    for B in (5, 4):
        x = torch.randn(B, 6, D), [1 + k % 6 for k in range(B)], [0.5 + k for k in range(B)]
        assert len(right_or_named(model, x, B)) == 2
        assert not gnsfast.coverage(model).proof


def test_a_list_that_is_as_long_as_the_batch() -> None:
    """It has the two sizes of an image."""
    model = Made(lambda m, x: m.a(x[0].view(len(x[0]), *x[1], D)), a=linear())
    assert len(right_or_named(model, (torch.randn(2, 6, D), [2, 3]), 2)) == 2
    assert not gnsfast.coverage(model).proof


def test_a_batch_that_is_a_list_of_samples() -> None:
    model = Made(lambda m, x: m.a(torch.stack(x)), a=linear())
    for B in (4, 5):
        assert len(right_or_named(model, [torch.randn(6, D) for _ in range(B)], B)) == 2
        assert not gnsfast.coverage(model).proof


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.seen = torch.zeros(()), 0, list[float]()

    def add(self, value: Tensor) -> None:
        self.total += value
        self.count += 1
        self.seen.append(float(value))


class Accumulates(nn.Module):
    """Adds a loss to an attribute, which the user sets to zero, and counts in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.meter = linear(), linear(), Meter()
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.aux += h.square().sum()
        self.meter.add(h.detach().mean())
        y: Tensor = self.b(h.tanh())
        return y


def test_a_loss_that_is_added_to_an_attribute() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        model.aux = torch.zeros(())
        return per_sample(model(x)).sum() + model.aux

    model, plain = Accumulates(), Accumulates()
    plain.load_state_dict(model.state_dict())
    for k in range(4):
        x = torch.randn(4, 6, D)
        loss(plain, x).backward()
        with gnsfast.per_sample_sqnorms(model, 4) as norms:
            loss(model, x).backward()
        assert len(norms) == 4 and model.meter.count == plain.meter.count == k + 1
        assert model.meter.seen == plain.meter.seen and model.meter.total == plain.meter.total
        for p, own in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(own.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_channels_in_another_order() -> None:
    """There are as many as samples of the first batch that are looked at."""
    model = Made(lambda s, x: s.conv(x[:, [2, 1, 0]]), conv=nn.Conv2d(3, D, 3))
    for B in (4, 5, 3):
        assert len(right_or_named(model, torch.randn(B, 3, 6, 6), B)) == 2


class Sequences(nn.Module):
    """Time first, as torch's recurrent layers are by default."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, D), nn.LSTM(D, D), linear()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.table(ids))[0])
        return y


def time_first(m: Any, x: Any) -> Tensor:
    return per_sample(m(x).transpose(0, 1))


TWO_WAYS = "may lie in two ways.*dimension 0.*dimension 1"


def test_as_many_time_steps_as_sequences() -> None:
    """Torch's LSTM itself would crash where the sequences of its states are others."""
    model, ids = Sequences(), torch.randint(0, 9, (4, 4))
    assert right_or_named(model, ids, 4, time_first) == set()
    gnsfast.configure(model, example=torch.randint(0, 9, (5, 4)), num_samples=4)
    for T in (5, 4, 3):
        assert len(right_or_named(model, torch.randint(0, 9, (T, 4)), 4, time_first)) == 7


@pytest.mark.parametrize("T", [3, 4])
def test_as_many_tokens_as_samples_of_a_model_that_sees_one_by_one(T: int) -> None:
    """Samples are taken to come first. That tokens might be them is no secret."""
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    assert len(right_or_named(model, torch.randn(4, T, D), 4)) == 4
    assert (re.search(TWO_WAYS, gnsfast.coverage(model).proof) is None) == (T != 4)


def encoded_pairs(m: Any, x: Tensor) -> Tensor:
    return per_sample(torch.cat([*m(x).chunk(2)], -1))


@pytest.mark.parametrize("is_part", [False, True])
def test_pairs_in_two_halves_of_a_batch(is_part: bool) -> None:
    """Rows b and B + b are sample b, as of a siamese network. Nothing shows it."""
    encoder = nn.Sequential(linear(), nn.Tanh(), linear())
    model: nn.Module = Made(lambda m, x: m.encoder(x), encoder=encoder) if is_part else encoder

    def loss(m: Any, x: Any) -> Tensor:
        return encoded_pairs(m.encoder if is_part else m, x)

    with (
        pytest.raises(gnsfast.SampleShapeError, match="4 samples"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        loss(model, torch.randn(8, 3, D)).sum().backward()


def loss_of_pairs(m: Any, x: Any) -> Tensor:
    return encoded_pairs(m.encoder, x[0]).mean() + 0 * x[1].sum()


def test_a_loss_of_pairs() -> None:
    """The labels have the number of the samples. Of the rows either way might be right."""
    model = Made(loss_of_pairs, encoder=nn.Sequential(linear(), nn.Tanh(), linear()))
    with (
        pytest.raises(gnsfast.ObservationError, match="encoder.0.weight.*rows that are apart"),
        gnsfast.per_sample_sqnorms(model, 4),
    ):
        model((torch.randn(8, 3, D), torch.randn(4))).backward()


def clouds(m: Any, x: Any) -> Tensor:
    """Each sample is a cloud of points."""
    y: Tensor = m.b(torch.stack(m.a(torch.cat(x)).tanh().split([*map(len, x)])).amax(1))
    return y


@pytest.mark.parametrize("points", [3, 4, 5])
def test_as_many_points_as_clouds(points: int) -> None:
    model = Made(clouds, a=linear(), b=linear())
    found = right_or_named(model, [torch.randn(points, D) for _ in range(4)], 4)
    assert len(found) == (0 if points == 4 else 4)


def sorted_and_packed(m: Any, x: Any) -> Tensor:
    """Its result is as long as the longest sequence, so no single sample shows the same."""
    lengths, order = x[1].sort(descending=True)
    packed = nn.utils.rnn.pack_padded_sequence(x[0][order], lengths, batch_first=True)
    first = m.first.expand(-1, len(order), -1).contiguous()
    y, _ = nn.utils.rnn.pad_packed_sequence(m.cells(packed, first)[0], batch_first=True)
    last: Tensor = m.a(y[order.argsort()])
    return last


ORDERED = "263145", "465321", "654312", "236145", "12", "624", "624" + 20 * "1" + "2"


@pytest.mark.parametrize("lengths", ORDERED)
def test_a_first_state_of_sorted_sequences(lengths: str) -> None:
    """The first batch shows an order that it cannot compare with single samples, also where it
    moves two samples only.
    """
    own = {"cells": nn.GRU(D, D, batch_first=True), "first": torch.randn(1, 1, D)}
    model, B = Made(sorted_and_packed, a=linear(), **own), len(lengths)
    x = torch.randn(B, 6, D), torch.tensor([*map(int, lengths)])
    assert right_or_named(model, x, B) <= {"a.weight", "a.bias"}
    assert "another shape" in gnsfast.coverage(model).proof


class Swaps(nn.Module):
    """Two samples change places in all batches but the first one."""

    def __init__(self, pair: tuple[int, int]) -> None:
        super().__init__()
        self.a, self.b, self.pair, self.steps = linear(), linear(), pair, 0

    def forward(self, x: Tensor) -> Tensor:
        order = [*range(len(x))]
        if self.steps:
            i, j = self.pair
            order[i], order[j] = j, i
        self.steps += 1
        y: Tensor = self.b(self.a(x[order]).tanh()[order])
        return y


@pytest.mark.parametrize("pair", [(0, 1), (3, 50), (31, 32), (62, 63)])
def test_two_samples_of_many_that_change_places(pair: tuple[int, int]) -> None:
    model = Swaps(pair)
    with pytest.raises(gnsfast.ObservationError, match=r"a\.weight.*another order"):
        for _ in range(128):
            with gnsfast.per_sample_sqnorms(model, 64):
                per_sample(model(torch.randn(64, D))).sum().backward()


class Scale(nn.Module):
    """A gain that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).tanh()


def of_tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.flatten(0, 1)).view_as(x)
    return y


def of_some_tokens(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0, :3] = False
    return x.masked_scatter(mask[..., None], m["scale"](x[mask]))


def of_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x[:, 0].T).T
    return y


def of_more_features(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m["scale"](x.permute(2, 1, 0)).permute(2, 1, 0)
    return y


@pytest.mark.parametrize("scale", [Scale, nn.PReLU])
@pytest.mark.parametrize("run", [of_tokens, of_some_tokens, of_features, of_more_features])
def test_a_number_for_all_features_of_a_part(run: Model, scale: type[nn.Module]) -> None:
    """There are as many features as samples, so that a part alone does not show which they are."""
    for T in (4, 6, D):
        model = nn.ModuleDict({"a": linear(), "scale": scale()})

        def loss(m: Any, x: Tensor) -> Tensor:
            return per_sample(run(m, m["a"](x)))

        found = right_or_named(model, torch.randn(D, T, D), D, loss)
        assert not any(name.startswith("scale") for name in found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.scale = linear(), linear(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(F.scaled_dot_product_attention(self.q(x), x, self.scale(x)))
        return y


def test_what_a_part_does_shows_where_its_samples_are() -> None:
    """It joins the features of a sample, or its tokens, of which there are as many as samples."""

    def loss(m: Any, x: Tensor) -> Tensor:
        return per_sample(m["last"](m["first"](x)))

    for first, shape in ((Attends(), (D, D, D)), (nn.Sequential(linear(), Scale()), (D, D))):
        model = nn.ModuleDict({"first": first, "last": nn.Sequential(Scale(), linear())})
        found = right_or_named(model, torch.randn(shape), D, loss)
        assert {n for n, _ in model["first"].named_parameters(prefix="first")} <= found
        assert ("last.0.gain" in found) == (len(shape) == 2)


def class_token_before_layer(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
    y: Tensor = m.b(m.a(h.reshape(-1, D)).tanh()).view_as(h)
    return y[:, 0]


def all_but_the_last(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b((m.a(x) * m.token[0, 0])[:, :-1].reshape(-1, D).tanh())
    return y.view(len(x), -1, D)


def in_time(m: Any, x: Tensor) -> Tensor:
    """The tokens lie first, so that the rows of a sample are apart."""
    h = torch.cat([m.token.expand(-1, len(x), -1), x.transpose(0, 1)])
    y: Tensor = m.b(m.a(h.reshape(-1, D)).tanh()).view_as(h)
    return y.transpose(0, 1)


def expert_of_tokens(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
    rows = h.reshape(-1, D)
    own = (rows[:, 0] > -0.5).nonzero()[:, 0]
    y: Tensor = torch.zeros_like(rows).index_copy(0, own, m.b(m.a(rows[own]).tanh()))
    return y.view_as(h)


@pytest.mark.parametrize(
    "run", [class_token_before_layer, all_but_the_last, in_time, expert_of_tokens]
)
@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_tokens_that_do_not_grow_with_the_samples(run: Model, more: int, late: bool) -> None:
    """A layer gets one list of tokens, some more or fewer for each sample than it has."""
    model = Made(
        run, a=linear(), b=linear(), token=torch.randn(1, more if run is not in_time else 1, D)
    )
    sizes = [(5, 9), *([(4, 9), (6, 9)] if late else []), (5, 7), (4, 12), (5, 9), (3, 5), (2, 14)]
    found = over_batches(model, [torch.randn(B, T, D) for B, T in sizes], 0)
    assert found == [{*dict(model.named_parameters())}] * len(sizes)


def first_tokens(m: Any, x: Any) -> Tensor:
    """A layer gets the tokens that are no padding, by numbers of Python."""
    h = class_token_before_layer(m, x[0])
    rows = torch.cat([own[:n] for own, n in zip(x[0], x[1].tolist())])
    parts = m.c(m.w * rows).split(x[1].tolist())
    return h + torch.stack([own.square().mean(0) for own in parts])


@pytest.mark.parametrize("later", [(12, [12, 10, 11, 11]), (7, [7, 5, 6, 6]), (9, [9, 9, 9, 1])])
@pytest.mark.parametrize("between", [[], [(12, [12] * 4)], [(12, [12] * 4), (7, [7] * 4)]])
def test_rows_that_numbers_of_python_have_chosen(
    later: tuple[int, list[int]], between: list[tuple[int, list[int]]]
) -> None:
    """Their number would fit samples whose class token does not grow."""
    own = {"token": torch.randn(1, 1, D), "w": torch.rand(D)}
    model = Made(first_tokens, a=linear(), b=linear(), c=linear(), **own)
    batches = [
        (torch.randn(4, T, D), torch.tensor(n)) for T, n in [(6, [6] * 4), *between, later, later]
    ]
    found = over_batches(model, batches, 4)
    assert all(found[: 1 + len(between)]) and not found[-1] & {"c.weight", "c.bias", "w"}


TASKS: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(3)]),
    "dict": lambda: nn.ParameterDict({str(k): torch.randn(D, D) for k in range(3)}),
    "layers": lambda: nn.ModuleList([linear() for _ in range(3)]),
}


def of_task(m: Any, x: Tensor, task: int) -> Tensor:
    own = m.tasks[str(task) if isinstance(m.tasks, nn.ParameterDict) else task]
    y: Tensor = own(x) if isinstance(own, nn.Module) else F.linear(x, own)
    return y * m.unused if task > 2 else y


def save_products(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "no": lambda f, *given: f(*given),
    "plain": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_products),
    ),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("at_once", [False, True])
def test_parameters_that_a_later_pass_is_the_first_to_take(
    kind: str, how: str, at_once: bool
) -> None:
    """Those of a task each, in batches with one task, or in several passes of the first block."""

    def run(m: Any, x: Tensor, task: int) -> Tensor:
        h = m.a(x).tanh()
        y: Tensor = m.b(CHECKPOINTS[how](partial(of_task, m), h, task).tanh())
        return y

    def loss(m: Any, x: Any) -> Tensor:
        return sum(per_sample(m(x[0], task)) for task in x[1])  # type: ignore[return-value]

    tables = {"tasks": TASKS[kind](), "unused": torch.randn(D)}
    model = Made(run, a=linear(), b=linear(), **tables)
    many = len([*model.parameters()]) - 1
    for tasks in ([0, 1, 2], [1]) if at_once else ([0], [2], [2], [1], [0], [1]):
        x = torch.randn(4, 6, D), tasks
        assert len(right_or_named(model, x, 4, loss) - {"unused"}) == many


def test_samples_that_meet_in_what_a_later_pass_is_the_first_to_take() -> None:
    def run(m: Any, x: Any) -> Tensor:
        y = F.linear(m.a(x[0]).tanh(), m.tasks[x[1]])
        return y - y.mean(0) if x[1] == 1 else y

    model = Made(run, a=linear(), tasks=TASKS["list"]())
    found = [right_or_named(model, (torch.randn(5, D), task), 5) for task in (0, 2, 1)]
    assert found[0] and found[1] and not found[2]


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
    for B in (4, 5, 4, 2):
        assert len(right_or_named(model, torch.randn(B, *shape, D), B, loss)) == 4


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
    assert "not found in broadcast_tensors" in row.reason


def distances(m: Any, x: Tensor) -> Tensor:
    return torch.cdist(m(x), m.centers)


def of_distances(m: Any, x: Tensor) -> Tensor:
    return per_sample(distances(m, x))


def test_a_first_batch_that_is_as_large_as_a_layer_is_wide() -> None:
    """A function outside of the model then has two such dimensions; the error says what to do."""
    model = Made(lambda s, x: s.a(x), a=linear(), centers=torch.randn(5, D))
    with (
        pytest.raises(gnsfast.ObservationError, match=r"centers: .*example=batch, run=step"),
        gnsfast.per_sample_sqnorms(model, D),
    ):
        of_distances(model, torch.randn(D, D)).sum().backward()
    model.zero_grad()
    gnsfast.configure(model, example=torch.randn(16, D), run=partial(distances, model))
    for B in (16, 7, D):
        assert len(right_or_named(model, torch.randn(B, D), B, of_distances)) == 3


def test_a_last_batch_that_is_as_large_as_a_layer_is_wide() -> None:
    """The batches before it have shown which dimension holds the samples."""
    model = Made(lambda s, x: s.a(x), a=linear(), centers=torch.randn(5, D))
    for B in (16, 16, D, 7, 5):
        assert len(right_or_named(model, torch.randn(B, D), B, of_distances)) == 3


@pytest.mark.parametrize("turned_first", [True, False])
def test_what_no_batch_has_shown_without_an_error(turned_first: bool) -> None:
    """The samples lie first in one use, and last in the other, in a batch with an error too."""

    def loss(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        if turned_first:
            return per_sample((y.T * m.w).T) + per_sample(y * m.w)
        return per_sample(y * m.w) + per_sample((y.T * m.w).T)

    model = Made(lambda s, x: s.a(x), a=linear(), w=torch.rand(1))
    for B in (16, D, 16, D):
        right_or_named(model, torch.randn(B, D), B, loss)


def queries(m: Any, x: Tensor) -> Tensor:
    """As in DETR: the first layers get the same queries for each sample, which lie first."""
    h = m.table.weight.unsqueeze(1).repeat(1, len(x), 1)
    h = (m.a(h.reshape(-1, D)).tanh() * m.gain).view_as(h)
    h = h + m.b(x).mean(1)
    y: Tensor = m.c(h.tanh().reshape(-1, D)).view_as(h).transpose(0, 1)
    return y


def queries_last(m: Any, x: Tensor) -> Tensor:
    h = m.a(m.table.weight.repeat(len(x), 1)).tanh() * m.gain
    y: Tensor = m.c(h + m.b(x).mean(1).repeat_interleave(5, 0))
    return y.view(len(x), 5, D)


@pytest.mark.parametrize("run", [queries, queries_last])
@pytest.mark.parametrize("B", [6, 5, 3])
def test_queries_that_all_samples_share(run: Model, B: int) -> None:
    tables = {"table": nn.Embedding(5, D), "gain": torch.rand(D)}
    model = Made(run, a=linear(), b=linear(), c=linear(), **tables)
    found = over_batches(model, [torch.randn(n, 6, D) for n in (B, 4, 8, 2, 5)], 0)
    assert [*map(len, found)] == [8] * 5


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
