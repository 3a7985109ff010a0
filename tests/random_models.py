# SPDX-License-Identifier: Apache-2.0
"""Small models drawn at random, from layers and from what models do between them.

``python tests/random_models.py 10000`` tries so many and prints what became of them.
"""

import random
import sys
from collections import Counter
from typing import Any

import torch
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


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


WEIGHTS = ("as_tensor", "as_tensor_too")
MEETING = {"meeting", "neighbours"}
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
        "stretched",
        "tiled",
    ),
)
KINDS = (
    lambda: nn.Linear(D, D),
    lambda: nn.Linear(D, D, bias=False),
    lambda: nn.LayerNorm(D),
    lambda: nn.RMSNorm(D),
    Gain,
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


def loss(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    weights = torch.linspace(0.5, 1.5, y[0].numel(), dtype=y.dtype).view(y[0].shape)
    return (y * weights).square().sum()


def outcome(seed: int) -> tuple[str, float]:
    """What becomes of a model: "right", with its covered fraction, or how it is refused. Raises
    AssertionError for a wrong norm.
    """
    model = RandomModel(seed).eval().double()  # some amplify what float32 rounds
    x = torch.randn(model.B, model.T, D, dtype=torch.float64)
    try:
        gnsfast.convert(model, example=x)
    except ValueError as error:
        assert "ties the samples" in str(error), error
        assert MEETING & {*model.names}, f"{model.names}: {error}"
        return "refused by convert", 0.0
    if gnsfast.coverage(model).covered_fraction == 0.0:
        return "nothing covered", 0.0
    try:
        with gnsfast.per_sample_sqnorms(model, model.B) as norms:
            loss(model, x).backward()
    except (gnsfast.ObservationError, ValueError) as error:
        return f"refused in the pass: {type(error).__name__}", 0.0
    loop = loop_sqnorms(model, loss, x, model.B)
    assert_norms(norms, {name: loop[name] for name in norms})
    other = 3 * torch.randn(model.B + 1, model.T, D, dtype=torch.float64)
    try:
        with gnsfast.per_sample_sqnorms(model, len(other)) as norms:
            loss(model, other).backward()
    except (gnsfast.ObservationError, ValueError) as error:
        return f"another batch is refused: {type(error).__name__}", 0.0
    loop = loop_sqnorms(model, loss, other, len(other))
    assert_norms(norms, {name: loop[name] for name in norms})
    return "right", gnsfast.coverage(model).covered_fraction


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
        dict(found), f"mean covered fraction of the right: {covered / max(found['right'], 1):.3f}"
    )


if __name__ == "__main__":
    arguments: list[Any] = [int(a) for a in sys.argv[1:]]
    main(*arguments)
