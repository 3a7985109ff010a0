# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows have the norms that they have alone, in torch's attention and in
mixtures of experts.
"""

import copy
from typing import Any

import experts
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from oracle import assert_norms
from test_documents import LENGTHS, D, V, draw, loop, norms_of
from tiny_models import SMALL, scattered
from torch import Tensor, nn

import gnsfast


class Attends(nn.Module):
    """Attention within each document, in rows, sequence first, or without a batch dimension."""

    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.tokens, self.memory = nn.Embedding(V, D), nn.Embedding(V, options.get("kdim", D))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first, **options)
        self.head, self.need_weights = nn.Linear(D, V), False

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """ids [R, T], or [T] without a batch dimension."""
        x, y, module = self.tokens(ids), self.memory(ids), self.attention
        document = (places == 0).flatten().cumsum(0).view(places.shape)
        hidden = document[..., :, None] != document[..., None, :]
        if ids.ndim == 2:
            hidden = hidden.repeat_interleave(2, dim=0)
        if turned := ids.ndim == 2 and not module.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        x = x + module(x, y, y, attn_mask=hidden, need_weights=self.need_weights)[0]
        out: Tensor = self.head(x.transpose(0, 1) if turned else x)
        return out


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    ids, places, labels = batch
    return F.cross_entropy(model(ids, places).flatten(0, -2), labels.flatten(), reduction="sum")


def rows_of(shape: tuple[int, ...]) -> list[Tensor]:
    """A batch where every row begins a document, or has one row only."""
    return [t.view(shape) for t in draw()]


LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (Attends, (2, 12)),
    "one row": (Attends, (1, 24)),
    "sequence first": (lambda: Attends(batch_first=False), (1, 24)),
    "rows that alternate": (lambda: Attends(batch_first=False), (2, 12)),
    "no batch dimension": (lambda: Attends(batch_first=False), (24,)),
    "three weights": (lambda: Attends(kdim=6, vdim=6), (2, 12)),
    "no bias": (lambda: Attends(bias=False), (2, 12)),
}


def pieces(shape: tuple[int, ...], places: Tensor) -> list[int]:
    """The lengths of documents; one that crosses into the next row is two."""
    return gnsfast.cu_seqlens(places.view(-1, shape[-1])).diff().tolist()


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention(layout: str, need_weights: bool) -> None:
    make, shape = LAYOUTS[layout]
    model, batch = make(), rows_of(shape)
    model.need_weights = need_weights
    lengths = pieces(shape, batch[1])
    truth, plain = loop(model, loss_of, batch, lengths), copy.deepcopy(model)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    with gnsfast.per_sample_sqnorms(
        model, len(lengths), cu_seqlens=starts, audit="always"
    ) as norms:
        loss_of(model, batch).backward()
    assert_norms(norms, truth, rtol=3e-5)
    loss_of(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "in_", "out_proj", "bias_k"])
def test_frozen_parts(frozen: str) -> None:
    """A frozen ``bias_k`` needs no norms; the others are what they are without documents."""
    model, batch = Attends(add_bias_kv=frozen == "bias_k"), rows_of((1, 24))
    for name, p in model.attention.named_parameters():
        own = name in ("bias_k", "bias_v") if frozen == "bias_k" else name.startswith(frozen)
        p.requires_grad_(not own)
    wide, truth = copy.deepcopy(model).double(), {}
    trained = {n: p for n, p in wide.named_parameters() if p.requires_grad}
    parts = zip(*(t.flatten().split(LENGTHS) for t in batch))
    found = [
        torch.autograd.grad(loss_of(wide, [t[None] for t in part]), [*trained.values()])
        for part in parts
    ]
    truth = {
        n: torch.stack([g.square().sum() for g in each]) for n, each in zip(trained, zip(*found))
    }
    assert_norms(norms_of(model, loss_of, batch, gnsfast.cu_seqlens(batch[1])), truth, rtol=3e-5)


class TestRefused:
    def test_keys_of_other_documents(self) -> None:
        layer, x = gnsfast.MultiheadAttention(D, 2, batch_first=True), torch.randn(1, 8, D)
        with gnsfast.per_sample_sqnorms(layer, 2, cu_seqlens=torch.tensor([0, 3, 8])) as norms:
            y = layer(x, *[torch.randn(1, 9, D)] * 2, attn_mask=torch.zeros(8, 9))[0]
            y.sum().backward()
        why = {r.parameter: r.reason for r in gnsfast.coverage(layer).rows}["in_proj_weight"]
        assert (
            "[9, 1, 8]: the leading dimensions do not hold their 8 tokens" in why
            and "in_proj_weight" not in norms
        )

    def test_a_key_that_all_documents_see(self) -> None:
        model, batch = Attends(add_bias_kv=True), rows_of((1, 24))
        norms = norms_of(model, loss_of, batch, gnsfast.cu_seqlens(batch[1]))
        reasons = {r.parameter: r.reason for r in gnsfast.coverage(model).rows}
        assert reasons.keys() - {*norms} == {"attention.bias_k", "attention.bias_v"}
        assert "no norms for packed documents" in reasons["attention.bias_k"]

    def test_documents_that_attend_to_each_other(self) -> None:
        """gpt-oss does so in transformers: its masks do not look at the positions."""
        model, batch = moe("gpt_oss"), rows_of((1, 24))
        with pytest.raises(gnsfast.ObservationError, match="attend to each other"):
            norms_of(model, of_ids, batch, gnsfast.cu_seqlens(batch[1]))


def moe(family: str) -> nn.Module:
    sizes = dict(num_experts_per_tok=2, **experts.EAGER)
    config = {
        "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4, **sizes),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **SMALL, head_dim=4, num_experts=4, moe_intermediate_size=12, **sizes
        ),
        "gpt_oss": lambda: hf.GptOssConfig(
            **SMALL, head_dim=4, num_local_experts=4, attn_implementation="eager", **sizes
        ),
    }[family]()
    return scattered(hf.AutoModelForCausalLM.from_config(config))


def of_ids(model: nn.Module, batch: Any) -> Tensor:
    ids, places, labels = batch
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts(family: str) -> None:
    model, batch = moe(family), rows_of((1, 24))
    truth = loop(model, of_ids, batch, LENGTHS)
    norms = norms_of(model, of_ids, batch, gnsfast.cu_seqlens(batch[1]))
    assert {n.split(".")[-1] for n in norms} >= {"gate_up_proj", "down_proj"}
    assert any("gate.weight" in n for n in norms)
    assert_norms(norms, truth, rtol=1e-4)
