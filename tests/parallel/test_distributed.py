# SPDX-License-Identifier: Apache-2.0
"""Two processes: data, sharded and tensor parallel models have the norms of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers import assert_as_loop
from made import Made
from processes import each, spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gnsfast

pytestmark = pytest.mark.dist
RANKS, B, T, V = 2, 3, 5, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Tied head, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(V, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def draw() -> tuple[Tensor, Tensor]:
    return torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))


def draws_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's two micro-batches; every rank draws all of them."""
    return [[draw() for _ in range(RANKS)][rank] for _ in range(2)]


def mean_gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What data parallelism leaves in ``.grad``: the ranks' mean of their accumulated gradients."""
    sum(loss_of(model, b) for b in batches).backward()
    grads = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        grads[name] = p.grad / RANKS
    return grads


def data_parallel(rank: int) -> None:
    model = Model()
    plain, batches = copy.deepcopy(model), draws_of(rank)
    wrapped = DistributedDataParallel(model)
    for i, batch in enumerate(batches):
        wrapped.require_backward_grad_sync = i == 1
        assert_as_loop(model, batch, B, loss_of, twin=plain, run=wrapped)
    for name, grad in mean_gradients(plain, batches).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad)


def sharded(rank: int) -> None:
    model = Model()
    plain, batches = copy.deepcopy(model), draws_of(rank)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for batch in batches:
        assert_as_loop(model, batch, B, loss_of, twin=plain)
    grads = dict(model.named_parameters())
    for name, grad in mean_gradients(plain, batches).items():
        sharded_grad = grads[name].grad
        assert isinstance(sharded_grad, DTensor)
        torch.testing.assert_close(sharded_grad.full_tensor(), grad)
    assert gnsfast.coverage(model).proof == ""


class Attention(nn.Module):
    """Grouped heads as in Llama, each projection a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class TensorParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, 8, padding_idx=2)
        self.norm, self.attention, self.block = nn.RMSNorm(8), Attention(), Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        out: Tensor = self.block(x + self.attention(self.norm(x)))
        return out


PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"attention.{p}": ColwiseParallel() for p in "qkv"},
    "attention.o": RowwiseParallel(),
    "block.up": ColwiseParallel(),
    "block.down": RowwiseParallel(),
}


def tensor_parallel(rank: int) -> None:
    model, r = TensorParallel(), torch.randn(B, T, 8)
    ids = torch.arange(B * T).view(B, T) % V  # those of both shards, and padding
    plain = copy.deepcopy(model)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (m(batch[0]) * batch[1]).sum()

    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), PLAN)
    assert_as_loop(model, (ids, r), B, loss, twin=plain)
    loss(plain, (ids, r)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")


def tied_by_hand(rank: int) -> None:
    """A weight that is also used as a tensor, below DDP."""
    tied = lambda m, ids: F.linear(torch.tanh(m.tokens(ids)), m.tokens.weight)
    model, batch = Made(tied, tokens=nn.Embedding(V, 8)), draw()
    plain, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    assert_as_loop(model, batch, B, loss_of, twin=plain, run=wrapped)


def unused_on_one_rank(rank: int) -> None:
    """A layer that only the other rank calls gets an average, and is no error."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    gate = Made(lambda m, x: m.layers[rank](x), layers=layers)
    wrapped = DistributedDataParallel(gate, find_unused_parameters=True)
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(wrapped.module, B) as norms:
            wrapped(torch.randn(B, 8)).square().sum().backward()
        assert [bool(n.any()) for n in norms.values()] == [rank == 0] * 2 + [rank == 1] * 2


def test_two_processes() -> None:
    works = data_parallel, sharded, tensor_parallel, tied_by_hand, unused_on_one_rank
    spawn(each, args=(works,))
