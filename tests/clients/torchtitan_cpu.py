# SPDX-License-Identifier: Apache-2.0
"""Lets torchtitan run on a CPU, which it has no device for: import it before torchtitan."""

import types

import torch
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

nothing = lambda *args, **kwargs: None
utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    set_device=nothing,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 34),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=nothing,
    empty_cache=nothing,
    synchronize=nothing,
)
set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor


def by_sums(self: FSDPModule, factor: float) -> None:
    """Gloo cannot scale while it reduces."""
    set_gradient_divide_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = by_sums
torch.distributed.set_timeout = nothing  # which torch 2.13 lacks
