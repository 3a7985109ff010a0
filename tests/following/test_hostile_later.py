# SPDX-License-Identifier: Apache-2.0
"""Models whose later batches show what the first one did not: samples in another order, layers that
start late, samples that meet. Each parameter is right or left out by name.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hostile import (
    D,
    Model,
    in_its_batch,
    linear,
    order_of,
    over_batches,
    per_sample,
    right_or_named,
)
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


def test_a_batch_that_is_not_finite_says_nothing() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 4
    bad = torch.randn(5, 6, D)
    bad[0, 0, 0] = torch.nan
    with gnsfast.per_sample_sqnorms(model, 5):
        per_sample(model(bad)).sum().backward()
    model.zero_grad()
    assert len(right_or_named(model, torch.randn(4, 6, D), 4)) == 4


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
LISTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "list": lambda x, order: x[order.tolist()],
    "array": lambda x, order: x[order.numpy()],
    "list of columns": lambda x, order: x.T[:, order.tolist()].T,
}


@pytest.mark.parametrize("kind", [*HIDDEN, *LISTS])
def test_samples_sorted_by_way_of_constants(kind: str) -> None:
    """The first batches have equal lengths, so that the order shows nothing. What lists choose
    shows in a batch that is looked at again, and the second one is.
    """

    def run(m: Any, x: Any) -> Tensor:
        order = x[1].argsort(descending=True, stable=True)
        y: Tensor = m.b((HIDDEN | LISTS)[kind](m.a(x[0]).tanh(), order).tanh() * m.g)
        return y[order.argsort()]

    model = Made(run, a=linear(), b=linear(), g=torch.rand(D))
    for lengths in ([6, 6, 6, 6],) * (2 - (kind in LISTS)) + ([2, 6, 5, 1],):
        x = torch.randn(4, D), torch.tensor(lengths)
        right_or_named(model, x, 4)


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


def trimmed(m: Any, x: Any) -> Tensor:
    """Cut to the longest sample, as a packed sequence is when it is padded again."""
    x, lengths = x
    x = x[:, : int(lengths.max())]
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return (m.last(m.first(x).tanh()) * mask[..., None]).sum(1)


def test_samples_that_are_cut_to_the_longest() -> None:
    model = Made(trimmed, first=linear(), last=linear())
    for lengths in ([7, 3, 5, 4, 2, 6], [2, 3, 3, 6, 1, 1], [4, 7, 1]):
        x = torch.randn(len(lengths), 7, D), torch.tensor(lengths)
        assert len(right_or_named(model, x, len(lengths))) == 4


def video(m: Any, x: Tensor) -> Tensor:
    """Frames [B, T, 3, H, W] go through a convolution as one batch, and get a bias."""
    h = m.conv(x.flatten(0, 1)) + m.bias
    return m.last(h.relu().mean((2, 3)).view(*x.shape[:2], D).mean(1))


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 3, 5), (4, 2, 7), (4, 5, 6), (3, 4, 5), (4, 3, 5)],
        [(4, 1, 5), (4, 2, 5), (4, 5, 5), (4, 1, 5), (3, 3, 4)],
    ],
    ids=["several frames", "one frame first"],
)
def test_frames_of_any_number_and_size(shapes: list[tuple[int, int, int]]) -> None:
    model = Made(video, conv=nn.Conv2d(3, D, 3), bias=torch.randn(D, 1, 1), last=linear())
    for B, T, size in shapes:
        assert len(right_or_named(model, torch.randn(B, T, 3, size, size), B)) == 5


def of_images_and_texts(m: Any, x: Tensor) -> Tensor:
    """One encoder, which flattens samples and tokens, for both."""
    h = m.table(x) if x.dtype == torch.int64 else m.patches(x)
    h = m.encoder(h.flatten(0, 1)).view(*h.shape[:2], D)
    return m.last(h.tanh().mean(1))


def test_images_and_texts_in_turn() -> None:
    """What fits no batch before is learnt by itself, and known when it comes again."""
    model = Made(of_images_and_texts, table=nn.Embedding(9, D), patches=linear(), encoder=linear())
    model.last = linear()
    found = []
    for k in range(8):
        B = 4 + k % 3
        texts, images = torch.randint(9, (B, 6 + k // 2)), torch.randn(B, 9, D)
        found.append(right_or_named(model, images if k % 2 else texts, B))
    every = {name for name, _ in model.named_parameters()}
    of_images, of_texts = every - {"table.weight"}, {n for n in every if "patches" not in n}
    assert all(own >= (of_images if k % 2 else of_texts) for k, own in enumerate(found))


def test_two_sequences_that_are_joined() -> None:
    """The length of the whole is in proportion to neither."""

    def joined(m: Any, x: Any) -> Tensor:
        h = torch.cat([m.table(own) for own in x], 1)
        return m.last(m.first(h.flatten(0, 1)).tanh().view(h.shape).mean(1))

    model = Made(joined, table=nn.Embedding(9, D), first=linear(), last=linear())
    for lengths in ((3, 7), (4, 9), (2, 6), (5, 5), (3, 8)):
        x = tuple(torch.randint(9, (4, T)) for T in lengths)
        assert len(right_or_named(model, x, 4)) == 5


@pytest.mark.parametrize("lengths", [(6, 6, 4, 6), (8, 4, 4, 5), (6, 7, 5, 5, 5, 4, 6, 4)])
def test_masks_and_times_as_long_as_there_are_samples(lengths: tuple[int, ...]) -> None:
    """What had no samples in the first batch has none where its size is theirs by chance."""

    def run(m: Any, x: Any) -> Tensor:
        ids, mask, times = x
        h = m.table(ids) + m.of_time(times[:, None])
        h = h + (h @ h.mT + mask).softmax(-1) @ m.value(h)
        return m.last(h.flatten(0, 1)).view(h.shape)

    model = Made(run, table=nn.Embedding(9, D), of_time=nn.Linear(1, D), value=linear())
    model.last = linear()
    for T in lengths:
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        x = torch.randint(9, (4, T)), mask, torch.linspace(0, 1, T)
        assert len(right_or_named(model, x, 4)) == 7
