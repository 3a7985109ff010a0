# SPDX-License-Identifier: Apache-2.0
"""Autocast inside an autograd function."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import guard
from gnsfast.torch_internals import any_autocast, unfollowed


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a matrix product of ``x``. None if autocast is off, or for
    float64, which it does not change.
    """
    if not any_autocast():
        return None
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_like(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """``parameters`` in the dtype that autocast gives a product with ``x``."""
    if (dtype := autocast_dtype(x)) is None:
        return parameters
    return tuple(None if p is None else p.to(dtype) for p in parameters)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off."""
    if not any_autocast():
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


graphs_of_gradients = [0]
"""How many backward passes were to have a graph of their own (``create_graph``)."""


def backward_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that computes in the dtypes that forward chose, even if the user calls it
    inside an autocast block. ``function`` takes the saved tensors before the gradients. It is not
    seen by the class of a parameter that is followed. To differentiate its results is an error. An
    error that a guard takes leaves out the norms, where torch's own function gives the gradients.
    """

    @once_differentiable
    def once(ctx: Any, _: Tensor, tensors: Any, *grads: Tensor | None) -> Any:
        return function(ctx, tensors, *grads)

    @wraps(function)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = ctx.saved_tensors  # not below: a checkpoint runs its forward again here
        try:
            return outside_autocast(ctx, tensors, *grads)
        except Exception as error:
            plan = getattr(ctx, "plan", None)
            if plan is None or not plan.norms_alone or not guard.takes(error):
                raise
            return (None,) * len(ctx.needs_input_grad)

    def outside_autocast(ctx: Any, tensors: Any, *grads: Tensor | None) -> Any:
        with unfollowed():
            if not (torch.is_grad_enabled() or any_autocast()):
                return function(ctx, tensors, *grads)  # to turn off what is off takes 2 µs
            some = next((g for g in grads if g is not None), None)
            with nullcontext() if some is None else without_autocast(some):
                if not torch.is_grad_enabled():
                    return function(ctx, tensors, *grads)
                graphs_of_gradients[0] += 1
                # The results depend on saved tensors too, even where no gradient needs one.
                return once(ctx, torch.zeros((), requires_grad=True), tensors, *grads)

    return run
