# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.MultiheadAttention``, and torch's Transformer layers around it: torch's outputs and
gradients, and every sample's norms, for every option.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention import B, E, H, L, S, assert_as_in_torch, inputs_for
from torch import nn


def torch_inputs() -> Iterator[Any]:
    """Torch's own module tests: constructor and forward arguments of attention and Transformers."""
    from torch.testing._internal import common_modules

    torch.manual_seed(0)  # else the inputs depend on what was collected before
    wanted = ("nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer")
    for info in common_modules.module_db:
        if info.name not in (*wanted, "nn.TransformerEncoder", "nn.Transformer"):
            continue
        layer = info.name in wanted
        for training in (True, False) if layer else (True,):  # eval differs in the layers alone
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            )
            for i, one in enumerate(inputs):
                make, call = one.constructor_input, one.forward_input
                mode = "train" if training else "eval"
                yield pytest.param(
                    info.module_cls, make, call, training, id=f"{info.name[3:]}-{mode}-{i}"
                )


@pytest.mark.second
@pytest.mark.parametrize("cls, make, call, training", list(torch_inputs()))
def test_torch_inputs(cls: Any, make: Any, call: Any, training: bool) -> None:
    torch.manual_seed(0)
    model = cls(*make.args, **make.kwargs).train(training)
    attention = next(m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    unbatched = call.args[0].ndim == 2
    dim = 0 if attention.batch_first else 1
    assert_as_in_torch(model, call.args, call.kwargs, dim=None if unbatched else dim)


CONSTRUCTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": dict(bias=False),
    "kdim and vdim": dict(kdim=6, vdim=10),
    "bias_k, bias_v": dict(add_bias_kv=True),
    "zero attention": dict(add_zero_attn=True),
    "all": dict(kdim=6, vdim=10, add_bias_kv=True, add_zero_attn=True, dropout=0.2),
    "dropout": dict(dropout=0.3),
}


def masks(kind: str, tokens: int) -> dict[str, Any]:
    """Boolean and float masks; the last token of one sample is padding."""
    padding = torch.zeros(B, tokens, dtype=torch.bool)
    padding[1, -1] = True
    square = torch.zeros(L, tokens, dtype=torch.bool)
    square[0, -1] = True
    each = torch.rand(B * H, L, tokens) < 0.3
    each[..., 0] = False
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    return {
        "none": {},
        "padding": dict(key_padding_mask=padding),
        "float padding": dict(key_padding_mask=torch.randn(B, tokens)),
        "mask": dict(attn_mask=square),
        "mask for each head": dict(attn_mask=each),
        "both": dict(attn_mask=each, key_padding_mask=padding),
        "both, float": dict(attn_mask=torch.randn(L, tokens), key_padding_mask=padding.float()),
        "causal": dict(attn_mask=causal, is_causal=True),
        "causal, padded": dict(attn_mask=causal, is_causal=True, key_padding_mask=padding.float()),
    }[kind]


MASKS = ("none", "padding", "float padding", "mask", "mask for each head", "both", "both, float")


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("kind", ["self", "memory", "value is query", "three"])
@pytest.mark.parametrize("made", CONSTRUCTED)
def test_constructor(made: str, kind: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=batch_first, **CONSTRUCTED[made])
    if layer.bias_k is None or layer.in_proj_bias is not None:
        nn.init.normal_(layer.out_proj.weight)
    if not layer._qkv_same_embed_dim and kind != "three":
        pytest.skip("one tensor has one width")
    inputs = inputs_for(kind, layer, batch_first)
    for need_weights in (True, False):
        kwargs = dict(need_weights=need_weights, average_attn_weights=batch_first)
        dim = 0 if batch_first else 1
        assert_as_in_torch(copy.deepcopy(layer), inputs, kwargs, dim=dim)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("made", ["plain", "all"])
@pytest.mark.parametrize("kind", [*MASKS, "causal", "causal, padded"])
def test_masks(kind: str, made: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=batch_first, **CONSTRUCTED[made])
    causal = kind.startswith("causal")
    q, k, v = inputs_for("self" if made == "plain" else "three", layer, batch_first)
    if not causal and made == "plain":
        k = v = inputs_for("memory", layer, batch_first)[1]
    elif causal and made == "all":
        k, v = (torch.cat([t, t], int(batch_first)).narrow(int(batch_first), 0, L) for t in (k, v))
    options = masks(kind, L if causal else S)
    for need_weights in (True, False):
        kwargs = dict(need_weights=need_weights, **options)
        assert_as_in_torch(copy.deepcopy(layer), (q, k, v), kwargs, dim=0 if batch_first else 1)
