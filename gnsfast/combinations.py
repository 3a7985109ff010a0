# SPDX-License-Identifier: Apache-2.0
"""The one table of what can be measured together: which features each layer supports, and which
features exclude each other. Layers, plans, the slab and the estimator use it to refuse the rest.
"""

import functools
from collections.abc import Iterable
from itertools import combinations

from gnsfast.tensors import is_dtensor

DOCUMENTS = "documents of packed rows (cu_seqlens)"
METRIC = "Adam's metric (metric='adam')"
SIGN = "the sign noise scale (metric='sign')"
SPECTRAL = "the spectral noise scale (metric='spectral')"
MICRO_BATCHES = "noise from micro-batches (noise_from='micro_batches')"
GROUPS = "groups of samples"
TIED = "a weight that it shares"
REPEATED = "several calls in one pass"
TENSOR_PARALLEL = "tensor parallelism"
PIPELINE = "pipeline stages"
SHARDED = "sharded parameters (FSDP2)"
COMPILED = "torch.compile"
CUDA = "a GPU"

FEATURES = (
    *(REPEATED, DOCUMENTS, METRIC, SIGN, SPECTRAL, MICRO_BATCHES, GROUPS, TIED),
    *(TENSOR_PARALLEL, PIPELINE, SHARDED, COMPILED, CUDA),
)

ALWAYS = {PIPELINE, COMPILED, CUDA, MICRO_BATCHES}
MEASURES = {DOCUMENTS, METRIC, GROUPS}
LAYERS: dict[str, set[str]] = {
    "linear": {*MEASURES, SIGN, SPECTRAL, *ALWAYS, TIED, REPEATED, TENSOR_PARALLEL},
    "embedding": {*MEASURES, SIGN, *ALWAYS, TIED, REPEATED, TENSOR_PARALLEL},
    "layer_norm": {*MEASURES, SIGN, *ALWAYS, REPEATED, TENSOR_PARALLEL},
    "rms_norm": {*MEASURES, SIGN, *ALWAYS, REPEATED, TENSOR_PARALLEL},
    "embedding_bag": {*ALWAYS},
    "copies": {METRIC, MICRO_BATCHES, GROUPS, PIPELINE, CUDA, REPEATED},
    "bilinear": {*MEASURES, *ALWAYS, REPEATED},
    "channel_norm": {METRIC, GROUPS, *ALWAYS},
    "linear_cross_entropy": {DOCUMENTS, *ALWAYS, TIED},
    "conv": {*ALWAYS, REPEATED},
    "in_projection": {DOCUMENTS, *ALWAYS},
    "out_projection": {DOCUMENTS, *ALWAYS},
    "attention": {*ALWAYS},
    "experts": {DOCUMENTS, *ALWAYS},
    "router": {DOCUMENTS, *ALWAYS},
    "replay": {*ALWAYS, REPEATED},
}
"""The features that each layer supports. Every layer measures its samples and their sum."""

WHOLE = "a hook must see the whole gradient of one process, as under DistributedDataParallel"
OUTSIDE = "its sums are outside of the graph, so the estimator measures it in eager mode"

APART: dict[frozenset[str], str] = {
    frozenset((DOCUMENTS, METRIC)): "",
    frozenset((DOCUMENTS, GROUPS)): "",
    frozenset((METRIC, GROUPS)): "",
    frozenset((DOCUMENTS, TENSOR_PARALLEL)): "",
    frozenset((METRIC, TENSOR_PARALLEL)): "",
    frozenset((GROUPS, TENSOR_PARALLEL)): "",
    frozenset((TIED, TENSOR_PARALLEL)): "",
    frozenset((REPEATED, TENSOR_PARALLEL)): "",
    frozenset(
        (REPEATED, COMPILED)
    ): "a graph cannot know which call is the last, so leave the layer out of torch.compile",
    frozenset((DOCUMENTS, PIPELINE)): "",
    frozenset((METRIC, PIPELINE)): "",
    frozenset((GROUPS, PIPELINE)): "",
    frozenset((REPEATED, PIPELINE)): "",
    **{frozenset((SIGN, each)): "" for each in (DOCUMENTS, GROUPS, TENSOR_PARALLEL, PIPELINE)},
    **{frozenset((SPECTRAL, each)): "" for each in (DOCUMENTS, GROUPS, TENSOR_PARALLEL, PIPELINE)},
    frozenset((SPECTRAL, TIED)): "",
    frozenset((SIGN, COMPILED)): OUTSIDE,
    frozenset((SPECTRAL, COMPILED)): OUTSIDE,
    **{frozenset((MICRO_BATCHES, each)): WHOLE for each in (SHARDED, TENSOR_PARALLEL, PIPELINE)},
}
"""Pairs that no layer supports together -> the reason, or an empty string."""

APART_IN: dict[str, set[frozenset[str]]] = {
    "linear": {frozenset((DOCUMENTS, TIED, CUDA)), frozenset((REPEATED, DOCUMENTS, TIED))},
    "embedding": {frozenset((DOCUMENTS, TIED, CUDA))},
    "linear_cross_entropy": {frozenset((DOCUMENTS, TIED))},
}
"""Layer -> the combinations that it does not support, in addition to those in ``APART``."""

REMEDIES = {
    "linear_cross_entropy": "Compute the loss from the head's output",
    "attention": "Leave the sinks out: gnsfast.configure(model, exclude=['*.sinks'])",
}
"""Layer -> the remedy, if there is a better one than leaving the parameter out."""


def reason(layer: str | None, features: Iterable[str]) -> str:
    """Why ``layer`` (or any layer, for None) does not support all of ``features`` together. Empty
    if it does.
    """
    return _reason(layer, frozenset(features))


@functools.cache  # each micro-batch asks
def _reason(layer: str | None, together: frozenset[str]) -> str:
    asked = [f for f in FEATURES if f in together]
    kind = "the model" if layer is None else layer
    if layer is not None:
        for feature in asked:
            if feature not in LAYERS[layer]:
                return f"{kind} has no norms for {feature}"
        for apart in APART_IN.get(layer, ()):
            if apart <= together:
                return f"{kind} has no norms for {_listed(f for f in asked if f in apart)}"
    for pair in combinations(asked, 2):
        if (why := APART.get(frozenset(pair))) is not None:
            return f"{kind} has no norms for {_listed(pair)}" + (f": {why}" if why else "")
    return ""


def refuse(layer: str | None, features: Iterable[str], module: str | None = None) -> None:
    """Raise NotImplementedError if there is a ``reason``. The error names ``module``."""
    if why := reason(layer, features):
        if module is None:
            raise NotImplementedError(f"{why}. Measure the one without the other.")
        leave_out = f"Leave it out: gnsfast.configure(model, exclude=[{module!r}])"
        raise NotImplementedError(f"{module}: {why}. {REMEDIES.get(layer or '', leave_out)}.")


def tensor_parallel(*tensors: object) -> tuple[str, ...]:
    """``(TENSOR_PARALLEL,)`` if any of ``tensors`` is a DTensor, else empty."""
    return (TENSOR_PARALLEL,) if any(map(is_dtensor, tensors)) else ()


def _listed(features: Iterable[str]) -> str:
    return " together with ".join(features)
