# SPDX-License-Identifier: Apache-2.0
"""Small models drawn at random, from layers and from what models do between them.

``python tests/random_models.py 10000`` tries so many and prints what became of them.
"""

import random
import re
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

D = 4


class Step(nn.Module):
    """What a model does with a layer; it takes [B, T, D], and gives that shape."""

    def __init__(self, name: str, layer: nn.Module, how: int) -> None:
        super().__init__()
        self.name, self.layer, self.how = name, layer, how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.name)(x)
        return y

    def plain(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def flat(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def turned(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)

    def turned_flat(self, x: Tensor) -> Tensor:
        return self.flat(x.transpose(0, 1)).transpose(0, 1)

    def conv(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)

    def pooled(self, x: Tensor) -> Tensor:
        return x + self.layer(x.mean(1))[:, None]

    def table(self, x: Tensor) -> Tensor:
        """Positions: a bare index, one row that all samples share, or a row for each."""
        index = torch.arange(x.shape[1])
        if self.how == 1:
            index = index[None]
        elif self.how == 2:
            index = index.expand(len(x), -1)
        return x + self.layer(index)

    def of_table(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.ones(x.shape[1], D, dtype=x.dtype).cumsum(0))

    def picked(self, x: Tensor) -> Tensor:
        mask = (x[..., 0] > (0.0, -0.9, -9.0)[self.how]).detach()
        return x.masked_scatter(mask[..., None].expand_as(x), self.layer(x[mask]))

    def picked_by_number(self, x: Tensor) -> Tensor:
        number = (x[..., 0] > (0.0, -0.9, -9.0)[self.how]).flatten().nonzero()[:, 0]
        rows = x.flatten(0, 1)
        rows = rows.index_copy(0, number, self.layer(rows.index_select(0, number)))
        return rows.view_as(x)

    def every_other(self, x: Tensor) -> Tensor:
        return x + self.layer(x[:, ::2]).mean(1, keepdim=True)

    def sorted(self, x: Tensor) -> Tensor:
        order = x.detach().sum((1, 2)).argsort()
        y: Tensor = self.layer(x[order])[order.argsort()]
        return y

    def as_tensor(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.layer.weight)

    def as_tensor_too(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + x @ self.layer.weight)

    def meeting(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))

    def neighbours(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.5 * x.roll(1, 0))

    def stretched(self, x: Tensor) -> Tensor:
        """Every sample's rows several times, as beams are."""
        return self.layer(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).mean(1)

    def tiled(self, x: Tensor) -> Tensor:
        return self.layer(x.repeat(2, 1, 1)).unflatten(0, (2, -1)).mean(0)

    def sliced(self, x: Tensor) -> Tensor:
        """Two pieces of a weight, one after another."""
        w, half = self.layer.weight, D // 2
        a, b = F.linear(x, w[:half]), F.linear(x, w[half:])
        return torch.cat([torch.tanh(a), b], -1)

    def overlapping(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        return torch.tanh(F.linear(x, w)) + F.linear(x, w[1:], None).sum(-1, keepdim=True)

    def tied_pieces(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        return torch.tanh(F.linear(x, w)) @ w[: D // 2].repeat(2, 1)

    def shared_index(self, x: Tensor) -> Tensor:
        index = torch.arange(D) // (1, 2, 3)[self.how]
        return F.linear(x, self.layer.weight[index])

    def rows_of_table(self, x: Tensor) -> Tensor:
        """Rows of a weight at places that all samples share, or at those that a sample chose."""
        w, n = self.layer.weight, x.shape[1]
        if self.how == 0:
            return x + w[torch.arange(n) % D]
        if self.how == 1:
            return x + w[(x[..., 0] > 0).long().detach()]
        return x + w.mean(0).expand(len(x), n, D)

    def in_place(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        x = x * 1.0
        if self.how == 0:
            return x.mul_(w[0]).add_(w[1])
        if self.how == 1:
            x[:, 0] = w[2]
            return x
        x[x[..., 1] > 0] = w[3]
        return x

    def functional(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        if self.how == 0:
            return torch.einsum("btd,de->bte", x, torch.sin(w))
        if self.how == 1:
            return F.layer_norm(x, (D,), 1 + w[0], w[1])
        return torch.func.functional_call(self.layer, {"weight": w + w.t()}, (x,))

    def merged(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        return F.linear(x, w / w.norm() + torch.outer(w[0], w[1]))

    def attention(self, x: Tensor) -> Tensor:
        """Heads, and a bias for each pair of places that all samples share."""
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        n = x.shape[1]
        bias = self.layer.weight.repeat(3, 3)[None, None, :n, :n].expand(1, 2, n, n)
        q = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        return q.transpose(1, 2).flatten(2)

    def of_channels(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        if self.how == 0:
            return F.conv1d(x.mT, w[..., None], w[0]).mT
        if self.how == 1:
            return F.group_norm(x.mT, 2, w[0], w[1]).mT
        return F.conv1d(x.mT, w[:, None, :3], None, padding=1, groups=D).mT

    def class_token(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        token = w[None, :1].expand(len(x), -1, -1) if self.how else w[:1].repeat(len(x), 1, 1)
        return torch.cat([token, x], 1).cumsum(1)[:, 1:]

    def one_by_one(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(row, self.layer.weight) for row in x])

    def last_rows(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[:, -1])
        return x + y[:, None]

    def meeting_after(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y - y.mean(0)


WEIGHTS = ("as_tensor", "as_tensor_too")
FUNCTIONAL = (
    *("sliced", "overlapping", "tied_pieces", "shared_index", "rows_of_table", "in_place"),
    *("functional", "merged", "attention", "of_channels", "class_token", "one_by_one"),
)
"""Uses of a bare weight [D, D]."""

MEETING = ("meeting", "neighbours", "meeting_after")
STEPS = (
    *("plain", "plain", "again", "flat", "turned", "turned_flat", "conv", "pooled", "table"),
    *(
        "of_table",
        "picked",
        "picked_by_number",
        "every_other",
        "sorted",
        *WEIGHTS,
        *MEETING,
        *FUNCTIONAL,
        "stretched",
        "tiled",
        "last_rows",
    ),
)
KINDS = (
    lambda: nn.Linear(D, D),
    lambda: nn.Linear(D, D, bias=False),
    lambda: nn.LayerNorm(D),
    lambda: nn.RMSNorm(D),
    lambda: Made(lambda m, x: m.gain * x, gain=torch.randn(D)),
    lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5)),
)


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.B, self.T = rng.randint(2, 5), rng.randint(2, 6)
        self.first = nn.Linear(D, D)
        self.names = [rng.choice(STEPS) for _ in range(rng.randint(1, 5))]
        steps: list[nn.Module] = []
        for name in self.names:
            layer = rng.choice(KINDS)()
            if name == "again":
                name, layer = (
                    "plain",
                    rng.choice(
                        [self.first, *(s.layer for s in steps if s.name not in ("conv", "table"))]
                    ),
                )
            elif name == "conv":
                layer = nn.Conv1d(D, D, 3, padding=1)
            elif name == "table":
                layer = nn.Embedding(8, D)
            elif name in WEIGHTS:
                layer = nn.Linear(D, D, bias=False)
            elif name in FUNCTIONAL:
                layer = nn.Linear(D, D, bias=False)
                bare = [s.layer for s in steps if s.name in (*FUNCTIONAL, *WEIGHTS)]
                if bare and rng.random() < 0.3:
                    layer = rng.choice(bare)
            steps.append(Step(name, layer, rng.randrange(3)))
        self.steps = nn.Sequential(*steps)
        shape = rng.choice([None, (), (D,), (1, D), (1, 1, D), (1, self.T, D)])
        self.gain = None if shape is None else nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        y: Tensor = self.steps(first)
        if self.gain is None:
            return y
        return self.gain * y + torch.tanh(self.gain).to(x.dtype) * first


def losses(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    weights = torch.linspace(0.5, 1.5, y[0].numel(), dtype=y.dtype).view(y[0].shape)
    return (y * weights).square().flatten(1).sum(1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return losses(model, x).sum()


def shares(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The squared norms of the gradients of each sample's share of the loss. Where samples meet in
    a model, a sample alone has another loss.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    norms = {n: torch.zeros(len(x), dtype=torch.float64) for n in named}
    for b, own in enumerate(losses(model, x)):
        grads = torch.autograd.grad(own, named.values(), retain_graph=True, allow_unused=True)
        for name, g in zip(named, grads):
            norms[name][b] = 0.0 if g is None else g.square().sum()
    return norms


def outcome(seed: int) -> tuple[str, float]:
    """What becomes of a model: "right", with its covered fraction, or how it is refused. Raises
    AssertionError for a wrong norm.
    """
    model = RandomModel(seed).eval().double()  # some amplify what float32 rounds
    covered = 0.0
    for k, size in enumerate((model.B, model.B + 1, model.B)):
        x = (1 + 2 * k) * torch.randn(size, model.T, D, dtype=torch.float64)
        try:
            with gnsfast.per_sample_sqnorms(model, size) as norms:
                loss(model, x).backward()
        except gnsfast.ObservationError as error:
            which = "another" if k else "the first"
            return f"{which} batch is refused: {said(error)}", 0.0
        table = gnsfast.coverage(model)
        assert all(row.reason for row in table.rows if not row.static)
        assert set(norms) == {row.parameter for row in table.rows if row.static}
        meets = {*MEETING} & {*model.names}
        loop = shares(model, x) if meets else loop_sqnorms(model, loss, x, size)
        if norms:
            assert_norms(norms, {name: loop[name] for name in norms})
        covered = table.covered_fraction
    kind = "right" if covered == 1.0 else "right, in part" if covered else "nothing covered"
    return kind, covered


def said(error: Exception) -> str:
    """The beginning of an error's reason, without names and numbers."""
    return re.sub(r"\d+", "n", str(error).partition(": ")[2])[:70]


def main(count: int, first: int = 0) -> None:
    found: Counter[str] = Counter()
    covered = 0.0
    for seed in range(first, first + count):
        try:
            what, fraction = outcome(seed)
        except Exception as error:
            what, fraction = "WRONG", 0.0
            print(seed, RandomModel(seed).names, f"{type(error).__name__}: {str(error)[:300]}")
        found[what] += 1
        covered += fraction
    print(
        dict(found.most_common()),
        f"mean covered fraction: {covered / count:.3f}",
    )


if __name__ == "__main__":
    arguments: list[Any] = [int(a) for a in sys.argv[1:]]
    main(*arguments)
