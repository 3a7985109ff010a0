# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.MultiheadAttention`` as it is used: half precision, frozen parts, windows, subclasses,
graphs. ``test_transformer_layers.py`` has its options.
"""

import copy
import pickle
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
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gnsfast


def test_packed_gradients_are_not_joined() -> None:
    """The gradients of query, key and value go to the weight's as they lie: what plain torch copies
    into one tensor of three times their size.
    """
    seen: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = op(*args, **(kwargs or {}))
            sizes = [t.numel() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
            seen.append((op.overloadpacket.__name__, max(sizes, default=0)))
            return out

    layer, x = gnsfast.MultiheadAttention(E, H, batch_first=True), torch.randn(B, 64, E)
    with gnsfast.per_sample_sqnorms(layer, B):
        loss = layer(x, x, x, need_weights=False)[0].sum()
        with Watch():
            loss.backward()
    copies = ("cat", "stack", "copy_", "clone", "select_backward", "slice_backward")
    assert "in_projection_wgrad" in dict(seen)
    assert not [s for s in seen if s[0] in copies and s[1] >= B * 64 * 3 * E]


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


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_windows(batch_first: bool) -> None:
    """Rows of attention that are windows of a sample: declared, or named in the error."""
    torch.manual_seed(0)
    layer = gnsfast.MultiheadAttention(E, H, batch_first=batch_first)
    x = torch.randn(2 * B, L, E)
    x = x if batch_first else x.transpose(0, 1)
    with pytest.raises(gnsfast.SampleShapeError, match=r"fold=\['MultiheadAttention'\]"):
        with gnsfast.per_sample_sqnorms(layer, B):
            layer(x, x, x)
    plain = copy.deepcopy(layer)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        terms(outputs_of(layer, (x, x, x), {}), 0 if batch_first else 1).sum().backward()
    wide, x = plain.double(), x.double()
    rows = terms(outputs_of(wide, (x, x, x), {}), 0 if batch_first else 1)
    for b, loss in enumerate(rows.view(B, 2).sum(1)):
        grads = torch.autograd.grad(loss, list(wide.parameters()), retain_graph=True)
        for (n, _), g in zip(wide.named_parameters(), grads):
            torch.testing.assert_close(norms[n][b].double(), g.square().sum(), rtol=1e-4, atol=1e-4)


def test_wrong_batch() -> None:
    layer = gnsfast.MultiheadAttention(E, H)
    x = torch.randn(B, L, E)
    with pytest.raises(gnsfast.SampleShapeError, match="batch_first=False says that dimension 1"):
        with gnsfast.per_sample_sqnorms(layer, B):
            layer(x, x, x)
    with pytest.raises(gnsfast.SampleShapeError, match="it has no batch dimension"):
        with gnsfast.per_sample_sqnorms(layer, B):
            layer(x[0], x[0], x[0])


def test_bad_shapes() -> None:
    layer, x = gnsfast.MultiheadAttention(E, H, batch_first=True), torch.randn(B, L, E)
    one, wide = torch.randn(1, 8, E), torch.randn(B, L, E + 1)
    for key, value in ((one, one), (x, x[:, :-1]), (wide, wide)):
        with gnsfast.per_sample_sqnorms(layer, B):
            with pytest.raises(ValueError, match=r"MultiheadAttention: query \[3, 5, 8\], key"):
                layer(x, key, value)
            layer(x, x, x)[0].sum().backward()


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
    """The layer uses its output weight by itself: no link of a head reaches it."""
    model = nn.ModuleDict({"e": nn.Embedding(E, E), "a": nn.MultiheadAttention(E, H)})
    model["a"].out_proj.weight = model["e"].weight
    rows = gnsfast.coverage(model).rows
    (tied,) = [r for r in rows if r.parameter == "e.weight"]
    assert not tied.static and "shared by" in tied.reason


def test_what_is_left_out_says_why() -> None:
    """A pruned output projection, and peft's adapters, which put other weights in."""
    pruned = nn.MultiheadAttention(E, H)
    prune.l1_unstructured(pruned.out_proj, "weight", 0.5)
    adapted = get_peft_model(
        nn.Sequential(nn.MultiheadAttention(E, H)), LoraConfig(target_modules=["0"], r=2)
    )
    for model, word in ((pruned, "does not run the hook"), (adapted, "peft puts other weights")):
        rows = gnsfast.coverage(model).rows
        reasons = {r.reason for r in rows if r.route != "frozen"}
        assert len(reasons) == 1 and word in reasons.pop()


def test_bad_masks() -> None:
    layer, x = gnsfast.MultiheadAttention(E, H, batch_first=True), torch.randn(B, L, E)
    with gnsfast.per_sample_sqnorms(layer, B):
        with pytest.raises(RuntimeError, match=r"attn_mask must have shape \[5, 5\], not \[4, 5\]"):
            layer(x, x, x, attn_mask=torch.zeros(4, 5))
        with pytest.raises(RuntimeError, match=r"key_padding_mask must have shape \[3, 5\]"):
            layer(x, x, x, key_padding_mask=torch.zeros(3, 4))
        with pytest.raises(RuntimeError, match="so it needs one"):
            layer(x, x, x, is_causal=True)
        terms(outputs_of(layer, (x, x, x), {}), 0).sum().backward()


class Scaled(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * query, *args, **kwargs)


class Rewritten(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = torch.nn.functional.linear(query, self.in_proj_weight[:E])
        return torch.nn.functional.linear(y, self.out_proj.weight), None


def test_subclasses() -> None:
    """A forward that calls torch's gets ours below it; one of its own is replayed."""
    x = torch.randn(B, L, E)
    scaled = assert_as_in_torch(Scaled(E, H, batch_first=True), (x, x, x), {}, dim=0)
    assert isinstance(scaled, gnsfast.MultiheadAttention) and isinstance(scaled, Scaled)
    layer = Rewritten(E, H, bias=False, batch_first=True)
    assert isinstance(layer, Replayed)
    assert gnsfast.coverage(layer).covered_fraction == 1.0


def test_copies_and_pickles() -> None:
    layer = gnsfast.MultiheadAttention(E, H)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is gnsfast.MultiheadAttention
        assert isinstance(twin.out_proj, gnsfast.Linear)
    again = layer
    assert type(again) is gnsfast.MultiheadAttention and type(again.out_proj) is type(twin.out_proj)


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


def test_without_gradients_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference takes torch's fast path, also while a block is open."""
    called: list[str] = []
    fast = torch._native_multi_head_attention

    def spy(*args: Any) -> Any:
        called.append("fast")
        return fast(*args)

    monkeypatch.setattr(torch, "_native_multi_head_attention", spy)
    layer, x = gnsfast.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(B, L, E)
    with gnsfast.per_sample_sqnorms(layer, B):
        with torch.no_grad():
            layer(x, x, x)
        assert called == ["fast"]
        layer(x, x, x)[0].sum().backward()
    assert called == ["fast"]


def parts_of(E: int) -> dict[str, list[tuple[str, tuple[slice, ...]]]]:
    """Where each noise scale's parameters lie, written out."""
    parts = {}
    for i, name in enumerate("qkv"):
        rows = slice(i * E, (i + 1) * E)
        parts[name] = [("in_proj_weight", (rows,)), ("in_proj_bias", (rows,))]
    whole = (slice(None),)
    parts["out_proj"] = [("out_proj.bias", whole), ("out_proj.weight", whole)]
    return parts


@pytest.mark.parametrize("source", ["auto", "global", "local"])
def test_noise_scales_of_parts(source: str) -> None:
    """Query, key, value and output apart: tr Σ and |G|² of single samples."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(E, E), nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    )
    model[1].self_attn.in_proj_bias.data.normal_()
    x, r = torch.randn(B, L, E), torch.randn(B, L, E)
    attention = model[1].self_attn
    named = {n: p.shape for n, p in attention.named_parameters()}
    g: dict[str, list[Tensor]] = {n: [] for n in named}
    for b in range(B):
        grads = torch.autograd.grad((model(x)[b] * r[b]).sum(), list(attention.parameters()))
        for n, grad in zip(named, grads):
            g[n].append(grad.double())
    gns = gnsfast.GradientNoiseScale(model, source=source, loss_reduction="sum")
    with gns.microbatch(B):
        (model(x) * r).sum().backward()
    gns.update()
    found = gns.compute().per_module
    parts = parts_of(E)
    assert {f"1.self_attn.{part}" for part in parts} == {p for p in found if "self_attn" in p}
    for part, where in parts.items():
        trace = sum(torch.stack([t[block] for t in g[n]]).var(0).sum() for n, block in where)
        mean = sum(
            torch.stack([t[block] for t in g[n]]).mean(0).square().sum() for n, block in where
        )
        ours = found[f"1.self_attn.{part}"]
        assert ours.trace == pytest.approx(float(trace), rel=1e-4)
        assert ours.grad_sqnorm == pytest.approx(float(mean - trace / B), rel=1e-3, abs=1e-4)


def test_noise_scale() -> None:
    """A Transformer of torch's under the estimator: every parameter has its share."""
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 16, 0.0, batch_first=True)
    assert gnsfast.coverage(model).covered_fraction == 1.0
    gns = gnsfast.GradientNoiseScale(model)
    args = torch.randn(B, L, E), torch.randn(B, S, E)
    with gns.microbatch(B):
        terms([model(*args)], 0).sum().backward()
    gns.update()
    result = gns.compute()
    assert "decoder.layers.0.multihead_attn.k" in result.per_module
    assert sum(m.trace for m in result.per_module.values()) == pytest.approx(result.trace)
