# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: an attention module of transformers that owns sinks."""

import copy
import pickle

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from tiny_models import B, T, gpt_oss, loss_of, scattered
from torch import nn

import gnsfast


def converted() -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """Plain, converted, and a batch in which one sample ends in padding."""
    model, batch = gpt_oss()
    plain = copy.deepcopy(scattered(model))
    batch["attention_mask"] = torch.ones(B, T, dtype=torch.int64)
    batch["attention_mask"][1, -2:] = 0
    return plain, model, batch


def test_sinks() -> None:
    """Outputs and gradients as in transformers, and the norms of single samples, by a kernel."""
    plain, model, batch = converted()
    assert torch.equal(loss_of(model, batch), loss_of(plain, batch))
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss = loss_of(model, batch)
        loss.backward()
    want = loss_of(plain, batch)
    want.backward()
    torch.testing.assert_close(loss, want)
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=n)
    loop = loop_sqnorms(plain, loss_of, batch, B)
    assert_norms(norms, loop)
    rows = {r.parameter: r for r in gnsfast.coverage(model).rows}
    assert {rows[f"model.layers.{i}.self_attn.sinks"].route for i in (0, 1)} == {"attention"}
    assert model.config._attn_implementation == "eager"


def test_frozen_sinks() -> None:
    """Without a trainable sink the module is transformers' own."""
    _, model, batch = converted()
    for n, p in model.named_parameters():
        p.requires_grad_("sinks" not in n)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss_of(model, batch).backward()
    assert not [n for n in norms if "sinks" in n]


@pytest.mark.second
def test_other_implementations_are_refused() -> None:
    model, batch = gpt_oss(attn_implementation="flex_attention")
    with pytest.raises(gnsfast.ObservationError, match=r"self_attn: .*'flex_attention'"):
        with gnsfast.per_sample_sqnorms(model, B):
            loss_of(model, batch)


def test_dropout_is_refused() -> None:
    model, batch = gpt_oss()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    model.train()
    with pytest.raises(gnsfast.ObservationError, match=r"dropout \(0.1\)"):
        with gnsfast.per_sample_sqnorms(model, B):
            loss_of(model, batch)
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "sinks"))


def test_attention_weights_are_refused() -> None:
    """They would be missing in silence, and a loss on them too."""
    _, model, batch = converted()
    with pytest.raises(gnsfast.ObservationError, match="attention weights as an output"):
        with gnsfast.per_sample_sqnorms(model, B):
            model(**batch, output_attentions=True)


def test_copies() -> None:
    _, model, batch = converted()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(loss_of(twin, batch), loss_of(model, batch))
        with gnsfast.per_sample_sqnorms(twin, B) as norms:
            loss_of(twin, batch).backward()
        assert "model.layers.0.self_attn.sinks" in norms
