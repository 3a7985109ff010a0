# SPDX-License-Identifier: Apache-2.0
"""``convert(model, example=batch)`` finds where each layer has its samples."""

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from examples_of_models import (
    B,
    D,
    Flattened,
    NanoGPT,
    T,
    assert_right,
    by_token,
    ids,
    said,
    squares,
)
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


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
    assert said(model, "fc.weight").reason == f"{T} consecutive rows are one sample"


def test_rows_that_are_flattened_and_alternate() -> None:
    model, x = Flattened(interleaved=True), ids()
    assert_right(gnsfast.convert(model, example=x), x)
    assert said(model, "fc.weight").reason == "the rows of the samples alternate"


@pytest.mark.parametrize("length", [T, B])
def test_sequence_first(length: int) -> None:
    model, x = SequenceFirst(), torch.randn(length, B, D)
    with pytest.raises(ValueError, match=r"ties the samples.*convert\(.*batch_dim=1\)"):
        gnsfast.convert(model, example=x)
    gnsfast.convert(model, example=x, batch_dim=1)
    assert said(model, "up.weight").reason == "the samples lie along dimension 1"
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
    assert "replayed: the backward pass runs 2 layers" in said(model, "up.weight").reason


def test_a_weight_that_is_used_as_a_tensor_in_a_large_model() -> None:
    model = FunctionalHead()
    model.more = nn.Linear(50, 50)
    gnsfast.convert(model, example=ids())
    row = said(model, "tokens.weight")
    assert not row.static and "used as a tensor in the model" in row.reason
    assert "replay=['']" in row.reason
    assert said(model, "up.weight").static
    assert said(model, "more.weight").reason == "the example does not call it"


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
    assert said(model, "block.weight").reason == "its 3 calls are joined"
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


class Masked(nn.Module):
    """A replayed module with a mask [T, T], which a batch of T samples could be taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x_BTD: Tensor, mask_TT: Tensor) -> Tensor:
        mixed = 1e-6 * (mask_TT @ x_BTD.square())
        y: Tensor = x_BTD @ self.gain.diag() + mixed @ self.gain.square().diag()
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
