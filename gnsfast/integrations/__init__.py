# SPDX-License-Identifier: Apache-2.0
"""gnsfast in other training loops and dashboards.

Each module imports its framework. ``import gnsfast`` and this package import none of them.

``gnsfast.integrations.transformers.GNSCallback`` measures a run of transformers' Trainer.
``gnsfast.integrations.transformers_batch_size.BatchSizeCallback`` grows its batch size.
``gnsfast.integrations.lightning.GNSMonitor`` measures a run of Lightning's Trainer.
``gnsfast.integrations.lightning_batch_size.BatchSizeCallback`` grows its batch size.
``gnsfast.integrations.torchtitan.measured`` measures a run of torchtitan's Trainer.
``gnsfast.integrations.olmo_core.GNSCallback`` measures a run of OLMo-core's Trainer.
``gnsfast.integrations.trackers`` writes JSON lines, or to TensorBoard or Weights & Biases.
"""
