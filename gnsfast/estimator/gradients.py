# SPDX-License-Identifier: Apache-2.0
"""Squared norms of the gradients that an optimizer is about to use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast import reference
from gnsfast.errors import ObservationError
from gnsfast.estimator.settings import Mark
from gnsfast.following import unfollowed
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes, parameter_groups
from gnsfast.probing import checks
from gnsfast.tensors import accumulate_dtype, local_part

WITNESSES = 8
"""How many gradients ``witness`` reads."""


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


class EndOfPass(NamedTuple):
    """The gradients after a backward pass: the mark of each one, the norms of a few, and of all in
    an audit of a given norm.
    """

    marks: list[Mark]
    witness: Tensor | None
    read: Sqnorms | None = None


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


def refuse_unscaled_stage(scaler: GradScaler | None) -> None:
    """Raise if this pipeline stage's scaler has no scale: only the last stage scales the loss."""
    if scaler is not None and scaler.is_enabled() and scaler._scale is None:
        raise ObservationError(
            "The grad_scaler has scaled nothing on this pipeline stage, so its scale is unknown "
            "here. On every stage call scaler.scale(torch.zeros(())) before the pass, and "
            "scaler.update() after the step."
        )


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


def witness(smallest: list[nn.Parameter], device: torch.device) -> Tensor | None:
    """The norms of a few gradients: those of the first parameters in ``smallest`` that have one, or
    None. They are cheap to read, and change when gradients are scaled or clipped.
    """
    few: dict[torch.device, list[Tensor]] = {}
    left = WITNESSES
    for p in smallest:
        with unfollowed():
            grad = p.grad
        if grad is None or grad.is_sparse:
            continue
        grad = _local(grad.detach())
        if grad.numel():
            few.setdefault(grad.device, []).append(grad)
            left -= 1
        if not left:
            break
    if not few:
        return None
    norms = []
    for grads in few.values():
        wide = max((accumulate_dtype(g.dtype) for g in grads), key=lambda dtype: dtype.itemsize)
        norms.append(torch.stack(torch._foreach_norm(grads, 2, dtype=wide)).to(device))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def rewritten(
    before: Tensor, after: Tensor, scale_before: Tensor | None, scale_after: Tensor | None
) -> Tensor:
    """1.0 if the gradients were written to between two ``witness``, else 0.0. Not every write
    changes a version: ``unscale_`` on the CPU does not, nor clipping shards.
    """
    then = loss_factors.without_scale(before.double().sum().square(), scale_before)
    now = loss_factors.without_scale(after.double().sum().square(), scale_after)
    return ((now / then - 1).abs() > 1e-3).double()


def refuse_rewritten(
    before: list[Mark],
    now: list[Mark],
    scaler: GradScaler | None,
    device: torch.device,
    takes_norm: bool,
) -> None:
    """Raise if the gradients are not those of the last backward pass, whose marks are ``before``.
    ``takes_norm``: a ``grad_norm`` is a remedy.
    """
    writes = loss_factors.unscale_writes(device) if loss_factors.unscaled(scaler) else 0
    if all(m is None for m in now):
        raise ObservationError(
            "No parameter has a gradient. Call gns.update() before optimizer.zero_grad(). If the "
            "optimizer runs inside the backward pass, use source='local'."
        )
    if now != [m and (m[0], m[1] + writes) for m in before]:
        raise ObservationError(checks.explain_rewritten(takes_norm))


def _local(grad: Any) -> Tensor:
    """The part of a gradient that is on this process."""
    grad = local_part(grad)
    return grad.coalesce().values() if grad.is_sparse else grad  # type: ignore[no-any-return]
