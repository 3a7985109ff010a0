# SPDX-License-Identifier: Apache-2.0
"""timm's architectures for ``python -m benchmarks families``, small ones of each kind."""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import nn

KIND = "image, timm"
SIZE = 64
"""Of the images' sides, where a model does not say otherwise."""

VIT = {"img_size": 32, "patch_size": 8, "depth": 2}
WINDOWS = {
    **{"img_size": 64, "window_size": 4, "embed_dim": 24},
    **{"depths": (2, 2), "num_heads": (2, 2)},
}
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("beit_base_patch16_224 convit_tiny", {**VIT, "embed_dim": 64, "num_heads": 2}),
    (
        "botnet26t_256 coat_tiny coatnet_nano_rw_224 maxvit_nano_rw_256 nest_tiny visformer_tiny "
        "gmixer_12_224 mixer_s16_224 resmlp_12_224",
        {"img_size": 64},
    ),
    (
        "cait_xxs24_224 deit3_small_patch16_224 deit_tiny_distilled_patch16_224 "
        "eva02_tiny_patch14_224 vit_relpos_small_patch16_224 vit_tiny_patch16_224",
        VIT,
    ),
    ("gcvit_xxtiny levit_128s", {"img_size": 224}),
    ("sequencer2d_s", {"img_size": 56}),
    ("swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256", WINDOWS),
    ("xcit_nano_12_p16_224", {"img_size": 32, "depth": 2}),
)
"""Settings that make architectures small."""

AS_THEY_ARE = """
    caformer_s18 convmixer_768_32 convnext_atto convnext_atto_rms convnextv2_atto
    crossvit_tiny_240 davit_tiny densenet121 dla34 edgenext_xx_small efficientformer_l1
    efficientnet_b0 efficientvit_b0 fastvit_t8 focalnet_tiny_srf gcresnet33ts ghostnet_100
    hgnetv2_b0 hiera_tiny_224 hrnet_w18_small inception_next_atto lcnet_035 mambaout_femto
    mnasnet_small mobilenetv3_small_050 mobilenetv4_conv_small_035 mobilevit_xxs mvitv2_tiny
    nf_resnet26 pit_ti_224 poolformer_s12 pvt_v2_b0 regnety_002 repvit_m0_9 resnest14d resnet10t
    resnet18 rexnet_100 skresnet18 starnet_s1 tiny_vit_5m_224 tinynet_e tnt_s_patch16_224
    twins_svt_small volo_d1_224 vovnet39a
"""
"""Architectures that are small enough as they are."""

ARCHITECTURES: dict[str, dict[str, Any]] = dict(
    sorted(
        (name, given) for names, given in (*SETTINGS, (AS_THEY_ARE, {})) for name in names.split()
    )
)
"""Architecture -> settings. All have ten classes."""


def version() -> str | None:
    """The version of timm; None where there is none."""
    if importlib.util.find_spec("timm") is None:
        return None
    return importlib.metadata.version("timm")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model with random weights, away from the zeros and ones of initialisation, and images.

    Batch norms have seen images: the running statistics of a new one let a deep network overflow.
    """
    import timm

    settings = ARCHITECTURES[name]
    model = timm.create_model(name, num_classes=10, **settings)
    size = settings.get("img_size") or _fixed_size(model) or SIZE
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
        model.train()
        for _ in range(3):
            model(torch.randn(8, 3, size, size))
    model.eval()
    for module in model.modules():  # LeViT's: in evaluation they keep a graph from pass to pass
        if hasattr(module, "attention_bias_cache"):
            module.training = True
    return model, {"x": torch.randn(3, 3, size, size)}


def _fixed_size(model: Any) -> int:
    """The side of the images of a model that takes no other; 0 if it takes any."""
    config = model.pretrained_cfg
    return int(config["input_size"][-1]) if config.get("fixed_input_size") else 0
