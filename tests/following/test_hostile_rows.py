# SPDX-License-Identifier: Apache-2.0
"""Models that choose rows: experts, tables of parameters, tokens that do not grow with the samples.
Each parameter is right or left out by name.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import assert_right
from hostile import D, Model, linear, over_batches, per_sample, right_or_named
from made import Made
from torch import Tensor, nn

import gnsfast


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


def by_mask(h: Tensor, mask: Tensor) -> Tensor:
    return h[mask]


def by_numbers(h: Tensor, mask: Tensor) -> Tensor:
    return h.flatten(0, 1)[mask.flatten().nonzero()[:, 0]]


def by_python(h: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([own[:n] for own, n in zip(h, mask.sum(1).tolist())])


def by_length(h: Tensor, mask: Tensor) -> Tensor:
    """Those of a few tokens first."""
    rows = h[mask]
    length = mask.sum(1)[mask.nonzero()[:, 0]]
    return rows[length.argsort(stable=True)]


def by_gather(h: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    order = mask.sum(1)[mask.nonzero()[:, 0]].argsort(stable=True)
    return rows.gather(0, order[:, None].expand(-1, D))


def by_select(h: Tensor, mask: Tensor) -> Tensor:
    return h.masked_select(mask[..., None]).view(-1, D)


def of_sorted_samples(h: Tensor, mask: Tensor) -> Tensor:
    order = mask.sum(1).argsort(stable=True)
    return h[order].flatten(0, 1)[mask[order].flatten().nonzero()[:, 0]]


PICKS = by_mask, by_numbers, by_python, by_length, by_gather, by_select, of_sorted_samples


@pytest.mark.parametrize("pick", PICKS)
def test_rows_that_are_chosen_from_chosen_rows(pick: Callable[[Tensor, Tensor], Tensor]) -> None:
    """One index deep is followed. Each sample has six tokens on average, so that their number fits
    in all batches.
    """

    def run(m: Any, x: Any) -> Tensor:
        h, mask = m.a(x[0]), x[1]
        at = torch.arange(mask.numel()).view_as(mask)[..., None].expand_as(h)
        rows, order = pick(h, mask), pick(at, mask)[:, 0]
        expert, out = (rows[:, 0] * 4).long().abs() % 2, torch.zeros_like(h).flatten(0, 1)
        for e in range(2):
            own = (expert == e).nonzero()[:, 0]
            out = out.index_add(0, order[own], m.experts[e](rows[own]))
        return out.view_as(h)

    for lengths in ([9, 6, 6, 3], [6, 6, 6, 6]):
        if pick is by_python and lengths[0] == 6:  # as many rows of each sample, by chance
            continue
        model = Made(run, a=linear(), experts=nn.ModuleList([linear(), linear()]))
        more = [lengths, [9, 3, 5, 7], [8, 8, 4, 4]]
        batches = [(torch.randn(4, 9, D), torch.arange(9) < torch.tensor(n)[:, None]) for n in more]
        assert over_batches(model, batches, 4) == [{"a.weight", "a.bias"}] * 3


@pytest.mark.parametrize(
    "last, found",
    [
        (lambda h, x: h[-1], 3),
        (lambda h, x: h.unbind(0)[-1], 3),
        (lambda h, x: h[x[..., 0].argmax(1), torch.arange(len(x))], 2),  # two indices in one
        (lambda h, x: h.transpose(0, 1)[torch.arange(len(x)), x[..., 0].argmax(1)], 3),
    ],
)
def test_one_step_of_a_sequence_outside_of_the_model(
    last: Callable[..., Tensor], found: int
) -> None:
    """The steps lie along dimension 0, and their number is a multiple of that of the samples."""
    model = Made(lambda s, x: s.a(x.transpose(0, 1)), a=linear(), head=torch.randn(D, D))
    step = lambda x: F.linear(last(model(x), x), model.head)  # noqa: E731
    x = torch.randn(4, 8, D)
    table = gnsfast.learn(model, x, run=step)
    assert len(right_or_named(model, x, 4, lambda _, x: per_sample(step(x)), table)) == found


def test_a_list_as_an_index_of_a_table() -> None:
    """Rows that occur twice are no piece of the table."""
    model = Made(lambda s, x: s.a(x) + s.table[[0, 1, 1, 2]], a=linear(), table=torch.randn(3, D))
    assert "table" in right_or_named(model, torch.randn(5, 4, D), 5)


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
    h = torch.cat([m.token.expand(len(x), -1, -1).abs(), x], 1)
    rows = h.reshape(-1, D)
    own = (rows[:, 0] > -0.5).nonzero()[:, 0]
    y: Tensor = torch.zeros_like(rows).index_copy(0, own, m.b(m.a(rows[own]).tanh()))
    return y.view_as(h)


@pytest.mark.parametrize(
    "run", [class_token_before_layer, all_but_the_last, in_time, expert_of_tokens]
)
@pytest.mark.parametrize("more", [1, 3])
def test_tokens_that_do_not_grow_with_the_samples(run: Model, more: int) -> None:
    """A layer gets one list of tokens, some more or fewer for each sample than it has. Where
    another layer has shown how the samples grow, other lengths are an error.
    """
    model = Made(
        run, a=linear(), b=linear(), token=torch.randn(1, more if run is not in_time else 1, D)
    )
    every = {*dict(model.named_parameters())}
    sizes = [
        (5, 9),
        (4, 9),
        (6, 9),
        *([] if run is all_but_the_last else [(5, 7), (4, 12), (2, 14)]),
    ]
    found = over_batches(model, [torch.randn(B, T, D) for B, T in sizes], 0)
    assert found == [every] * len(sizes)
    if run is all_but_the_last:
        assert not right_or_named(model, torch.randn(5, 7, D), 5)
        table = gnsfast.learn(model, torch.randn(5, 9, D)) | gnsfast.learn(
            model, torch.randn(5, 7, D)
        )
        assert right_or_named(model, torch.randn(3, 7, D), 3, table=table) == every


def first_tokens(m: Any, x: Any) -> Tensor:
    """A layer gets the tokens that are no padding, by numbers of Python."""
    rows = torch.cat([own[:n] for own, n in zip(m.a(x[0]), x[1].tolist())])
    parts = m.c(m.w * rows).split(x[1].tolist())
    return torch.stack([own.square().mean(0) for own in parts])


@pytest.mark.parametrize("lengths", [[12, 10, 11, 12], [7, 5, 6, 6]])
def test_rows_that_numbers_of_python_have_chosen(lengths: list[int]) -> None:
    """A number that fits no sample is an error by name."""
    model = Made(first_tokens, a=linear(), c=linear(), w=torch.rand(D))
    whole = torch.randn(4, 12, D), torch.full((4,), 12)
    assert len(right_or_named(model, whole, 4)) == 5
    assert not right_or_named(model, (torch.randn(4, 12, D), torch.tensor(lengths)), 4)
    other = Made(first_tokens, a=linear(), c=linear(), w=torch.rand(D))
    x = torch.randn(4, 12, D), torch.tensor(lengths)
    assert right_or_named(other, x, 4) == {"a.weight", "a.bias"}


@pytest.mark.parametrize("steps", [3, 5, 12])
@pytest.mark.parametrize("at", [0, -1, "each"])
def test_a_time_step_is_no_sample(at: int | str, steps: int) -> None:
    """One of steps that come first, whose number is by chance a multiple of the samples in which
    the model is learnt (3 and 4), or of those of the batch.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        h, _ = m.rnn(x.transpose(0, 1))
        rows = h.unbind(0) if at == "each" else [h[at]]
        return torch.stack([m.scale * (m.shift + m.a(row)) for row in rows], 1)

    model = Made(forward, rnn=nn.LSTM(D, D), a=linear(), shift=torch.rand(D), scale=torch.rand(D))
    for n in (4, 6):
        assert_right(model, torch.randn(n, steps, D), num_samples=n)


@pytest.mark.parametrize("steps", [3, 8, 9, 12])
def test_the_last_steps_of_sorted_samples(steps: int) -> None:
    """Two indexes of a tensor with time first. In the first batch all samples are as long."""

    def forward(m: Any, x: Tensor) -> Tensor:
        last = (x[:, 0, 0].abs() * 9).long() % steps
        order = last.argsort(stable=True)
        h = m.a(x.transpose(0, 1)).tanh()
        return m.b(h[last[order], order])[order.argsort()]

    model = Made(forward, a=linear(), b=linear())
    x = torch.randn(6, steps, D)
    x[:, 0, 0] = 0.0
    for batch in (x, torch.randn(6, steps, D), torch.randn(6, steps, D)):
        assert right_or_named(model, batch, 6) >= {"a.weight", "a.bias"}


@pytest.mark.parametrize("steps", [3, 4, 5, 12])
def test_a_word_beside_each_time_step(steps: int) -> None:
    """Its table is looked up at ids of the samples; the data have not chosen the step's rows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        words = (x.abs() * 9).long() % 10
        out = [m.words(words[:, t, 0]) + h for t, h in enumerate(m.a(x).transpose(0, 1))]
        return torch.stack(out, 1)

    model = Made(forward, a=linear(), words=nn.Embedding(10, D))
    for n in (4, 6):
        assert_right(model, torch.randn(n, steps, D), num_samples=n)


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


@pytest.mark.parametrize(
    "moved", [lambda t: t.flip(0), lambda t: t.roll(1, 0)], ids=["flip", "roll"]
)
@pytest.mark.parametrize("gathers", [False, True], ids=["index", "gather"])
def test_chosen_rows_in_another_order(moved: Any, gathers: bool) -> None:
    """The first batches choose one row, whose order shows nothing."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.i(x).flatten(0, 1)
        index = (x.flatten(0, 1)[:, 0] > 0).nonzero()[:, 0]
        own = rows.gather(0, index[:, None].expand(-1, D)) if gathers else rows[index]
        y = m.e(moved(own)).tanh()
        return x + torch.zeros_like(rows).index_add(0, moved(index), y).view_as(x)

    model = Made(forward, i=linear(), e=linear())
    for n in (1, 1, 3, 4):
        x = torch.randn(6, 5, D)
        x[..., 0] = -x[..., 0].abs()
        x[:n, 0, 0] = 1.0
        right_or_named(model, x, 6)


@pytest.mark.parametrize("T", [3, 4, 5])
def test_rows_of_stacked_samples_are_no_tokens_of_one(T: int) -> None:
    """Each sample goes through a layer alone, and may have as many tokens as there are samples."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.stack([m.a(own).tanh() for own in m.b(x)])
        return h[:, -1] * m.gain  # type: ignore[no-any-return]

    model = Made(run, a=linear(), b=linear(), gain=torch.rand(D))
    for B in (4, 3, 5):
        x = torch.randn(B, T, D)
        table = gnsfast.learn(model, x, take=lambda x, samples: x[samples])
        assert len(right_or_named(model, x, B, table=table)) == 5


def test_a_loop_over_samples_of_the_batch_itself() -> None:
    """Shapes do not tell that its calls take samples, through which no gradient goes."""
    model = Made(lambda m, x: torch.stack([m.a(own) for own in x]).tanh(), a=linear())
    assert not gnsfast.learn(model, torch.randn(4, 6, D)).proofs
    assert not right_or_named(model, torch.randn(4, 6, D), 4)
