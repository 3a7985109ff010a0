# SPDX-License-Identifier: Apache-2.0
"""Torch's activation checkpoints, which run a part of a model again in backward."""

import torch


def saves_nothing() -> bool:
    """Whether the first forward of a non-reentrant checkpoint runs. To ask its graph for a tensor
    would run it once more.
    """
    return _saves_for("_checkpoint_hook")


def recomputing() -> bool:
    """Whether a non-reentrant checkpoint runs its forward again, whose graph is never used."""
    return torch._C._current_graph_task_id() != -1 and _saves_for("_recomputation_hook")


def _saves_for(hook: str) -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hook in getattr(hooks[0], "__qualname__", "")
