# SPDX-License-Identifier: Apache-2.0
"""The four kinds of functions that take a parameter: those with a kernel, those of parameters and
constants alone, element-wise ones, and those that are replayed. Each model is judged by the loop of
single samples, on the batch that it has learnt from, on another of the same size, and on one of
another size.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gnsfast

B, T, D = 4, 5, 16


def squares(model: nn.Module, x: Any) -> Tensor:
    y: Tensor = model(x)
    return (
        (y * torch.linspace(0.5, 1.5, y[0].numel(), dtype=y.dtype).view(y[0].shape)).square().sum()
    )


def assert_followed(
    model: nn.Module,
    draw: Callable[[int], Any],
    sizes: tuple[int, ...] = (B, B, B + 1),
) -> None:
    """Each sample's norm is right in batches of all ``sizes``, of which the first is learnt from,
    and gradients are torch's.
    """
    for size in sizes:
        x = draw(size)
        loop = loop_sqnorms(model, squares, x, size)
        model.zero_grad()
        squares(model, x).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        with gnsfast.per_sample_sqnorms(model, size, audit="always") as norms:
            squares(model, x).backward()
        table = gnsfast.coverage(model)
        assert all(r.static for r in table.rows), str(table)
        assert_norms(norms, loop)
        for n, p in model.named_parameters():
            g = grads[n]
            assert (p.grad is None) == (g is None), n
            if g is not None:
                close = dict(rtol=1e-4, atol=1e-5 * g.abs().max().item() + 1e-12)
                torch.testing.assert_close(p.grad, g, **close, msg=lambda m, n=n: f"{n}: {m}")


def tokens(size: int) -> Tensor:
    return torch.randn(size, T, D)


def layer(use: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """A layer, then what ``use`` does with it, then another layer."""
    run = lambda m, x: m.last(m.use(m, torch.tanh(m.first(x))))  # noqa: E731
    return Made(run, first=nn.Linear(D, D), last=nn.Linear(D, 3), use=use, **parts)


def gain() -> dict[str, Any]:
    return {"g": 1 + 0.3 * torch.randn(D)}


def square() -> dict[str, Any]:
    return {"w": 0.3 * torch.randn(D, D)}


def both() -> dict[str, Any]:
    return {**gain(), **square()}


def two_gains() -> dict[str, Any]:
    return {**gain(), "h": torch.randn(D)}


def lora() -> dict[str, Any]:
    return {**square(), "up": 0.3 * torch.randn(D, 2), "down": 0.3 * torch.randn(2, D)}


def qkv() -> dict[str, Any]:
    return {"qkv": nn.Linear(D, 3 * D)}


def of(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"w": 0.3 * torch.randn(shape)}


def inner(make: Callable[..., nn.Module], *sizes: int, **options: Any) -> Callable[[], Any]:
    return lambda: {"inner": make(*sizes, **options)}


def merged_lora(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w + m.up @ m.down)


def split_lora(m: Any, x: Tensor) -> Tensor:
    return x @ m.w + (x @ m.down.t()) @ m.up.t() * 2.0


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (F.linear(x, m.qkv.weight[i : i + D], m.qkv.bias[i : i + D]) for i in (0, D, 2 * D))
    return F.scaled_dot_product_attention(q, k, v)


def by_chunk(m: Any, x: Tensor) -> Tensor:
    w, b = m.qkv.weight.chunk(3), m.qkv.bias.split(D)
    return sum(torch.sin(F.linear(x, *own)) for own in zip(w, b))  # type: ignore[return-value]


def class_token(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.places


def repeated_token(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.token.repeat(len(x), 1, 1), x], 1)


def masked_token(m: Any, x: Tensor) -> Tensor:
    mask = (x[..., :1] > 0.2).detach()
    return torch.where(mask, m.g, x)


def masked_assignment(m: Any, x: Tensor) -> Tensor:
    mask = (x[..., 0] > 0.2).detach()
    x = x.clone()
    x[mask] = m.g.to(x.dtype)
    return x


def in_place(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x *= m.g
    x += m.g
    return x.sub_(m.h).mul_(m.g)


def written_to(m: Any, x: Tensor) -> Tensor:
    """A model that changes its own parameter."""
    with torch.no_grad():
        m.g.mul_(1.0)
    return x * m.g


def experts(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    chosen = (rows @ m.router.weight.t()).argmax(-1)
    out = torch.zeros_like(rows)
    for k, expert in enumerate(m.experts):
        at = (chosen == k).nonzero()[:, 0]
        out = out.index_add(0, at, expert(rows[at]))
    return out.view_as(x) + torch.softmax(m.router(x), -1).sum(-1, keepdim=True)


def loop_of_cells(m: Any, x: Tensor) -> Tensor:
    h = c = k = x.new_zeros(len(x), D)
    for t in range(x.shape[1]):
        h, c = m.cell(x[:, t], (h, c))
        k = m.gru(h, k)
    return torch.stack([k, h], 1)


def sequence_first(name: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: getattr(m, name)(x.transpose(0, 1))[0].transpose(0, 1)


def alternating(m: Any, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).reshape(-1, D)
    rows = m.norm(m.inner(rows) * m.g)
    return rows.view(x.shape[1], len(x), D).transpose(0, 1)


def consecutive(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.inner(x.flatten(0, 1)) * m.g).view_as(x)


def positions_of_all(m: Any, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return x + m.table(at) + m.table.weight[at] + m.places[: x.shape[1]]


def positions_of_each(m: Any, x: Tensor) -> Tensor:
    return x + m.table(torch.arange(x.shape[1]).expand(len(x), -1))


def shared_relative_bias(m: Any, x: Tensor) -> Tensor:
    """As in T5 and Swin: rows of a table at ids that all samples share."""
    n = x.shape[1]
    ids = torch.arange(n)[:, None] - torch.arange(n) + n
    bias = m.table(ids).permute(2, 0, 1)[None]
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    q = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    return q.transpose(1, 2).flatten(2)


def written_table(m: Any, x: Tensor) -> Tensor:
    """As Siglip2's positions: rows are written into a tensor, sample by sample."""
    n = x.shape[1]
    out = torch.empty(len(x), n, D, dtype=m.places.dtype)
    for b in range(len(x)):
        out[b, : n - 1] = m.places[: n - 1]
        out[b, n - 1 :] = m.places[0]
    return x + out


def rows_of_one_sample(m: Any, x: Tensor) -> Tensor:
    """Each sample goes through the layer alone, in a loop."""
    return torch.stack([m.inner(x[b]) for b in range(len(x))])


def mlp() -> dict[str, Any]:
    return {"inner": nn.Linear(D, D), "norm": nn.LayerNorm(D), **gain()}


USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], dict[str, Any]]]] = {
    # functions with a kernel
    "x @ w": (lambda m, x: x @ m.w, square),
    "torch.matmul": (lambda m, x: torch.matmul(x, m.w), square),
    "mm of rows": (lambda m, x: (x.flatten(0, 1).mm(m.w)).view_as(x), square),
    "addmm": (lambda m, x: torch.addmm(m.g, x.reshape(-1, D), m.w).view_as(x), both),
    "w.t()": (lambda m, x: F.linear(x, m.w.t(), m.g), both),
    "rms norm": (lambda m, x: F.rms_norm(x, (D,), m.g), gain),
    "rms norm, 1 + w": (lambda m, x: F.rms_norm(x, (D,), 1 + m.g), gain),
    "layer norm in double": (
        lambda m, x: F.layer_norm(x.double(), (D,), m.g.double()).to(x.dtype),
        gain,
    ),
    "conv": (lambda m, x: F.conv1d(x.mT, m.w, padding=1).mT, of(D, D, 3)),
    "conv of pieces": (
        lambda m, x: F.conv1d(x.mT, m.w[: D // 2], padding=1, groups=2).mT.repeat(1, 1, 2),
        of(D, D // 2, 3),
    ),
    "depthwise conv": (
        lambda m, x: F.conv1d(x.mT, m.w, m.g, padding="same", groups=D).mT,
        lambda: {"w": 0.3 * torch.randn(D, 1, 3), **gain()},
    ),
    "group norm": (lambda m, x: F.group_norm(x.mT, 2, m.g, m.g).mT, gain),
    "bilinear": (lambda m, x: F.bilinear(x, x, m.w), lambda: {"w": 0.1 * torch.randn(D, D, D)}),
    # functions of parameters and constants alone
    "(1 + w) * x": (lambda m, x: (1 + m.g) * x, gain),
    "-exp(a)": (lambda m, x: x * torch.exp(-torch.exp(m.g)), gain),
    "softplus": (lambda m, x: x * F.softplus(m.g) + torch.sigmoid(m.g), gain),
    "gain * number": (lambda m, x: x * (m.g * m.s), lambda: {**gain(), "s": torch.tensor(0.7)}),
    "pieces of q, k, v": (attention, qkv),
    "chunks": (by_chunk, qkv),
    "overlapping pieces": (
        lambda m, x: F.linear(x, m.w[:D]) + torch.sin(F.linear(x, m.w[2 : D + 2])),
        of(D + 4, D),
    ),
    "cat of two": (
        lambda m, x: F.linear(x, torch.cat([m.w[: D // 2], m.v]), m.g),
        lambda: {**square(), "v": 0.3 * torch.randn(D // 2, D), **gain()},
    ),
    "stack of gains": (lambda m, x: x * torch.stack([m.g, m.h]).mean(0), two_gains),
    "shared index": (lambda m, x: x * m.g[torch.arange(D).flip(0)], gain),
    "shared index, twice the same": (lambda m, x: x * m.g[torch.arange(D) // 2], gain),
    "index_select": (lambda m, x: x * m.g.index_select(0, torch.arange(D) // 3), gain),
    "tied pieces": (
        lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w[: D // 2].repeat(2, 1).t()),
        square,
    ),
    "symmetric": (lambda m, x: x @ (m.w.triu() + m.w.triu(1).t()), square),
    "outer product": (lambda m, x: F.linear(x, torch.outer(m.g, m.h)), two_gains),
    "einsum of parameters": (lambda m, x: F.linear(x, torch.einsum("i,ij->ij", m.g, m.w)), both),
    "normalised weight": (lambda m, x: F.linear(x, F.normalize(m.w, dim=-1)), square),
    "dora": (
        lambda m, x: F.linear(x, m.g[:, None] * m.w / m.w.norm(dim=1, keepdim=True).detach()),
        both,
    ),
    "merged lora": (merged_lora, lora),
    "lora": (split_lora, lora),
    "weight norm": (
        lambda m, x: m.inner(x),
        lambda: {"inner": parametrizations.weight_norm(nn.Linear(D, D))},
    ),
    "weight norm of a conv": (
        lambda m, x: m.inner(x.mT).mT,
        lambda: {"inner": parametrizations.weight_norm(nn.Conv1d(D, D, 3, padding=1))},
    ),
    "orthogonal": (
        lambda m, x: m.inner(x),
        lambda: {"inner": parametrizations.orthogonal(nn.Linear(D, D))},
    ),
    # element-wise
    "where": (masked_token, gain),
    "masked assignment": (masked_assignment, gain),
    "in place": (in_place, two_gains),
    "written to": (written_to, gain),
    "lerp": (lambda m, x: torch.lerp(x, x.roll(1, 1), m.g), gain),
    "addcmul": (lambda m, x: torch.addcmul(m.g, x, m.h), two_gains),
    "class token": (
        class_token,
        lambda: {"token": torch.randn(1, 1, D), "places": torch.randn(1, T + 1, D)},
    ),
    "repeated token": (repeated_token, lambda: {"token": torch.randn(1, 2, D)}),
    "gain of channels": (lambda m, x: (x.mT * m.g[:, None]).mT, gain),
    "temperature": (lambda m, x: x / m.s.exp(), lambda: {"s": torch.tensor(0.7)}),
    "prelu": (lambda m, x: m.inner(x.mT).mT, inner(nn.PReLU, D)),
    "prelu of one": (lambda m, x: m.inner(x), inner(nn.PReLU)),
    "power": (lambda m, x: (x.abs() + 0.1) ** m.g, gain),
    # replayed
    "einsum": (lambda m, x: torch.einsum("btd,hde->bthe", x, m.w).flatten(2), of(4, D, D // 4)),
    "einsum, tokens first": (
        lambda m, x: torch.einsum("tbd,de->tbe", x.transpose(0, 1), m.w).transpose(0, 1),
        square,
    ),
    "lstm": (
        lambda m, x: m.inner(x)[0],
        inner(nn.LSTM, D, D // 2, 2, batch_first=True, bidirectional=True),
    ),
    "lstm, tokens first": (sequence_first("inner"), inner(nn.LSTM, D, D)),
    "gru": (lambda m, x: m.inner(x)[0], inner(nn.GRU, D, D, batch_first=True)),
    "cells": (loop_of_cells, lambda: {"cell": nn.LSTMCell(D, D), "gru": nn.GRUCell(D, D)}),
    "baddbmm": (lambda m, x: torch.baddbmm(m.g, x, m.w.expand(len(x), -1, -1)), both),
    "cumulative": (lambda m, x: torch.cumsum(x * m.g, 1), gain),
    "pad and roll": (lambda m, x: F.pad(x * m.g, (0, 0, 1, 0))[:, :-1], gain),
    # where the samples lie
    "alternating rows": (alternating, mlp),
    "consecutive rows": (consecutive, mlp),
    "experts": (
        experts,
        lambda: {
            "router": nn.Linear(D, 3, bias=False),
            "experts": nn.ModuleList([nn.Linear(D, D) for _ in range(3)]),
        },
    ),
    "positions of all": (
        positions_of_all,
        lambda: {"table": nn.Embedding(8, D), "places": torch.randn(8, D)},
    ),
    "positions of each": (positions_of_each, lambda: {"table": nn.Embedding(8, D)}),
    "relative bias": (shared_relative_bias, lambda: {"table": nn.Embedding(2 * T, 4)}),
    "written table": (written_table, lambda: {"places": torch.randn(T, D)}),
    "a loop over samples": (rows_of_one_sample, inner(nn.Linear, D, D)),
    "several calls": (
        lambda m, x: m.inner(torch.tanh(m.inner(x))) + F.linear(x, m.inner.weight.t()),
        inner(nn.Linear, D, D),
    ),
}


@pytest.mark.parametrize("sizes", [(B, B, B + 1), (3, 5, 3)], ids=str)
@pytest.mark.parametrize("name", USES)
def test_uses(name: str, sizes: tuple[int, ...]) -> None:
    use, own = USES[name]
    assert_followed(layer(use, **own()), tokens, sizes)


CHECKPOINTED = (
    *("experts", "a loop over samples", "positions of each", "where", "in place", "lstm"),
    *("several calls", "class token", "masked assignment", "tied pieces", "dora"),
)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_uses_in_checkpoints(name: str, reentrant: bool) -> None:
    """The rows of an expert are known when the checkpoint runs again. Reentrant ones are proven as
    others are.
    """
    use, own = USES[name]
    plain = layer(use, **own())
    model = copy.deepcopy(plain)
    model.use = lambda m, x: checkpoint(lambda t: use(m, t), x, use_reentrant=reentrant)
    for size in (B, B, B + 1):
        x = tokens(size)
        with gnsfast.per_sample_sqnorms(model, size, audit="always") as norms:
            squares(model, x).backward()
        assert not gnsfast.coverage(model).proof
        assert_norms(norms, loop_sqnorms(plain, squares, x, size))


@pytest.mark.second
@pytest.mark.parametrize("name", ["dora", "einsum"])
def test_uses_in_compiled_models(name: str) -> None:
    """What compiled code does not follow runs in eager code between its graphs."""
    use, own = USES[name]
    model = layer(use, **own())
    compiled = torch.compile(model, backend="aot_eager")
    for size in (B, B, B + 1):
        x = tokens(size)
        with gnsfast.per_sample_sqnorms(model, size, audit="always") as norms:
            squares(compiled, x).backward()
        assert_norms(norms, loop_sqnorms(model, squares, x, size))


@pytest.mark.parametrize("name", [name for name in USES if name not in ("bilinear", "lerp")])
def test_uses_under_autocast(name: str) -> None:
    """Backward runs a function again as forward did: in half precision. (Torch's own ``bilinear``
    and ``lerp`` do not take it.)
    """
    use, own = USES[name]
    model, x = layer(use, **own()), tokens(B)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x)
        return (y.float() * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)).square().sum()

    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss(x).backward()
    parameters = dict(model.named_parameters())
    assert set(norms) == set(parameters)
    for b in range(B):
        grads = torch.autograd.grad(
            loss(x[b : b + 1]), list(parameters.values()), materialize_grads=True
        )
        for n, g in zip(parameters, grads):
            want = g.double().square().sum().item()
            assert norms[n][b].item() == pytest.approx(want, rel=0.1, abs=1e-6), (n, b)
