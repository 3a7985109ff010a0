# SPDX-License-Identifier: Apache-2.0
"""Changes the batch size while a run trains, by the noise scale or by a schedule."""

from gnsfast.critical_batch.control import token_schedules
from gnsfast.critical_batch.control.changing import (
    ChangingBatchSize,
    Decision,
    ScheduledBatchSize,
)
from gnsfast.critical_batch.control.controller import BatchSizeController
from gnsfast.critical_batch.control.samples import ResizableBatchSampler, SampleStream
from gnsfast.critical_batch.control.token_schedules import by_tokens, constant, cosine, linear, wsd

__all__ = [
    "BatchSizeController",
    "ChangingBatchSize",
    "Decision",
    "ResizableBatchSampler",
    "SampleStream",
    "ScheduledBatchSize",
    "by_tokens",
    "constant",
    "cosine",
    "linear",
    "token_schedules",
    "wsd",
]
