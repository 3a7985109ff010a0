# SPDX-License-Identifier: Apache-2.0
"""Squared norms of the gradients that an optimizer is about to use."""

from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.parallel import Processes, parameter_groups
from gnsfast.tensors import accumulate_dtype, is_dtensor

WITNESSES = 8
"""How many of the smallest gradients ``witness`` reads."""


Block = tuple[nn.Parameter, tuple[slice, ...]]
"""A parameter and a block of it; the whole parameter without slices."""


def grad_sqnorms(blocks: list[Block], processes: Processes, device: torch.device) -> Tensor:
    """float64 [K] on ``device``: this process's share of each ‖p.grad[block]‖². The shares of all
    ``processes`` add up to it.

    The shares of a replicated gradient are equal, those of a sharded one are its shards'. Without a
    gradient the share is zero. Nothing waits for the device.
    """
    norms = torch.zeros(len(blocks), dtype=torch.float64, device=device)
    by_device: dict[torch.device, list[tuple[int, Tensor, int]]] = {}
    for k, (p, block) in enumerate(blocks):
        if p.grad is not None:
            grad, copies = _local(p.grad.detach()), processes.copies(p.grad)
            grad = _within(grad, p.grad, block) if block else grad
            by_device.setdefault(grad.device, []).append((k, grad, copies))
    for where, shares in by_device.items():
        index, grads, shared = (list(each) for each in zip(*shares))
        if where.type == "cpu":
            # On the CPU torch's own norm is 1e-3 low at 16.8M elements.
            found = torch.stack([reference.sqnorm(g).double() for g in grads])
        else:
            found = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).double()
            found = found.square()
        share = torch.tensor(shared, dtype=torch.float64).reciprocal().to(where, non_blocking=True)
        norms[torch.tensor(index).to(device, non_blocking=True)] = (found * share).to(device)
    return norms


def refuse_divide_factor(model: nn.Module) -> None:
    """Raise if FSDP2's ``set_gradient_divide_factor`` gives ``.grad`` another factor than 1/R."""
    for path, group in parameter_groups(model):
        if getattr(group, "gradient_divide_factor", None) is not None:
            raise NotImplementedError(
                f"{path or 'the model'}: set_gradient_divide_factor gives gradients another "
                "scale than their mean over processes: use source='local', which does not "
                "read them"
            )


def witness(parameters: list[nn.Parameter], device: torch.device) -> Tensor | None:
    """float64 scalar on ``device``: the summed norms of the smallest gradients; None without any.

    It changes when gradients are scaled or clipped, and is cheap to read.
    """
    grads: list[Any] = [p.grad.detach() for p in parameters if p.grad is not None]
    parts = sorted((g.to_local() if is_dtensor(g) else g for g in grads), key=Tensor.numel)
    few = [g for g in parts if g.numel() and not g.is_sparse][:WITNESSES]
    if not few:
        return None
    norms = [
        torch.linalg.vector_norm(g, dtype=accumulate_dtype(g.dtype)).to(device).double()
        for g in few
    ]
    return torch.stack(norms).sum()


def _within(local: Tensor, grad: Any, block: tuple[slice, ...]) -> Tensor:
    """The part of a block that is on this process, whose shard has some of a gradient's rows."""
    if is_dtensor(grad):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            grad.shape, grad.device_mesh, grad.placements
        )
        block = tuple(
            slice(*(min(max(end - first, 0), size) for end in (s.start, s.stop)))
            for s, first, size in zip(block, offset, shape)
        )
    return local[block]


def _local(grad: Any) -> Tensor:
    """The part of a gradient that is on this process."""
    if is_dtensor(grad):
        return grad.to_local()  # type: ignore[no-any-return]
    return grad.coalesce().values() if grad.is_sparse else grad  # type: ignore[no-any-return]
