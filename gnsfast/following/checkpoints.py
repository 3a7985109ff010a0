# SPDX-License-Identifier: Apache-2.0
"""Torch's activation checkpoints, which run a part of a model again in backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint


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


def with_graphs() -> AbstractContextManager[Any]:
    """Let non-reentrant checkpoints keep their graphs, in which rows that the data have chosen are
    found.
    """
    return patch.object(checkpoint, "_checkpoint_hook", lambda frame: nullcontext())


def not_reentrant() -> AbstractContextManager[Any]:
    """Let reentrant checkpoints be others, which have a gradient in ``autograd.grad`` too."""
    return patch.object(checkpoint.CheckpointFunction, "apply", _not_reentrant)


def _not_reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
