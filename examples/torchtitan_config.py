# SPDX-License-Identifier: Apache-2.0
"""Measures torchtitan's own training from its command line:

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config --config llama3_8b

The other options of torchtitan follow, and those of ``Measured.Config``.
"""

from torchtitan.models.llama3 import config_registry

from gnsfast.integrations.torchtitan import Measured, measured


def llama3_debugmodel() -> Measured.Config:
    return measured(config_registry.llama3_debugmodel())


def llama3_8b() -> Measured.Config:
    config = config_registry.llama3_8b()
    config.training.disable_cuda_graphs = True  # nothing is seen inside of one
    return measured(config)
