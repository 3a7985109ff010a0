# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.MultiheadAttention`` as it is used: half precision, frozen parts, windows, subclasses,
graphs. ``test_transformer_layers.py`` has its options.
"""

import copy
from typing import Any

import pytest
import torch
from attention import (
    B,
    E,
    H,
    L,
    S,
    assert_as_in_torch,
    assert_terms,
    inputs_for,
    loop_of_terms,
    outputs_of,
    terms,
)
from layers import assert_as_loop, weighted_loss
from made import Made
from oracle import assert_norms, loop_sqnorms
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast


@pytest.mark.parametrize("kind", ["self", "memory", "three"])
def test_half(kind: str) -> None:
    """No worse than twice plain torch's own error at bfloat16, one sample at a time."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).bfloat16()
    x, y, z = (torch.randn(B, 24, 32).bfloat16() for _ in range(3))
    args = {"self": (x, x, x), "memory": (x, y, y), "three": (x, y, z)}[kind]
    kwargs = dict(need_weights=False)
    loop = loop_of_terms(layer, args, kwargs, 0)
    errors = {}
    for b, loss in enumerate(terms(outputs_of(layer, args, kwargs), 0)):
        named = dict(layer.named_parameters())
        for n, g in zip(named, torch.autograd.grad(loss, list(named.values()), retain_graph=True)):
            error = (g.double().square().sum() - loop[n][b]).abs() / loop[n][b]
            errors[n] = max(errors.get(n, 0.0), error.item())
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        terms(outputs_of(layer, args, kwargs), 0).sum().backward()
    assert layer.in_proj_weight.grad is not None
    assert layer.in_proj_weight.grad.dtype == torch.bfloat16
    worst = max(errors.values())
    for n in norms:
        assert ((norms[n].double() - loop[n]).abs() / loop[n]).max().item() <= 2 * worst, n


def test_autocast() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True)
    plain, x = copy.deepcopy(layer), torch.randn(B, L, E)
    with gnsfast.per_sample_sqnorms(layer, B) as norms, torch.autocast("cpu", torch.bfloat16):
        found = outputs_of(layer, (x, x, x), dict(need_weights=False))
        wanted = outputs_of(plain, (x, x, x), dict(need_weights=False))
        assert found[0].dtype == wanted[0].dtype
        assert torch.equal(found[0], wanted[0])
        terms(found, 0).sum().backward()
        terms(wanted, 0).sum().backward()
    loop = loop_of_terms(plain, (x, x, x), dict(need_weights=False), 0)
    for n, p in layer.named_parameters():
        q = dict(plain.named_parameters())[n]
        assert p.grad is not None and q.grad is not None and p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.02 * q.grad.abs().max().item())
        torch.testing.assert_close(norms[n].double(), loop[n], rtol=0.1, atol=1e-3)


FROZEN = {
    "in_proj_weight": ["in_proj_weight"],
    "in_proj_bias": ["in_proj_bias"],
    "all but the output": ["in_proj_weight", "in_proj_bias", "bias_k", "bias_v"],
    "the output": ["out_proj.weight", "out_proj.bias"],
    "bias_k": ["bias_k"],
    "all but bias_k": ["in_proj_weight", "in_proj_bias", "bias_v", "out_proj.weight"],
    "one of three": ["k_proj_weight"],
    "three weights": ["q_proj_weight", "k_proj_weight", "v_proj_weight"],
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen(frozen: str) -> None:
    torch.manual_seed(0)
    three = any("_proj_weight" in n and n != "in_proj_weight" for n in FROZEN[frozen])
    options = dict(kdim=6, vdim=10) if three else {}
    layer = nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, **options)
    for n in FROZEN[frozen]:
        layer.get_parameter(n).requires_grad_(False)
    plain, args = copy.deepcopy(layer), inputs_for("three", layer, True)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        terms(outputs_of(layer, args, {}), 0).sum().backward()
    assert_terms(norms, plain, args, {}, 0)


@pytest.mark.parametrize("excluded", ["self_attn", "self_attn.out_proj"])
def test_excluded(excluded: str) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    plain, x = copy.deepcopy(layer), torch.randn(B, L, E)
    gnsfast.configure(layer, exclude=[excluded])
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        terms([layer(x)], 0).sum().backward()
    assert not [n for n in norms if n.startswith(excluded)]
    loop = loop_of_terms(plain, (x,), {}, 0)
    assert {"self_attn.in_proj_weight"} & norms.keys() or excluded == "self_attn"
    for n in norms:
        torch.testing.assert_close(norms[n].double(), loop[n], rtol=1e-4, atol=1e-9)


class Windows(nn.Module):
    """Rows of attention that are windows of a sample."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, windows, L, E]"""
        rows = x.flatten(0, 1)
        rows = rows if self.attention.batch_first else rows.transpose(0, 1)
        y = self.attention(rows, rows, rows)[0]
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return y.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_windows(batch_first: bool) -> None:
    model, batch = Windows(batch_first), (torch.randn(B, 2, L, E), torch.randn(B, 2, L, E))
    loop = loop_sqnorms(model, weighted_loss, batch, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        weighted_loss(model, batch).backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize("need_weights", [True, False])
def test_no_samples(need_weights: bool) -> None:
    layer, x = gnsfast.MultiheadAttention(E, H, batch_first=True), torch.randn(0, L, E)
    with gnsfast.per_sample_sqnorms(layer, 0) as norms:
        y, weights = layer(x, x, x, need_weights=need_weights)
        y.sum().backward()
    assert y.shape == x.shape and all(len(norm) == 0 for norm in norms.values())
    assert weights is None or weights.shape == (0, L, L)


def test_dropout_behind_it() -> None:
    """The output lies as torch's does, so a dropout behind it draws the same mask."""
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.2, batch_first=True)
    plain, x = copy.deepcopy(layer), torch.randn(B, L, E)
    torch.manual_seed(3)
    want = plain(x)
    torch.manual_seed(3)
    with gnsfast.per_sample_sqnorms(layer, B):
        y = layer(x)
        y.sum().backward()
    torch.testing.assert_close(y, want)


def test_output_tied_to_an_embedding() -> None:
    e, a = nn.Embedding(E, E), nn.MultiheadAttention(E, H, batch_first=True)
    a.out_proj.weight = e.weight
    shares = lambda m, ids: m.a(*[m.e(ids)] * 3, need_weights=False)[0]
    batch = torch.randint(0, E, (B, L)), torch.randn(B, L, E)
    assert_as_loop(Made(shares, e=e, a=a), batch, B)


def test_adapters_of_peft() -> None:
    """They put other weights in. What cannot be followed is left out by name."""
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.MultiheadAttention(E, H, batch_first=True)),
        LoraConfig(target_modules=["0"], r=2),
    ).base_model.model[0]
    x = torch.randn(B, L, E)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        terms([model(x, x, x, need_weights=False)[0]], 0).sum().backward()
    reasons = {r.parameter: r.reason for r in gnsfast.coverage(model).rows if r.route != "frozen"}
    assert all(reason for name, reason in reasons.items() if name not in norms)


class Scaled(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * query, *args, **kwargs)


class Rewritten(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = torch.nn.functional.linear(query, self.in_proj_weight[:E])
        return torch.nn.functional.linear(y, self.out_proj.weight), None


def test_subclasses() -> None:
    """A forward around torch's, and one of its own."""
    x = torch.randn(B, L, E)
    assert_as_in_torch(Scaled(E, H, batch_first=True), (x, x, x), {}, dim=0)
    layer = Rewritten(E, H, bias=False, batch_first=True)
    loop = loop_of_terms(layer, (x,), {}, 0)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        terms(outputs_of(layer, (x,), {}), 0).sum().backward()
    assert_norms(norms, loop)


@pytest.mark.second
@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_whole_graph(how: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, 0.0, batch_first=True)
    plain, args = copy.deepcopy(layer), (torch.randn(B, L, E), torch.randn(B, S, E))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if how == "compiled" else layer
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = run(*args) if how == "compiled" else checkpoint(run, *args, use_reentrant=False)
        terms([y], 0).sum().backward()
    assert_terms(norms, plain, args, {}, 0)
