# SPDX-License-Identifier: Apache-2.0
"""Finds the samples of a Trainer's batch, and which labels the loss is a mean over."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.functional import cu_seqlens

LOSSES = ("causal", "tokens", "samples")
IGNORED = -100
ROWS = 1024
"""Tokens in a slice of the logits, which takes 0.5 GB in float32 for a vocabulary of 128k."""
COMPARED = 8
"""How many micro-batches are compared at most while none of them has settled the rule."""


@dataclass(frozen=True)
class Rule:
    """What a loss is a mean over: one of ``LOSSES``. With ``items``, its sum over labels is divided
    by Trainer's ``num_items_in_batch``. Some models take that number but do not divide by it.
    """

    loss: str
    items: bool

    def counts(self, inputs: Mapping[str, Any], starts: Tensor | None = None) -> Tensor:
        """How many labels count, for each sample [B]: a row, or with ``starts``, the ``cu_seqlens``
        of packed rows, a document.
        """
        counted = targets_of(self.loss, inputs) != IGNORED
        if starts is None:
            return counted.reshape(len(counted), -1).sum(1)
        T = int(starts[-1]) // len(counted)  # the last position of a row may predict nothing
        listed = F.pad(counted, (0, T - counted.shape[1])).flatten()
        before = F.pad(listed.cumsum(0), (1, 0))
        return before[starts.to(before.device).long()].diff()


def targets_of(loss: str, inputs: Mapping[str, Any]) -> Tensor:
    """The labels that the loss uses, [B, ...]."""
    if loss == "causal" and isinstance(inputs.get("shift_labels"), Tensor):
        shifted: Tensor = inputs["shift_labels"]
        return shifted
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            "GNSCallback: the batch has no 'labels', so the tokens of a sample cannot be counted. "
            "If the loss is a mean over samples, pass GNSCallback(loss='samples')"
        )
    return labels[..., 1:] if loss == "causal" else labels


class RuleSearch:
    """The rules by which the cross entropy of the logits gave every loss that was compared.

    A micro-batch settles the search if one rule is left and the mean over samples of their token
    means differs from the loss. They do not differ where all samples have equally many labels.
    Until the search is settled, it compares the first ``COMPARED`` micro-batches. Later it compares
    one micro-batch after each ``again()``.
    """

    def __init__(self) -> None:
        self._rules: list[Rule] | None = None
        self._left = COMPARED

    @property
    def due(self) -> bool:
        """Whether the next micro-batch is compared, which waits for the device."""
        return self._left > 0

    def again(self) -> None:
        self._left = max(1, self._left)

    def compare(
        self,
        loss: Tensor,
        outputs: Any,
        inputs: Mapping[str, Any],
        num_items: Tensor | int | None,
        *,
        smoothing: float,
        first: str,
    ) -> Rule:
        """The rule by which the logits give ``loss`` and the earlier ones; of several, the one
        named ``first``.

        Raises:
            ValueError: if none does; it lists what was tried.
        """
        which = "the first micro-batch" if self._rules is None else "a later micro-batch"
        value, logits = float(loss), _logits(outputs)
        half = loss.dtype in (torch.float16, torch.bfloat16)
        relative = 2e-2 if half else 1e-4
        names = sorted(("causal", "tokens"), key=lambda name: name != first)
        sums = {name: _cross_entropy(name, logits, inputs, smoothing) for name in names}
        if self._rules is None:
            kinds = (False,) if num_items is None else (True, False)
            self._rules = [Rule(n, k) for n in names if sums[n] is not None for k in kinds]
        left, tried, settled = [], [], False
        for rule in self._rules:
            if (found := sums[rule.loss]) is None:
                continue
            if found.count == 0 or not math.isfinite(value):  # it excludes nothing
                left.append(rule)
                continue
            divisor = float(num_items) if rule.items and num_items is not None else found.count
            # 1e-5 a token: float32 rounds a cross entropy by 1e-7 of its logits, not of itself
            within = (relative * found.total + 1e-5 * found.count) / divisor
            mean = found.total / divisor
            if abs(mean - value) <= within:
                left.append(rule)
                other = found.sample_means * found.count / divisor
                settled = abs(other - mean) > 2 * within
            else:
                by = " by num_items_in_batch" if rule.items else ""
                tried.append(f"{rule.loss!r} {mean:.6g}{by}")
        if not left:
            raise ValueError(
                f"GNSCallback cannot tell what the loss of {which} is a mean over. The loss is "
                f"{value:.6g}. The mean cross entropy over its labels "
                f"{'is ' + ', '.join(tried) if tried else 'cannot be computed from the outputs'}. "
                "If the model adds an auxiliary loss (a router's balance), switch it off: it has "
                "no per-sample gradient. For a mean over samples pass GNSCallback(loss='samples'). "
                "For a mean over labels that are not -100 pass loss='tokens', or loss='causal' if "
                "the model shifts the labels"
            )
        self._rules = left
        self._left = 0 if settled and len(left) == 1 else max(0, self._left - 1)
        return left[0]


@dataclass(frozen=True)
class _Sums:
    """The cross entropy over the labels that count: its sum, their number, and the mean over
    samples of their own means.
    """

    total: float
    count: float
    sample_means: float


def _logits(outputs: Any) -> Tensor | None:
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if found is None and isinstance(outputs, (tuple, list)):
        found = next((t for t in outputs if isinstance(t, Tensor) and t.ndim > 1), None)
    return found.detach() if isinstance(found, Tensor) else None


def _cross_entropy(
    name: str, logits: Tensor | None, inputs: Mapping[str, Any], smoothing: float
) -> _Sums | None:
    """None where shapes do not fit."""
    if logits is None or (name == "causal" and logits.ndim < 3):
        return None
    targets = targets_of(name, inputs)
    if name == "causal" and targets.shape[-1] == logits.shape[-2] - 1:
        logits = logits[..., :-1, :]
    if targets.is_floating_point() or targets.shape != logits.shape[:-1]:
        return None
    targets = targets.to(logits.device)
    rows = logits.reshape(-1, logits.shape[-1]).split(ROWS)
    options: Any = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": smoothing}
    pieces = zip(rows, targets.reshape(-1).split(ROWS))
    each_N = torch.cat([F.cross_entropy(x_NV.float(), t_N, **options) for x_NV, t_N in pieces])
    total_B = each_N.double().reshape(len(targets), -1).sum(1)
    count_B = (targets != IGNORED).reshape(len(targets), -1).sum(1)
    mean_B = total_B / count_B  # NaN for a sample without labels
    return _Sums(*torch.stack([total_B.sum(), count_B.sum(), mean_B.nanmean()]).tolist())


def document_starts(inputs: Mapping[str, Any]) -> Tensor | None:
    """``cu_seqlens`` of a batch of packed documents, on the CPU; None where each row is a sample.

    Padding begins no document: it is positions that stand alone and have no label, and its
    gradient is zero. Where a batch has ``position_ids``, the call waits for the device.

    Raises:
        NotImplementedError: for documents that only ``cu_seq_lens_q`` or ``seq_idx`` mark.
    """
    position_ids = inputs.get("position_ids")
    marks = [key for key in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if key in inputs]
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        if marks:
            raise NotImplementedError(
                f"GNSCallback: the rows of this batch are packed (it has {' and '.join(marks)}), "
                "but no position_ids [rows, T] say where documents begin: make the collator return "
                "them (return_position_ids=True)"
            )
        return None
    mask = inputs.get("attention_mask")
    real = torch.ones_like(position_ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == position_ids.shape:
        real = mask != 0  # positions in padding are arbitrary
    restarts = (position_ids.diff(dim=1) <= 0) & real[:, 1:] & real[:, :-1]
    if not marks and not bool(restarts.any()):
        return None
    starts = cu_seqlens(position_ids.masked_fill(~real, 0)).cpu()
    padding, labels = starts.diff() == 1, inputs.get("labels")
    if isinstance(labels, Tensor) and bool(padding.any()):
        padding &= labels.flatten().cpu()[starts[:-1].long()] == IGNORED
        starts = starts[F.pad(~padding, (0, 1), value=True)]
        starts[:1] = 0  # padding in front goes with the first document
    return starts if len(starts) > 1 else None


OF_TRL = {"DPOTrainer": 2, "RewardTrainer": 2, "KTOTrainer": 1}
"""TRL's trainers whose loss is a mean over samples, and the rows of a sample: pairs have two."""

NOT_OF_PAIRS = {
    "sft": "a mean over the tokens of all chosen answers",
    "aot": "of margins that are sorted over the batch, so that pairs meet",
    "aot_unpaired": "of margins that are sorted over the batch, so that pairs meet",
}
"""The losses of DPOTrainer that are no means over pairs."""


def of_trl(trainer: Any) -> list[str]:
    """The names of the trainers of TRL that a Trainer is."""
    return [t.__name__ for t in type(trainer).__mro__ if t.__module__.startswith("trl.")]


def not_of_pairs(trainer: Any) -> str:
    """What the loss of a DPOTrainer is, if it is no mean over pairs."""
    if "DPOTrainer" not in of_trl(trainer):
        return ""
    given = trainer.args.loss_type
    of_others = [t for t in ([given] if isinstance(given, str) else given) if t in NOT_OF_PAIRS]
    if of_others:
        return f"loss_type={of_others[0]!r}, {NOT_OF_PAIRS[of_others[0]]}"
    if getattr(trainer, "aux_loss_enabled", False):
        return "a router's auxiliary loss, in which samples meet: router_aux_loss_coef=0"
    return ""


@dataclass(frozen=True)
class Rows:
    """How many rows ``a_sample`` has, and what the ``loss`` is a mean over. ``most`` rows are in a
    batch, if that is known.
    """

    a_sample: int
    loss: str = "auto"
    most: int | None = None

    @classmethod
    def of(cls, trainer: Any, rows_per_sample: int | None) -> "Rows":
        """Those of a Trainer, unless the user says how many rows a sample has."""
        rows = next((OF_TRL[name] for name in of_trl(trainer) if name in OF_TRL), None)
        loss = "auto" if rows is None else "samples"
        if rows_per_sample is not None:
            if rows not in (None, rows_per_sample):
                raise ValueError(
                    f"GNSCallback(rows_per_sample={rows_per_sample}): a sample of "
                    f"{type(trainer).__name__} has {rows} rows. Leave rows_per_sample out"
                )
            return cls(rows_per_sample, loss)
        rows = rows or 1
        return cls(rows, loss, rows * trainer._train_batch_size)

    def samples(self, inputs: Mapping[str, Any], starts: Tensor | None) -> int:
        """The samples of a batch. With ``starts``, the ``cu_seqlens`` of packed rows, they are
        documents.

        Raises:
            ObservationError: for a batch of more rows than Trainer's batch size allows, or of parts
                of samples.
            NotImplementedError: for samples of several documents.
        """
        if starts is not None and self.a_sample == 1:
            return len(starts) - 1
        if starts is not None:
            raise NotImplementedError(
                f"GNSCallback: a sample of {self.a_sample} rows cannot be packed. Train without "
                "packing and padding_free"
            )
        rows = _rows(inputs)
        if self.most is not None and rows > self.most:
            raise ObservationError(
                f"GNSCallback: the batch has {rows} rows, but Trainer's batch size is "
                f"{self.most // self.a_sample}. If several rows are one sample, as in pairs, say "
                "how many, and that the loss is a mean over samples: GNSCallback(loss='samples', "
                f"rows_per_sample={max(2, rows * self.a_sample // self.most)}). Rows b, b + n, ... "
                "are then sample b of n, not rows 2b and 2b + 1. If each row is a sample of its "
                "own: rows_per_sample=1"
            )
        if rows % self.a_sample:
            raise ObservationError(
                f"GNSCallback: {rows} rows are no samples of {self.a_sample} rows each. Make the "
                "collator put all rows of a sample in one batch"
            )
        return rows // self.a_sample


def _rows(inputs: Mapping[str, Any]) -> int:
    tensors = [inputs.get("labels"), *inputs.values()]
    first = next((t for t in tensors if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        raise ObservationError(
            "GNSCallback: the batch holds no tensor that shows its number of samples"
        )
    return int(first.shape[0])
