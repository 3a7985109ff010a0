# SPDX-License-Identifier: Apache-2.0
"""Each reason of ``gnsfast.reasons``: its section in the docs, a model that meets it, and the same
model after its advice, which is measured.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ragged
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from test_docs_pages import anchors
from torch import Tensor, nn

import gnsfast
from gnsfast import reasons

B, D, V = 6, 8, 20
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "left-out.md"
ALL = {name: r for name, r in vars(reasons).items() if isinstance(r, reasons.Reason)}

Forward = Callable[[Any, Tensor], Tensor]


class Recomputed(torch.autograd.Function):
    """A checkpoint of one's own: it runs ``run`` again in backward, with the parameters given."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = run(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        if not ctx.parameters:
            torch.autograd.backward(y, dy)
            return None, x.grad
        return None, *torch.autograd.grad(y, [x, *ctx.parameters], dy)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.utils.checkpoint.checkpoint(m.inner, m.outer(x), use_reentrant=False)
    return y


def recurrent(dropout: float) -> nn.Module:
    return nn.LSTM(D, D, 2 if dropout else 1, dropout=dropout, batch_first=True)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def forces(m: Any, x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    energy = m.a(m.a(y).tanh()).sum()
    return torch.autograd.grad(energy, y, create_graph=True)[0]


def weight(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (D, D)), **options) / 3)


def learnt(model: nn.Module, x: Any, **options: Any) -> gnsfast.Table:
    return gnsfast.learn(model, x, **options)


def in_model(forward: Forward, **parts: Any) -> str:
    """Why the first parameter of a model is left out."""
    torch.manual_seed(0)
    x = torch.randn(B, D)
    if any(isinstance(part, nn.Embedding) for part in parts.values()):
        x = torch.randint(V, (B, 4))
    left_out = gnsfast.learn(Made(forward, **parts), x).left_out
    return next(iter(left_out.values()), "")


def in_block(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> str:
    """The error of a block around a pass."""
    try:
        with gnsfast.per_sample_sqnorms(model, len(x), **options):
            loss(model(x)).backward()
    except gnsfast.ObservationError as error:
        return str(error)
    return ""


def with_penalty(penalty: Callable[[nn.Linear, Tensor], Tensor], reduction: str = "mean") -> str:
    torch.manual_seed(0)
    model = linear()
    if reduction == "none":
        return in_block(
            model,
            lambda y: (y.square().mean(1) + penalty(model, y)).mean(),
            torch.randn(B, D),
        )
    return in_block(model, lambda y: penalty(model, y), torch.randn(B, D))


def by_parts(takes: bool) -> str:
    torch.manual_seed(0)
    model, x = nn.Sequential(linear(), linear()), torch.randn(B, D)
    run: Callable[[Tensor], Tensor] = lambda x: model[1](model[0](x))  # noqa: E731
    table = gnsfast.learn(model, x, run=run) if takes else None
    try:
        with gnsfast.per_sample_sqnorms(model, B, table=table):
            run(x).square().mean().backward()
    except gnsfast.ObservationError as error:
        return str(error)
    return ""


def other_shape(shows: bool) -> str:
    torch.manual_seed(0)
    model = Made(
        lambda m, x: m.a(x) if x.ndim == 2 else torch.einsum("bti,oi->bto", x, m.a.weight),
        a=nn.Linear(D, D, bias=False),
    )
    x, longer = torch.randn(B, D), torch.randn(B, 3, D)
    table = gnsfast.learn(model, x)
    table = table | gnsfast.learn(model, longer) if shows else table
    return in_block(model, lambda y: y.square().mean(), longer, table=table)


def square(**options: Any) -> str:
    torch.manual_seed(0)
    rnn, x = Made(lambda m, x: m.a(x) - m.a(x).mean(0), a=linear()), torch.randn(B, B, D)
    return next(iter(learnt(rnn, x, **options).left_out.values()), "")


def gated(both: bool) -> str:
    torch.manual_seed(0)
    a, b = linear(), nn.Linear(D, D, bias=False)
    model = Made(lambda m, x: m.a(x) if float(x[0, 0]) > 0 else m.b(x), a=a, b=b)
    ones = torch.ones(B, D) + 0.1 * torch.rand(B, D)
    table = learnt(model, ones)
    return next(iter((table | learnt(model, -ones) if both else table).left_out.values()), "")


def add_penalty(model: nn.Linear, y: Tensor) -> Tensor:
    return y.square().mean() + 0.1 * model.weight.norm()


def pool(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.a(x).square().mean()
    return y


def of_sequences(packs: bool) -> str:
    """Why an LSTM of sequences of unequal lengths is left out."""
    torch.manual_seed(0)
    x, lengths = torch.randn(4, 5, D), torch.tensor([5, 2, 4, 3])

    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        if packs:
            packed = nn.utils.rnn.pack_padded_sequence
            h: Tensor = m.a(packed(x, lengths, batch_first=True, enforce_sorted=False))[1][0][0]
            return h
        y: Tensor = m.a(x)[0][torch.arange(len(x)), lengths - 1]
        return y

    return next(iter(learnt(Made(forward, a=recurrent(0)), (x, lengths)).left_out.values()), "")


def of_rows(forward: Forward, parts: Callable[[], Any], x: Tensor, **rows: Any) -> str:
    """Why the first parameter is left out of a ragged batch."""
    torch.manual_seed(0)
    left_out = learnt(Made(forward, **parts()), x, **rows).left_out
    return next(iter(left_out.values()), "")


STARTS = torch.tensor([0, 2, 4, 7])


def of_edges(maps: str) -> str:
    """Why what a graph network makes of its edges is left out."""
    torch.manual_seed(0)
    batch = ragged.draw([4, 2, 6], [5, 3, 9])
    rows = batch.owner if maps == "nodes" else batch.rows
    left_out = learnt(ragged.GraphNet(), (batch,), rows=rows).left_out
    return left_out.get("features.weight", "")


Example = tuple[Callable[[], str], Callable[[], str]]


def models(forward: Forward, mended: Forward, parts: Any, mended_parts: Any = None) -> Example:
    """An example in which the model is written in another way."""
    return lambda: in_model(forward, **parts()), lambda: in_model(
        mended, **(mended_parts or parts)()
    )


EXAMPLES: dict[str, Example] = {
    "PENALTY_ON_WEIGHTS": (
        lambda: with_penalty(add_penalty),
        lambda: with_penalty(lambda model, y: y.square().mean()),
    ),
    "OF_NO_SAMPLE": (
        lambda: with_penalty(lambda model, y: model.weight.norm() + model.bias.norm()),
        lambda: with_penalty(lambda model, y: y.square().mean()),
    ),
    "ADDED_TO_SAMPLES": (
        lambda: with_penalty(lambda model, y: 0.1 * model.weight.norm(), "none"),
        lambda: with_penalty(lambda model, y: y.new_zeros(()), "none"),
    ),
    "NO_BATCH": (lambda: by_parts(False), lambda: by_parts(True)),
    "OTHER_CALL": (lambda: other_shape(False), lambda: other_shape(True)),
    "NO_RESULT": models(pool, lambda m, x: m.a(x), lambda: {"a": linear()}),
    "UNCLEAR": (square, lambda: square(take=lambda x, samples: x[:, samples])),
    "UNREACHED": (lambda: gated(False), lambda: gated(True)),
    "NO_GRADIENT": models(
        lambda m, x: Recomputed.apply(m.inner, m.outer(x)),
        checkpointed,
        lambda: {"outer": linear(), "inner": linear()},
    ),
    "DIFFERS": models(
        lambda m, x: m.a(x) - m.a(x).mean(0),
        lambda m, x: m.a(x) - m.a(x).mean(1, True),
        lambda: {"a": linear()},
    ),
    "MIXED": models(
        lambda m, x: m.a(x)[x[:, 0].argsort()] if len(x) > 4 else m.a(x),
        lambda m, x: m.a(x),
        lambda: {"a": linear()},
    ),
    "UNSEEN": models(
        lambda m, x: Recomputed.apply(m.inner, m.outer(x), *m.inner.parameters()),
        checkpointed,
        lambda: {"outer": linear(), "inner": linear()},
    ),
    "TWICE": models(forces, lambda m, x: m.a(m.a(x).tanh()), lambda: {"a": linear()}),
    "WRITES": models(
        lambda m, x: (x * 2).addmm_(x, m.w),
        lambda m, x: torch.addmm(x * 2, x, m.w),
        lambda: {"w": weight()},
    ),
    "DRAWS": models(
        lambda m, x: m.a(x[:, None].expand(-1, 3, -1))[0],
        lambda m, x: m.a(x[:, None].expand(-1, 3, -1))[0],
        lambda: {"a": recurrent(0.5)},
        lambda: {"a": recurrent(0)},
    ),
    "PACKED_SEQUENCE": (lambda: of_sequences(True), lambda: of_sequences(False)),
    "OTHER_TOKENS": (
        lambda: of_rows(
            lambda m, x: m.a(x, 0 * x),
            lambda: {"a": nn.GRUCell(D, D)},
            torch.randn(7, D),
            cu_seqlens=STARTS,
        ),
        lambda: of_rows(
            lambda m, x: m.a(x, 0 * x),
            lambda: {"a": nn.GRUCell(D, D)},
            torch.randn(7, D),
            rows=torch.repeat_interleave(torch.arange(3), STARTS.diff()),
        ),
    ),
    "OTHER_ROWS": (lambda: of_edges("nodes"), lambda: of_edges("both")),
    "TRANSFORM": models(
        lambda m, x: torch.func.vmap(lambda x: m.w @ x)(x),
        lambda m, x: x @ m.w.T,
        lambda: {"w": weight()},
    ),
    "COMPLEX": models(
        lambda m, x: (m.w * x).real,
        lambda m, x: m.w * x,
        lambda: {"w": weight(D, dtype=torch.cfloat)},
        lambda: {"w": weight(D)},
    ),
    "MADE_COMPLEX": models(
        lambda m, x: (torch.complex(m.w, m.w) * x).abs(),
        lambda m, x: torch.complex(m.w * x, m.w * x).abs(),
        lambda: {"w": weight(D)},
    ),
    "BY_FREQUENCY": models(
        lambda m, x: m.a(x),
        lambda m, x: m.a(x),
        lambda: {"a": nn.Embedding(V, D, scale_grad_by_freq=True)},
        lambda: {"a": nn.Embedding(V, D)},
    ),
}


def test_each_reason_has_an_example() -> None:
    assert EXAMPLES.keys() == ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_reason(name: str) -> None:
    reason = ALL[name]
    assert reason.section in anchors(PAGE)
    broken, mended = EXAMPLES[name]
    why = broken()
    text = re.sub(r"\\{.*?\\}", ".*", re.escape(f"{reason.sentence}. {reason.remedy}"))
    assert re.search(text, why), why
    assert mended() == ""


def bag(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(V, D, **options), nn.Linear(D, 1))


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_sparse_bags(mode: str) -> None:
    model, ids = bag(sparse=True, mode=mode), torch.randint(V, (B, 4))
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(ids).square().sum().backward()
    dense = bag(mode=mode)
    assert_norms(norms, loop_sqnorms(dense, lambda m, x: m(x).square().sum(), ids, B))


def test_penalty_after_the_block() -> None:
    """As SASRec's penalty on its embeddings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, 1))
    ids, y = torch.randint(V, (B,)), torch.rand(B)

    def loss(m: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(ids)[:, 0], y.to(m[1].weight), reduction="sum")

    def penalty() -> Tensor:
        return 0.1 * model[0].weight.norm()

    with (
        pytest.raises(gnsfast.ObservationError, match=r"call penalty.backward\(\) after the block"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        (loss(model, ids, y) + penalty()).backward()
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss(model, ids, y).backward()
    penalty().backward()
    assert_norms(norms, loop_sqnorms(model, lambda m, b: loss(m, *b), (ids, y), B))
    whole = torch.autograd.grad(loss(model, ids, y) + penalty(), [*model.parameters()])
    for p, real in zip(model.parameters(), whole):
        torch.testing.assert_close(p.grad, real)


@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("order", [1, 2])
def test_residual_of_a_differential_equation(order: int, gradients: str) -> None:
    """A second ``autograd.grad`` in a block is our error. With ``on_error="skip"`` the update is
    dropped, and the gradients are torch's.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, D), nn.Tanh(), nn.Linear(D, 1))
    x = torch.randn(B, 1, requires_grad=True)

    def loss() -> Tensor:
        u = model(x)
        for _ in range(order):
            u = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return (u + model(x)).square().mean()

    with (
        pytest.raises(gnsfast.ObservationError, match=r"unit='micro_batch'.*on_error='skip'"),
        gnsfast.per_sample_sqnorms(model, B, gradients=gradients),
    ):
        loss().backward()
    if gradients == "fused":
        return
    real = torch.autograd.grad(loss(), [*model.parameters()])
    gns = gnsfast.GradientNoiseScale(model, gradients="torch", on_error="skip")
    for _ in range(2):
        model.zero_grad()
        with gns.update(B):
            loss().backward()
        for p, g in zip(model.parameters(), real):
            torch.testing.assert_close(p.grad, g)
    assert gns.compute().errors == 2


class SVDLinear(nn.Module):
    """AdaLoRA's layer, as peft has it, whose ``rank`` may be the number of samples."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.lora_A, self.lora_B = weight(rank, D), weight(D, rank)
        self.lora_E = weight(rank, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ (self.lora_A * self.lora_E).T @ self.lora_B.T

    def penalty(self) -> Tensor:
        a, b = self.lora_A @ self.lora_A.T, self.lora_B.T @ self.lora_B
        eye = torch.eye(len(a))
        return (torch.norm(a - eye) + torch.norm(b - eye)) / 2


@pytest.mark.parametrize("rank", [2, B])
def test_adalora(rank: int) -> None:
    torch.manual_seed(0)
    model, x = SVDLinear(rank), torch.randn(B, D)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(x).square().sum().backward()
    loop = loop_sqnorms(model, lambda m, x: m(x).square().sum(), x, B)
    assert_norms(norms, loop)
    with (
        pytest.raises(gnsfast.ObservationError, match=r"lora_A: .*call penalty.backward"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        loss = model(x).square().sum()
        loss += 0.1 * model.penalty()  # in place, as peft does
        loss.backward()


def test_adalora_of_peft() -> None:
    """It adds its penalty in the model, in place, to the loss of labels. Its rank is the number of
    samples, which no product of its parameters may be taken for.
    """
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=V, **sizes, **heads)
    options = {"init_r": 4, "target_r": 2, "total_step": 10, "lora_dropout": 0.0}
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options),
    )
    for name, p in model.named_parameters():
        if "lora_E" in name:
            nn.init.normal_(p)
    ids = torch.randint(V, (4, 5))
    left_out = gnsfast.learn(model, {"input_ids": ids, "labels": ids}).left_out
    assert {name.split(".")[-2] for name in left_out} == {"lora_A", "lora_B"}
    assert all("call it without labels" in why for why in left_out.values())

    def loss(m: Any, ids: Tensor) -> Tensor:
        logits = m(input_ids=ids).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")

    table = gnsfast.learn(model, {"input_ids": ids})
    assert table.covered_fraction == 1
    with gnsfast.per_sample_sqnorms(model, 4, table=table) as norms:
        loss(model, ids).backward()
    assert_norms(norms, loop_sqnorms(model, loss, ids, 4), rtol=1e-4)
