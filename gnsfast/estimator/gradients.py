# SPDX-License-Identifier: Apache-2.0
"""Squared norms of the gradients that an optimizer is about to use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnsfast import reference
from gnsfast.errors import ObservationError
from gnsfast.parallel import Processes, parameter_groups
from gnsfast.tensors import local_part


class Sqnorms(NamedTuple):
    """This process's share of ‖p.grad‖² for K parameters, before any arithmetic. For each device it
    holds the ``indices`` of the parameters, their ``norms``, and how many ``copies`` share each.
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
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        found.indices.append(index)
        found.norms.append(norms)
        found.copies.append(shared)
    return found


def refuse_partial_norm(left_out: Sequence[str]) -> None:
    """Raise if the norm of the whole gradient includes parameters without per-sample norms."""
    if left_out:
        raise ValueError(
            "grad_norm is the norm of all parameters, but these have no per-sample norms: "
            f"{', '.join(left_out[:5])}. Call gns.update() without grad_norm."
        )


def given_sqnorm(grad_norm: float | Tensor, device: torch.device) -> Tensor:
    """The square of a norm that the caller gives."""
    full = getattr(grad_norm, "full_tensor", None)  # that of FSDP2 is sharded
    norm = torch.as_tensor(grad_norm if full is None else full())
    if norm.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"grad_norm is a {norm.dtype}, which is too coarse for a difference of squares. Call "
            "gns.update() without it, before clipping."
        )
    return norm.to(device, torch.float64, non_blocking=True).square()


def averages(model: nn.Module, processes: Processes, replicas: Sequence[bool]) -> bool:
    """Whether backward passes leave the average over processes in ``.grad``. ``replicas`` says
    which parameters FSDP2 does not hold, and so does not average.
    """
    wrapped = any(isinstance(m, DistributedDataParallel) for m in model.modules())
    return processes.data == 1 or wrapped or not any(replicas)


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
            "set_gradient_divide_factor was called since the first micro-batch, so old and new "
            "gradients have different scales. Call gns.reset()."
        )


def _local(grad: Any) -> Tensor:
    """The part of a gradient that is on this process."""
    grad = local_part(grad)
    return grad.coalesce().values() if grad.is_sparse else grad  # type: ignore[no-any-return]
