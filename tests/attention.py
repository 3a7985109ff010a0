# SPDX-License-Identifier: Apache-2.0
"""Attention layers against their torch twins, and against the gradient of each sample's own term of
the loss in float64.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gnsfast

E, H, B, L, S = 8, 2, 3, 5, 4


def outputs_of(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    torch.manual_seed(1)  # dropout
    out = model(*args, **kwargs)
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]


def terms(outputs: list[Tensor], batch_dim: int | None) -> Tensor:
    """[B]: each sample's share in a loss where every output has a weight of its own. Attention
    weights always lie batch first.
    """
    total = torch.zeros((), dtype=outputs[0].dtype)
    for i, y in enumerate(outputs):
        generator = torch.Generator().manual_seed(2)
        r = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        value = y.nan_to_num() * r
        if batch_dim is None:
            total = total + value.sum()[None]
        else:
            total = total + value.movedim(0 if i else batch_dim, 0).flatten(1).sum(1)
    return total


def assert_as_in_torch(model: nn.Module, args: Any, kwargs: Any, *, dim: int | None) -> nn.Module:
    """Closed: torch's bits. Open: its outputs, the gradients of inputs and parameters, and the
    norms of single terms of the loss in float64. ``dim`` None: one unbatched sample.
    """
    plain = copy.deepcopy(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        for a, b in zip(outputs_of(model, args, kwargs), outputs_of(plain, args, kwargs)):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())

    leaves: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        if id(t) not in leaves:  # query, key and value stay one tensor
            leaves[id(t)] = t.detach().clone().requires_grad_()
        return leaves[id(t)]

    ours = pytree.tree_map(leaf, (args, kwargs))
    wanted = outputs_of(plain, *ours)
    samples = len(terms(wanted, dim))
    inputs = list(leaves.values())
    theirs = torch.autograd.grad(
        terms(wanted, dim).sum(), [*inputs, *plain.parameters()], allow_unused=True
    )
    with gnsfast.per_sample_sqnorms(model, samples) as norms:
        found = outputs_of(model, *ours)
        terms(found, dim).sum().backward()
    for a, b in zip(found, wanted):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, equal_nan=True)
    scale = max(g.abs().max().item() for g in theirs if g is not None)
    for p, g in zip([*inputs, *model.parameters()], theirs):
        assert (p.grad is None) == (g is None)
        if g is not None:
            torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-5 * scale)
    assert_terms(norms, plain, args, kwargs, dim)
    return model


def loop_of_terms(
    plain: nn.Module,
    args: Any,
    kwargs: Any,
    batch_dim: int | None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Parameter name -> [B] squared norms of the gradient of each term of the loss alone."""
    model = copy.deepcopy(plain).to(dtype)
    args, kwargs = pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t,
        (args, kwargs),
    )
    loss_B = terms(outputs_of(model, args, kwargs), batch_dim)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loop = {n: torch.zeros(len(loss_B), dtype=torch.float64) for n in named}
    for b, loss in enumerate(loss_B):
        grads = torch.autograd.grad(
            loss, list(named.values()), allow_unused=True, retain_graph=True
        )
        for n, g in zip(named, grads):
            loop[n][b] = 0.0 if g is None else g.double().square().sum()
    return loop


def assert_terms(
    norms: Any, plain: nn.Module, args: Any, kwargs: Any, batch_dim: int | None
) -> None:
    """Within 1e-5, or twice the error that plain torch has at float32."""
    loop = loop_of_terms(plain, args, kwargs, batch_dim)
    narrow = loop_of_terms(plain, args, kwargs, batch_dim, torch.float32)
    with_gradient = {name for name, norm in loop.items() if norm.any()}
    assert with_gradient <= set(norms) <= set(loop)
    total_B = torch.stack(list(loop.values())).sum(0)
    for name, norm in norms.items():
        own = 2 * (narrow[name] - loop[name]).abs().max()
        error = (norm.double() - loop[name]).abs()
        assert bool((error <= own + 1e-5 * loop[name] + 1e-10 * total_B).all()), (name, error)


def inputs_for(kind: str, layer: nn.MultiheadAttention, batch_first: bool) -> tuple[Tensor, ...]:
    def draw(tokens: int, features: int) -> Tensor:
        return torch.randn(B, tokens, features) if batch_first else torch.randn(tokens, B, features)

    q, k, v = draw(L, E), draw(S, layer.kdim), draw(S, layer.vdim)
    if kind == "self":
        return q, q, q
    if kind == "memory":
        return q, k, k
    if kind == "value is query":
        k = draw(L, layer.kdim)
        return q, k, q
    return q, k, v
