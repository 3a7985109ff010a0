# SPDX-License-Identifier: Apache-2.0
"""Models whose later batches show what the batch of their table did not: samples in another order,
layers that start late, longer and shorter loops. Each parameter is right or left out by name.
"""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hostile import (
    D,
    Model,
    in_its_batch,
    linear,
    over_batches,
    per_sample,
    right_or_named,
)
from made import Made
from oracle import assert_norms
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


class Gates(nn.Module):
    """Blocks behind gates that are zero at first. In the last block samples may meet."""

    def __init__(self, meets: bool) -> None:
        super().__init__()
        self.meets = meets
        self.blocks = nn.ModuleList([linear() for _ in range(3)])
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates):
            r = block(x).tanh()
            x = x + gate * (r - r.mean(0) if self.meets and block is self.blocks[-1] else r)
        return x


@pytest.mark.parametrize("meets", [False, True])
def test_gates_that_open_late(meets: bool) -> None:
    """The proof opens them: what is behind a closed gate is known from the first batch on."""
    model = Gates(meets)
    for gate in model.gates:
        assert len(right_or_named(model, torch.randn(4, D), 4)) == (0 if meets else 9)
        nn.init.ones_(gate)
    assert len(right_or_named(model, torch.randn(4, D), 4)) == (0 if meets else 9)


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


def test_a_loop_over_rows_in_two_orders() -> None:
    """Shapes do not tell which of its calls has interleaved rows."""
    model, x = Made(two_orders, a=linear()), torch.randn(4, 6, D)
    for times in (2, 1):
        assert not right_or_named(model, (x, torch.full((4,), times)), 4)


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
    "list": lambda x, order: x[order.tolist()],
    "array": lambda x, order: x[order.numpy()],
    "list of columns": lambda x, order: x.T[:, order.tolist()].T,
}


def sorted_by(pick: Callable[[Tensor, Tensor], Tensor]) -> Model:
    """Sorts samples by their lengths, and puts them back before the last layer."""

    def run(m: Any, x: Any) -> Tensor:
        order = x[1].argsort(descending=True, stable=True)
        y = F.linear(m.a(pick(x[0], order)).tanh() * m.g, m.w)
        last: Tensor = m.b(pick(y, order.argsort()))
        return last

    return run


def when_lengths_differ(m: Any, x: Any) -> Tensor:
    """Sorts only where it must, as before a function that takes sorted sequences."""
    return sorted_by(lambda h, order: h[order] if len(x[1].unique()) > 1 else h)(m, x)


def by_permutation_matrix(m: Any, x: Any) -> Tensor:
    return sorted_by(lambda h, order: F.one_hot(order, len(h)).to(h.dtype) @ h)(m, x)


def by_two_sorts(m: Any, x: Any) -> Tensor:
    """The second sort is no reverse of the first one."""
    first = x[1].argsort(descending=True, stable=True)
    second = (x[1][first] % 3).argsort(stable=True)
    h = F.linear(m.a(x[0][first][second]).tanh() * m.g, m.w)
    y: Tensor = m.b(h[second.argsort()][first.argsort()])
    return y


SORTS: dict[str, Model] = {
    **{kind: sorted_by(pick) for kind, pick in (ORDERS | HIDDEN).items()},
    **{run.__name__: run for run in (when_lengths_differ, by_permutation_matrix, by_two_sorts)},
}


@pytest.mark.parametrize("kind", SORTS)
def test_samples_that_are_sorted(kind: str) -> None:
    """A batch of other lengths shows an order. One of equal lengths does not: the sums of the norms
    of later batches, of which a noise scale is made, are right all the same.
    """
    equal, others = torch.full((6,), 6), torch.tensor([2, 6, 5, 1, 4, 3])
    own = {"a": linear(), "b": linear(), "g": torch.rand(D), "w": torch.randn(D, D)}
    for first in (others, torch.arange(6, 0, -1)):  # which is in order already
        model = Made(SORTS[kind], **own)
        for lengths in (first, others):
            right_or_named(model, (torch.randn(6, D), lengths), 6)
    model = Made(SORTS[kind], **own)
    for lengths in (equal, others):
        x = torch.randn(6, D), lengths
        names = right_or_named(model, x, 6, ordered=lengths is equal)
        assert len(names) == 6 or (
            kind == "by_two_sorts" and names == {"a.weight", "a.bias", "g", "w"}
        )


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
    own = {"cells": nn.GRU(D, D, batch_first=True), "first": torch.randn(1, 1, D)}
    model, B = Made(sorted_and_packed, a=linear(), **own), len(lengths)
    x = torch.randn(B, 6, D), torch.tensor([*map(int, lengths)])
    assert right_or_named(model, x, B) <= {"a.weight", "a.bias"}


class Swaps(nn.Module):
    """Two samples change places in all batches but the first one."""

    def __init__(self, pair: tuple[int, int]) -> None:
        super().__init__()
        self.a, self.b, self.pair, self.steps = linear(), linear(), pair, 0

    def forward(self, x: Tensor) -> Tensor:
        order = [*range(len(x))]
        if self.steps > 2:  # two passes in plain torch come first
            i, j = self.pair
            order[i], order[j] = j, i
        self.steps += 1
        y: Tensor = self.b(self.a(x[order]).tanh()[order])
        return y


@pytest.mark.parametrize("pair", [(0, 1), (3, 50), (62, 63)])
def test_two_samples_of_many_that_change_places(pair: tuple[int, int]) -> None:
    model = Swaps(pair)
    for k in range(3):
        names = right_or_named(model, torch.randn(64, D), 64, ordered=k == 0)
        assert names == {"a.weight", "a.bias", "b.weight", "b.bias"}


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


def test_samples_that_meet_in_batches_of_another_kind() -> None:
    """The table of both kinds leaves them out."""

    def run(m: Any, x: Any) -> Tensor:
        y = F.linear(m.a(x[0]).tanh(), m.tasks[x[1]])
        return y - y.mean(0) if x[1] == 1 else y

    model = Made(run, a=linear(), tasks=TASKS["list"]())
    table = gnsfast.learn(model, ((torch.randn(5, D), 0),))
    assert "tasks.1" in table.proofs
    table |= gnsfast.learn(model, ((torch.randn(5, D), 1),))
    assert table.proofs.keys() == {"tasks.0", "tasks.2"}
    for task in (0, 2):
        assert right_or_named(model, (torch.randn(5, D), task), 5, table=table)


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
    batches = [torch.randn(B, T, 3, size, size) for B, T, size in shapes]
    table = gnsfast.learn(model, batches[0]) | gnsfast.learn(model, batches[1])
    assert [*map(len, over_batches(model, batches, 0, None, table))] == [5] * len(batches)


def test_more_frames_than_the_table_knows() -> None:
    """A sample of one frame has one row, and one of two frames has several."""
    model = Made(video, conv=nn.Conv2d(3, D, 3), bias=torch.randn(D, 1, 1), last=linear())
    assert len(right_or_named(model, torch.randn(4, 1, 3, 5, 5), 4)) == 5
    assert not right_or_named(model, torch.randn(4, 2, 3, 5, 5), 4)


def of_images_and_texts(m: Any, x: Tensor) -> Tensor:
    """One encoder, which flattens samples and tokens, for both."""
    h = m.table(x) if x.dtype == torch.int64 else m.patches(x)
    h = m.encoder(h.flatten(0, 1)).view(*h.shape[:2], D)
    return m.last(h.tanh().mean(1))


def test_images_and_texts_in_turn() -> None:
    """The table of both knows them."""
    model = Made(of_images_and_texts, table=nn.Embedding(9, D), patches=linear(), encoder=linear())
    model.last = linear()
    table = gnsfast.learn(model, torch.randn(4, 9, D)) | gnsfast.learn(
        model, torch.randint(9, (4, 6))
    )
    every = {name for name, _ in model.named_parameters()}
    assert table.proofs.keys() == every
    for k in range(6):
        B = 4 + k % 3
        x = torch.randn(B, 9, D) if k % 2 else torch.randint(9, (B, 6 + k // 2))
        assert right_or_named(model, x, B, table=table) == every


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


@pytest.mark.parametrize("pools", [False, True])
def test_rows_at_a_mask_that_is_empty_first(pools: bool) -> None:
    """A layer that no sample has reached takes the row of its sibling, whose input is [B, T, D] or
    [B, D]. Its own rows are as many as samples by chance.
    """

    def run(m: Any, x: Tensor) -> Tensor:
        mask = x[..., 0] > 2.0
        h = x + m.layers[0](x.mean(1))[:, None] if pools else m.layers[0](x)
        return h.masked_scatter(mask[..., None].expand_as(h), m.layers[1](h[mask]))

    model = Made(run, layers=nn.ModuleList(nn.RMSNorm(D) for _ in range(2)))
    x = torch.randn(3, 4, D).clamp(max=1.0)
    table = gnsfast.learn(model, x)
    x[0, :2, 0], x[2, 1, 0] = 3.0, 3.0  # two rows of a sample, and one of another
    with (
        pytest.raises(
            gnsfast.ObservationError, match=r"rms_norm takes it with data of shape \[3, "
        ),
        gnsfast.per_sample_sqnorms(model, 3, table=table),
    ):
        model(x).square().sum().backward()


@pytest.mark.parametrize("B", [2, 3, 4, 5])
def test_few_samples_that_are_sorted_by_chance(B: int) -> None:
    """Whatever order they come in, a model that sorts them is seen."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.layer(x[order])[order.argsort()]

    model = Made(run, layer=linear())
    for order in permutations(range(B)):
        x = torch.randn(B, D)
        x[:, 0] = torch.tensor(order)
        table = gnsfast.learn(model, x)
        assert set(table.left_out) == {"layer.weight", "layer.bias"}, order


def test_results_in_another_order() -> None:
    """A model that sorts its samples, and leaves its results so."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x[x[:, 0].argsort()]).tanh())

    model = Made(run, a=linear(), b=linear())
    for order in permutations(range(3)):
        x = torch.randn(8, D)
        x[:3, 0] = torch.tensor(order)
        assert {"a.weight", "a.bias", "b.weight"} <= gnsfast.learn(model, x).left_out.keys()
