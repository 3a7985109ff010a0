# SPDX-License-Identifier: Apache-2.0
"""Parameters that are used outside of the model's forward, and functions of which a part is left
out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import one_update
from oracle import assert_norms, loop_sqnorms
from processes import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import gnsfast

B, T, D, V = 4, 6, 8, 20
IDS = torch.randint(0, V, (2 * B, T), generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    """A language model that returns its hidden states: the loss takes the head."""

    def __init__(self, head: type[nn.Linear] = nn.Linear, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = head(D, V, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embed(ids)).tanh()


def fused(head: Any, h: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    loss = gnsfast.functional.linear_cross_entropy
    return loss(h, head.weight, labels, bias=head.bias, reduction=reduction)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "functional": lambda m, ids, how: fused(m.head, m(ids), ids, how),
    "called": lambda m, ids, how: F.cross_entropy(m.head(m(ids)).mT, ids, reduction=how),
    "parts": lambda m, ids, how: F.cross_entropy(
        m.head(m.layer(m.embed(ids))).mT, ids, reduction=how
    ),
    "a method": lambda m, ids, how: m.head.cross_entropy(m(ids), ids, reduction=how),
}


def shown(model: nn.Module, loss: Callable[..., Tensor], ids: Tensor) -> gnsfast.Table:
    """The table of a model and what its loss calls beside it."""
    return gnsfast.learn(model, ids, run=lambda ids: loss(model, ids, "none"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_outside_of_the_model(loss: str, tied: bool) -> None:
    """The batch that the model gets does not show it: it is left out, or an error shows ``run``."""
    torch.manual_seed(0)
    model = Body(gnsfast.Linear, tied=tied)
    mean = lambda m, ids: LOSSES[loss](m, ids, "mean")  # noqa: E731
    if loss == "parts" or (tied and loss == "called"):
        with pytest.raises(gnsfast.ObservationError, match="run=step"):
            gnsfast.verify(model, mean, IDS[:B])
    else:
        rows = gnsfast.verify(model, mean, IDS[:B]).rows
        heads = set() if tied else {"head.weight", "head.bias"}  # links join a tie
        assert {row.parameter for row in rows if row.verdict != "ok"} == heads
    table = shown(model, LOSSES[loss], IDS[:B])
    for ids in (IDS[:B], IDS[B:]):
        found = gnsfast.verify(model, mean, ids, table=table)
        assert found.ok and {row.verdict for row in found.rows} == {"ok"}, found


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0, self.bias)


def test_a_part_that_makes_something_of_a_weight_of_an_earlier_part() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), Doubled(D, D)])
    model[1].weight = model[0].weight
    run = lambda x: model[1](model[0](x).tanh())  # noqa: E731
    table = gnsfast.learn(model, torch.randn(B, D), run=run)
    loss = lambda _, x: run(x).square().flatten(1).sum(1).mean()  # noqa: E731
    for _ in range(2):
        found = gnsfast.verify(model, loss, torch.randn(B, D), table=table)
        assert found.ok and {row.verdict for row in found.rows} == {"ok"}, found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_with_a_tie_that_returns_its_loss(backend: str) -> None:
    class Loss(Body):
        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(super().forward(ids)).mT, ids)

    torch.manual_seed(0)
    model = Loss(tied=True)
    compiled: Any = torch.compile(model, backend=backend)
    table = gnsfast.learn(model, IDS[:B], run=lambda ids: model.head(Body.forward(model, ids)))
    found = []
    for run in (model, compiled):
        with gnsfast.per_sample_sqnorms(run, B, table=table) as norms:
            run(IDS[:B]).backward()
        found.append(dict(norms))
    assert found[0].keys() == found[1].keys()
    for name, own in found[0].items():
        torch.testing.assert_close(found[1][name], own)


def test_a_part_of_a_function_is_left_out() -> None:
    model = nn.LSTM(D, 5, batch_first=True)
    gnsfast.configure(model, exclude=["*_hh_*"])
    found = gnsfast.verify(model, lambda m, x: m(x)[0].square().mean(), torch.randn(B, T, D))
    assert [row.verdict for row in found.rows] == ["ok", "uncovered"] * 2


def trained(model: nn.Module, head: Any, ids: Tensor, **options: Any) -> gnsfast.NoiseScale:
    table = gnsfast.learn(model, ids, run=lambda ids: head.loss(model(ids), ids, reduction="none"))
    gns = gnsfast.GradientNoiseScale(model, table=table, loss_reduction="sum", **options)
    for _ in range(2):
        with one_update(gns, len(ids), scale=0.5):
            (head.loss(model(ids), ids) * 0.5).backward()
    return gns.compute()


def sharded(rank: int) -> None:
    """A head in a shard of its own, which is called by a method that FSDP2 was told of."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Body())
        head: Any = models[-1].head
        head.loss = partial(fused, head, reduction="sum")
    model, alone = models
    fully_shard(model.head)
    fully_shard(model)
    register_fsdp_forward_method(model.head, "loss")
    ours = trained(model, model.head, IDS[rank::2])
    own = [torch.distributed.new_group([r]) for r in range(2)][rank]
    theirs = trained(alone, alone.head, IDS, process_group=own)
    assert not ours.left_out
    assert ours.trace == pytest.approx(theirs.trace, rel=1e-4)
    assert ours.grad_sqnorm == pytest.approx(theirs.grad_sqnorm, rel=1e-3)


@pytest.mark.dist
def test_a_method_of_a_sharded_head() -> None:
    spawn(sharded, 2)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)


def inside(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.second(m.first(x).transpose(0, 1)).sin()
    return y.transpose(0, 1)


def outside(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.first(x), m.second.weight).sin()


def test_a_weight_in_turns_inside_and_outside_of_a_part() -> None:
    """With as many time steps as samples, the shapes of both are the same: one of both is right,
    or an error.
    """
    model = Parts()
    long, square = torch.randn(7, 5, D), torch.randn(5, 5, D)
    tables = {run: gnsfast.learn(model, long, run=partial(run, model)) for run in (inside, outside)}
    for run, x in [(inside, long), (outside, long), (outside, square), (inside, square)]:
        loss = lambda m, x: run(m, x).sum()  # noqa: B023, E731
        with gnsfast.per_sample_sqnorms(model, len(x), table=tables[run]) as norms:
            loss(model, x).backward()
        model.zero_grad()
        assert_norms(norms, loop_sqnorms(model, loss, x, len(x)))
