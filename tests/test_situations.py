# SPDX-License-Identifier: Apache-2.0
"""Situations of ``docs/how-to/situations.md``: small models with the structure that matters, each
against a loop over single samples in float64.
"""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from examples_of_models import assert_right
from made import Made
from oracle import gradients_of, noise_scale_of, widened
from torch import Tensor, nn

import gnsfast

B, T, D, V = 4, 6, 8, 12
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "situations.md"

Batch = tuple[Tensor, ...]
Case = tuple[nn.Module, Batch]
"""A model whose forward gives a loss of each sample, or their sum, for the batch."""


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape) / 3


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def of_tokens(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """A cross entropy of each sample, a mean over its tokens."""
    return F.cross_entropy(logits_BTV.mT, labels_BT, reduction="none").mean(1)


def unet() -> Case:
    """A diffusion model: time in every block, group norm, attention, a skip, transposed convs."""

    def block(m: Any, name: str, x: Tensor, time: Tensor) -> Tensor:
        h = getattr(m, f"conv_{name}")(F.silu(getattr(m, f"norm_{name}")(x)))
        h = h + getattr(m, f"time_{name}")(time)[:, :, None, None]
        return x + h

    def run(m: Any, x: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        at = steps[:, None] * torch.exp(-torch.arange(4, device=x.device).to(x.dtype))
        time = m.time(torch.cat([at.sin(), at.cos()], 1))
        share = (steps / 10)[:, None, None, None]
        skip = block(m, "a", m.first((1 - share) * x + share * noise), time)
        h = block(m, "b", m.down(skip), time)
        rows = m.norm(h).flatten(2).mT
        h = h + m.attention(rows, rows, rows, need_weights=False)[0].mT.unflatten(2, (4, 4))
        h = m.last(torch.cat([m.up(h), skip], 1))
        return (h - noise).square().mean((1, 2, 3))

    parts: dict[str, nn.Module] = {
        f"{kind}_{name}": make()
        for name in "ab"
        for kind, make in {
            "conv": lambda: nn.Conv2d(D, D, 3, padding=1),
            "norm": lambda: nn.GroupNorm(2, D),
            "time": lambda: nn.Linear(D, D),
        }.items()
    }
    parts |= {"time": mlp(D, D, D), "first": nn.Conv2d(3, D, 3, padding=1)}
    parts |= {"down": nn.Conv2d(D, D, 3, stride=2, padding=1), "norm": nn.GroupNorm(2, D)}
    parts |= {"attention": nn.MultiheadAttention(D, 2, batch_first=True)}
    parts |= {"up": nn.ConvTranspose2d(D, D, 2, stride=2)}
    parts |= {"last": nn.Conv2d(2 * D, 3, 3, padding=1)}
    x, noise = torch.randn(2, B, 3, 8, 8)
    return Made(run, **parts), (x, torch.rand(B) * 10, noise)


def detr() -> Case:
    """Queries that all samples share, first in each tensor; a matching that depends on the data."""
    from scipy.optimize import linear_sum_assignment

    def run(m: Any, x: Tensor, boxes: Tensor, kinds: Tensor) -> Tensor:
        memory = m.encoder(m.patches(x).flatten(2).permute(2, 0, 1) + m.rows[:, None])
        queries = m.queries.weight[:, None].repeat(1, len(x), 1)
        h = m.decoder(queries, memory).transpose(0, 1)
        logits, at = m.kinds(h), m.boxes(h).sigmoid()
        losses = []
        for b in range(len(x)):
            with torch.no_grad():
                cost = torch.cdist(at[b], boxes[b], p=1) - logits[b].softmax(-1)[:, kinds[b]]
            row, column = map(torch.as_tensor, linear_sum_assignment(cost))
            wanted = torch.full((len(logits[b]),), 3).index_put((row,), kinds[b][column])
            loss = F.cross_entropy(logits[b], wanted)
            losses.append(loss + F.l1_loss(at[b][row], boxes[b][column]))
        return torch.stack(losses)

    layer = dict(dropout=0.0, dim_feedforward=D)
    model = Made(
        run,
        patches=nn.Conv2d(3, D, 4, stride=4),
        rows=weight(4, D),
        queries=nn.Embedding(5, D),
        encoder=nn.TransformerEncoderLayer(D, 2, **layer),
        decoder=nn.TransformerDecoderLayer(D, 2, **layer),
        kinds=nn.Linear(D, 4),
        boxes=mlp(D, D, 4),
    )
    return model, (torch.randn(B, 3, 8, 8), torch.rand(B, 2, 4), torch.randint(0, 3, (B, 2)))


def saint() -> Case:
    """Knowledge tracing by an encoder of exercises and a decoder of answers, time first, masks."""

    def run(m: Any, exercises: Tensor, answers: Tensor) -> Tensor:
        positions = m.positions(torch.arange(T))[:, None]
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        start = torch.full_like(answers[:, :1], 2)
        given = torch.cat([start, answers[:, :-1]], 1)
        h = m.transformer(
            m.exercises(exercises).transpose(0, 1) + positions,
            m.answers(given).transpose(0, 1) + positions,
            *(mask, mask, mask),
        )
        logits = m.head(h).squeeze(-1).t()
        wanted = answers.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)

    model = Made(
        run,
        exercises=nn.Embedding(V, D),
        answers=nn.Embedding(3, D),
        positions=nn.Embedding(T, D),
        transformer=nn.Transformer(D, 2, 1, 1, dim_feedforward=D, dropout=0.0),
        head=nn.Linear(D, 1),
    )
    return model, (ids(B, T), torch.randint(0, 2, (B, T)))


def akt() -> Case:
    """A difficulty for each question times a vector for each concept, and attention that decays
    with a distance by the scores themselves, at a rate for each head.
    """

    def run(m: Any, questions: Tensor, answers: Tensor) -> Tensor:
        concepts = questions % 4
        x = m.concepts(concepts) + m.difficulty(questions) * m.variation(concepts)
        y = x + m.answers(answers)
        q, v = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in (m.query(x), m.value(y)))
        scores = q @ q.mT / math.sqrt(D / 2)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        with torch.no_grad():
            share = scores.masked_fill(hidden, -math.inf).softmax(-1)
            left = share.sum(-1, keepdim=True) - share.cumsum(-1)
            apart = (torch.arange(T)[:, None] - torch.arange(T)).abs()
            distance = (left * apart).clamp(min=0).sqrt()
        decay = (-F.softplus(m.rate) * distance).exp().clamp(1e-5, 1e5)
        h = (scores * decay).masked_fill(hidden, -math.inf).softmax(-1) @ v
        logits = m.head(torch.cat([h.transpose(1, 2).flatten(2), x], -1))
        return of_tokens(logits, answers)

    model = Made(
        run,
        concepts=nn.Embedding(4, D),
        variation=nn.Embedding(4, D),
        difficulty=nn.Embedding(V, 1),
        answers=nn.Embedding(2, D),
        query=nn.Linear(D, D),
        value=nn.Linear(D, D),
        rate=weight(2, 1, 1),
        head=nn.Linear(2 * D, 2),
    )
    return model, (ids(B, T), torch.randint(0, 2, (B, T)))


def conformer() -> Case:
    """Convolutions over time beside attention with relative positions, and the CTC loss."""

    def shifted(x: Tensor) -> Tensor:
        """Row t begins at position T - 1 - t of [2 T - 1], as in Transformer-XL."""
        padded = F.pad(x, (1, 0)).flatten(2)
        return padded.unflatten(2, (2 * T, T))[:, :, 1:].reshape(x.shape)[..., :T]

    def run(m: Any, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        x = m.subsample(x[:, None]).transpose(1, 2).flatten(2)
        h = m.project(x)
        h = h + m.feed(m.norm_feed(h)) / 2
        q, k, v = m.qkv(m.norm(h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        rows = torch.arange(T - 1, -T, -1).to(h.dtype)[:, None] / T
        relative = m.relative(torch.cat([rows.sin(), rows.cos()], 1)).unflatten(-1, (2, -1))
        content = (q + m.u[:, None]) @ k.mT
        position = shifted((q + m.v[:, None]) @ relative.permute(1, 2, 0))
        h = h + m.out(((content + position).softmax(-1) @ v).transpose(1, 2).flatten(2))
        c = m.pointwise(m.norm_conv(h).mT)
        c = m.depthwise(F.glu(c, 1)).mT
        h = h + F.silu(m.norm_depth(c))
        logits = m.head(h).log_softmax(-1).transpose(0, 1)
        full = torch.full_like(lengths, T)
        return F.ctc_loss(logits, labels, full, lengths, reduction="none")

    model = Made(
        run,
        subsample=nn.Conv2d(1, 2, 3, stride=2, padding=1),
        project=nn.Linear(2 * 4, D),
        norm_feed=nn.LayerNorm(D),
        feed=mlp(D, 2 * D, D),
        norm=nn.LayerNorm(D),
        qkv=nn.Linear(D, 3 * D),
        relative=nn.Linear(2, D, bias=False),
        u=weight(2, D // 2),
        v=weight(2, D // 2),
        out=nn.Linear(D, D),
        norm_conv=nn.LayerNorm(D),
        pointwise=nn.Conv1d(D, 2 * D, 1),
        depthwise=nn.Conv1d(D, D, 3, padding=1, groups=D),
        norm_depth=nn.LayerNorm(D),
        head=nn.Linear(D, V),
    )
    labels, lengths = torch.randint(1, V, (B, 3)), torch.tensor([3, 1, 2, 3])
    return model, (torch.randn(B, 2 * T, 8), labels, lengths)


def ppo() -> Case:
    """A policy and a value with a trunk in common, and a deviation that all states share."""

    def run(m: Any, states: Tensor, actions: Tensor, old: Tensor, a: Tensor, r: Tensor) -> Tensor:
        h = m.trunk(states).tanh()
        policy = torch.distributions.Normal(m.mean(h), m.log_deviation.exp())
        ratio = (policy.log_prob(actions).sum(1) - old).exp()
        clipped = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        entropy = policy.entropy().sum(1)
        return -clipped + 0.5 * (m.value(h)[:, 0] - r).square() - 0.01 * entropy

    parts = {"trunk": mlp(5, D, D), "mean": nn.Linear(D, 2), "value": nn.Linear(D, 1)}
    model = Made(run, log_deviation=torch.zeros(2), **parts)
    states, actions = torch.randn(B, 5), torch.randn(B, 2)
    return model, (states, actions, -3 + torch.rand(B), *torch.randn(2, B))


def mae() -> Case:
    """Each sample hides other patches; a token that stands for all that are hidden."""
    small: dict[str, Any] = dict(hidden_size=D, intermediate_size=D, num_hidden_layers=1)
    small |= dict(decoder_hidden_size=D, decoder_intermediate_size=D, decoder_num_hidden_layers=1)
    small |= dict(num_attention_heads=2, decoder_num_attention_heads=2)
    config = hf.ViTMAEConfig(image_size=8, patch_size=2, mask_ratio=0.5, **small)

    def run(m: Any, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        out = m.mae(pixel_values=x, noise=noise)
        return out.loss * len(x), out.logits  # each sample hides as many

    model = Made(run, mae=hf.ViTMAEForPreTraining(config))
    return model, (torch.randn(B, 3, 8, 8), torch.rand(B, 16))


def moco() -> Case:
    """Negatives from a queue, which belongs to no sample; the keys' encoder has no gradient."""

    def run(m: Any, x: Tensor, other: Tensor) -> Tensor:
        q = F.normalize(m.encoder(x), dim=1)
        with torch.no_grad():
            k = F.normalize(m.slow(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone()], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="none")

    encoder = mlp(5, D, D)
    model = Made(run, encoder=encoder, slow=copy.deepcopy(encoder).requires_grad_(False))
    model.register_buffer("queue", F.normalize(torch.randn(D, 16), dim=0))
    return model, (torch.randn(B, 5), torch.randn(B, 5))


def stylegan2() -> Case:
    """Weights times a style of each sample, in one convolution with a group for each; a learned
    constant that all samples begin with; noise with a strength.
    """

    def run(m: Any, z: Tensor, noise: Tensor) -> Tensor:
        style = m.mapping(z)
        x = m.constant.repeat(len(z), 1, 1, 1)
        w = m.weight[None] / math.sqrt(9 * D) * m.affine(style)[:, None, :, None, None]
        w = w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = F.conv2d(x.reshape(1, -1, 4, 4), w.flatten(0, 1), padding=1, groups=len(z))
        x = x.view(len(z), -1, 4, 4) + m.strength * noise
        x = F.leaky_relu(x + m.bias[:, None, None], 0.2) * math.sqrt(2)
        return F.softplus(-m.critic(x.flatten(1)))[:, 0]

    model = Made(
        run,
        mapping=mlp(5, D, D),
        affine=nn.Linear(D, D),
        constant=torch.randn(1, D, 4, 4),
        weight=torch.randn(D, D, 3, 3),
        strength=torch.tensor(0.3),
        bias=torch.zeros(D),
        critic=nn.Linear(16 * D, 1),
    )
    return model, (torch.randn(B, 5), torch.randn(B, 1, 4, 4))


def crf() -> Case:
    """Transitions between labels: looked up at pairs, and added to each state of a recursion."""

    def run(m: Any, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        emissions = m.emissions(m.lstm(m.words(x))[0]).transpose(0, 1)
        labels = labels.t()
        at = torch.arange(len(x))
        score = m.start[labels[0]] + emissions[0, at, labels[0]]
        every = m.start + emissions[0]
        last = labels[0]
        for t in range(1, T):
            inside = t < lengths
            step = m.transitions[labels[t - 1], labels[t]] + emissions[t, at, labels[t]]
            score = score + step * inside
            after = (every[:, :, None] + m.transitions + emissions[t][:, None]).logsumexp(1)
            every = torch.where(inside[:, None], after, every)
            last = torch.where(inside, labels[t], last)
        return (every + m.end).logsumexp(1) - score - m.end[last]

    K = 3
    model = Made(
        run,
        words=nn.Embedding(V, D),
        lstm=nn.LSTM(D, D, bidirectional=True, batch_first=True),
        emissions=nn.Linear(2 * D, K),
        transitions=weight(K, K),
        start=weight(K),
        end=weight(K),
    )
    return model, (ids(B, T), torch.randint(0, K, (B, T)), torch.tensor([6, 3, 5, 1]))


def dlrm() -> Case:
    """Bags of ids of any length, as one list with offsets, and products of all pairs of them."""

    def run(m: Any, dense: Tensor, bags: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        inside = torch.arange(bags.shape[2]) < lengths[:, :, None]
        rows = [m.bottom(dense)]
        for k, table in enumerate(m.tables):
            offsets = lengths[:, k].cumsum(0) - lengths[:, k]
            rows.append(table(bags[:, k][inside[:, k]], offsets))
        x = torch.stack(rows, 1)
        i, j = torch.tril_indices(3, 3, -1)
        z = m.top(torch.cat([rows[0], (x @ x.mT)[:, i, j]], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(z, label, reduction="none")

    tables = nn.ModuleList(nn.EmbeddingBag(V, D, mode="sum") for _ in range(2))
    model = Made(run, bottom=mlp(5, D, D), tables=tables, top=mlp(D + 3, D, 1))
    lengths = torch.tensor([[1, 3], [2, 2], [3, 1], [2, 3]])
    return model, (torch.randn(B, 5), ids(B, 2, 3), lengths, torch.rand(B).round())


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (unet, detr, saint, akt, conformer, ppo, mae, moco, stylegan2, crf, dlrm)
}


def total(model: nn.Module, batch: Batch) -> Tensor:
    out = model(*batch)
    loss: Tensor = (out[0] if isinstance(out, tuple) else out).sum()
    return loss


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", CASES)
def test_norms(name: str) -> None:
    """Every sample's norm for every parameter, to 1e-5."""
    model, batch = CASES[name]()
    assert_right(model, batch, loss=total)


def labelled() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model of tokens; ids [48, T], labels of which -100 is none, and how many each has."""
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, V))
    x, counts_B = ids(48, T), torch.arange(48) * 5 % T + 1
    labels = ((x + 1) % V).masked_fill(torch.arange(T) >= counts_B[:, None], -100)
    return model, x, labels, counts_B


def of_mean(model: nn.Module, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x).mT, labels, reduction=reduction)


def test_token_normalised_accumulation() -> None:
    """Sums of micro-batches over the tokens of the whole update, at the weights of the loop."""
    model, x, labels, counts_B = labelled()
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    for rows in torch.arange(48).split(16):
        tokens = int(counts_B[rows].sum())
        with gns.update():
            for some in rows.split([3, 5, 8]):
                with gns.microbatch(len(some), tokens=counts_B[some], scale=1 / tokens):
                    (of_mean(model, x[some], labels[some], "sum") / tokens).backward()
        model.zero_grad()
    wide, _ = widened(model, x)
    losses = (of_mean(wide, x[b : b + 1], labels[b : b + 1]) for b in range(48))
    g_KnP = gradients_of(wide, losses).view(3, 16, -1)
    truth = noise_scale_of(g_KnP, counts_B.double().view(3, 16))
    assert gns.compute().noise_scale == pytest.approx(truth, rel=1e-5)


def test_a_batch_schedule_inside_a_window() -> None:
    """Updates of 4, 8 and 16 samples that train: |G|² and tr Σ of each by itself, then their means
    over the samples of the window.
    """
    model, x, labels, _ = labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gns = gnsfast.GradientNoiseScale(model)
    labels = labels.where(labels >= 0, 0)
    grad_sqnorm, squares = 0.0, 0.0
    for rows in torch.arange(48).split([4, 4, 8, 16, 16]):
        wide, _ = widened(model, x)
        losses = (of_mean(wide, x[b : b + 1], labels[b : b + 1]) for b in rows)
        g_nP = gradients_of(wide, losses)
        n, p, q = len(rows), g_nP.square().sum(), g_nP.sum(0).square().sum()
        grad_sqnorm += n / 48 * float(q - p) / (n * n - n)
        squares += float(p) / 48
        with gns.update(n):
            of_mean(model, x[rows], labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = gns.compute()
    assert found.grad_sqnorm == pytest.approx(grad_sqnorm, rel=1e-5)
    assert found.trace == pytest.approx(squares - grad_sqnorm, rel=1e-5)


def test_the_page_names_tests_that_exist() -> None:
    """Each test of a row, and each case of this file in a row."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if ".py" in line]
    named = [each for row in rows for each in re.findall(r"`((?:\w+/)*\w+\.py)(?:::(\S+))?`", row)]
    assert len(rows) > 20
    for file, test in named:
        function, _, case = test.partition("[")
        text = (ROOT / "tests" / file.removeprefix("tests/")).read_text(encoding="utf-8")
        assert not test or f"def {function}(" in text, test
        assert case.rstrip("]") in (*CASES, "") or f'"{case[:-1]}"' in text, test
    assert {test for _, test in named} >= {f"test_norms[{name}]" for name in CASES}
