# SPDX-License-Identifier: Apache-2.0
"""Parameters that a model uses several times in one pass: the norm is that of the sum."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from made import Made
from repeated_models import Again, B, Chunked, D, T, Universal, V, albert, check, square
from tiny_models import B as SAMPLES
from tiny_models import loss_of, scattered, text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import gnsfast


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_groups": 2}, {"inner_group_num": 2}], ids=["one", "two", "inner"]
)
def test_albert(options: dict[str, int]) -> None:
    norms = check(
        scattered(albert(**options)),
        text(),
        loss_of,
        samples=SAMPLES,
    )
    assert len(norms) == len(dict(albert(**options).named_parameters()))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_universal_transformer(norm: type[nn.Module]) -> None:
    ids = torch.randint(0, V, (B, T))
    check(Universal(norm), ids, square)


def test_siamese_towers_of_two_lengths() -> None:
    """One tower for two inputs."""
    tower = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5))
    alike = lambda m, a, b: torch.cosine_similarity(m.tower(a).mean(1), m.tower(b).mean(1))
    check(Made(alike, tower=tower), (floats(B, T, D), floats(B, 3, D)), square)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tokens", [12, 13])
def test_head_called_for_each_chunk(tokens: int, tied: bool) -> None:
    ids = torch.randint(0, V, (B, tokens))
    model = Chunked(tied)
    check(model, ids, square)
    with gnsfast.per_sample_sqnorms(model, B):
        square(model, ids).backward()
    verdict = gnsfast.verify(model, square, ids, loss_reduction="sum")
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("around", ["both", "head"])
def test_checkpoint_around_a_tied_head(around: str) -> None:
    """What is recomputed in backward is there for its saved tensors alone."""

    def recomputed(model: Chunked, ids: Tensor) -> Tensor:
        part = model if around == "both" else model.logits
        y: Tensor = checkpoint(part, ids if around == "both" else model.hidden(ids), **options)
        return y.square().sum()

    options: dict[str, Any] = {"use_reentrant": False}
    model, ids = Chunked(tied=True), torch.randint(0, V, (B, T))
    table = gnsfast.learn(model, ids)
    check(model, ids, recomputed, table=table)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "linear without bias": lambda: nn.Linear(D, D, bias=False),
    "Conv1D": lambda: Conv1D(D, D),
    "layer norm": lambda: nn.LayerNorm(D),
    "layer norm without bias": lambda: nn.LayerNorm(D, bias=False),
    "rms norm": lambda: nn.RMSNorm(D),
    "llama": lambda: hf.models.llama.modeling_llama.LlamaRMSNorm(D),
    "gemma": lambda: hf.models.gemma.modeling_gemma.GemmaRMSNorm(D),
    "t5": lambda: hf.models.t5.modeling_t5.T5LayerNorm(D),
}


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_layers(make: Callable[[], nn.Module], times: int) -> None:
    check(scattered(Again(make(), times)), floats(B, T, D), square)


@pytest.mark.parametrize("layer", [nn.Linear(D, D), nn.LayerNorm(D)], ids=["linear", "norm"])
@pytest.mark.parametrize("names", ["weight", "bias"])
def test_frozen(layer: nn.Module, names: str) -> None:
    layer = frozen(copy.deepcopy(layer), names)
    check(scattered(Again(layer)), floats(B, T, D), square)


@pytest.mark.parametrize("make", [nn.Linear, nn.RMSNorm])
@pytest.mark.parametrize("shape", [(B, D), (B, 2, 3, D), (1, T, D), (0, T, D)], ids=str)
def test_shapes(make: Any, shape: tuple[int, ...]) -> None:
    layer = make(D) if make is nn.RMSNorm else make(D, D)
    check(Again(layer), floats(*shape), square, samples=shape[0])


def test_norm_over_two_dimensions() -> None:
    check(scattered(Again(nn.LayerNorm((T, D)))), floats(B, 3, T, D), square)


def test_float64() -> None:
    check(Again(nn.Linear(D, D)).double(), floats(B, T, D).double(), square)


def test_sequence_first() -> None:
    def sums(m: Any, x: Tensor) -> Tensor:
        """Tokens are mixed along dimension 0."""
        for _ in range(3):
            x = m.layer(m.norm(x).cumsum(0)).sin()
        return x

    model = Made(sums, norm=nn.LayerNorm(D), layer=nn.Linear(D, D))
    check(model, floats(T, B, D), square, batch_dim=1)


def test_folded_rows() -> None:
    """The layer sees [B * T, D], once, and [B * 2, D] in the last call."""

    def folded(m: Any, x: Tensor) -> Tensor:
        y = torch.tanh(m.layer(x.flatten(0, 1))).view(x.shape)
        return m.layer(y[:, :2].flatten(0, 1)).view(-1, 2, D)

    check(Made(folded, layer=nn.Linear(D, D)), floats(B, T, D), square)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    """A table for two texts, whose words repeat within a sample and between the texts."""
    lookups = lambda m, source, target: m.words(source).sin().sum(1) * m.words(target).sum(1)
    texts = torch.randint(0, 4, (B, T)), torch.randint(2, 6, (B, 9)).int()
    check(Made(lookups, words=nn.Embedding(V, D, **options)), texts, square)


def test_shared_positions() -> None:
    """A table [1, T] that all samples share, looked up for two texts."""

    def placed(m: Any, source: Tensor, target: Tensor) -> Tensor:
        a, b = (m.table(torch.arange(t.shape[1])[None]) for t in (source, target))
        return (source * a).sum(1) * (target * b).sum(1)

    check(Made(placed, table=nn.Embedding(9, D)), (floats(B, T, D), floats(B, 9, D)), square)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_shared_index_in_any_order(odd: int) -> None:
    def placed(m: Any, x: Tensor) -> Tensor:
        indices = [torch.arange(T)[None], torch.tensor([[3, 1, 4, 1, 5, 0]])]
        a, b = (m.table(index) for index in (indices[odd], indices[1 - odd]))
        return (x * a).sin() * b

    check(Made(placed, table=nn.Embedding(9, D)), floats(B, T, D), square)


def test_replayed() -> None:
    """A layer without a kernel."""
    of = lambda m, x: (x.sin() * m.scale + m.shift).cos()
    layer = Made(of, scale=torch.randn(D), shift=torch.randn(D))
    check(Again(layer), floats(B, T, D), square)


def test_replayed_attention_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True, dropout=0.0)
    check(Again(layer), floats(B, T, D), square)


@pytest.mark.parametrize("height", [6, 4], ids=["one size", "two sizes"])
def test_convolutions(height: int) -> None:
    tower = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2))
    images = lambda m, a, b: m.tower(a).mean((2, 3)) * m.tower(b).mean((2, 3))
    check(Made(images, tower=tower), (floats(B, 2, 6, 5), floats(B, 2, height, 5)), square)


def test_transposed_convolutions() -> None:
    layer = nn.ConvTranspose1d(D, D, 4, stride=2, padding=1)
    model = Made(lambda m, x: m.layer(x).sin() * m.layer(x.cos()), layer=layer)
    check(model, floats(B, D, T), square)


def test_transposed_convolution_of_two_output_sizes() -> None:
    sizes = lambda m, x: torch.cat([m.layer(x, [12]).sin(), m.layer(x, [13])], 2)
    check(Made(sizes, layer=nn.ConvTranspose1d(D, 3, 2, stride=2)), floats(B, D, T), square)


class Trident(nn.Module):
    """One convolution with another dilation in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for dilation in (1, 2):
            self.conv.dilation = self.conv.padding = (dilation,)
            y = y + self.conv(x)
        return y


class Padded(nn.Module):
    """One table with another padding index in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)

    def forward(self, ids: Tensor) -> Tensor:
        y = torch.zeros(*ids.shape, D)
        for padding in (0, 1):
            self.words.padding_idx = padding
            y = y + self.words(ids)
        return y


@pytest.mark.parametrize("kind", [Trident, Padded])
def test_options_that_differ_between_calls(kind: Any) -> None:
    x = torch.randn(B, 2, 8) if kind is Trident else torch.randint(0, V, (B, T))
    check(kind(), x, square)
