# SPDX-License-Identifier: Apache-2.0
"""The head's own cross entropy in models: ties, memory, compilation, transformers, Triton."""

import copy
from typing import Any

import pytest
import torch
from cross_entropy import B, D, T, V, draw, small_parts, torch_loss
from layers import error_against_loop, plain
from oracle import assert_norms, loop_sqnorms, sample_of
from tiny_models import MODELS, scattered
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.functional import _cross_entropy, linear_cross_entropy

__all__ = ["small_parts"]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


class Tied(nn.Module):
    """``uses`` embeddings and a head over one weight; few ids, so that most repeat in a sample."""

    def __init__(
        self, uses: int = 1, around: bool = False, bias: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(V, D, **options) for _ in range(uses))
        self.mix, self.lm_head = nn.Linear(D, D), gnsfast.Linear(D, V, bias=bias)
        self.around = around
        for table in self.tables:
            table.weight = self.lm_head.weight

    def hidden(self, *ids_BT: Tensor) -> Tensor:
        h = sum(table(i).cumsum(1) for table, i in zip(self.tables, ids_BT))
        out: Tensor = torch.tanh(self.mix(h))
        return out

    def forward(self, *batch: Tensor) -> Tensor:
        return self.lm_head(self.hidden(*batch))

    def loss(self, *batch: Tensor, reduction: str = "sum") -> Tensor:
        if self.around:
            return checkpoint(self.from_hidden, *batch, reduction=reduction, use_reentrant=False)
        return self.from_hidden(*batch, reduction=reduction)

    def from_hidden(self, *batch: Tensor, reduction: str) -> Tensor:
        return self.lm_head.cross_entropy(
            self.hidden(*batch[:-1]), batch[-1], reduction=reduction, **OWN
        )


OWN: dict[str, Any] = dict(softcap=2.0, z_loss=0.1)


def tied_loss(model: Tied, batch: tuple[Tensor, ...]) -> Tensor:
    """The same with torch's means."""
    return torch_loss(lambda ids: model(*ids), (batch[:-1], batch[-1]), reduction="sum", **OWN)


def learned(model: Tied, batch: tuple[Tensor, ...]) -> gnsfast.Table:
    """The table by a loss for each token: the model itself is not called."""
    return gnsfast.learn(model, batch, run=lambda b: model.loss(*b, reduction="none"))


def tied_batch(uses: int = 1) -> tuple[Tensor, ...]:
    """Ids from the first and the last part; labels among them, so that the two uses meet."""
    few = torch.tensor([0, 3, 5, 129, 298, 299])
    return tuple(few[torch.randint(0, 6, (B, T))] for _ in range(uses + 1))


TIES = {
    "embedding and head": Tied(),
    "padding": Tied(padding_idx=3),
    "a bias": Tied(bias=True),
    "three-way": Tied(uses=2),
    "checkpointed": Tied(around=True),
}


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("model", TIES.values(), ids=TIES.keys())
def test_ties_are_exact(model: Tied, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if together:
        monkeypatch.setattr(_cross_entropy, "CHUNK", 2 * T * T)  # two samples, then one
    model.zero_grad()
    batch = tied_batch(len(model.tables))
    table = learned(model, batch)
    with gnsfast.per_sample_sqnorms(model, B, audit="always", table=table) as norms:
        model.loss(*batch).backward()
    assert_norms(norms, loop_sqnorms(model, tied_loss, batch, B))


def test_tie_at_half_precision() -> None:
    model, batch = Tied(), tied_batch()
    loop = loop_sqnorms(model, tied_loss, batch, B)
    torch_error = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        for b in range(B):
            value = tied_loss(model, sample_of(batch, b))
            for (n, _), g in zip(
                model.named_parameters(), torch.autograd.grad(value, model.parameters())
            ):
                error = (g.double().square().sum() - loop[n][b]).abs() / loop[n][b]
                torch_error = max(torch_error, error.item())
        with gnsfast.per_sample_sqnorms(model, B, table=learned(model, batch)) as norms:
            model.loss(*batch).backward()
    assert error_against_loop(norms, loop) <= 2 * torch_error


def test_no_tensor_holds_all_logits() -> None:
    """2 x 40 tokens, 3000 words: no tensor is larger than the weight, a twentieth of the logits."""
    model = nn.Sequential(nn.Embedding(3000, 4), gnsfast.Linear(4, 3000, bias=False))
    model[1].weight = model[0].weight
    ids = torch.randint(0, 3000, (2, 40))
    each = lambda b: model[1].cross_entropy(model[0](b), b, shift=True, reduction="none")
    table = gnsfast.learn(model, ids, run=each)
    with gnsfast.per_sample_sqnorms(model, 2, table=table), Largest() as largest:
        model[1].cross_entropy(model[0](ids), ids, shift=True).backward()
    with Largest() as closed:
        model[1].cross_entropy(model[0](ids), ids, label_smoothing=0.1).backward()
    assert largest.elements <= 3000 * 4 and closed.elements <= 3000 * 4
    with Largest() as whole:
        model[1](model[0](ids))
    assert whole.elements == 2 * 40 * 3000


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cross_entropy, "LEAST", 200)  # two parts are enough to trace
    model, batch = Tied(), tied_batch()
    with gnsfast.per_sample_sqnorms(model, B, table=learned(model, batch)) as norms:
        torch.compile(model.loss, backend="aot_eager", fullgraph=True)(*batch).backward()
    assert_norms(norms, loop_sqnorms(model, tied_loss, batch, B))


def test_wrong_labels_of_a_compiled_loss_are_nan() -> None:
    """As on a GPU, where nobody waits for a look at the labels."""
    head, (x, labels) = gnsfast.Linear(D, V), draw(B, T)
    labels[0, 0] = V
    compiled = torch.compile(head.cross_entropy, backend="eager", fullgraph=True)
    loss = compiled(x, labels)
    loss.backward()
    assert loss.isnan() and head.weight.grad.isnan().any()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers(name: str) -> None:
    """The loss of transformers, out of the head's own cross entropy; Qwen3's head is tied."""
    model, batch = MODELS[name]()
    scattered(model)
    want = copy.deepcopy(model)(**batch, use_cache=False).loss

    def of_model(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return m(**b, use_cache=False).loss

    def of_head(m: nn.Module, b: dict[str, Tensor], **options: Any) -> Tensor:
        hidden = m.model(b["input_ids"], use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden, m.lm_head.weight, b["labels"], shift=True, **options)

    loop = loop_sqnorms(model, of_model, batch, 3)
    torch.testing.assert_close(of_head(model, batch), want)
    table = gnsfast.learn(model, batch, run=lambda b: of_head(model, b, reduction="none"))
    with gnsfast.per_sample_sqnorms(model, 3, audit="always", table=table) as norms:
        of_head(model, batch).backward()
    assert_norms(norms, {n: norm / 9 for n, norm in loop.items()})
    assert gnsfast.verify(model, of_head, batch, table=table).ok


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_triton(tied: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is there on Linux alone")
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")
    if tied:
        model, batch = Tied().to(device), tied_batch()
        loop = loop_sqnorms(copy.deepcopy(model).cpu(), tied_loss, batch, B)
        batch = tuple(t.to(device) for t in batch)
        with gnsfast.per_sample_sqnorms(model, B, table=learned(model, batch)) as norms:
            model.loss(*batch).backward()
    else:
        model, batch = gnsfast.Linear(D, V).to(device), draw(B, T)
        summed = lambda m, b: torch_loss(m, b, reduction="sum")
        loop = loop_sqnorms(plain(model).cpu(), summed, batch, B)
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            loss = model.cross_entropy(*(t.to(device) for t in batch), reduction="sum")
            loss.backward()
    assert_norms(norms, loop)
