# SPDX-License-Identifier: Apache-2.0
"""Groups of samples where layers share a weight, and in compiled models."""

from typing import Any

import pytest
import torch
from noise_cases import one_update
from test_groups import NAMES, D, Model, V, batches, check, loss_of, measure
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.signatures import OPERATORS, EmbeddingWgrad, LinearWgrad, NormBackward

f = gnsfast.functional
NAMES_OF = {kind: name for name, kind in OPERATORS.items()}


class Tied(Model):
    """GPT-2's pair of embedding and head. ``twice``: a second embedding shares the weight too, as
    in T5; then there may be no head.
    """

    def __init__(self, twice: bool = False, head: bool = True, padding: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D, padding_idx=padding)
        self.again = nn.Embedding(V, D) if twice else None
        for module in (self.again, self.head if head else None):
            if module is not None:
                module.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.again is not None:
            x = x + self.again((ids + 1) % V).sin()
        x = self.before(x)
        out: Tensor = self.head(self.after(x + torch.tanh(self.up(x))))
        return out


class Checkpointed(Tied):
    """All of it is recomputed in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, ids, use_reentrant=False)
        return out


MODELS: dict[str, Any] = {
    "tied": Tied,
    "two embeddings and a head": lambda: Tied(twice=True),
    "two embeddings": lambda: Tied(twice=True, head=False),
    "padding": lambda: Tied(padding=3),
    "checkpointed": Checkpointed,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_shared_weights(name: str) -> None:
    """The sum of a group holds the product of what its embedding and its head give the weight."""
    model, updates = make(name), batches()
    check(measure(model, updates), model, updates)


def measure_compiled(model: nn.Module, updates: list[Any], **options: Any) -> gnsfast.NoiseScale:
    """The estimator holds the model, the loop calls it compiled."""
    compiled, gns = torch.compile(model, **options), gnsfast.GradientNoiseScale(model, groups=NAMES)
    for groups, batch in updates:
        with one_update(gns, len(groups), groups=groups):
            loss_of(compiled, batch).backward()
    return gns.compute()


@pytest.mark.parametrize("backend, tied", [("aot_eager", False), ("inductor", True)])
def test_compiled(backend: str, tied: bool) -> None:
    """Batches of one size are one graph, however their samples divide into groups."""
    torch.manual_seed(1)
    model = Tied() if tied else Model()
    updates = [(groups, batch) for groups, batch in batches() if len(groups) == 5]
    updates += [(["web"] * 5, updates[0][1]), (["code", *["web"] * 4], updates[1][1])]
    counter = CompileCounterWithBackend(backend)
    result = measure_compiled(model, updates, backend=counter, fullgraph=True)
    check(result, model, updates)
    assert counter.frame_count == 1


def test_compiled_with_a_graph_break_and_other_batch_sizes() -> None:
    class Broken(Tied):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.before(self.tokens(ids))
            torch._dynamo.graph_break()
            out: Tensor = self.head(self.after(x + torch.tanh(self.up(x))))
            return out

    torch.manual_seed(1)
    model, updates = Broken(), batches()[:4]
    check(measure_compiled(model, updates, backend="aot_eager"), model, updates)


def calls() -> dict[str, tuple[Any, list[bool], Tensor | None]]:
    """Arguments, what is wanted of them, and the rows that a link asks for."""
    x, y = torch.randn(4, 5, D, dtype=torch.bfloat16), torch.randn(4, 5, 3, dtype=torch.bfloat16)
    ids_BT, at_BS = torch.randint(0, V, (4, 5)), torch.randint(0, 3, (4, 2))
    linear = LinearWgrad(x, y, True, True, False, x.dtype)
    norm = NormBackward(x, x.sin(), None, x[..., :1].abs(), x[0, 0], None, True, False)
    starts, lists = torch.tensor([0, 3, 3, 11, 20]), (x.flatten(0, 1), y.flatten(0, 1))
    listed = EmbeddingWgrad(x.view(1, 20, D), ids_BT.view(1, 20), V, 2, x.dtype, starts)
    return {
        "linear": (linear, [True, True], None),
        "documents": (LinearWgrad(*lists, True, True, False, x.dtype, starts), [True, True], None),
        "embedding of documents": (listed, [True], None),
        "tied": (linear._replace(ids_BS=at_BS), [True, True], at_BS),
        "bias alone": (linear._replace(weight=False), [False, True], None),
        "embedding": (EmbeddingWgrad(x, ids_BT, V, 2, x.dtype), [True], at_BS),
        "norm": (norm, [True, False], None),
    }


@pytest.mark.parametrize("name", calls())
def test_operators(name: str) -> None:
    """What torch demands of an operator, also with a group without samples."""
    groups = f.Groups.of(*(torch.tensor(m, dtype=torch.int64) for m in ([2, 0], [], [3, 1])))
    a, wanted, at_BS = calls()[name]
    operator = getattr(torch.ops.gnsfast, f"{NAMES_OF[type(a)]}_by_group").default
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(operator, (*groups, at_BS, wanted, *a), test_utils=checks)
