# SPDX-License-Identifier: Apache-2.0
"""Grows the batch size while a run trains."""

from gnsfast.critical_batch.control import token_schedules
from gnsfast.critical_batch.control.controller import BatchSizeController
from gnsfast.critical_batch.control.decision import Decision
from gnsfast.critical_batch.control.samples import ResizableBatchSampler, SampleStream
from gnsfast.critical_batch.control.token_schedules import by_tokens, constant, cosine, linear, wsd

__all__ = [
    "BatchSizeController",
    "Decision",
    "ResizableBatchSampler",
    "SampleStream",
    "by_tokens",
    "constant",
    "cosine",
    "linear",
    "token_schedules",
    "wsd",
]
