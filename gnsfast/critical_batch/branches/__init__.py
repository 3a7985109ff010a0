# SPDX-License-Identifier: Apache-2.0
"""Measures a critical batch size by training branches of a run."""

from gnsfast.critical_batch.branches.branch_folder import BranchFolder as BranchFolder
from gnsfast.critical_batch.branches.branch_folder import multiple as multiple
from gnsfast.critical_batch.branches.branch_protocol import BranchRun as BranchRun
from gnsfast.critical_batch.branches.branch_protocol import BranchStep as BranchStep
from gnsfast.critical_batch.branches.branch_rule import check_grid as check_grid
from gnsfast.critical_batch.branches.branch_rule import matching as matching
from gnsfast.critical_batch.branches.branch_rule import smoothed as smoothed
from gnsfast.critical_batch.branches.branch_rule import smoothed_std as smoothed_std
from gnsfast.critical_batch.branches.branch_training import Plan as Plan
from gnsfast.critical_batch.branches.branches import critical_batch_in as critical_batch_in
from gnsfast.critical_batch.branches.branches import (
    measure_critical_batch as measure_critical_batch,
)
from gnsfast.critical_batch.branches.branches import train_branch as train_branch
from gnsfast.critical_batch.branches.measurement import RESULT as RESULT
from gnsfast.critical_batch.branches.measurement import Branch as Branch
from gnsfast.critical_batch.branches.measurement import CriticalBatch as CriticalBatch
from gnsfast.critical_batch.branches.measurement import averaged as averaged
from gnsfast.critical_batch.branches.measurement import pooled_factor as pooled_factor
from gnsfast.critical_batch.branches.torch_run import TorchRun as TorchRun
