# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch_geometric: the recipe, and the layers of the library against a float64 loop."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as layers
from clients.recipes import Recipe, against, compare
from oracle import assert_norms
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import gnsfast

RECIPE = Recipe("torch-geometric")
I, D, EDGE, SIZES = 5, 8, 3, (4, 7, 3, 6, 5)


def test_recipe() -> None:
    row = compare(RECIPE, "torch_geometric")
    ran = RECIPE.run(LEARNING_RATE=0.0, STEPS=20)
    names: dict[str, Any] = ran.names

    def loss(model: nn.Module, graph: Data) -> Tensor:
        batch: Any = Batch.from_data_list([graph])
        return nn.functional.cross_entropy(model(batch), batch.y)

    truth = gnsfast.brute_force_noise_scale(names["model"], loss, names["graphs"])
    against(row, names["noise_scale"], truth.noise_scale)
    assert all(r.observed for r in gnsfast.coverage(names["model"]).rows)


def mlp(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, D), nn.ReLU(), nn.Linear(D, D))


def pna(features: int) -> nn.Module:
    options: Any = {"deg": torch.tensor([1, 2, 4, 5, 3])}
    return layers.PNAConv(features, D, ["mean", "max"], ["identity", "amplification"], **options)


PLAIN: dict[str, Callable[[int], nn.Module]] = {
    "GCN": lambda i: layers.GCNConv(i, D),
    "SAGE": lambda i: layers.SAGEConv(i, D),
    "GAT": lambda i: layers.GATConv(i, D),
    "GIN": lambda i: layers.GINConv(mlp(i), train_eps=True),
    "Cheb": lambda i: layers.ChebConv(i, D, 3),
    "GraphConv": lambda i: layers.GraphConv(i, D),
    "PNA": pna,
}
WITH_EDGES: dict[str, Callable[[int], nn.Module]] = {
    "GINE": lambda i: layers.GINEConv(mlp(i), edge_dim=EDGE),
    "Transformer": lambda i: layers.TransformerConv(i, D, edge_dim=EDGE),
    "NN": lambda i: layers.NNConv(i, D, nn.Linear(EDGE, i * D)),
    "GATv2": lambda i: layers.GATv2Conv(i, D, edge_dim=EDGE),
}


class Net(nn.Module):
    def __init__(
        self, conv: Callable[[int], nn.Module], takes_edges: bool, norm: nn.Module
    ) -> None:
        super().__init__()
        self.first, self.second, self.norm = conv(I), conv(D), norm
        self.head, self.takes_edges = nn.Linear(D, 2), takes_edges

    def forward(self, batch: Any) -> Tensor:
        more = {"edge_attr": batch.edge_attr} if self.takes_edges else {}
        x = self.norm(self.first(batch.x, batch.edge_index, **more).relu(), batch.batch)
        x = self.second(x, batch.edge_index, **more).relu()
        out: Tensor = self.head(layers.global_mean_pool(x, batch.batch, batch.num_graphs))
        return out


def graph(n: int) -> Data:
    ends = torch.randint(0, n, (2, 3 * n))
    wide = {"dtype": torch.float64}
    features = {"x": torch.randn(n, I, **wide), "edge_attr": torch.randn(3 * n, EDGE, **wide)}
    return Data(edge_index=ends, y=torch.randint(0, 2, (1,)), **features)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch.y, reduction="sum")


def loop(model: nn.Module, graphs: list[Data]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    norms: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for each in graphs:
        model.zero_grad()
        loss_of(model, Batch.from_data_list([each])).backward()
        for name, p in model.named_parameters():
            norms[name].append((torch.zeros_like(p) if p.grad is None else p.grad).square().sum())
    return {name: torch.stack(each) for name, each in norms.items()}


@pytest.mark.parametrize("norm", [layers.GraphNorm, layers.LayerNorm])
@pytest.mark.parametrize("name", [*PLAIN, *WITH_EDGES])
def test_layers(name: str, norm: Any) -> None:
    torch.manual_seed(0)
    model = Net((PLAIN | WITH_EDGES)[name], name in WITH_EDGES, norm(D)).double()
    graphs = [graph(n) for n in SIZES]
    batch: Any = Batch.from_data_list(graphs)
    start, end = batch.edge_index
    rows = [batch.batch, batch.batch[start]]
    if name == "GATv2":  # it puts a loop at each node
        rows.append(torch.cat([batch.batch[start[start != end]], batch.batch]))
    with gnsfast.per_sample_sqnorms(model, len(SIZES), rows=rows) as norms:
        loss_of(model, batch).backward()
    truth = loop(model, graphs)
    assert norms.keys() == truth.keys()
    assert_norms(norms, truth)


def test_batch_norm_is_refused() -> None:
    model = Net(PLAIN["GCN"], False, layers.BatchNorm(D))
    with pytest.raises(gnsfast.ObservationError, match="statistics"):
        gnsfast.per_sample_sqnorms(model, 2, rows=torch.tensor([0, 0, 1])).__enter__()
