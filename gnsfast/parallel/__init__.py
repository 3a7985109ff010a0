# SPDX-License-Identifier: Apache-2.0
"""Finds the processes that share an update."""

from gnsfast.parallel.first import first, is_first, mean, meet, process_count
from gnsfast.parallel.processes import (
    Processes,
    find_processes,
    fsdp_degrees,
    gathered,
    parameters_at_rest,
    sharding_groups,
    shared,
)
from gnsfast.parallel.split_samples import (
    in_context_parallel,
    refuse_context_parallel,
    refuse_parts,
)
from gnsfast.torch_internals import parameter_groups

__all__ = [
    "Processes",
    "find_processes",
    "first",
    "fsdp_degrees",
    "gathered",
    "in_context_parallel",
    "is_first",
    "mean",
    "meet",
    "parameter_groups",
    "parameters_at_rest",
    "process_count",
    "refuse_context_parallel",
    "refuse_parts",
    "shared",
    "sharding_groups",
]
