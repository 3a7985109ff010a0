# SPDX-License-Identifier: Apache-2.0
"""From a noise scale to a batch size.

- ``measure_critical_batch`` trains branches of a run: a ``TorchRun``, or your own ``BranchRun``.
- ``BatchSizeController`` grows a batch size by the noise scale and a factor that branches measured;
  ``ScheduledBatchSize`` by thresholds in tokens.
- ``Rules`` moves learning rate, betas and weight decay with the batch size.
- ``BatchSizeSchedule`` counts the steps that a growing batch size saves; ``seesaw`` and
  ``late_switch`` make one.
- ``laws``, ``trade_off`` and ``fit_power_law`` are what ``gnsfast plan`` prints.
"""

from gnsfast.critical_batch import exports, laws
from gnsfast.critical_batch.branches import (
    Branch,
    BranchRun,
    BranchStep,
    CriticalBatch,
    TorchRun,
    averaged,
    measure_critical_batch,
    pooled_factor,
)
from gnsfast.critical_batch.control import (
    BatchSizeController,
    Decision,
    ResizableBatchSampler,
    SampleStream,
    ScheduledBatchSize,
    token_schedules,
)
from gnsfast.critical_batch.costs import Cost, trade_off
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor, RunIdentity
from gnsfast.critical_batch.fits import PowerLaw, fit_power_law
from gnsfast.critical_batch.rules import RULES, Rule, Rules
from gnsfast.critical_batch.schedule import BatchSizeSchedule
from gnsfast.critical_batch.seesaw import late_switch, seesaw

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
    "RULES",
    "ResizableBatchSampler",
    "Rule",
    "Rules",
    "RunIdentity",
    "SampleStream",
    "ScheduledBatchSize",
    "TorchRun",
    "averaged",
    "exports",
    "fit_power_law",
    "late_switch",
    "laws",
    "measure_critical_batch",
    "pooled_factor",
    "seesaw",
    "token_schedules",
    "trade_off",
]
