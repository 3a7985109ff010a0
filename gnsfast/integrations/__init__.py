# SPDX-License-Identifier: Apache-2.0
"""gnsfast in other training loops and dashboards. Each module imports its framework, so neither
``import gnsfast`` nor this package imports any of them.

``gnsfast.integrations.transformers.GNSCallback``: for transformers' Trainer.
``gnsfast.integrations.transformers_batch_size.BatchSizeCallback``: grows its batch size.
``gnsfast.integrations.transformers_branches.TrainerRun``: trains branches of its run.
``gnsfast.integrations.lightning.GNSMonitor``: for Lightning's Trainer.
``gnsfast.integrations.lightning_batch_size.BatchSizeCallback``: grows its batch size.
``gnsfast.integrations.trackers``: JSON lines, TensorBoard, Weights & Biases, for any loop.
"""
