# SPDX-License-Identifier: Apache-2.0
"""The detectors of everything that makes a norm wrong in silence, and what they say."""

import math

import torch
from torch import Tensor

from gnsfast.probed import Probed
from gnsfast.sharding import is_dtensor


def several_ranks() -> bool:
    """Whether ``.grad`` is an average over processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def mark(p: Tensor) -> tuple[int, int] | None:
    """Changes when a gradient is written to ``p.grad``."""
    if p.grad is None:
        return None
    # Some writes to a DTensor count on it, some on the tensor inside of it (clipping: on neither).
    return id(p.grad), p.grad._version + getattr(p.grad, "_local_tensor", p.grad)._version


def hooked(p: Tensor) -> bool:
    """Whether someone else may change ``p.grad``, or holds it sharded."""
    sparse = p.grad is not None and p.grad.is_sparse
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks or is_dtensor(p) or sparse)


def may_repeat(module: Probed) -> bool:
    """A tied embedding links its uses to each other: any number of them is exact."""
    return module._tie is not None and module.route == "embedding"


def explain_calls(path: str, module: Probed, calls: float) -> str:
    """Why norms of ``calls`` passes in one block are wrong; NaN is a replay that did not agree."""
    where = f"{path or 'the model'} ({type(module).__name__})"
    if calls != calls:
        return (
            f"{where}: replaying it sample by sample gave other outputs than its forward pass "
            "(dropout, state, or an argument whose samples were not found). Leave it out: "
            f"convert(model, exclude=[{path!r}])."
        )
    return (
        f"{where}: backward went through it {int(calls)} times in one block, and norms of several "
        "calls do not add. One block takes one forward and one backward pass; a module that a "
        "model calls more than once has no exact route: leave it out: convert(model, "
        f"exclude=[{path!r}])."
    )


def explain_unseen(name: str, path: str) -> str:
    """Why a parameter with a gradient but without a call of its module has no norms."""
    return (
        f"{name} got a gradient, but its module {path!r} was not called (or its forward ran before "
        "the block): the weight is used as a tensor somewhere, as fused losses and kernels do. Its "
        f"norms would be missing. Leave the module out: convert(model, exclude=[{path!r}])."
    )


def explain_sums(
    p: Tensor, name: str, paths: list[str], ours: float, real: float, samples: float
) -> str | None:
    """Whether all of a parameter's gradient passed through its modules: None, or what did not.

    ``ours`` is the squared norm that the probes saw, ``real`` that of ``.grad``, ``samples`` the
    sum of the per-sample ones. An overflow that a gradient scaler will skip says nothing.
    """
    tolerance = 1e-3 if p.dtype in (torch.float32, torch.float64) else 3e-2
    if not math.isfinite(real + ours):
        return None
    if abs(ours - real) <= tolerance * max(ours, real) + 1e-6 * samples:
        return None
    return (
        f"{name}: the squared norm of its gradient is {real:.6g}, but what passed through "
        f"{' and '.join(map(repr, paths))} has {ours:.6g}. The weight is also used outside of its "
        "module (F.linear(x, module.weight), a penalty on the weights), so its norms would be "
        f"wrong. Leave it out: convert(model, exclude=[{paths[0]!r}])."
    )
