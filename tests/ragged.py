# SPDX-License-Identifier: Apache-2.0
"""Graphs batched as one, a small graph network in plain torch, and its norms in a loop over single
graphs.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

D = 6


class Graphs(NamedTuple):
    """Graphs as one batch, as torch_geometric makes it: ``owner`` is its ``batch``."""

    kinds: Tensor
    edges: Tensor
    features: Tensor
    owner: Tensor
    n: int

    @property
    def rows(self) -> dict[str, Tensor]:
        """What ``rows=`` gets."""
        return {"nodes": self.owner, "edges": self.owner[self.edges[0]]}

    def one(self, b: int) -> "Graphs":
        """Graph b alone."""
        keeps = self.owner == b
        number, keeps_edge = keeps.cumsum(0) - 1, keeps[self.edges[0]]
        edges, features = number[self.edges[:, keeps_edge]], self.features[keeps_edge]
        return Graphs(self.kinds[keeps], edges, features, self.owner[keeps] * 0, 1)

    def double(self) -> "Graphs":
        return self._replace(features=self.features.double())


def draw(nodes: list[int], edges: list[int], shuffled: bool = False) -> Graphs:
    """Random graphs of so many nodes and edges, of which shuffled ones lie in any order."""
    owner = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor(nodes))
    first = torch.tensor(nodes).cumsum(0) - torch.tensor(nodes)
    sizes = zip(nodes, edges, first)
    parts = [torch.randint(0, max(k, 1), (2, m)) + start for k, m, start in sizes]
    both, N, E = torch.cat(parts, 1), sum(nodes), sum(edges)
    if shuffled:
        order = torch.randperm(N)
        owner, both = owner[order], order.argsort()[both][:, torch.randperm(E)]
    return Graphs(torch.randint(0, 5, (N,)), both, torch.randn(E, 3), owner, len(nodes))


class Messages(nn.Module):
    """A message passing layer: messages along the edges are added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * D, D), nn.Linear(D, D, bias=False)
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        start, end = edges
        messages = torch.tanh(self.message(torch.cat([x[start], features], 1))) * self.gain
        return torch.tanh(self.update(x + torch.zeros_like(x).index_add(0, end, messages)))


class GraphNet(nn.Module):
    """A prediction for each graph. If it ``mixes``, a node sees the mean of all graphs."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.kinds, self.features = nn.Embedding(5, D), nn.Linear(3, D)
        self.first, self.second = Messages(), Messages()
        self.norm, self.head, self.mixes = nn.LayerNorm(D), nn.Linear(D, 2), mixes

    def forward(self, graphs: Graphs) -> Tensor:
        x, features = self.kinds(graphs.kinds), self.features(graphs.features)
        x = self.first(x, graphs.edges, features)
        if self.mixes:
            x = x + x.mean(0)
        x = self.norm(self.second(x, graphs.edges, features))
        pooled = x.new_zeros(graphs.n, D).index_add(0, graphs.owner, x)
        out: Tensor = self.head(pooled)
        return out


def loss_of(model: nn.Module, graphs: Any) -> Tensor:
    return model(graphs).square().sum()


def loop(model: nn.Module, graphs: Any, loss: Any = loss_of) -> dict[str, Tensor]:
    """The squared norms of every graph by itself, in float64."""
    wide = copy.deepcopy(model).double()
    norms: dict[str, list[Tensor]] = {name: [] for name, _ in wide.named_parameters()}
    for b in range(graphs.n):
        wide.zero_grad()
        loss(wide, graphs.double().one(b)).backward()
        for name, p in wide.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            norms[name].append(grad.square().sum())
    return {name: torch.stack(each) for name, each in norms.items()}
