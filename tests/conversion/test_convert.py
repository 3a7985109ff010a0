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
        (gnsfast.EmbeddingBag, nn.EmbeddingBag, (5, 3)),
        (gnsfast.Bilinear, nn.Bilinear, (5, 3, 2)),
        (gnsfast.LayerNorm, nn.LayerNorm, (5,)),
        (gnsfast.RMSNorm, nn.RMSNorm, (5,)),
        (gnsfast.Conv1d, nn.Conv1d, (5, 3, 2)),
        (gnsfast.Conv2d, nn.Conv2d, (5, 3, 2)),
        (gnsfast.Conv3d, nn.Conv3d, (5, 3, 2)),
        (gnsfast.ConvTranspose1d, nn.ConvTranspose1d, (5, 3, 2)),
        (gnsfast.ConvTranspose2d, nn.ConvTranspose2d, (5, 3, 2)),
        (gnsfast.ConvTranspose3d, nn.ConvTranspose3d, (5, 3, 2)),
        (gnsfast.GroupNorm, nn.GroupNorm, (2, 6)),
        (gnsfast.InstanceNorm1d, nn.InstanceNorm1d, (6, 1e-3, 0.1, True, True)),
        (gnsfast.InstanceNorm2d, nn.InstanceNorm2d, (6, 1e-3, 0.1, True)),
        (gnsfast.InstanceNorm3d, nn.InstanceNorm3d, (6, 1e-3, 0.1, True)),
        (gnsfast.BatchNorm1d, nn.BatchNorm1d, (6,)),
        (gnsfast.BatchNorm2d, nn.BatchNorm2d, (6,)),
        (gnsfast.BatchNorm3d, nn.BatchNorm3d, (6,)),
        (gnsfast.SyncBatchNorm, nn.SyncBatchNorm, (6,)),
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
    assert all(not getattr(m, "is_open", False) for m in other.modules())
    assert other.head.weight is other.tokens.weight
    assert other.head.gnsfast.tie is other.tokens.gnsfast.tie is not model.head.gnsfast.tie
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
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3).requires_grad_(False))
    assert gnsfast.coverage(model).rows[0].reason == "not converted: call gnsfast.convert(model)"
    table = gnsfast.coverage(gnsfast.convert(model, exclude=["1"]))
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
    "batch_dim": (dict(batch_dim=2), "batch_dim must be 0 or 1"),
    "no such module": (
        dict(exclude=["nope"]),
        "no module or parameter has a name that matches 'nope'",
    ),
    "a string": (dict(fold="up"), r"a list of patterns, not a string: write fold=\['up'\]"),
    "broadcast of a linear": (dict(broadcast=["up"]), "not an embedding"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gnsfast.convert(Model(), **options)


def test_sequence_first_transformer_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with pytest.raises(ValueError, match=r"sequence-first: call convert\(model, batch_dim=1\)"):
        gnsfast.convert(nn.Sequential(layer))
    with pytest.raises(ValueError, match=r"batch-first: call convert\(model, batch_dim=0\)"):
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


def test_exclude_and_fold_on_a_container() -> None:
    """Exclude takes all that is below; a pattern that reaches no parameter is an error."""
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Linear(5, 5))
    rows = gnsfast.coverage(gnsfast.convert(model, exclude=["0"])).rows
    assert [r.static for r in rows] == [False] * 4 + [True] * 2
    with pytest.raises(
        ValueError, match="fold: the modules that match '0' have no parameters of their own"
    ):
        gnsfast.convert(model, fold=["0"])
    with pytest.raises(
        ValueError, match=r"exclude: the modules that match '0\.0' have no parameters"
    ):
        gnsfast.convert(model, replay=["0"], exclude=["0.0"])


@pytest.mark.parametrize("option", ["exclude", "replay"])
def test_names_that_begin_alike(option: str) -> None:
    """'10' is not inside of '1'."""
    model = nn.ModuleDict({name: nn.Linear(5, 5) for name in ("1", "10")})
    rows = gnsfast.coverage(gnsfast.convert(model, **{option: ["1"]})).rows
    assert [r.static and r.route == "linear" for r in rows] == [False] * 2 + [True] * 2


def test_converted_again_after_a_replay() -> None:
    """Every route is found from what the module was before any convert."""
    x = torch.randn(3, 4, 8)

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = (
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Linear(8, 8),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.attention(x, x, x)[0])
            return y

    model = gnsfast.convert(gnsfast.convert(Attended()), replay=["out"])
    for options in ({}, {"replay": ["out"]}, {}):
        gnsfast.convert(model, **options)
        with gnsfast.per_sample_sqnorms(model, 3) as norms:
            model(x).square().sum().backward()
        assert (norms.total() > 0).all()
        expected = "replay" if options else "linear"
        assert {r.route for r in gnsfast.coverage(model).rows if "out.w" in r.parameter} >= {
            expected
        }


def test_on_the_meta_device() -> None:
    """A model that is built without memory converts there, foreign norms included."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        model = gnsfast.convert(nn.Sequential(nn.Linear(5, 5), LlamaRMSNorm(5)))
    assert [r.route for r in gnsfast.coverage(model).rows] == ["linear", "linear", "rms_norm"]


@pytest.mark.parametrize(
    "x_dtype, w_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "t5", "olmo", "gemma"])
def test_foreign_norms_open_as_closed(
    kind: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    """Bit for bit, dtype included, in every mixture of dtypes."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    cls = {"llama": LlamaRMSNorm, "t5": T5LayerNorm, "olmo": Olmo2RMSNorm, "gemma": GemmaRMSNorm}
    norm = cls[kind](16)
    nn.init.normal_(norm.weight)
    norm, x = gnsfast.convert(norm.to(w_dtype)), torch.randn(3, 4, 16, dtype=x_dtype)
    closed = norm(x)
    with gnsfast.per_sample_sqnorms(norm, 3):
        y = norm(x)
        y.float().sum().backward()
    assert y.dtype == closed.dtype and torch.equal(y, closed)
    assert norm.gnsfast.route == "rms_norm"


def test_a_norm_in_name_only() -> None:
    """A class of its own ways is not broken by the look at it."""

    class ImageRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(5)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, c, h, w = x.shape
            return x * self.weight.view(1, c, 1, 1)

    model = gnsfast.convert(ImageRMSNorm())
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        model(torch.randn(3, 5, 2, 2)).sum().backward()
    assert gnsfast.coverage(model).rows[0].route == "replay" and len(norms) == 1
