# SPDX-License-Identifier: Apache-2.0
"""Every layer's per-sample norms under Adam's metric against single samples in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adam_cases import EPS, Tied, adam, loop_norms, metric_of
from layers import weighted_loss
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gnsfast
from gnsfast.reference import outer, rows


def measured_norms(gns: gnsfast.GradientNoiseScale) -> dict[str, Tensor]:
    """Parameter name -> [B + 1] that the probes hold."""
    rows = {leaf.name: rows for leaf, rows in gns._start().slab.rows.items()}
    assert all(own[0, -1] >= 1.0 for own in rows.values())
    return {name: own[1, :-1].double() for name, own in rows.items()}


def assert_norms(
    model: nn.Module, x: Tensor, B: int, rtol: float = 1e-5, batch_dim: int = 0
) -> None:
    """Two optimizer steps, then every sample's norms of a third pass."""
    optimizer = adam(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(2):
        y = model(x)
        weighted_loss(model, (x, torch.randn_like(y))).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Second moments of very different size: an error in P must not hide.
    for name, p in model.named_parameters():
        if name in trained:
            optimizer.state[p]["exp_avg_sq"].mul_(torch.logspace(-3, 3, p.numel()).view(p.shape))
    r = torch.randn_like(model(x))
    loop = loop_norms(model, weighted_loss, (x, r), B, metric_of(model, optimizer), batch_dim)
    settings: Any = {"source": "local", "loss_reduction": "sum"}
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer, **settings)
    with gns.microbatch(B):
        weighted_loss(model, (x, r)).backward()
    found = measured_norms(gns)
    assert set(found) == set(loop) == trained
    for name, ours in found.items():
        torch.testing.assert_close(ours, loop[name], rtol=rtol, atol=0, msg=name)
    gns.update()
    assert gns.compute().adam is not None and gns.compute().adam.left_out == ()


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 3), lambda: torch.randn(4, 9, 5)),
    "linear of one token": (lambda: nn.Linear(5, 3), lambda: torch.randn(4, 5)),
    "linear in several tiles": (lambda: nn.Linear(40, 30), lambda: torch.randn(7, 3, 40)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), lambda: torch.randn(4, 2, 5)),
    "embedding": (lambda: nn.Embedding(9, 5, padding_idx=3), lambda: torch.randint(0, 9, (4, 8))),
    "layer norm": (lambda: nn.LayerNorm([3, 5]), lambda: torch.randn(4, 9, 3, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), lambda: torch.randn(4, 9, 5)),
    "Llama's rms norm": (lambda: LlamaRMSNorm(5), lambda: torch.randn(4, 9, 5)),
    "tied": (Tied, lambda: torch.randint(0, 7, (4, 6))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "TILE", 400)  # 40 x 30: tiles of ten rows
    monkeypatch.setattr(outer, "GROUP", 2000)  # five samples together
    layer, x = LAYERS[name]
    model = layer()
    assert_norms(model, x(), len(x()))


def test_norms_of_a_transposed_layer() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert_norms(conv1d(3, 5), torch.randn(4, 9, 5), 4)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_norms_beside_a_frozen_parameter(frozen: str) -> None:
    layer = nn.LayerNorm(5) if frozen == "weight" else nn.Linear(5, 3)
    getattr(layer, frozen).requires_grad_(False)
    assert_norms(layer, torch.randn(4, 9, 5), 4)


def test_norms_of_float64_and_sequence_first() -> None:
    model = nn.Linear(5, 3).double()
    assert_norms(model, torch.randn(9, 4, 5).double(), 4, rtol=1e-6, batch_dim=1)


def test_q_of_long_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is weighed piece by piece, laid out as v or not."""
    monkeypatch.setattr(rows, "WEIGHED", 40)
    g, v, constants = torch.randn(7, 30), torch.rand(30, 7).T, torch.tensor([1.5, EPS])
    want = (g.double().square() / (v.double().sqrt() * 1.5 + EPS)).sum()
    for shape in ((7, 30), (210,), (7, 5, 6)):
        found = rows.metric_sqnorm(g.view(shape), v.reshape(shape), constants)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
