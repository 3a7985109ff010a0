# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers, which are replayed sample by sample."""

from typing import Any

import pytest
import torch
from layers import weighted_loss
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, I, H = 3, 5, 4, 6
KINDS = [nn.RNN, nn.LSTM, nn.GRU]


class Classifier(nn.Module):
    """Tokens, a recurrent layer, a head on the last hidden state, or on every row."""

    def __init__(self, kind: Any, last: bool, **options: Any) -> None:
        super().__init__()
        self.tokens, self.rows = nn.Embedding(7, I), kind(I, H, **options)
        self.last, self.dim = last, 0 if self.rows.batch_first else 1
        self.head = nn.LazyLinear(2)

    def forward(self, ids: Tensor) -> Tensor:
        y, state = self.rows(self.tokens(ids))
        h = state[0] if isinstance(state, tuple) else state
        out: Tensor = self.head(h.transpose(0, 1).flatten(1) if self.last else y)
        return out


def batch(model: Classifier, B: int = B) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 7, (B, T) if model.dim == 0 else (T, B))
    return ids, torch.randn(model(ids).shape)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": B, "bias": False}])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_per_sample(kind: Any, batch_first: bool, options: Any, last: bool) -> None:
    """With as many layers as samples the shape of a state does not tell which is which."""
    model = Classifier(kind, last, batch_first=batch_first, **options)
    data = batch(model)
    assert gnsfast.coverage(model).covered_fraction == 1.0
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        weighted_loss(model, data).backward()

    def loss(m: nn.Module, each: Any) -> Tensor:
        ids, r = each
        return weighted_loss(m, (ids, r))

    def one(b: int) -> Any:
        r = data[1].narrow(0 if last else model.dim, b, 1)
        return data[0].narrow(model.dim, b, 1), r

    wide = loop_of(model, loss, [one(b) for b in range(B)])
    assert_norms(norms, wide)


def loop_of(model: nn.Module, loss: Any, samples: list[Any]) -> dict[str, Tensor]:
    """The oracle's loop over samples that are cut already."""
    found = [loop_sqnorms(model, lambda m, _, s=s: loss(m, wide(s)), s[1], 1) for s in samples]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def wide(sample: Any) -> Any:
    ids, r = sample
    return ids, r.double()


def test_gradients_and_outputs_are_torchs() -> None:
    model = Classifier(nn.LSTM, True, batch_first=True, bidirectional=True)
    data = batch(model)
    weighted_loss(model, data).backward()
    want = [p.grad for p in model.rows.parameters()]
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B):
        weighted_loss(model, data).backward()
    for p, grad in zip(model.rows.parameters(), want):  # the head's kernel rounds in its own way
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-7)
    assert all(w is p for w, p in zip(model.rows._flat_weights, model.rows.parameters()))


def test_a_packed_sequence_is_refused() -> None:
    """No tensor of it has samples in a dimension."""
    layer = nn.GRU(I, H)
    rows = nn.utils.rnn.pack_sequence([torch.randn(t, I) for t in (4, 3, 2)])
    with pytest.raises(gnsfast.SampleShapeError, match=r"GRU: .* tensors of shape \[9, 4\]"):
        with gnsfast.per_sample_sqnorms(layer, B):
            layer(rows)[0].data.sum().backward()


def test_dropout_between_its_layers_is_named() -> None:
    """A sample by itself would draw other numbers."""
    model = nn.Sequential(nn.Linear(I, I), nn.LSTM(I, H, num_layers=2, dropout=0.1))
    x = torch.randn(T, B, I)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(x)[0].sum().backward()
    rows = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
    assert set(norms) == {"0.weight", "0.bias"}
    assert "lstm draws random numbers" in rows["1.weight_hh_l0"]


def test_a_recurrent_layer_that_is_called_by_itself() -> None:
    """No batch has shown where its samples are, and nothing is guessed."""
    model, x = nn.ModuleDict({"rows": nn.LSTM(I, H)}), torch.randn(B + 2, B, I)
    with pytest.raises(gnsfast.ObservationError, match=r"for lstm.*run=step"):
        with gnsfast.per_sample_sqnorms(model, B):
            model["rows"](x)[0].sum().backward()
    run = lambda x: model["rows"](x)[0]  # noqa: E731
    table = gnsfast.learn(model, x, run=run, num_samples=B)
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        run(x).square().sum().backward()
    loss = lambda m, x: m["rows"](x)[0].square().sum()  # noqa: E731
    assert_norms(norms, loop_sqnorms(model, loss, x, B, batch_dim=1))
