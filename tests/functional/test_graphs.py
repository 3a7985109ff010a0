# SPDX-License-Identifier: Apache-2.0
"""How many graphs a compiled run has, and that they compute what eager code does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from test_compile import squares
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gnsfast
from gnsfast.estimator.budget import Budget, Pace

pytestmark = pytest.mark.second
T, V, UPDATES = 6, 11, 64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.groups = (
            nn.Embedding(V, 8),
            nn.LayerNorm(8),
            nn.GroupNorm(2, 8),
        )
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, V)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.groups(self.tokens(ids).mT).mT
        out: Tensor = self.head(x + self.down(F.gelu(self.up(self.norm(x)))))
        return out


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """How many the compiler has made. A counting backend counts one twice where the compiler begins
    again, as it does with ``dynamic=True`` for the ``eps`` of a layer norm.
    """
    return int(counters["stats"]["unique_graphs"])


def begun(model: nn.Module, gns: Any, dynamic: bool | None) -> list[tuple[int, int]]:
    """Train with batches of three sizes: the updates that made graphs, and how many these made."""
    run = torch.compile(model, fullgraph=True, dynamic=dynamic)
    optimizer, made = torch.optim.AdamW(model.parameters(), 1e-3), []
    for update in range(UPDATES):
        before, samples = graphs(), 4 + update % 3
        ids, labels = torch.randint(0, V, (2, samples, T))
        with gns.update(samples):
            F.cross_entropy(run(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if graphs() > before:
            made.append((update, graphs() - before))
    return made


@pytest.mark.parametrize("gradients", ["fused", "torch"])
def test_two_graphs(gradients: str) -> None:
    """The first update learns and compiles nothing; the others are plain or measured."""
    gns = gnsfast.GradientNoiseScale(Tied(), every=8, gradients=gradients)
    assert begun(gns.model, gns, dynamic=True) == [(1, 1), (8, 1)]
    assert gns.compute().updates == UPDATES // 8


@pytest.mark.parametrize("gradients", ["fused", "torch"])
def test_two_graphs_with_a_budget(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it measures: the machine becomes busier after a while."""
    gaps: list[int] = []

    def pace(self: Budget) -> Pace:
        gaps.append(self.gap)
        return Pace(1.0, 1.0 if len(gaps) < 6 else 3.0)

    monkeypatch.setattr(Budget, "here", property(pace))
    gns = gnsfast.GradientNoiseScale(Tied(), budget=0.3, gradients=gradients)
    made = begun(gns.model, gns, dynamic=True)
    assert [number for _, number in made] == [1, 1]
    assert {3, 7} <= {*gaps}


def test_a_size_that_changes_without_notice() -> None:
    """Plain torch compiles the first batch size by itself. That makes three, and measured updates
    add one.
    """
    gns = gnsfast.GradientNoiseScale(Tied(), every=8)
    assert begun(gns.model, gns, dynamic=None) == [(1, 1), (2, 1), (8, 1)]


How = Callable[..., Tensor]

TWICE: dict[str, How] = {
    "torch.add of a bias": lambda m, x: torch.add(m.up(x), m.b),
    "torch.mul by a gain": lambda m, x: torch.mul(m.up(x), m.b),
    "torch.sub": lambda m, x: torch.sub(m.up(x), m.b),
    "torch.div": lambda m, x: torch.div(m.up(x), 2 + m.b),
    "two parameters": lambda m, x: F.linear(x, torch.add(m.v, m.w)),
    "their product": lambda m, x: F.linear(x, torch.mul(m.v, m.w)),
    "a scaled weight": lambda m, x: x @ (m.w * 2.0).t(),
    "an operator": lambda m, x: m.up(x) * m.b + m.b,
}
"""What functions of ``__torch_function__`` intercept in the two reports (pytorch 176679, 176686):
the compiler put the function's own code into the graph, whose functions took the same class again.
"""


@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("how", TWICE)
def test_functions_are_taken_once(how: str, gradients: str) -> None:
    """Outputs, gradients and norms of compiled code are those of eager code."""
    torch.manual_seed(0)
    parts = dict(b=torch.rand(8), v=torch.randn(8, 8), w=torch.randn(8, 8))
    model, x = Made(TWICE[how], up=nn.Linear(8, 8), **parts), torch.randn(4, T, 8)
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.requires_grad_(p.grad is not None)
    loop = loop_sqnorms(model, squares, x, 4)
    for backend in ("eager", "aot_eager", "inductor"):
        torch.compiler.reset()
        run = torch.compile(model, backend=backend)
        for _ in range(3):
            model.zero_grad()
            with gnsfast.per_sample_sqnorms(model, 4, gradients=gradients) as norms:
                out = run(x)
                out.square().sum().backward()
            torch.testing.assert_close(out, y)
            for p, grad in zip(model.parameters(), grads):
                torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-5)
            assert_norms(norms, loop)
