# SPDX-License-Identifier: Apache-2.0
"""The table as a value: it reads well, compares, joins, is saved and loaded, and is executed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import D, linear, right_or_named
from made import Made
from torch import Tensor, nn

import gnsfast


def mixture(m: Any, x: Tensor) -> Tensor:
    """A row goes to the expert that its first number tells, from 0 to 3."""
    rows = x.flatten(0, 1)
    chosen, out = (rows[:, 0].detach() * 4).long(), torch.zeros_like(rows)
    rows = m.first(rows).tanh()
    for k, expert in enumerate(m.experts):
        at = (chosen == k).nonzero()[:, 0]
        out = out.index_add(0, at, expert(rows[at]))
    y: Tensor = out.view_as(x) + rows.view_as(x)
    return y


def experts() -> nn.Module:
    return Made(mixture, first=linear(), experts=nn.ModuleList([linear() for _ in range(4)]))


def some(*chosen: int, B: int = 4, T: int = 6) -> Tensor:
    """Tokens for these experts."""
    x = torch.randn(B, T, D)
    x[..., 0] = (torch.tensor(chosen).repeat(T)[:T] + 0.5) / 4
    return x


def test_it_reads_well() -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(D), linear(), nn.Linear(D, 3))
    gnsfast.configure(model, exclude=["3.bias"])
    table = gnsfast.learn(model, torch.randn(4, 6, D))
    *rows, total, left_out = str(table).splitlines()
    assert rows == [
        "parameter     elements  functions   samples                       proven by",
        "#.weight (3)  152       linear      dimension 0                   3 samples alone",
        "#.bias (2)    16        linear      as in the call of its weight  3 samples alone",
        "1.weight      8         layer_norm  dimension 0                   3 samples alone",
        "1.bias        8         layer_norm  as in the call of its weight  3 samples alone",
    ]
    assert total.startswith(
        "Sequential: 7 of 8 parameters are measured, 98.4% of the elements and "
    )
    assert left_out.startswith("left out: 3.bias (") and left_out.endswith("norms): excluded")


def test_it_compares() -> None:
    model, turned = linear(), Made(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=linear())
    x = torch.randn(4, 6, D)
    assert gnsfast.learn(model, x) == gnsfast.learn(model, x)
    tables = [gnsfast.learn(m, x) for m in (Made(lambda m, x: m.a(x), a=linear()), turned)]
    assert tables[0] != tables[1] and tables[0].batches != tables[1].batches


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    """Another process with the same model executes it."""
    model, x = experts(), some(0, 1, 2)
    table = gnsfast.learn(model, x)
    table.save(tmp_path / "table.json")
    other = experts()
    other.load_state_dict(model.state_dict())
    loaded = gnsfast.Table.load(tmp_path / "table.json")
    assert loaded == table and str(loaded) == str(table)
    assert right_or_named(other, some(3, 1), 4, table=loaded) == {
        name for name, _ in model.named_parameters()
    }


def test_an_expert_that_no_sample_reached_is_as_its_siblings() -> None:
    model = experts()
    table = gnsfast.learn(model, some(0, 2))
    assert table.proofs["experts.3.weight"] == "its sibling experts.0.weight"
    for x in (some(1, 3), some(3, B=5), some(0)):
        assert len(right_or_named(model, x, len(x), table=table)) == 10


def apart(m: Any, x: Tensor) -> Tensor:
    """Layers of one kind with samples in other places: the last one is for negative samples."""
    h = m.layers[0](x)
    h = m.layers[1](h.transpose(0, 1)).transpose(0, 1)
    return m.layers[2](h) if float(x.detach().sum()) < 0 else h


def test_siblings_that_do_not_agree_show_nothing() -> None:
    """It is left out until a batch shows it."""
    model, x = Made(apart, layers=nn.ModuleList([linear() for _ in range(3)])), torch.rand(4, 6, D)
    last = {"layers.2.weight", "layers.2.bias"}
    table = gnsfast.learn(model, x)
    assert table.left_out.keys() == table.unreached == last
    assert table.covered_fraction == table.covered_norm == 1
    assert "no sample of the batch has reached it" in str(table)
    assert len(right_or_named(model, -x, 4, table=table)) == 4
    both = table | gnsfast.learn(model, -x)
    assert not both.left_out and not both.unreached
    for batch in (x, -x, -torch.rand(5, 6, D)):
        assert len(right_or_named(model, batch, len(batch), table=both)) == 6


def test_what_is_wrong_in_one_batch_is_left_out() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(x - x.mean(0) if x.shape[1] > 6 else x)
        return m.b(y.tanh() - (y.mean(0) if x.shape[1] > 6 else 0))  # type: ignore[no-any-return]

    model = Made(run, a=linear(), b=linear())
    right, wrong = (gnsfast.learn(model, torch.randn(4, T, D)) for T in (6, 7))
    assert len(right.proofs) == 4
    for table in (right | wrong, wrong | right):
        assert {"a.weight", "a.bias"} <= table.left_out.keys()
        assert "samples meet" in table.left_out["a.weight"] and not table.unreached


def test_tables_of_two_models() -> None:
    table = gnsfast.learn(linear(), torch.randn(4, D))
    with pytest.raises(ValueError, match="two models, Linear and Sequential"):
        table | gnsfast.learn(nn.Sequential(linear()), torch.randn(4, D))
    with pytest.raises(gnsfast.ObservationError, match="other trained parameters: 0.bias"):
        gnsfast.per_sample_sqnorms(nn.Sequential(linear()), 4, table=table)


def test_what_is_not_proven_is_measured_on_request() -> None:
    model = Made(lambda m, x: m.b(m.a(x).tanh()).square().sum(), a=linear(), b=linear())
    x, loss = torch.randn(4, 6, D), lambda m, x: m.b(m.a(x).tanh()).square().flatten(1).sum(1)
    assert not gnsfast.learn(model, x).proofs
    table = gnsfast.learn(model, x, unproven="measure")
    assert str(table).count("not proven: no result of the model belongs to single samples") == 4
    assert len(right_or_named(model, x, 4, loss, table)) == 4
    assert {row.reason[:10] for row in gnsfast.coverage(model).rows} == {"not proven"}
    with pytest.raises(ValueError, match="'leave_out' or 'measure', not 'always'"):
        gnsfast.learn(model, x, unproven="always")


def test_a_table_is_executed_until_there_is_another_one() -> None:
    """Learning again has no effect but its value, and a new table forgets the one before."""
    model = Made(apart, layers=nn.ModuleList([linear() for _ in range(3)]))
    x = torch.rand(4, 6, D)
    assert len(right_or_named(model, x, 4)) == 4  # learns implicitly
    other = gnsfast.learn(model, -x)
    assert not other.left_out
    assert len(right_or_named(model, -x, 4)) == 4
    assert len(right_or_named(model, -x, 4, table=other)) == 6
    assert len(right_or_named(model, -x, 4)) == 6
