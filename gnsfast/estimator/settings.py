# SPDX-License-Identifier: Apache-2.0
"""The settings of an estimator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gnsfast.arguments import check_choice
from gnsfast.combinations import DOCUMENTS, GROUPS, MICRO_BATCHES, refuse
from gnsfast.table import Take


@dataclass(frozen=True)
class Settings:
    """The settings, which stay the same over all updates."""

    source: str
    loss_reduction: str
    grad_scaler: GradScaler | None
    group: "dist.ProcessGroup | None"
    optimizer: Any = None  # whose metric is measured; None without a metric
    groups: tuple[str, ...] = ()
    dual: tuple[str, ...] = ()  # the dual norms to measure, "sign" and "spectral"
    matrices: frozenset[nn.Parameter] | None = None  # the only ones in the spectral norm
    window: int = 64
    keep_largest: int = 0  # how many samples with the largest gradients are kept of each update
    unit: str = "sample"
    gradients: str = "fused"  # who makes those of measured passes, kernels or "torch"
    clusters: bool = False  # whether each micro-batch says which samples belong together
    take: Take | None = None  # what cuts samples out of the batch of the first block

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("update", "local"))
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        if not isinstance(self.keep_largest, int) or self.keep_largest < 0:
            raise ValueError(f"keep_largest must be a number of samples, not {self.keep_largest!r}")
        check_choice("unit", self.unit, ("sample", "micro_batch"))
        of_samples = self.groups or self.clusters or self.keep_largest
        if self.by_gradients and (self.local or of_samples):
            raise ValueError(
                "unit='micro_batch' compares micro-batches, and looks at no single sample: leave "
                "out source='local', groups, clusters and keep_largest"
            )
        if self.groups and self.clusters:
            raise NotImplementedError(
                "groups and clusters cannot be measured together, because each takes the sums of "
                "samples. Measure the one without the other."
            )
        if self.local and self.metrics:
            raise ValueError(
                f"metric={self.metrics[0]!r} needs the gradient of the whole update: use "
                "source='update'"
            )
        refuse(self.features())

    def features(self, documents: bool = False) -> list[str]:
        """The features of ``combinations`` in use, in a micro-batch of ``documents`` or not."""
        asked = {
            DOCUMENTS: documents,
            MICRO_BATCHES: bool(self.metrics) or self.by_gradients,
            GROUPS: bool(self.groups or self.clusters),
        }
        return [feature for feature, is_asked in asked.items() if is_asked]

    def check_block(self, block: Any, tokens: Any, cu_seqlens: Any, rows: Any) -> None:
        """Raise if the arguments of a micro-batch do not go together."""
        if self.local and block.num_samples < 2:
            raise ValueError(
                "source='local' needs two samples in each micro-batch, because it measures each "
                "one by itself. With one sample in a micro-batch use source='update'."
            )
        if block.ids is not None and not self.keep_largest:
            raise ValueError(
                "ids name the samples that GradientNoiseScale(keep_largest=16) keeps, and this one "
                "keeps none"
            )
        if cu_seqlens is not None or rows is not None:
            refuse(self.features(documents=True))
        if tokens is not None and getattr(tokens, "ndim", 0) != 1:
            if block.groups is not None or self.clusters:
                kind = "groups" if block.groups is not None else "clusters"
                raise ValueError(
                    f"With {kind}, tokens must be a tensor with one count for each sample."
                )
        if cu_seqlens is not None and tokens is None:
            raise ValueError(
                "With cu_seqlens pass tokens=..., the tokens of each document that the loss "
                "counts: cu_seqlens.diff() - 1 for next-token losses, 0 for padding. If the loss "
                "is a mean over documents, pass 1 for each."
            )

    @property
    def by_probe(self) -> bool:
        """Whether |G|² of an update of one micro-batch on one process comes from the probes."""
        return not self.metrics and not self.by_gradients

    @property
    def by_gradients(self) -> bool:
        """Whether p comes from the gradients of micro-batches, and there are no probes."""
        return self.unit == "micro_batch"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics beside the Euclidean one, whose noise is that of micro-batches."""
        return (*(("adam",) if self.optimizer is not None else ()), *self.dual)

    @property
    def sides(self) -> dict[str, bool]:
        """What may be measured beside the norms, and whether it is asked for."""
        return {
            "micro_batches": self.by_gradients,
            "adam": self.optimizer is not None,
            "sign": "sign" in self.dual,
            "spectral": "spectral" in self.dual,
            "groups": bool(self.groups),
            "clusters": self.clusters,
            "largest": self.keep_largest > 0,
        }

    @property
    def local(self) -> bool:
        return self.source == "local"


def ordered_names(names: Any) -> tuple[str, ...]:
    """The names of groups as a tuple. A set is refused: all processes need the same order."""
    if isinstance(names, (str, set, frozenset)) or len(set(names)) < len(tuple(names)):
        raise ValueError(
            f"groups must be a list of different names in a fixed order, not {names!r}"
        )
    return tuple(names)


def measured(metric: str | Sequence[str] | None, optimizer: Any) -> dict[str, Any]:
    """The fields of ``Settings`` that say which noise scales are measured beside the Euclidean."""
    metrics = () if metric is None else (metric,) if isinstance(metric, str) else tuple(metric)
    for each in metrics:
        check_choice("metric", each, ("adam", "sign", "spectral"))
    if "adam" in metrics and optimizer is None:
        raise ValueError(
            "metric='adam' needs the optimizer: GradientNoiseScale(model, metric='adam', "
            "optimizer=optimizer)"
        )
    if optimizer is not None and not {"adam", "spectral"} & {*metrics}:
        raise ValueError(
            "optimizer=... is used only with metric='adam' and metric='spectral'. Name the metric "
            "too, or leave the optimizer out."
        )
    matrices = None
    if optimizer is not None and "spectral" in metrics and "adam" not in metrics:
        matrices = frozenset(p for group in optimizer.param_groups for p in group["params"])
    return {
        "optimizer": optimizer if "adam" in metrics else None,
        "dual": tuple(each for each in ("sign", "spectral") if each in metrics),
        "matrices": matrices,
    }
