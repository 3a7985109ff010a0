# SPDX-License-Identifier: Apache-2.0
"""Measures a critical batch size by training branches of a run."""

from gnsfast.critical_batch.branches.branch_executors import reason_of
from gnsfast.critical_batch.branches.branch_folder import LOGS, BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, BranchStep
from gnsfast.critical_batch.branches.branch_rule import (
    check_grid,
    matching,
    smoothed,
    smoothed_std,
)
from gnsfast.critical_batch.branches.branches import measure_critical_batch, measure_repeatedly
from gnsfast.critical_batch.branches.measurement import (
    RESULT,
    Branch,
    CriticalBatch,
    averaged,
    pooled_factor,
)
from gnsfast.critical_batch.branches.run_state import (
    load_state,
    random_state,
    set_random_state,
    state_of,
)
from gnsfast.critical_batch.branches.torch_run import TorchRun

__all__ = [
    "Branch",
    "BranchFolder",
    "BranchRun",
    "BranchStep",
    "CriticalBatch",
    "LOGS",
    "RESULT",
    "TorchRun",
    "averaged",
    "check_grid",
    "load_state",
    "matching",
    "measure_critical_batch",
    "measure_repeatedly",
    "pooled_factor",
    "random_state",
    "reason_of",
    "set_random_state",
    "smoothed",
    "smoothed_std",
    "state_of",
]
