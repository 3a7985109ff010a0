# SPDX-License-Identifier: Apache-2.0
"""Embedding bags of mode "sum" and "mean"."""

import copy
from typing import Any

import pytest
import torch
from layers import error_against_loop, plain
from oracle import assert_norms, widened
from torch import Tensor, nn

import gnsfast

V, D, B, L = 7, 5, 4, 6
OFFSETS = torch.tensor([0, 3, 3, 10])  # the second bag is empty
MODES: dict[str, dict[str, Any]] = {
    "sum": dict(mode="sum"),
    "mean": dict(),
    "padding": dict(padding_idx=2),
    "padding, sum": dict(mode="sum", padding_idx=-1),
    "renormed": dict(mode="sum", max_norm=1.0),
}


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def loop(layer: nn.Module, bags: list[Tensor], r: Tensor, weights: Any = None) -> dict[str, Tensor]:
    """The squared norm of each sample, the ``bags`` of which are added one by one in float64."""
    wide, r = widened(layer, r)
    assert isinstance(wide, nn.EmbeddingBag)
    wide.include_last_offset = False
    per_sample, found = len(bags) // B, []
    for b in range(B):
        value = r.new_zeros(())
        for g in range(b * per_sample, (b + 1) * per_sample):
            w = None if weights is None else weights[g].double()
            first = torch.zeros(1, dtype=bags[g].dtype)
            value = value + (wide(bags[g], first, per_sample_weights=w) * r[g]).sum()
        grads = torch.autograd.grad(value, [wide.weight])
        found.append(grads[0].square().sum())
    return {"weight": torch.stack(found)}


def table_of(layer: nn.Module, bags: list[Tensor], weights: Any = None) -> gnsfast.Table:
    """That of a layer which gets bags as one list with offsets."""

    def take(batch: Any, samples: list[int]) -> dict[str, Tensor | None]:
        lengths = torch.tensor([0, *(len(bags[b]) for b in samples)])
        starts = lengths.cumsum(0).to(bags[0].dtype)
        w = None if weights is None else torch.cat([weights[b] for b in samples])
        return {
            "input": torch.cat([bags[b] for b in samples]),
            "offsets": starts if layer.include_last_offset else starts[:-1],
            "per_sample_weights": w,
        }

    return gnsfast.learn(layer, torch.cat(bags), take=take, num_samples=B)


def assert_bag(
    layer: nn.Module, bags: list[Tensor], *args: Any, weights: Any = None, **kwargs: Any
) -> None:
    """Outputs and gradients are torch's; norms are those of the ``bags`` alone."""
    twin, r = plain(layer), torch.randn(len(bags), D)
    want = twin(*args, **kwargs)
    (want * r).sum().backward()
    assert torch.equal(copy.deepcopy(layer)(*args, **kwargs), want)  # closed
    table = table_of(layer, bags, weights) if len(args) > 1 else None
    with gnsfast.per_sample_sqnorms(layer, B, table=table) as norms:
        y = layer(*args, **kwargs)
        (y * r).sum().backward()
    assert torch.equal(y, want)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    assert_norms(norms, loop(twin, bags, r, weights))


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_rows_of_ids(options: dict[str, Any]) -> None:
    x = ids(B, L)
    assert_bag(gnsfast.EmbeddingBag(V, D, **options), list(x), x)


@pytest.mark.parametrize("last", [False, True], ids=["offsets", "and the last one"])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_offsets(options: dict[str, Any], last: bool) -> None:
    x = ids(13)
    bags = list(x.tensor_split(OFFSETS[1:]))
    layer = gnsfast.EmbeddingBag(V, D, include_last_offset=last, **options)
    assert_bag(layer, bags, x, torch.cat([OFFSETS, torch.tensor([13])]) if last else OFFSETS)


def test_narrow_ids() -> None:
    x = ids(13)
    bags = list(x.tensor_split(OFFSETS[1:]))
    assert_bag(gnsfast.EmbeddingBag(V, D), bags, x.int(), OFFSETS.int())


@pytest.mark.parametrize("cut", ["rows", "offsets"])
def test_weights(cut: str) -> None:
    """Their own gradient is torch's."""
    x, weights = ids(B, L), torch.randn(B, L)
    for layer in (gnsfast.EmbeddingBag(V, D, mode="sum", padding_idx=p) for p in (None, 3)):
        flat = cut == "offsets"
        args = (x.flatten(), torch.arange(B) * L) if flat else (x,)
        w = weights.flatten() if flat else weights
        assert_bag(layer, list(x), *args, per_sample_weights=w, weights=weights)
        ours, theirs = (w.clone().requires_grad_() for _ in range(2))
        plain(layer)(*args, per_sample_weights=theirs).square().sum().backward()
        with gnsfast.per_sample_sqnorms(layer, B):
            layer(*args, per_sample_weights=ours).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_few_samples() -> None:
    for n in (0, 1):
        layer = gnsfast.EmbeddingBag(V, D)
        with gnsfast.per_sample_sqnorms(layer, n) as norms:
            layer(ids(n, L)).sum().backward()
        assert norms["weight"].shape == (n,) and layer.weight.grad is not None


def test_bag_of_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean is of no row; the kernel of a small table multiplies all of them."""
    pytest.importorskip("triton")
    x = torch.tensor([[2, 2], [0, 1], [2, 5], [3, 3]])
    for backend in ("reference", "triton"):
        monkeypatch.setenv("GNSFAST_BACKEND", backend)
        layer = gnsfast.EmbeddingBag(V, D, padding_idx=2)
        assert_bag(layer, list(x), x)
        layer = gnsfast.EmbeddingBag(V, D, padding_idx=2)
        assert_bag(layer, list(x), x.flatten(), torch.arange(B) * 2)


def test_padding_counted_from_the_end() -> None:
    w, x = torch.randn(V, D, requires_grad=True), torch.tensor([[V - 1, 1], [0, 0]])
    probe = torch.zeros(1, 2 + 2, requires_grad=True)
    functional = gnsfast.functional.embedding_bag
    functional(x, w, probe, mode="sum", padding_idx=-1).sum().backward()
    assert probe.grad is not None and probe.grad[0, :2].tolist() == [D, 4 * D]


def test_half_precision() -> None:
    layer, x, r = gnsfast.EmbeddingBag(V, D).bfloat16(), ids(B, L), torch.randn(B, D).bfloat16()
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        (layer(x) * r).sum().backward()
    assert error_against_loop(norms, loop(plain(layer), list(x), r)) < 2e-2


def test_autocast() -> None:
    layer, x, r = gnsfast.EmbeddingBag(V, D), ids(B, L), torch.randn(B, D)
    with gnsfast.per_sample_sqnorms(layer, B) as norms, torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == plain(layer)(x).dtype
        (y * r).sum().backward()
    assert_norms(norms, loop(plain(layer), list(x), r))


def test_compiled() -> None:
    layer, x, r = gnsfast.EmbeddingBag(V, D), ids(13), torch.randn(B, D)
    bags = list(x.tensor_split(OFFSETS[1:]))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with gnsfast.per_sample_sqnorms(layer, B, table=table_of(layer, bags)) as norms:
        (run(x, OFFSETS) * r).sum().backward()
    assert_norms(norms, loop(plain(layer), bags, r))


@pytest.mark.parametrize("options", [dict(mode="max"), dict(sparse=True)])
def test_without_a_kernel(options: dict[str, Any]) -> None:
    """Each bag is looked up once more."""
    layer, x, r = nn.EmbeddingBag(V, D, **options), ids(B, L), torch.randn(B, D)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        (layer(x) * r).sum().backward()
    dense = nn.EmbeddingBag(V, D, _weight=layer.weight.detach(), mode=layer.mode)
    assert_norms(norms, loop(dense, list(x), r))
