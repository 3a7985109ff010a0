# SPDX-License-Identifier: Apache-2.0
"""Samples that have unequal numbers of rows, in any order, have the norms that they have alone."""

import copy
from typing import Any

import pytest
import ragged
import torch
from oracle import assert_norms
from ragged import D, GraphNet, Graphs, loop, loss_of
from torch import Tensor, nn

import gnsfast

NODES, EDGES = [4, 2, 6, 3, 5], [5, 3, 9, 2, 7]


def graphs(shuffled: bool = True) -> Graphs:
    return ragged.draw(NODES, EDGES, shuffled)


def norms_of(
    model: nn.Module, batch: Any, loss: Any = loss_of, rows: Any = None, **more: Any
) -> Any:
    rows = batch.rows if rows is None else rows
    with gnsfast.per_sample_sqnorms(model, batch.n, rows=rows, audit="always", **more) as norms:
        loss(model, batch).backward()
    return norms


@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
def test_graphs(shuffled: bool, gradients: str) -> None:
    model, batch = GraphNet(), graphs(shuffled)
    truth, plain = loop(model, batch), copy.deepcopy(model)
    assert_norms(norms_of(model, batch, gradients=gradients), truth)
    loss_of(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_other_batches_of_one_table() -> None:
    """Numbers of graphs, nodes and edges differ from those that the table was learnt from."""
    model = GraphNet()
    batch = graphs()
    table = gnsfast.learn(model, (batch,), rows=batch.rows)
    assert str(table).count("ragged rows") == 10 and not table.left_out
    for nodes, edges in (([3, 9], [8, 5]), ([1, 7, 2, 2, 2, 4, 3], [1, 4, 6, 2, 3, 5, 9])):
        batch = ragged.draw(nodes, edges, True)
        assert_norms(norms_of(model, batch, table=table), loop(model, batch))


def test_graphs_that_mix_are_left_out() -> None:
    model, batch = GraphNet(mixes=True), graphs()
    truth, norms = loop(GraphNet(), batch), norms_of(model, batch)
    before = {name for name in truth if name.startswith(("kinds", "first"))}
    assert truth.keys() - {*norms} == before | {"features.weight", "features.bias"}
    why = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
    assert all("samples meet" in why[name] for name in before)


def test_sorted_rows_are_cu_seqlens() -> None:
    layers = nn.Embedding(5, D), nn.LayerNorm(D), nn.Linear(D, 3)
    model, ids = nn.Sequential(*layers), torch.randint(0, 5, (20,))
    starts = torch.tensor([0, *NODES]).cumsum(0)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(NODES))
    given: list[dict[str, Tensor]] = [{"rows": owner}, {"cu_seqlens": starts}]
    weights, results = torch.randn(20, 3), []
    for ragged_rows in given:
        with gnsfast.per_sample_sqnorms(model, 5, **ragged_rows) as norms:  # type: ignore[arg-type]
            (model(ids) * weights).sum().backward()
        results.append(norms)
    for name, norm in results[0].items():
        torch.testing.assert_close(norm, results[1][name], rtol=1e-6, atol=0.0)


class OfNodes(nn.Module):
    """A prediction for each node, by functions with a kernel and others."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.cell = nn.Embedding(5, D), nn.GRUCell(D, D)
        self.heads, self.table = nn.Parameter(torch.randn(1, 2, 3)), nn.Parameter(torch.randn(5, D))
        self.chosen, self.head = nn.Linear(D, D), nn.Linear(D, 5)
        self.tied = nn.Linear(D, 5, bias=False)
        self.tied.weight = self.kinds.weight

    def forward(self, graphs: Graphs) -> Tensor:
        x, (start, end) = self.kinds(graphs.kinds), graphs.edges
        x = x + (x.view(-1, 2, 3) * self.heads).flatten(1) + self.table[graphs.kinds]
        messages = self.chosen(x[start])  # rows that the data choose from nodes
        x = self.cell(torch.zeros_like(x).index_add(0, end, messages), x)
        out: Tensor = self.head(x) + self.tied(x)
        return out


@pytest.mark.parametrize("maps", ["nodes", "both"])
def test_nodes(maps: str) -> None:
    """Edges that are rows of nodes by an index need no map of their own."""
    model, batch = OfNodes(), graphs()
    rows = batch.owner if maps == "nodes" else batch.rows
    truth, norms = loop(model, batch), norms_of(model, batch, rows=rows)
    assert norms.keys() == truth.keys()
    assert_norms(norms, truth)


def test_a_graph_without_edges_and_one_without_nodes() -> None:
    model, batch = GraphNet(), ragged.draw([4, 0, 3, 2], [5, 0, 0, 6], True)
    norms = norms_of(model, batch)
    assert_norms(norms, loop(model, batch))
    assert norms["kinds.weight"][1] == 0 and norms["head.bias"][1] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    model = GraphNet()
    batch = graphs()
    table = gnsfast.learn(model, (batch,), rows=batch.rows)
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for nodes, edges in ((NODES, EDGES), ([3, 9, 4], [8, 4, 6])):
        batch = ragged.draw(nodes, edges, True)
        with gnsfast.per_sample_sqnorms(model, batch.n, rows=batch.rows, table=table) as norms:
            loss_of(compiled, batch).backward()
        assert_norms(norms, loop(model, batch))
        model.zero_grad()


def test_micro_batches() -> None:
    """Graphs in two micro-batches have the noise scale of the graphs alone."""
    model, results = GraphNet(), []
    for alone in (False, True):
        torch.manual_seed(2)
        gns = gnsfast.GradientNoiseScale(model)
        for _ in range(4):
            with gns.update():
                for _ in range(2):
                    batch = graphs()
                    parts = [batch.one(b) for b in range(batch.n)] if alone else [batch]
                    for part in parts:
                        scale = part.n / (2 * batch.n)
                        with gns.microbatch(part.n, scale=scale, rows=part.rows):
                            (loss_of(model, part) / part.n * scale).backward()
            model.zero_grad()
        results.append(gns.compute())
    together, apart = results
    assert together.samples == apart.samples == 40
    for name in ("noise_scale", "trace", "grad_sqnorm"):
        assert getattr(together, name) == pytest.approx(getattr(apart, name), rel=1e-5)


class Sequences(nn.Module):
    """The last states of sequences of unequal lengths, packed or padded."""

    def __init__(self, cells: nn.Module) -> None:
        super().__init__()
        self.cells, self.head, self.packs = cells, nn.Linear(D, 2), True

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence
        if self.packs:
            states = self.cells(pack(x, lengths, batch_first=True, enforce_sorted=False))[1]
            last = states[0][-1] if isinstance(states, tuple) else states[-1]
        else:
            last = self.cells(x)[0][torch.arange(len(x)), lengths - 1]
        out: Tensor = self.head(last)
        return out


def test_trajectories() -> None:
    """Steps of episodes as one list, and the mean over all steps: tokens has their numbers."""
    model = nn.Sequential(nn.Linear(3, D), nn.Tanh(), nn.Linear(D, 1))
    lengths, results = torch.tensor(NODES), []
    owner = torch.repeat_interleave(torch.arange(5), lengths)
    for packed in (True, False):
        torch.manual_seed(2)
        gns = gnsfast.GradientNoiseScale(model)
        for _ in range(5):
            steps, order = torch.randn(20, 3), torch.randperm(20)
            if packed:
                with gns.update(5, rows=owner[order], tokens=lengths):
                    model(steps[order]).square().mean().backward()
            else:
                with gns.update():
                    for part in steps.split(NODES):
                        own = torch.tensor([len(part)])
                        with gns.microbatch(1, tokens=own, scale=len(part) / 20):
                            (model(part[None]).square().sum() / 20).backward()
            model.zero_grad()
        results.append(gns.compute())
    for name in ("noise_scale", "trace", "grad_sqnorm", "lower", "upper"):
        packed_result, alone = (getattr(result, name) for result in results)
        assert packed_result == pytest.approx(alone, rel=1e-5)


def test_rows_that_are_as_many_by_chance() -> None:
    """They end no run: the update is left out, and counted."""
    model = GraphNet()
    gns = gnsfast.GradientNoiseScale(model)
    for edges in (EDGES, [4, 2, 6, 3, 5], EDGES):
        batch = ragged.draw(NODES, edges, shuffled=True)
        with gns.update(batch.n, rows=batch.rows):
            loss_of(model, batch).backward()
        model.zero_grad()
    result = gns.compute()
    assert (result.updates, result.errors) == (2, 1)


class TestErrors:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (torch.tensor([0, 1, 2, 5, 5]), r"rows holds samples 0 to 5, and num_samples is 3"),
            (torch.tensor([-1, 0, 1, 2]), r"rows holds samples -1 to 2.*batch\.batch"),
            (torch.tensor([0.0, 1.0, 2.0, 2.0]), r"rows must be integers \[N\].*float32"),
            (torch.zeros(4, 2, dtype=torch.int64), r"rows must be integers \[N\].*\[4, 2\]"),
            (torch.zeros(4, dtype=torch.int64, device="meta"), r"rows must be on the CPU"),
            ([0, 1, 2, 2], r"rows must be a tensor \[N\].*not list"),
            ({}, "rows holds no row"),
            (torch.tensor([0, 0, 2]), r"rows has 3 rows, as many as there are samples"),
            (
                {"a": torch.tensor([0, 0, 1, 2]), "b": torch.tensor([0, 1, 1, 2])},
                r"rows\['a'\] and rows\['b'\] have 4 rows both, of other samples",
            ),
        ],
    )
    def test_bad_maps(self, rows: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            gnsfast.per_sample_sqnorms(nn.Linear(2, 1), 3, rows=rows)

    def test_both(self) -> None:
        with pytest.raises(ValueError, match="give one of them"):
            gnsfast.per_sample_sqnorms(
                nn.Linear(2, 1), 2, rows=torch.tensor([0, 1, 1]), cu_seqlens=torch.tensor([0, 1, 3])
            )

    @pytest.mark.parametrize("cells", [nn.LSTM, nn.GRU, nn.RNN])
    def test_a_packed_sequence(self, cells: Any) -> None:
        """It is left out with the line to write, which is measured, and gives the same numbers."""
        model = Sequences(cells(3, D, batch_first=True))
        x, lengths = torch.randn(4, 7, 3), torch.tensor([7, 3, 5, 2])
        outputs = []
        for model.packs in (True, False):
            with gnsfast.per_sample_sqnorms(model, 4) as norms:
                outputs.append(model(x, lengths))
                outputs[-1].square().sum().backward()
            why = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
            assert ("cells.weight_ih_l0" in norms) is not model.packs
            assert ("Give the padded batch" in why["cells.weight_ih_l0"]) is model.packs, why
            gnsfast.configure(model)  # begins anew
        torch.testing.assert_close(*outputs)

    def test_a_loss_is_not_proven(self) -> None:
        batch = graphs()
        with pytest.raises(ValueError, match="leave out loss="):
            gnsfast.learn(GraphNet(), (batch,), rows=batch.rows, loss=loss_of)

    def test_no_rows(self) -> None:
        model, batch = GraphNet(), graphs()
        with (
            pytest.raises(gnsfast.SampleShapeError, match=r"rows=owner\), which is batch.batch"),
            gnsfast.per_sample_sqnorms(model, batch.n),
        ):
            loss_of(model, batch)

    def test_rows_without_a_map(self) -> None:
        model, batch = GraphNet(), graphs()
        norms = norms_of(model, batch, rows=batch.owner)
        why = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
        assert "features.weight" not in norms and "first.update.weight" in norms
        assert "[26, 6]" in why["features.weight"] and "owner_of_these" in why["features.weight"]
