# SPDX-License-Identifier: Apache-2.0
"""The one table of what can be measured together. Plans and the estimator refuse the rest by it.

Every parameter has every measure, whatever functions take it. Only measures and parallelism exclude
each other, and kernels that are called by themselves, as in compiled code, measure less.
"""

import functools
from collections.abc import Iterable
from itertools import combinations

DOCUMENTS = "samples of unequal numbers of rows (cu_seqlens, rows)"
MICRO_BATCHES = "noise from micro-batches (metric='adam', 'sign', 'spectral')"
GROUPS = "groups of samples (or clusters)"
TIED = "a weight that it shares"
REPEATED = "several uses in one pass"
TENSOR_PARALLEL = "tensor parallelism"
SHARDED = "sharded parameters (FSDP2)"
COMPILED = "torch.compile"
CUDA = "a GPU"

FEATURES = (
    *(REPEATED, DOCUMENTS, MICRO_BATCHES, GROUPS, TIED),
    *(TENSOR_PARALLEL, SHARDED, COMPILED, CUDA),
)

WHOLE = "a hook must see the whole gradient of one process, as under DistributedDataParallel"

APART: dict[frozenset[str], str] = {
    **{frozenset((TENSOR_PARALLEL, each)): "" for each in (DOCUMENTS, GROUPS, TIED, REPEATED)},
    frozenset((REPEATED, COMPILED)): "a graph cannot know which use is the last",
    **{frozenset((MICRO_BATCHES, each)): WHOLE for each in (SHARDED, TENSOR_PARALLEL)},
}
"""Pairs that do not go together -> the reason, or an empty string."""

_MEASURES = {DOCUMENTS, GROUPS}
_EVERYWHERE = {COMPILED, CUDA}
ALONE: dict[str, set[str]] = {
    "linear": {*_MEASURES, TIED, TENSOR_PARALLEL, *_EVERYWHERE},
    "embedding": {*_MEASURES, TIED, TENSOR_PARALLEL, *_EVERYWHERE},
    "layer_norm": {*_MEASURES, TENSOR_PARALLEL, *_EVERYWHERE},
    "rms_norm": {*_MEASURES, TENSOR_PARALLEL, *_EVERYWHERE},
    "bilinear": {*_MEASURES, *_EVERYWHERE},
    "channel_norm": {GROUPS, *_EVERYWHERE},
    "linear_cross_entropy": {DOCUMENTS, TIED, *_EVERYWHERE},
    "experts": {DOCUMENTS, *_EVERYWHERE},
}
"""What kernels measure by themselves. Those that are not here measure nothing beside norms."""

ALONE_APART = {
    "linear": {frozenset((DOCUMENTS, TIED, CUDA)), frozenset((DOCUMENTS, TIED, GROUPS))},
    "embedding": {frozenset((DOCUMENTS, TIED, CUDA)), frozenset((DOCUMENTS, TIED, GROUPS))},
    "linear_cross_entropy": {frozenset((DOCUMENTS, TIED))},
}
"""What a kernel does not measure together by itself, in addition to ``APART``."""


@functools.cache  # each micro-batch asks
def _reason(kernel: str | None, together: frozenset[str]) -> str:
    asked = [f for f in FEATURES if f in together]
    kind = "the model" if kernel is None else kernel
    if kernel is not None:
        for feature in asked:
            if feature not in ALONE.get(kernel, _EVERYWHERE):
                return f"{kind} has no norms for {feature}"
        for apart in ALONE_APART.get(kernel, ()):
            if apart <= together:
                return f"{kind} has no norms for {_listed(f for f in asked if f in apart)}"
    for pair in combinations(asked, 2):
        if (why := APART.get(frozenset(pair))) is not None:
            return f"{kind} has no norms for {_listed(pair)}" + (f": {why}" if why else "")
    return ""


def reason(features: Iterable[str], kernel: str | None = None) -> str:
    """Why all of ``features`` cannot be measured together, or not by a ``kernel`` by itself. Empty
    if they can.
    """
    return _reason(kernel, frozenset(features))


def refuse(features: Iterable[str], kernel: str | None = None, module: str | None = None) -> None:
    """Raise NotImplementedError if there is a ``reason``. The error names the ``module``."""
    if not (why := reason(features, kernel)):
        return
    if module is None:
        raise NotImplementedError(f"{why}. Measure the one without the other.")
    raise NotImplementedError(
        f"{module}: {why}. Leave it out: gnsfast.configure(model, exclude=[{module!r}])."
    )


def _listed(features: Iterable[str]) -> str:
    return " together with ".join(features)
