# SPDX-License-Identifier: Apache-2.0
"""Whether the mask of an attention keeps the documents of its rows apart."""

import torch
from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.functional import documents_of_rows

MARGIN = 5e3
"""A logit that is lower by this has the weight e^-5000 = 0. Models write -1e9 for minus infinity,
and in half precision -1e4, which bfloat16 rounds to -9984.
"""

ATTEND_TO_EACH_OTHER = (
    "the documents of a row (cu_seqlens) attend to each other, so they have no norms of their own. "
    "Give the attention an attn_mask [rows * heads, T, T], or [T, T] for one row, that is True (or "
    "-inf) for every pair of positions of different documents, and is_causal=False. Where each row "
    "is one document, leave out cu_seqlens."
)


def keeps_apart(bias_NHLS: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Whether no query sees the keys of another document: a bool on the device of the mask.

    ``bias_NHLS`` is added to the logits of ``rows`` rows, and may have dimensions of size 1. A
    query whose whole row is masked by a finite number would see all keys alike.
    """
    S = bias_NHLS.shape[3]
    document_NS = documents_of_rows(starts, rows * S).view(rows, S)
    same_N1LS = (document_NS[:, :, None] == document_NS[:, None]).unsqueeze(1)
    own, other = (
        bias_NHLS.detach().masked_fill(hidden, -torch.inf).amax(3)
        for hidden in (~same_N1LS, same_N1LS)
    )
    return ((other == -torch.inf) | (own - other >= MARGIN)).all()


def checked_probe(probe: Tensor, samples: int, apart: Tensor | None) -> Tensor:
    """The probe, whose count of calls becomes NaN where documents are not ``apart``. So the end of
    the block raises, and no pass waits for the device.
    """
    if apart is None:
        return probe
    factor = torch.ones_like(probe[0])
    factor[samples + 1] = torch.where(apart, 1.0, torch.nan)
    return probe * factor


def refuse_at_once(apart: Tensor) -> bool:
    """Whether reading ``apart`` neither waits for a device nor breaks a compiled graph."""
    return apart.device.type == "cpu" and not torch.compiler.is_compiling()


def refuse_attending(name: str, apart: Tensor) -> Tensor | None:
    """Raise if documents are not ``apart``, or return that where it cannot be read yet."""
    if not refuse_at_once(apart):
        return apart
    if not apart:
        raise ObservationError(f"{name}: {ATTEND_TO_EACH_OTHER}")
    return None
