# SPDX-License-Identifier: Apache-2.0
"""Which processes and pipeline stages share an update."""

from gnsfast.parallel.pipeline import PipelinePasses
from gnsfast.parallel.processes import (
    Processes,
    find_processes,
    fsdp_degrees,
    gathered,
    in_context_parallel,
    parameter_groups,
    parameters_at_rest,
    refuse_context_parallel,
)

__all__ = [
    "PipelinePasses",
    "Processes",
    "find_processes",
    "fsdp_degrees",
    "gathered",
    "in_context_parallel",
    "parameter_groups",
    "parameters_at_rest",
    "refuse_context_parallel",
]
