# SPDX-License-Identifier: Apache-2.0
"""Which labels a language model's loss is a mean over, found out of the loss itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("causal", "tokens", "samples")
IGNORED = -100
ROWS = 1024
"""Tokens of a slice of the logits: 0.5 GB in float32 for a vocabulary of 128k."""


@dataclass(frozen=True)
class Rule:
    """What a loss is a mean over: one of ``LOSSES``; with ``items``, its sum over labels is divided
    by Trainer's ``num_items_in_batch``, which not all models do that take it.
    """

    loss: str
    items: bool

    def counts(self, inputs: Mapping[str, Any]) -> Tensor:
        """Labels that count, for each sample: [B]."""
        targets = targets_of(self.loss, inputs)
        return (targets != IGNORED).reshape(len(targets), -1).sum(1)


def targets_of(loss: str, inputs: Mapping[str, Any]) -> Tensor:
    """The labels that the loss looks at, [B, ...]."""
    if loss == "causal" and isinstance(inputs.get("shift_labels"), Tensor):
        shifted: Tensor = inputs["shift_labels"]
        return shifted
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            "GNSCallback: the batch has no 'labels' to count tokens of. Where the loss is a mean "
            "over samples, say GNSCallback(loss='samples')"
        )
    return labels[..., 1:] if loss == "causal" else labels


def find_rule(
    loss: Tensor,
    outputs: Any,
    inputs: Mapping[str, Any],
    num_items: Tensor | int | None,
    *,
    smoothing: float,
    first: str,
) -> Rule:
    """The rule by which the logits' cross entropy gives ``loss``; ``first`` where several do.

    Raises:
        ValueError: where none does, with what was tried.
    """
    logits = _logits(outputs)
    value = float(loss)
    half = loss.dtype in (torch.float16, torch.bfloat16)
    tolerance = 2e-2 if half else 1e-4
    tried = []
    for name in sorted(("causal", "tokens"), key=lambda name: name != first):
        found = _cross_entropy(name, logits, inputs, smoothing)
        if found is None:
            continue
        total, count = found
        for items, divisor in ((True, num_items), (False, count)):
            if divisor is None:
                continue
            mean = total / float(divisor)
            if abs(mean - value) <= tolerance * abs(mean):
                return Rule(name, items)
            tried.append(f"{name!r} {mean:.6g}{' by num_items_in_batch' if items else ''}")
    raise ValueError(
        f"GNSCallback: the loss of the first micro-batch is {value:.6g}, and the mean cross "
        f"entropy over its labels {', '.join(tried) or 'cannot be had from the outputs'}, so how "
        "samples weigh in it is unknown. An auxiliary loss (a router's balance) has no per-sample "
        "gradient: switch it off. For a mean over samples say GNSCallback(loss='samples'); for one "
        "over labels that are not -100 loss='tokens', or loss='causal' where the model shifts them"
    )


def _logits(outputs: Any) -> Tensor | None:
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if found is None and isinstance(outputs, (tuple, list)):
        found = next((t for t in outputs if isinstance(t, Tensor) and t.ndim > 1), None)
    return found.detach() if isinstance(found, Tensor) else None


def _cross_entropy(
    name: str, logits: Tensor | None, inputs: Mapping[str, Any], smoothing: float
) -> tuple[float, int] | None:
    """The cross entropy summed over labels, and their number; None where shapes do not fit."""
    if logits is None or (name == "causal" and logits.ndim < 3):
        return None
    targets = targets_of(name, inputs)
    if name == "causal" and targets.shape[-1] == logits.shape[-2] - 1:
        logits = logits[..., :-1, :]
    if targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        return None
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    rows = logits.reshape(-1, logits.shape[-1]).split(ROWS)
    for rows_NV, targets_N in zip(rows, targets.reshape(-1).to(logits.device).split(ROWS)):
        total += F.cross_entropy(
            rows_NV.float(),
            targets_N,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing,
        )
    return float(total), int((targets != IGNORED).sum())
