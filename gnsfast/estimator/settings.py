# SPDX-License-Identifier: Apache-2.0
"""The settings of an estimator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast.arguments import check_choice
from gnsfast.combinations import (
    DOCUMENTS,
    GROUPS,
    METRIC,
    MICRO_BATCHES,
    PIPELINE,
    SIGN,
    SPECTRAL,
    refuse,
)


@dataclass(frozen=True)
class Settings:
    """The settings, which stay the same over all updates."""

    source: str
    loss_reduction: str
    grad_scaler: GradScaler | None
    group: "dist.ProcessGroup | None"
    stages: "dist.ProcessGroup | None"
    optimizer: Any = None  # whose metric is measured; None without a metric
    groups: tuple[str, ...] = ()
    dual: tuple[str, ...] = ()  # the dual norms to measure, "sign" and "spectral"
    matrices: frozenset[nn.Parameter] | None = None  # the only ones in the spectral norm
    window: int = 64
    noise_from: str = "samples"  # whose spread is the noise in dual norms
    keep_largest: int = 0  # how many samples with the largest gradients are kept of each update
    unit: str = "sample"
    clusters: bool = False  # whether each micro-batch says which samples belong together

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("auto", "local", "global"))
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        check_choice("noise_from", self.noise_from, ("samples", "micro_batches"))
        if not isinstance(self.keep_largest, int) or self.keep_largest < 0:
            raise ValueError(f"keep_largest must be a number of samples, not {self.keep_largest!r}")
        check_choice("unit", self.unit, ("sample", "micro_batch"))
        if self.micro_batches and not (self.dual or self.by_gradients):
            raise ValueError(
                "noise_from='micro_batches' needs metric='sign' or metric='spectral'. For the "
                "Euclidean noise scale of micro-batches use GradientNoiseScale(model, "
                "unit='micro_batch')."
            )
        of_samples = self.groups or self.clusters or self.keep_largest or self.optimizer is not None
        if self.by_gradients and (self.local or of_samples):
            raise ValueError(
                "unit='micro_batch' compares micro-batches, and looks at no single sample: leave "
                "out source='local', groups, clusters, keep_largest and metric='adam'"
            )
        if self.groups and self.clusters:
            raise NotImplementedError(
                "groups and clusters cannot be measured together, because each takes the sums of "
                "samples. Measure the one without the other."
            )
        if self.local and self.stages is not None:
            raise ValueError(
                "source='local' does not work with pipeline stages: use source='global'"
            )
        if self.local and self.dual:
            raise ValueError(
                f"metric={self.dual[0]!r} needs the gradient of the whole update: use "
                "source='global'"
            )
        refuse(self.features())

    def features(self, documents: bool = False, schedule: bool = False) -> list[str]:
        """The features of ``combinations`` in use. The arguments describe a micro-batch."""
        asked = {
            DOCUMENTS: documents,
            METRIC: self.optimizer is not None,
            SIGN: "sign" in self.dual and not self.micro_batches,
            SPECTRAL: "spectral" in self.dual and not self.micro_batches,
            MICRO_BATCHES: self.micro_batches,
            GROUPS: bool(self.groups or self.clusters),
            PIPELINE: schedule or self.stages is not None,
        }
        return [feature for feature, is_asked in asked.items() if is_asked]

    def check_block(
        self, tokens: Any, cu_seqlens: Any, groups: Any, schedule: Any, ids: Any
    ) -> None:
        """Raise if the arguments of a micro-batch do not go together."""
        if ids is not None and not self.keep_largest:
            raise ValueError(
                "ids name the samples that GradientNoiseScale(keep_largest=16) keeps, and this one "
                "keeps none"
            )
        if schedule is not None and self.keep_largest:
            raise ValueError("keep_largest does not work with a schedule, which splits samples")
        if schedule is not None and self.local:
            raise ValueError("source='local' does not work with a schedule: use source='global'")
        if cu_seqlens is not None or schedule is not None:
            refuse(self.features(cu_seqlens is not None, schedule is not None))
        each = isinstance(tokens, Tensor) and tokens.ndim
        if self.dual and not self.micro_batches and tokens is not None and not each:
            raise ValueError(
                f"metric={self.dual[0]!r} needs the tokens of each sample, not their total: pass "
                "tokens=torch.tensor([...]) with one count for each sample"
            )
        if tokens is not None and getattr(tokens, "ndim", 0) != 1:
            if groups is not None or self.clusters:
                kind = "groups" if groups is not None else "clusters"
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
        return self.source == "auto" and not self.dual and not self.by_gradients

    @property
    def by_gradients(self) -> bool:
        """Whether p comes from the gradients of micro-batches, and there are no probes."""
        return self.unit == "micro_batch"

    @property
    def micro_batches(self) -> bool:
        """Whether dual norms compare micro-batches and processes instead of single samples."""
        return self.noise_from == "micro_batches" or self.by_gradients

    @property
    def takes_norm(self) -> bool:
        """Whether ``update(grad_norm=...)`` may take the place of the gradients."""
        return self.optimizer is None and not self.dual

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


def measured(metric: str | Sequence[str] | None, optimizer: Any, noise_from: str) -> dict[str, Any]:
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
        "noise_from": noise_from,
    }
