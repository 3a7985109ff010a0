# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows have the norms that they have alone."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from made import Made
from oracle import assert_norms
from tiny_models import SMALL, scattered
from torch import Tensor, nn

import gnsfast

V, D = 23, 8
LENGTHS = [5, 1, 9, 3, 6]


class Packed(nn.Module):
    """Mixes the tokens of a document; the head is the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D, padding_idx=2), nn.Embedding(16, D)
        self.before, self.after = nn.LayerNorm(D), nn.RMSNorm(D)
        self.mix, self.head = nn.Linear(D, D), gnsfast.Linear(D, V, bias=False)
        self.again = nn.Embedding(V, D)
        if tied:  # three ways
            self.head.weight = self.again.weight = self.tokens.weight

    def hidden(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.before(self.tokens(ids) + self.places(places) + self.again((ids + 1) % V))
        document = (places == 0).flatten().cumsum(0)
        mean = (document[:, None] == document).to(x.dtype)
        mean = mean / mean.sum(1, keepdim=True)
        x = x + torch.tanh(mean @ self.mix(x).flatten(0, -2)).view_as(x)
        out: Tensor = self.after(x)
        return out

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(ids, places))
        return out


def packed_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, places, labels = batch
    return F.cross_entropy(model(ids, places).flatten(0, -2), labels.flatten(), reduction="sum")


def draw() -> tuple[Tensor, Tensor, Tensor]:
    N = sum(LENGTHS)
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return torch.randint(0, V, (1, N)), places, torch.randint(0, V, (1, N))


def loop(model: nn.Module, loss: Any, batch: Any, lengths: list[int]) -> dict[str, Tensor]:
    """Every document by itself, in float64."""
    wide = copy.deepcopy(model).double()
    norms: dict[str, list[Tensor]] = {name: [] for name, _ in wide.named_parameters()}
    rows = [t.flatten().split(lengths) for t in batch]
    for document in zip(*rows):
        wide.zero_grad()
        loss(wide, tuple(t[None] for t in document)).backward()
        for name, p in wide.named_parameters():
            assert p.grad is not None
            norms[name].append(p.grad.square().sum())
    return {name: torch.stack(each) for name, each in norms.items()}


def norms_of(model: nn.Module, loss: Any, batch: Any, starts: Tensor, **options: Any) -> Any:
    with gnsfast.per_sample_sqnorms(model, len(LENGTHS), cu_seqlens=starts, **options) as norms:
        loss(model, batch).backward()
    return norms


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [(1, 24), (4, 6), (24,)])
def test_documents(tied: bool, shape: tuple[int, ...]) -> None:
    model, batch = Packed(tied), draw()
    starts = gnsfast.cu_seqlens(batch[1])
    truth, plain = loop(model, packed_loss, batch, LENGTHS), copy.deepcopy(model)
    norms = norms_of(model, packed_loss, [t.view(shape) for t in batch], starts, audit="always")
    assert_norms(norms, truth)
    packed_loss(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.gpu
def test_on_gpu() -> None:
    model, batch = Packed(tied=False), draw()
    truth, starts = loop(model, packed_loss, batch, LENGTHS), gnsfast.cu_seqlens(batch[1])
    assert_norms(
        norms_of(model.cuda(), packed_loss, [t.cuda() for t in batch], starts), truth, rtol=1e-4
    )


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_models(family: str) -> None:
    """``position_ids`` that restart, as Hugging Face's collators make them."""
    config = getattr(hf, f"{family}Config")(
        **SMALL, head_dim=4, tie_word_embeddings=family == "Qwen3"
    )
    model, batch = scattered(getattr(hf, f"{family}ForCausalLM")(config)), draw()

    def loss(m: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, places, labels = batch
        logits = m(input_ids=ids, position_ids=places, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    truth = loop(model, loss, batch, LENGTHS)
    assert_norms(norms_of(model, loss, batch, gnsfast.cu_seqlens(batch[1])), truth, rtol=3e-5)


@pytest.mark.parametrize("shape", [(1, 12), (12,)])
def test_positions_that_rows_share(shape: tuple[int, ...]) -> None:
    """Two rows of documents share one index of positions, as GPT-2 makes it."""
    shared = lambda m, ids, places: m.head(torch.tanh(m.tokens(ids) + m.places(places)))
    tables = dict(tokens=nn.Embedding(V, D), places=nn.Embedding(16, D))
    model = Made(shared, **tables, head=nn.Linear(D, V))
    ids, _, labels = (t.view(2, 12) for t in draw())
    starts = torch.tensor([0, 5, 12, 24])
    parts = [(0, 0, 5), (0, 5, 12), (1, 0, 12)]
    truth: dict[str, list[Tensor]] = {}
    wide = copy.deepcopy(model).double()
    for row, a, b in parts:
        wide.zero_grad()
        logits = wide(ids[row, a:b], torch.arange(a, b))
        F.cross_entropy(logits, labels[row, a:b], reduction="sum").backward()
        for name, p in wide.named_parameters():
            truth.setdefault(name, []).append(p.grad.square().sum())
    with gnsfast.per_sample_sqnorms(model, 3, cu_seqlens=starts) as norms:
        packed_loss(model, (ids, torch.arange(12).view(shape), labels)).backward()
    assert_norms(norms, {name: torch.stack(each) for name, each in truth.items()})


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_chunked_cross_entropy(reduction: str) -> None:
    model, batch = Packed(tied=False), draw()
    truth = loop(model, packed_loss, batch, LENGTHS)

    def loss(m: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, places, labels = batch
        return m.head.cross_entropy(m.hidden(ids, places), labels, reduction=reduction).sum()

    assert_norms(norms_of(model, loss, batch, gnsfast.cu_seqlens(batch[1])), truth)
    with pytest.raises(gnsfast.ObservationError, match="linear_cross_entropy has no norms for"):
        norms_of(Packed(tied=True), loss, batch, gnsfast.cu_seqlens(batch[1]))


def test_a_tied_weight_with_empty_documents() -> None:
    """The estimator fills up the number of documents with empty ones."""
    model, batch = Packed(tied=True), draw()
    lengths = [*LENGTHS[:2], 0, *LENGTHS[2:]]
    truth = loop(model, packed_loss, batch, LENGTHS)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    with gnsfast.per_sample_sqnorms(model, len(lengths), cu_seqlens=starts) as norms:
        packed_loss(model, batch).backward()
    filled = [b for b, length in enumerate(lengths) if length]
    assert_norms({n: norm[filled] for n, norm in norms.items()}, truth)
    assert all(norm[2] == 0 for norm in norms.values())


def test_compiled() -> None:
    model, batch = Packed(tied=False), draw()
    truth, starts = loop(model, packed_loss, batch, LENGTHS), gnsfast.cu_seqlens(batch[1])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with gnsfast.per_sample_sqnorms(model, len(LENGTHS), cu_seqlens=starts) as norms:
        packed_loss(compiled, batch).backward()
    assert_norms(norms, truth)


def test_noise_scale() -> None:
    """Documents of a packed row measure what the same documents padded to one length do."""
    torch.manual_seed(1)
    model = Packed(tied=False)
    results = []
    for packed in (True, False):
        torch.manual_seed(2)
        gns = gnsfast.GradientNoiseScale(model)
        for _ in range(6):
            ids, places, labels = draw()
            tokens = torch.tensor(LENGTHS)
            if packed:
                starts = gnsfast.cu_seqlens(places)
                with gns.update(len(LENGTHS), cu_seqlens=starts, tokens=tokens):
                    (packed_loss(model, (ids, places, labels)) / tokens.sum()).backward()
            else:  # one micro-batch a document
                with gns.update():
                    for document in zip(*(t[0].split(LENGTHS) for t in (ids, places, labels))):
                        n = len(document[0])
                        with gns.microbatch(1, tokens=torch.tensor([n]), scale=n / sum(LENGTHS)):
                            batch = tuple(t[None] for t in document)
                            (packed_loss(model, batch) / sum(LENGTHS)).backward()  # type: ignore[arg-type]
            model.zero_grad()
        results.append(gns.compute())
    packed_result, alone = results
    assert packed_result.samples == alone.samples == 6 * len(LENGTHS)
    for name in ("noise_scale", "trace", "grad_sqnorm", "lower", "upper"):
        assert getattr(packed_result, name) == pytest.approx(getattr(alone, name), rel=1e-5)


def test_padding_is_no_sample() -> None:
    """The last document is padding without a loss; so is what follows the last one."""
    model, batch = Packed(tied=True), draw()
    starts, truth = gnsfast.cu_seqlens(batch[1]), loop(model, packed_loss, batch, LENGTHS)
    padded = [F.pad(t, (0, 4)) for t in batch]
    padded[1][0, -4:] = torch.arange(4)
    padded[2][0, -4:] = -100
    for given in (gnsfast.cu_seqlens(padded[1]), F.pad(starts, (0, 1), value=28)):
        assert_norms(norms_of(copy.deepcopy(model), packed_loss, padded, given), truth)


def padded_rows() -> tuple[tuple[Tensor, ...], Tensor]:
    """Two rows of documents, each with a tail of padding without labels; what the loss counts."""
    _, places, _ = draw()
    rows = [places[0, :6], torch.arange(2), places[0, 6:], torch.arange(4)]
    ids, labels = torch.randint(0, V, (2, 30))
    labels[6:8] = labels[-4:] = -100
    tokens = torch.tensor([5, 1, 0, 9, 3, 6, 0])
    return (ids[None], torch.cat(rows)[None], labels[None]), tokens


@pytest.mark.parametrize("case", ["right", "first five", "padding counted"])
def test_padding_between_documents(case: str) -> None:
    """Padding counts as a document with 0 tokens, which is no sample; else it is an error."""
    model = Packed(tied=False)
    batch, tokens = padded_rows()
    if case == "first five":
        tokens = tokens[:5]
    if case == "padding counted":
        tokens[-1] = 4
    gns, starts = gnsfast.GradientNoiseScale(model), gnsfast.cu_seqlens(batch[1])
    with gns.update(len(tokens), cu_seqlens=starts, tokens=tokens):
        (packed_loss(model, batch) / tokens.sum()).backward()
    if case == "right":
        assert gns.compute().samples == 5
        return
    with pytest.raises(gnsfast.ObservationError, match="without tokens|no gradient at all"):
        gns.compute()


class TestErrors:
    def test_rows_that_are_not_theirs(self) -> None:
        batch = draw()
        short = gnsfast.cu_seqlens(batch[1])
        short[-1] -= 1
        with pytest.raises(
            gnsfast.SampleShapeError, match=r"ends at token 23.*\[1, 24\].*last document"
        ):
            norms_of(Packed(tied=False), packed_loss, batch, short)

    def test_documents_that_see_each_other(self) -> None:
        """GPT-2 takes rows for documents where it is given no positions."""
        sizes = dict(n_embd=8, n_layer=1, n_head=2, n_positions=32)
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, **sizes))
        with pytest.raises(gnsfast.ObservationError, match="attend to each other.*position_ids"):
            with gnsfast.per_sample_sqnorms(model, 3, cu_seqlens=torch.tensor([0, 5, 12, 24])):
                model(draw()[0].view(2, 12))

    @pytest.mark.parametrize(
        "starts, message",
        [
            (torch.tensor([0.0, 24.0]), "must be integers"),
            (torch.tensor([0, 24]), r"too few documents \(1\): num_samples is 5"),
            (torch.tensor([0, 9, 5, 6, 7, 24]), "not decrease"),
            (torch.tensor([1, 4, 5, 6, 7, 24]), "begin with 0"),
        ],
    )
    def test_bounds(self, starts: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            norms_of(Packed(tied=False), packed_loss, draw(), starts)

    def test_functions_that_take_none(self) -> None:
        class Mixes(Packed):
            def __init__(self) -> None:
                super().__init__(tied=False)
                self.conv = nn.Conv1d(D, D, 1)

            def hidden(self, ids: Tensor, places: Tensor) -> Tensor:
                return self.conv(super().hidden(ids, places).mT).mT

        model, batch = Mixes(), draw()
        norms = norms_of(model, packed_loss, batch, gnsfast.cu_seqlens(batch[1]))
        reasons = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
        assert reasons.keys() - {*norms} == {"conv.weight", "conv.bias"}
        assert "conv1d has no norms for packed documents" in reasons["conv.weight"]

    @pytest.mark.parametrize("causal", [False, True])
    def test_attention_without_a_mask(self, causal: bool) -> None:
        """It mixes the documents of a row."""
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        given = dict(is_causal=True, attn_mask=torch.ones(4, 4).triu(1).bool()) if causal else {}
        starts = torch.tensor([0, 3, 4, 8])
        with pytest.raises(gnsfast.ObservationError, match="attend to each other.*attn_mask"):
            with gnsfast.per_sample_sqnorms(model, 3, cu_seqlens=starts):
                model(*[torch.randn(2, 4, 8)] * 3, **given)

    def test_tokens_are_needed(self) -> None:
        gns = gnsfast.GradientNoiseScale(Packed(tied=False))
        with pytest.raises(ValueError, match="pass tokens="):
            with gns.update(5, cu_seqlens=gnsfast.cu_seqlens(draw()[1])):
                pass

    def test_positions(self) -> None:
        odd = torch.tensor([3, 4, 0, 1, 7])  # windows of documents need not begin with 0
        assert gnsfast.cu_seqlens(odd).tolist() == [0, 2, 4, 5]
        with pytest.raises(ValueError, match="position_ids must be integers"):
            gnsfast.cu_seqlens(torch.zeros(2, 3))
