# SPDX-License-Identifier: Apache-2.0
"""``convert(model, example=batch)``: it finds every layout, or says why there is none."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, D = 4, 6, 5
Loss = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, x: Any) -> Tensor:
    """A loss that is a sum over samples."""
    y = model(**x) if isinstance(x, dict) else model(x)
    y = y if isinstance(y, Tensor) else y[0]
    return (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape).to(y.dtype)).square().sum()


def by_token(model: nn.Module, x_TBD: Tensor) -> Tensor:
    """The same for a sequence-first model."""
    return model(x_TBD).square().sum()


def assert_right(
    model: nn.Module, x: Any, loss: Loss = squares, batch_dim: int = 0, num_samples: int = B
) -> None:
    """Every trainable parameter has norms, and each is right."""
    with gnsfast.per_sample_sqnorms(model, num_samples) as norms:
        loss(model, x).backward()
    assert_norms(norms, loop_sqnorms(model, loss, x, num_samples, batch_dim=batch_dim))


def said(model: nn.Module, parameter: str) -> gnsfast.conversion.CoverageRow:
    return next(r for r in gnsfast.coverage(model).rows if r.parameter == parameter)


class NanoGPT(nn.Module):
    """nanoGPT's embeddings, with a position index that has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, D), nn.Embedding(2 * T, D)
        self.mlp, self.drop = nn.Linear(D, D), nn.Dropout(0.5)
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x = self.wte(ids_BT) + self.wpe(positions_T)
        logits: Tensor = self.head(self.ln(x + self.drop(torch.tanh(self.mlp(x)))))
        return logits


class Flattened(nn.Module):
    """OPT's way: all rows of the batch as one list."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.tokens, self.fc, self.norm = nn.Embedding(11, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.interleaved = interleaved

    def forward(self, ids_BT: Tensor) -> Tensor:
        ids = ids_BT.t() if self.interleaved else ids_BT
        x = self.norm(self.fc(self.tokens(ids.flatten())))
        x = x.unflatten(0, ids.shape)
        return x.transpose(0, 1) if self.interleaved else x


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = (
            nn.Linear(D, D),
            nn.Conv1d(D, D, 3, padding=1),
            nn.Linear(D, 2),
        )

    def forward(self, x_TBD: Tensor) -> Tensor:
        x = torch.tanh(self.up(x_TBD)).permute(1, 2, 0)
        y: Tensor = self.down(self.mix(x).permute(2, 0, 1))
        return y


def ids() -> Tensor:
    return torch.randint(0, 11, (B, T))


@pytest.mark.parametrize("length", [T, B])
def test_a_bare_position_index(length: int) -> None:
    model, x = NanoGPT(), ids()[:, :length]
    model.drop.p = 0.0
    assert_right(gnsfast.convert(model, example=x), x)
    assert said(model, "wpe.weight").reason == "all samples share its index"


def test_a_bare_position_index_without_an_example() -> None:
    """Only its use says whether it may be looked up once for each sample."""
    model, x = gnsfast.convert(NanoGPT().eval()), ids()[:, :4]
    with pytest.raises(gnsfast.SampleShapeError) as error:
        assert_right(model, torch.cat([x, x], 1))
    assert "broadcast=['wpe']" in str(error.value) and "fold" not in str(error.value)
    assert "convert(model, example=batch)" in str(error.value)


def test_an_irregular_bare_index_without_an_example_raises() -> None:
    model = gnsfast.convert(Flattened())
    with pytest.raises(gnsfast.SampleShapeError, match=r"example=batch"):
        assert_right(model, ids())


def test_rows_that_are_flattened() -> None:
    model, x = Flattened(), ids()
    assert_right(gnsfast.convert(model, example=x), x)
    assert said(model, "fc.weight").reason == f"{T} consecutive rows are a sample"


def test_rows_that_are_flattened_and_alternate() -> None:
    model, x = Flattened(interleaved=True), ids()
    assert_right(gnsfast.convert(model, example=x), x)
    assert said(model, "fc.weight").reason == "the samples' rows alternate"


@pytest.mark.parametrize("length", [T, B])
def test_sequence_first(length: int) -> None:
    model, x = SequenceFirst(), torch.randn(length, B, D)
    with pytest.raises(ValueError, match=r"ties the samples.*convert\(.*batch_dim=1\)"):
        gnsfast.convert(model, example=x)
    gnsfast.convert(model, example=x, batch_dim=1)
    assert said(model, "up.weight").reason == "samples along dimension 1"
    assert_right(model, x, by_token, batch_dim=1)


def test_a_sequence_first_encoder_is_found() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    )
    x = torch.randn(T, B, 8)
    gnsfast.convert(model, example=x).eval()
    assert_right(model, x, by_token, batch_dim=1)


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict", "function"])
def test_kinds_of_example(how: str) -> None:
    model, x = Flattened(), ids()
    example = {
        "tensor": x,
        "tuple": (x,),
        "dict": {"ids_BT": x},
        "function": lambda: squares(model, x).backward(),
    }[how]
    assert_right(gnsfast.convert(model, example=example), x)


class Picked(nn.Module):
    """A head on the tokens that a mask picks, or on sorted samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.head = how, nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = torch.tanh(self.up(x_BTD))
        if self.how == "mask":
            mask_BT = x_BTD[..., 0] > 0.7
            picked = x.new_zeros(*mask_BT.shape, 2)
            picked[mask_BT] = self.head(x[mask_BT])
            return picked
        order = x.sum((1, 2)).argsort()
        y: Tensor = self.head(x[order])[order.argsort()]
        return y


@pytest.mark.parametrize("how", ["mask", "sort"])
def test_rows_that_are_not_samples_are_refused_by_name(how: str) -> None:
    torch.manual_seed(1)
    model = Picked(how)
    gnsfast.convert(model, example=torch.randn(B, T, D))
    row = said(model, "head.weight")
    assert not row.static and row.reason.startswith("the data pick or order its rows")
    assert said(model, "up.weight").static


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv1d(D, D, 3), nn.BatchNorm1d(D), nn.Linear(D, 2)

    def forward(self, x_BDT: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.bn(self.conv(x_BDT))).mean(-1))
        return y


def test_batch_norm_that_trains_is_refused_by_name() -> None:
    model, x = Normed(), torch.randn(B, D, T)
    kinds = [type(m) for m in model.modules()]
    mean = model.bn.running_mean.clone()
    with pytest.raises(
        ValueError, match=r"bn \(BatchNorm1d\).*ties its samples together.*model\.bn\.eval"
    ):
        gnsfast.convert(model, example=x)
    assert kinds == [type(m) for m in model.modules()] and torch.equal(model.bn.running_mean, mean)


def test_frozen_batch_norm_is_no_trouble() -> None:
    model, x = Normed(), torch.randn(B, D, T)
    model.bn.eval()
    gnsfast.convert(model, example=x)
    assert said(model, "conv.weight").static and said(model, "out.weight").static


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x_BD: Tensor) -> Tensor:
        x = self.up(x_BD)
        y: Tensor = self.head(x - x.mean(0))
        return y


def test_samples_that_meet_in_the_models_own_code() -> None:
    with pytest.raises(ValueError, match=r"the model \(Contrast\) ties the samples"):
        gnsfast.convert(Contrast(), example=torch.randn(B, D))


class Shared(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(11, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.tokens(ids_BT)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        y: Tensor = self.head(x)
        return y


class Stack(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = inner, nn.Linear(2, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        y: Tensor = self.after(self.inner(ids_BT))
        return y


class FunctionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(11, D), nn.Linear(D, D)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.up(self.tokens(ids_BT))), self.tokens.weight)


def test_a_weight_that_is_used_as_a_tensor() -> None:
    model, x = FunctionalHead(), ids()
    gnsfast.convert(model, example=x)
    assert_right(model, x)
    assert "replayed sample by sample, which adds about" in said(model, "up.weight").reason


def test_a_weight_that_is_used_as_a_tensor_in_a_large_model() -> None:
    model = FunctionalHead()
    model.more = nn.Linear(50, 50)
    gnsfast.convert(model, example=ids())
    row = said(model, "tokens.weight")
    assert not row.static and "used as a tensor in the model" in row.reason
    assert "replay=['']" in row.reason
    assert said(model, "up.weight").static
    assert said(model, "more.weight").reason == "the example does not call it"


class Scalar(nn.Module):
    """nanochat's bare parameters on the module that gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(D, D), nn.Parameter(torch.ones(1))

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.gain * self.up(x_BD)
        return y


def test_bare_parameters_of_a_model_are_left_out_by_name() -> None:
    model, x = Scalar(), torch.randn(B, D)
    gnsfast.convert(model, example=x)
    row = said(model, "gain")
    assert not row.static and "replay=['']" in row.reason
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    loop = loop_sqnorms(model, squares, x, B)
    assert_norms(norms, {n: loop[n] for n in norms})
    assert {*norms} == {"up.weight", "up.bias"}


def test_everything_is_put_back() -> None:
    model, x = NanoGPT(), ids()
    model.register_buffer("steps", torch.zeros(3))
    model.register_forward_hook(lambda m, i, o: o + 0 * m.steps.add_(1).sum())
    model.mlp.forward = own = model.mlp.forward
    model.ln.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    modes = [m.training for m in model.modules()]
    grads = [p.grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    gnsfast.convert(model, example=x)
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is g for p, g in zip(model.parameters(), grads))
    assert torch.equal(model.steps, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert [n for n, m in model.named_modules() if "forward" in vars(m)] == ["mlp"]
    assert model.mlp.forward is own


@pytest.mark.parametrize(
    "example, match",
    [
        (torch.zeros(B, T, dtype=torch.int64), "its samples are alike"),
        (torch.randint(0, 11, (1, T)), "has size 1 along"),
        ({}, "without a tensor"),
        (lambda: None, "without a call of the model"),
    ],
)
def test_examples_that_show_nothing(example: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"example: .*{match}"):
        gnsfast.convert(Flattened(), example=example)


def test_an_example_that_is_no_call() -> None:
    with pytest.raises(TypeError, match="a tensor, a tuple of arguments, a dict"):
        gnsfast.convert(Flattened(), example=3)


def test_a_models_own_error_is_shown_as_it_is() -> None:
    with pytest.raises(IndexError, match="out of range") as error:
        gnsfast.convert(Flattened(), example=ids() + 99)
    assert sys.version_info < (3, 11) or "of the example" in error.value.__notes__[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper", "bert", "vit", "mixtral"])
def test_models_of_transformers(name: str) -> None:
    model, batch = getattr(tiny_models, name)()
    model.eval()
    gnsfast.convert(model, example=batch)
    loss = lambda m, b: m(**b).logits.double().square().sum()  # noqa: E731
    with gnsfast.per_sample_sqnorms(model, tiny_models.B) as norms:
        loss(model, batch).backward()
    loop = loop_sqnorms(model, loss, batch, tiny_models.B)
    assert_norms(norms, {n: loop[n] for n in norms})
    assert gnsfast.coverage(model).covered_fraction > 0.9


def test_calls_that_are_joined() -> None:
    model, x = Shared(), ids()
    gnsfast.convert(model, example=x)
    assert said(model, "block.weight").reason == "3 calls are joined"
    assert_right(model, x)


class Offset(nn.Embedding):
    """Bart's positions: the module gets token ids, and makes its own index of them."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        return super().forward(2 + torch.arange(ids_BT.shape[1]))


class OffsetModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, D), Offset(2 + T, D)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids_BT) * self.positions(ids_BT)
        return x


def test_a_layer_that_makes_its_own_input() -> None:
    model, x = OffsetModel(), ids()
    gnsfast.convert(model, example=x)
    assert said(model, "positions.weight").reason == "all samples share its index"
    assert type(model.positions).__mro__[1] is Offset
    assert_right(model, x)
    assert_right(gnsfast.convert(model, example=x), x)


class Hostile(nn.Module):
    """Writes to its parameters, swaps one, freezes another, keeps a state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(11, D, max_norm=0.1), nn.Linear(D, D)
        self.slow = nn.Parameter(torch.ones(D), requires_grad=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.slow.lerp_(self.up.bias, 0.5)
        self.up.bias.data.mul_(0.5)
        y: Tensor = self.up(self.tokens(ids_BT)) + self.slow
        self.up.weight = nn.Parameter(self.up.weight + 1)
        self.tokens.weight.requires_grad_(False)
        self.state = y
        return y


def test_parameters_are_put_back() -> None:
    model = Hostile()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    gnsfast.convert(model, example=ids())
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]), name
    assert model.tokens.weight.requires_grad and not hasattr(model, "state")


class Mixup(nn.Module):
    """Mixes samples, only in training, by a random order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.training:
            x_BD = 0.7 * x_BD + 0.3 * x_BD[torch.randperm(len(x_BD))]
        y: Tensor = self.up(x_BD)
        return y


class Gated(nn.Module):
    """What samples give each other is behind a gate that is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across = nn.Linear(D, D), nn.Linear(D, D)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.up(x_BD) + self.gate * self.across(x_BD - x_BD.mean(0))
        return y


class Loudest(nn.Module):
    """Divides all samples by the loudest number of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.up(x_BD / x_BD.abs().max())
        return y


@pytest.mark.parametrize("kind", [Mixup, Gated, Loudest])
@pytest.mark.parametrize("loudest", range(B))
def test_samples_that_meet_out_of_sight(kind: type[nn.Module], loudest: int) -> None:
    x = torch.randn(B, D)
    x[loudest, 0] = 9.0
    with pytest.raises(ValueError, match="ties the samples of a batch together"):
        gnsfast.convert(kind(), example=x)


class Ragged(nn.Module):
    """Rows of samples of several lengths, which are all full in the example."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.Linear(D, D)

    def forward(self, x_BTD: Tensor, length_B: Tensor) -> Tensor:
        mask_BT = torch.arange(x_BTD.shape[1]) < length_B[:, None]
        if self.how == "slices":
            rows = torch.cat([x[:n] for x, n in zip(x_BTD, length_B.tolist())])
        elif self.how == "mask":
            rows = x_BTD[mask_BT]
        elif self.how == "masked_select":
            rows = x_BTD.masked_select(mask_BT[..., None]).view(-1, D)
        elif self.how == "numpy":
            rows = x_BTD.flatten(0, 1)[torch.from_numpy(mask_BT.flatten().numpy().nonzero()[0])]
        elif self.how == "packed":
            lengths = length_B.cpu()
            rows = nn.utils.rnn.pack_padded_sequence(x_BTD, lengths, batch_first=True).data
        else:
            order = length_B.argsort()
            return self.up(x_BTD[order])[order.argsort()].sum(1)
        y: Tensor = self.up(rows)
        whole = torch.zeros_like(x_BTD).masked_scatter(mask_BT[..., None], y)
        return whole.sum(1) if self.how != "packed" else whole.sum(1) * 0 + y.sum()


@pytest.mark.parametrize("how", ["slices", "mask", "masked_select", "numpy", "packed", "sort"])
def test_rows_that_only_look_regular_in_the_example(how: str) -> None:
    model = Ragged(how)
    try:
        gnsfast.convert(model, example=(torch.randn(B, T, D), torch.full((B,), T)))
    except ValueError as error:
        assert how == "packed" and "ties the samples" in str(error)
        return
    row = said(model, "up.weight")
    if row.route == "replay":  # exact, whatever the lengths
        batch = torch.randn(B, T, D), torch.tensor([T, 2, 1, 3])
        loss = lambda m, b: m(*b).square().sum()  # noqa: E731
        assert_right(model, batch, loss)
    else:
        assert not row.static and "fold" in row.reason, row


class Masked(nn.Module):
    """A replayed module with a mask [T, T], which a batch of T samples could be taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x_BTD: Tensor, mask_TT: Tensor) -> Tensor:
        mixed = 1e-6 * (mask_TT @ x_BTD.square())
        y: Tensor = self.gain * x_BTD + self.gain.square() * mixed
        return y


class MaskedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(D, D), Masked()

    def forward(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.gain(self.up(x_BTD), torch.ones(T, T, dtype=x_BTD.dtype).tril())
        return y


def test_what_a_replay_shares_is_known_for_other_batches() -> None:
    model = MaskedModel()
    gnsfast.convert(model, example=torch.randn(B, T, D))
    assert model.gain.gnsfast.shared == {1}
    assert_right(model, torch.randn(T, T, D), num_samples=T)
