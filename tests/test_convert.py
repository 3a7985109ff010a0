# SPDX-License-Identifier: Apache-2.0
"""What ``convert`` keeps, and what it refuses."""

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


def test_identity_of_everything_but_classes() -> None:
    model = Model().eval()
    model.up.register_buffer("extra", torch.ones(2))
    calls: list[str] = []
    model.up.register_forward_hook(lambda m, i, o: calls.append("hook"))
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    keys, ids = list(model.state_dict()), batch()[0]
    want = model(ids)
    assert gnsfast.convert(model) is model
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert all(m is modules[n] for n, m in model.named_modules())
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.tokens.weight
    assert not model.training and not model.up.training
    assert torch.equal(model(ids), want) and calls == ["hook", "hook"]
    for name, m in modules.items():
        assert isinstance(m, Scaled) if name == "up" else True
        assert type(m).__name__ == type(getattr(Model(), name, m)).__name__ or not name


def test_same_constructor_and_state_dict() -> None:
    for ours, theirs, args in (
        (gnsfast.Linear, nn.Linear, (5, 3)),
        (gnsfast.Embedding, nn.Embedding, (5, 3)),
        (gnsfast.LayerNorm, nn.LayerNorm, (5,)),
        (gnsfast.RMSNorm, nn.RMSNorm, (5,)),
        (gnsfast.Conv1d, nn.Conv1d, (5, 3, 2)),
        (gnsfast.Conv2d, nn.Conv2d, (5, 3, 2)),
    ):
        torch.manual_seed(0)
        a = ours(*args)
        torch.manual_seed(0)
        b = theirs(*args)
        assert isinstance(a, theirs) and repr(a) == repr(b)
        assert list(a.state_dict()) == list(b.state_dict())
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
        b.load_state_dict(a.state_dict())
        a.load_state_dict(b.state_dict())


def test_dtype_and_device() -> None:
    model = gnsfast.convert(Model().to(torch.bfloat16).to("meta"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model = model.to_empty(device="cpu").float()
    for p in model.parameters():
        nn.init.normal_(p)
    assert norms_of(model, batch()).total().isfinite().all()


def test_meta_parameters_before_to_empty_are_not_lost() -> None:
    """``to_empty`` breaks ties in plain torch too; whoever ties again converts again."""
    model = gnsfast.convert(Model().to("meta")).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    model.head.weight = model.tokens.weight
    data = batch()
    assert_norms(
        norms_of(gnsfast.convert(model), data), loop_sqnorms(model, weighted_loss, data, 4)
    )


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_copies(how: str) -> None:
    model, data = gnsfast.convert(Model()), batch()
    with pytest.raises(gnsfast.ObservationError):  # copied while a probe is open
        with gnsfast.per_sample_sqnorms(model, 4):
            if how == "pickle":
                other = pickle.loads(pickle.dumps(model))
            elif how == "deepcopy":
                other = copy.deepcopy(model)
            else:
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                other = torch.load(file, weights_only=False)
    assert all(getattr(m, "_probe", None) is None for m in other.modules())
    assert other.head.weight is other.tokens.weight
    assert other.head._tie is other.tokens._tie is not model.head._tie
    assert type(other.up) is type(model.up)
    assert torch.equal(other(data[0]), model(data[0]))
    assert_norms(norms_of(other, data), loop_sqnorms(model, weighted_loss, data, 4))
    assert model.head.weight.grad is None


def test_state_dict_while_open() -> None:
    model = gnsfast.convert(Model())
    keys = list(model.state_dict())
    with pytest.raises(gnsfast.ObservationError):
        with gnsfast.per_sample_sqnorms(model, 4):
            assert list(model.state_dict()) == keys
            assert len(list(model.parameters())) == len(keys) - 1  # the tie


def test_converting_twice_applies_new_options() -> None:
    model, data = gnsfast.convert(Model(), exclude=["up"]), batch()
    assert set(norms_of(model, data)) == {n for n, _ in model.named_parameters() if "up" not in n}
    row = next(r for r in gnsfast.coverage(model).rows if r.parameter == "up.weight")
    assert not row.static and row.reason == "excluded by convert"
    classes = [type(m) for m in model.modules()]
    gnsfast.convert(model)
    assert [type(m) for m in model.modules()] == classes
    assert_norms(norms_of(model, data), loop_sqnorms(model, weighted_loss, data, 4))


def test_excluding_one_of_a_tie_leaves_out_both() -> None:
    model = gnsfast.convert(Model(), exclude=["head"])
    assert "tokens.weight" not in norms_of(model, batch())
    assert gnsfast.coverage(model).rows[0].reason == "excluded by convert"


def test_coverage_reads_well() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3).requires_grad_(False))
    assert gnsfast.coverage(model).rows[0].reason == "not converted: call gnsfast.convert(model)"
    table = gnsfast.coverage(gnsfast.convert(model))
    assert table.covered_fraction == 36 / 48
    assert str(table).splitlines()[1].split() == ["0.weight", "30", "linear", "yes", "-"]
    assert "covered: 75.0% of the trainable elements" in str(table)
    with gnsfast.per_sample_sqnorms(model, 4):
        model(torch.randn(4, 5)).sum().backward()
    assert [r.observed for r in gnsfast.coverage(model).rows] == [
        True,
        True,
        None,
        None,
        None,
        None,
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "batch_dim": (dict(batch_dim=2), "batch_dim is 0 or 1"),
    "no such module": (dict(exclude=["nope"]), "no module's name matches 'nope'"),
    "a string": (dict(fold="up"), "a list of patterns, not the string"),
    "broadcast of a linear": (dict(broadcast=["up"]), "not an embedding"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gnsfast.convert(Model(), **options)


def test_sequence_first_transformer_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with pytest.raises(ValueError, match=r"sequence-first: say convert\(model, batch_dim=1\)"):
        gnsfast.convert(nn.Sequential(layer))
    with pytest.raises(ValueError, match=r"batch-first: say convert\(model, batch_dim=0\)"):
        gnsfast.convert(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), batch_dim=1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers(batch_first: bool) -> None:
    options = dict(dim_feedforward=16, dropout=0.0, batch_first=batch_first)
    layer = nn.TransformerEncoderLayer(8, 2, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    shape, dim = ((4, 9, 8), 0) if batch_first else ((9, 4, 8), 1)
    data = torch.randn(shape), torch.randn(shape)
    loop = loop_sqnorms(model, weighted_loss, data, 4, batch_dim=dim)
    assert_norms(norms_of(gnsfast.convert(model, batch_dim=dim), data), loop)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="DataParallel"):
        gnsfast.convert(nn.DataParallel(Model()))
