# SPDX-License-Identifier: Apache-2.0
"""Other people's training loops and dashboards. Nothing here is imported by ``import gnsfast``,
and this package imports none of its modules: each of them imports its framework.

``gnsfast.integrations.transformers.GNSCallback``: for transformers' Trainer.
``gnsfast.integrations.transformers_batch_size.BatchSizeCallback``: lets its batch size grow.
``gnsfast.integrations.transformers_branches.TrainerRun``: has branches of its run trained.
``gnsfast.integrations.lightning.GNSMonitor``: for Lightning's Trainer.
``gnsfast.integrations.trackers``: JSON lines, TensorBoard, Weights & Biases, for any loop.
"""
