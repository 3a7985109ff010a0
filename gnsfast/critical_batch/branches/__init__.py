# SPDX-License-Identifier: Apache-2.0
"""Branches of a run, trained to measure its critical batch size."""

from gnsfast.critical_batch.branches import branch_process
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_process import Job
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, BranchStep
from gnsfast.critical_batch.branches.branch_rule import (
    LR_FACTORS,
    check_grid,
    matching,
    smoothed,
    smoothed_std,
)
from gnsfast.critical_batch.branches.branches import measure_critical_batch
from gnsfast.critical_batch.branches.measurement import RESULT, Branch, CriticalBatch, pooled_factor
from gnsfast.critical_batch.branches.random_state import random_state, set_random_state
from gnsfast.critical_batch.branches.repeats import averaged
from gnsfast.critical_batch.branches.run_state import other_buffers, set_lr
from gnsfast.critical_batch.branches.torch_run import TorchRun

__all__ = [
    "Branch",
    "BranchFolder",
    "BranchRun",
    "BranchStep",
    "CriticalBatch",
    "Job",
    "LR_FACTORS",
    "RESULT",
    "TorchRun",
    "averaged",
    "branch_process",
    "check_grid",
    "matching",
    "measure_critical_batch",
    "other_buffers",
    "pooled_factor",
    "random_state",
    "set_lr",
    "set_random_state",
    "smoothed",
    "smoothed_std",
]
