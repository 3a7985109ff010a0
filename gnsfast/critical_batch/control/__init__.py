# SPDX-License-Identifier: Apache-2.0
"""Changes the batch size while a run trains, by the noise scale or by a schedule."""

from gnsfast.critical_batch.control import token_schedules as token_schedules
from gnsfast.critical_batch.control.changing import ChangingBatchSize as ChangingBatchSize
from gnsfast.critical_batch.control.changing import Decision as Decision
from gnsfast.critical_batch.control.changing import ScheduledBatchSize as ScheduledBatchSize
from gnsfast.critical_batch.control.controller import BatchSizeController as BatchSizeController
from gnsfast.critical_batch.control.samples import ResizableBatchSampler as ResizableBatchSampler
from gnsfast.critical_batch.control.samples import SampleStream as SampleStream
from gnsfast.critical_batch.control.token_schedules import by_tokens as by_tokens
from gnsfast.critical_batch.control.token_schedules import constant as constant
from gnsfast.critical_batch.control.token_schedules import cosine as cosine
from gnsfast.critical_batch.control.token_schedules import linear as linear
from gnsfast.critical_batch.control.token_schedules import wsd as wsd
