# SPDX-License-Identifier: Apache-2.0
"""From a noise scale to a batch size: what to train with, what it costs, how it was measured.

``measure_critical_batch`` trains branches of a run (``TorchRun``, or one of your own);
``BatchSizeController`` grows a batch size by a noise scale and a factor that branches measure;
``BatchSizeSchedule`` counts what that saves; ``laws``, ``trade_off`` and ``fit_power_law`` are what
``gnsfast plan`` prints.
"""

from gnsfast.critical_batch import exports, laws, token_schedules
from gnsfast.critical_batch.branch_protocol import BranchRun, BranchStep
from gnsfast.critical_batch.branches import measure_critical_batch
from gnsfast.critical_batch.controller import BatchSizeController
from gnsfast.critical_batch.costs import Cost, trade_off
from gnsfast.critical_batch.decision import Decision
from gnsfast.critical_batch.factor import CriticalBatchFactor
from gnsfast.critical_batch.measurement import Branch, CriticalBatch, pooled_factor
from gnsfast.critical_batch.power_law import PowerLaw, fit_power_law
from gnsfast.critical_batch.repeats import averaged
from gnsfast.critical_batch.samples import ResizableBatchSampler, SampleStream
from gnsfast.critical_batch.schedule import BatchSizeSchedule
from gnsfast.critical_batch.torch_run import TorchRun

__all__ = [
    "BatchSizeController",
    "BatchSizeSchedule",
    "Branch",
    "BranchRun",
    "BranchStep",
    "Cost",
    "CriticalBatch",
    "CriticalBatchFactor",
    "Decision",
    "PowerLaw",
    "ResizableBatchSampler",
    "SampleStream",
    "TorchRun",
    "averaged",
    "exports",
    "fit_power_law",
    "laws",
    "measure_critical_batch",
    "pooled_factor",
    "token_schedules",
    "trade_off",
]
