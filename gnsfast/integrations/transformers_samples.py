# SPDX-License-Identifier: Apache-2.0
"""Finds the samples of a Trainer's batch: its rows, or the documents packed into them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.functional import cu_seqlens
from gnsfast.integrations.token_losses import IGNORED


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


def batch_size(inputs: Mapping[str, Any]) -> int:
    """The rows of a batch."""
    tensors = [inputs.get("labels"), *inputs.values()]
    first = next((t for t in tensors if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        raise ObservationError(
            "GNSCallback: the batch holds no tensor that shows its number of samples"
        )
    return int(first.shape[0])
