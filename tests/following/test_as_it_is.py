# SPDX-License-Identifier: Apache-2.0
"""A model is measured as it is: what a block keeps, copies of models, options, and the table."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from layers import weighted_loss
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


class Model(nn.Module):
    """One of each: torch's layers, a subclass, a bare parameter, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.gain = nn.Embedding(7, 5), nn.LayerNorm(5), Gain()
        self.up, self.rms, self.head = Scaled(5, 5), nn.RMSNorm(5), nn.Linear(5, 7, bias=False)
        self.conv = nn.Conv1d(9, 9, 3, padding=1)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.gain(self.norm(self.tokens(ids_BT)))
        return self.head(self.rms(self.conv(torch.tanh(self.up(x)))))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 7, (4, 9)), torch.randn(4, 9, 7)


def norms_of(model: nn.Module, data: Any) -> Any:
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        weighted_loss(model, data).backward()
    return norms


def kinds(model: nn.Module) -> set[type]:
    return {type(p) for p in model.parameters()}


def test_a_block_leaves_everything_as_it_was() -> None:
    model, data = Model(), batch()
    calls: list[str] = []
    model.up.register_forward_hook(lambda m, i, o: calls.append("hook"))
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    kept = [dict(vars(m)) for m in model.modules()]
    keys, want = list(model.state_dict()), model(data[0])
    for _ in range(2):
        assert_norms(norms_of(model, data), loop_sqnorms(model, weighted_loss, data, 4))
    assert all(p is parameters[n] and type(p) is nn.Parameter for n, p in model.named_parameters())
    assert not any(vars(p) for p in model.parameters())
    assert all(m is modules[n] for n, m in model.named_modules())
    assert [vars(m).keys() for m in model.modules()] == [own.keys() for own in kept]
    assert list(model.state_dict()) == keys and model.head.weight is model.tokens.weight
    assert torch.equal(model(data[0]), want)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy", "state_dict"])
def test_copies_in_a_block(how: str) -> None:
    model, data = Model(), batch()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        weighted_loss(model, data).backward()
        if how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "state_dict":
            other = Model()
            state = model.state_dict()
            assert {type(t) for t in state.values()} == {Tensor}
            other.load_state_dict(state)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert kinds(model) != {nn.Parameter}
    assert kinds(other) == kinds(model) == {nn.Parameter}
    assert other.head.weight is other.tokens.weight is not model.head.weight
    assert torch.equal(other(data[0]), model(data[0]))
    other.zero_grad()
    loop = loop_sqnorms(model, weighted_loss, data, 4)
    assert_norms(norms, loop)
    assert_norms(norms_of(other, data), loop)


def test_an_optimizer_steps_in_a_block() -> None:
    model, data = Model(), batch()
    loop = loop_sqnorms(model, weighted_loss, data, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        weighted_loss(model, data).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        repr(model)
        repr(model.head.weight)
        hash(model.head.weight)
    assert_norms(norms, loop)


def test_after_an_error_in_a_block() -> None:
    model, data = Model(), batch()
    with pytest.raises(KeyError), gnsfast.per_sample_sqnorms(model, 4):
        model(data[0])
        raise KeyError
    assert kinds(model) == {nn.Parameter}
    assert_norms(norms_of(model, data), loop_sqnorms(model, weighted_loss, data, 4))


def test_a_pass_without_gradients_in_a_block() -> None:
    model, data = Model(), batch()
    with gnsfast.per_sample_sqnorms(model, 4) as norms:
        with torch.no_grad():
            model(data[0][:2])
        weighted_loss(model, data).backward()
    assert_norms(norms, loop_sqnorms(model, weighted_loss, data, 4))


def test_options_replace_those_before() -> None:
    model, data = gnsfast.configure(Model(), exclude=["up"]), batch()
    assert set(norms_of(model, data)) == {n for n, _ in model.named_parameters() if "up" not in n}
    row = next(r for r in gnsfast.coverage(model).rows if r.parameter == "up.weight")
    assert not row.static and row.reason == "excluded"
    gnsfast.configure(model)
    assert_norms(norms_of(model, data), loop_sqnorms(model, weighted_loss, data, 4))


@pytest.mark.parametrize("pattern", ["head", "tokens", "head.weight", "tokens.*"])
def test_excluding_one_of_a_tie_leaves_out_both(pattern: str) -> None:
    model = gnsfast.configure(Model(), exclude=[pattern])
    assert "tokens.weight" not in norms_of(model, batch())
    assert gnsfast.coverage(model).rows[0].reason == "excluded"


def test_exclude_takes_all_that_is_below() -> None:
    """'10' is not inside of '1'."""
    model = nn.ModuleDict({n: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for n in ("1", "10")})
    rows = gnsfast.coverage(gnsfast.configure(model, exclude=["1"])).rows
    assert [r.static for r in rows] == [False] * 4 + [True] * 4
    rows = gnsfast.coverage(gnsfast.configure(model, exclude=["*.bias"])).rows
    assert [r.static for r in rows] == [True, False] * 4


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="'nope' matches no parameter"):
        gnsfast.configure(Model(), exclude=["nope"])
    with pytest.raises(ValueError, match=r"a list of patterns: exclude=\['up'\]"):
        gnsfast.configure(Model(), exclude="up")


def test_the_table_reads_well() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3).requires_grad_(False))
    gnsfast.configure(model, exclude=["1"])
    assert "not proven: no batch has gone through the model" in str(gnsfast.coverage(model))
    with gnsfast.per_sample_sqnorms(model, 4):
        model(torch.randn(4, 5)).sum().backward()
    table = gnsfast.coverage(model)
    assert table.covered_fraction == 36 / 48
    assert str(table).splitlines()[1].split() == ["0.weight", "30", "linear", "yes", "yes"]
    assert "covered: 75.0% of the trainable elements" in str(table)
    assert "proven for the model, not for the loss: " in str(table)
    assert [r.observed for r in table.rows] == [True, True, None, None, None, None]


def test_the_meta_device() -> None:
    """A model that is built without memory, whose parameters ``to_empty`` makes."""
    model = Model().to("meta")
    assert len(gnsfast.coverage(model).rows) == len([*model.parameters()])
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    model.head.weight = model.tokens.weight
    data = batch()
    assert_norms(norms_of(model, data), loop_sqnorms(model, weighted_loss, data, 4))


@pytest.mark.parametrize("kind", ["llama", "t5", "olmo", "gemma"])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_norms_of_transformers_give_the_same_bits(
    kind: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    cls = {"llama": LlamaRMSNorm, "t5": T5LayerNorm, "olmo": Olmo2RMSNorm, "gemma": GemmaRMSNorm}
    norm = cls[kind](16)
    nn.init.normal_(norm.weight)
    norm, x = norm.to(w_dtype), torch.randn(3, 4, 16, dtype=x_dtype)
    closed = norm(x)
    with gnsfast.per_sample_sqnorms(norm, 3) as norms:
        y = norm(x)
        y.float().sum().backward()
    assert y.dtype == closed.dtype and torch.equal(y, closed)
    for b in range(3):
        (one,) = torch.autograd.grad(norm(x[b : b + 1]).float().sum(), norm.weight)
        bar = 5e-2 if torch.bfloat16 in (x_dtype, w_dtype) else 1e-5
        assert norms["weight"][b].item() == pytest.approx(
            one.double().square().sum().item(), rel=bar
        )
