# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers' architectures, with a batch each. One table of sizes serves
all of them; what a configuration needs beside it is in ``exceptions``.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from benchmarks.families import of_timm
from benchmarks.families.exceptions import INPUTS, SPECIAL, TRAINING

B, T, V = 3, 7, 64
HEADS, HEAD_DIM = 4, 8
IMAGE = 32
"""Pixels along each side, where a configuration has no size of its own."""

MAPPINGS = {
    "text": ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM"),
    "audio": ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION"),
    "image": ("IMAGE_CLASSIFICATION",),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
}
"""The heads of each kind of input, the one with most layers first: it stands for the others."""

SIZES = (
    (r"vocab|^n_words$", V),
    (r"positions?(_embeddings)?$|max_(seq|length|time)|n_ctx|context_length", 64),
    (r"(head_dim|head_size|d_kv|d_head|dim_head|rotary_dim|rope_dim)$", HEAD_DIM),
    (r"(key_value|kv)_heads$|^n_group$|n_?groups$", 2),
    (r"heads$|^n_head$", HEADS),
    (r"_offset$|dense_replace$|dense_layers$", 1),
    (r"layers$|^n_layer$|depth$|_interval$|_period$", 2),
    (r"(per_tok|topk|top_k|_k)$", 2),
    (r"experts$", 4),
    (r"^topk_group$", 1),
    (r"intermediate|ffn|d_ff$|_inner$|mlp_dim|inner_dim", 48),
    (r"image_size", IMAGE),
    (r"patch_size", 8),
    (r"mel_bins|feat_per_channel", 16),
    (r"window", 4),
    (r"conv_pos_embeddings$|_state$", 8),
    (r"_groups$", 4),
    (r"_rank$", 16),
    (r"size$|dim$|width$|channels$|filters$|d_model|n_embd|hidden", 32),
)
"""What an integer of a configuration becomes where its name matches first, unless it is smaller."""

LISTS = (
    (r"^conv_(dim|kernel|stride)$", lambda sizes: [min(v, 16) for v in sizes[:3]]),
    (r"depth|layers|blocks", lambda sizes: [min(v, 2) for v in sizes]),
    (r"heads", lambda sizes: [min(v, 2) for v in sizes]),
    (r"size|dim|channels|embed", lambda sizes: [min(v, 32) for v in sizes]),
)
"""The same for lists of integers."""


class Family(NamedTuple):
    """An architecture: its kind of input, transformers' name for it, and its class."""

    kind: str
    model_type: str
    name: str


class Built(NamedTuple):
    """A model without dropout, and a batch for it."""

    model: nn.Module
    inputs: dict[str, Any]


def families() -> Iterator[Family]:
    """Every architecture of the installed transformers with one of ``MAPPINGS``, each class once,
    then those of timm, if it is installed.

    A model of text that is also part of a larger one is built by its own configuration.
    """
    seen = set()
    for kind, heads in MAPPINGS.items():
        types = set()
        for head in heads:
            names = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
            classes = {t: n if isinstance(n, str) else n[0] for t, n in names.items()}
            for model_type in sorted(classes, key=lambda t: _namesake(t, classes[t])):
                name = classes[model_type]
                if name not in seen and model_type not in types:
                    seen.add(name)
                    types.add(model_type)
                    yield Family(kind, model_type, name)
    for name in of_timm.ARCHITECTURES if of_timm.version() else ():
        yield Family(of_timm.KIND, "timm", name)


def _namesake(model_type: str, name: str) -> tuple[bool, bool]:
    """Sorts first those that share a class with others but have its name, or only its text."""
    named = name.lower().startswith(re.sub("[-_]", "", model_type))
    return not model_type.endswith("_text"), not named


def build(family: Family) -> Built:
    """The model with random weights, away from the zeros and ones of initialisation."""
    if family.kind == of_timm.KIND:
        return Built(*of_timm.build(family.name))
    cls = getattr(transformers, family.name)
    config = small(cls.config_class, SPECIAL.get(family.name, {}))
    if family.kind == "text" and hasattr(config, "is_decoder") and "Causal" in family.name:
        config.is_decoder = True
    config._experts_implementation = "eager"  # grouped_mm has no float64
    model = cls(config).train(family.name in TRAINING)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return Built(model, batch(family, model))


def small(cls: Any, given: dict[str, Any]) -> PreTrainedConfig:
    """A configuration whose sizes are those of ``SIZES``, in its parts too; ``given`` ones stay."""
    default = {
        f.name: f.default_factory() if f.default is MISSING else f.default
        for f in fields(cls)
        if f.default is not MISSING or f.default_factory is not MISSING
    }
    values = {name: shrunk(name, value) for name, value in default.items()}
    values = {name: value for name, value in values.items() if value is not default[name]}
    values |= layers(cls, given)
    if default.get("num_attention_heads", 0) == default.get("num_key_value_heads", 1):
        values["num_key_value_heads"] = HEADS
    if "head_dim" in default:
        values["head_dim"] = HEAD_DIM
    for name, spec in cls.sub_configs_defaults.items():
        if default.get(name) is None and spec.optional and name not in given:
            continue
        part = spec.config_class
        if not issubclass(part, PreTrainedConfig):
            part = CONFIG_MAPPING[given.get(name, {}).get("model_type", spec.model_type)]
        own = {key: shrunk(key, value) for key, value in spec.init_kwargs.items()}
        values[name] = small(part, own | given.get(name, {}))
    values |= {k: v for k, v in given.items() if k not in cls.sub_configs_defaults}
    if "use_cache" in default:
        values["use_cache"] = False
    config: PreTrainedConfig = cls(**values)
    return config


def layers(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where a configuration lists what its layers are; two at least."""
    whole, alias = cls(), cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = vars(whole).get(alias)
    named = {f.name: vars(whole).get(f.name) for f in fields(cls) if f.name not in given}
    kinds = {name: v for name, v in named.items() if isinstance(v, list) and len(v) == count}
    if not kinds or alias in given:
        return {}
    first: dict[str, int] = {}
    for i, kind in enumerate(zip(*kinds.values())):
        first.setdefault(str(kind), i)
    chosen = [*first.values()] if len(first) > 1 else [0, 1]
    return {alias: len(chosen), **{name: [v[i] for i in chosen] for name, v in kinds.items()}}


def shrunk(name: str, value: Any) -> Any:
    """A value of a configuration at its small size."""
    if re.search(r"_(id|index|idx)$", name) or name.endswith("_token_ids"):
        return token(name, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return next((min(value, size) for rule, size in SIZES if re.search(rule, name)), value)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return next((shrink(value) for rule, shrink in LISTS if re.search(rule, name)), value)
    return value


def token(name: str, value: Any) -> Any:
    """A special token that the small vocabulary does not have becomes one of its last 16."""
    if isinstance(value, (list, tuple)):
        return [token(name, v) for v in value]
    large = isinstance(value, int) and not isinstance(value, bool) and value >= V
    return V - 1 - sum(name.encode()) % 16 if large else value


def batch(family: Family, model: nn.Module) -> dict[str, Any]:
    """Random inputs by the names that the model's forward takes. No token is special."""
    config: Any = model.config
    takes = signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    if "input_ids" in takes and (family.kind != "audio" or "input_features" not in takes):
        inputs["input_ids"] = tokens(B, T)
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = tokens(B, T - 2)
    if "image" in family.kind and "pixel_values" in takes:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or IMAGE
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.randn(B, getattr(vision, "num_channels", 3), *sides)
    if family.kind == "audio" and "input_features" in takes:
        inputs["input_features"] = torch.randn(B, 40, 16)
    elif family.kind == "audio" and "input_values" in takes:
        inputs["input_values"] = torch.randn(B, 400)
    inputs |= INPUTS.get(family.name, lambda config: {})(config)
    return {name: value for name, value in inputs.items() if value is not None}


def tokens(*shape: int) -> Tensor:
    return torch.randint(16, V - 16, shape)
