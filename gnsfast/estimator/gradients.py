# SPDX-License-Identifier: Apache-2.0
"""Squared norms of the gradients that an optimizer is about to use."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.errors import ObservationError
from gnsfast.parallel import Processes, parameter_groups
from gnsfast.tensors import is_dtensor, local_part
from gnsfast.torch_internals import foreach_norm


class Sqnorms(NamedTuple):
    """This process's share of ‖p.grad‖² for K parameters, before any arithmetic. For each device it
    holds the ``indices`` of the parameters, their ``norms``, and how many ``copies`` share each.
    Without ``indices`` no parameter has a gradient.
    """

    parameters: int
    indices: list[list[int]]
    norms: list[Tensor]
    copies: list[list[int]]

    def shares(self, device: torch.device) -> Tensor:
        """float64 [K]: the shares of all processes add up to the squared norm. The share of a
        parameter without a gradient is zero.
        """
        found = torch.zeros(self.parameters, dtype=torch.float64, device=device)
        for own, norms, copies in zip(self.indices, self.norms, self.copies):
            index, of = (torch.tensor(t).to(device, non_blocking=True) for t in (own, copies))
            found[index] = norms.to(device, non_blocking=True).double().square() / of
        return found


def grad_sqnorms(parameters: Sequence[Any], processes: Processes) -> Sqnorms:
    """Read the gradients. All processes have an equal share of a replicated gradient, and each has
    its own shard of a sharded one. Nothing waits for the device.
    """
    by_device: dict[torch.device, list[tuple[int, Tensor, int]]] = {}
    for k, p in enumerate(parameters):
        if p.grad is not None:
            grad, copies = _local(p.grad.detach()), processes.copies(p.grad)
            by_device.setdefault(grad.device, []).append((k, grad, copies))
    found = Sqnorms(len(parameters), [], [], [])
    for where, shares in by_device.items():
        index, grads, shared = (list(each) for each in zip(*shares))
        if where.type == "cpu":
            # On the CPU torch's own norm is 1e-3 low at 16.8M elements.
            norms = torch.stack([reference.sqnorm(g).double() for g in grads]).sqrt()
        else:
            norms = torch.stack(foreach_norm(grads, 2, dtype=torch.float32))
        found.indices.append(index)
        found.norms.append(norms)
        found.copies.append(shared)
    return found


def refuse_hooks(parameters: Mapping[str, Any]) -> None:
    """Raise if a user's hook changes a gradient that is to be read."""
    for name, p in parameters.items():
        if p._backward_hooks and not is_dtensor(p):
            raise ObservationError(
                f"{name} has a gradient hook, so .grad may not be the sum of its samples' "
                "gradients. Use source='local', which does not read it."
            )


def divide_factor(model: nn.Module) -> float | None:
    """The number by which FSDP2's ``set_gradient_divide_factor`` divides all gradients. None stands
    for their mean.

    Raises:
        NotImplementedError: if gradients have different factors.
    """
    factors: dict[float | None, str] = {}
    inside: set[int] = set()
    for path, group in parameter_groups(model):
        factors.setdefault(getattr(group, "gradient_divide_factor", None), path or "the model")
        inside |= {id(p.sharded_param) for p in group.fsdp_params}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in inside:
            factors.setdefault(None, name)
    if len(factors) > 1:
        parts = " and ".join(f"{factor or 'the mean'} ({of})" for factor, of in factors.items())
        raise NotImplementedError(
            f"set_gradient_divide_factor gives parts of the model different scales: {parts}. Give "
            "all parts the same factor, or use source='local', which does not read gradients."
        )
    return next(iter(factors), None)


def refuse_new_factor(model: nn.Module, factor: float | None) -> None:
    """Raise if ``set_gradient_divide_factor`` was called since ``factor`` was read."""
    groups = (group for _, group in parameter_groups(model))
    if any(getattr(group, "gradient_divide_factor", None) != factor for group in groups):
        raise ObservationError(
            "set_gradient_divide_factor was called since the first update, so old and new "
            "gradients have different scales. Call gns.reset()."
        )


def _local(grad: Any) -> Tensor:
    """The part of a gradient that is on this process."""
    grad = local_part(grad)
    return grad.coalesce().values() if grad.is_sparse else grad  # type: ignore[no-any-return]
