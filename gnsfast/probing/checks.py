# SPDX-License-Identifier: Apache-2.0
"""Checks for everything that would silently make a norm wrong, and their error messages."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.following import EXCLUDED, Followed


def explain_calls(name: str, calls: float) -> str:
    """Why the norms of a parameter are wrong after ``calls`` calls in one block. A NaN means that
    compiled code used it in a way that only eager code follows, infinity that some of its uses had
    norms of their own when others were joined.
    """
    if calls != calls:
        return (
            f"{name}: compiled code uses it in a way that only eager code follows, or documents "
            "that attend to each other. Leave the module that calls it out of torch.compile. "
            f"{leave_out(name)}"
        )
    times = "several" if calls == math.inf else str(int(calls))
    return (
        f"{name}: backward went through its uses {times} times in one block, and the norms of "
        "several passes do not add up. A block takes one forward and one backward pass. "
        "Activation checkpointing with use_reentrant=True runs several backward passes where a "
        "parameter is used in several checkpoints: set use_reentrant=False. A loss in parts, as "
        "torchtitan's ChunkedLossWrapper, runs one for each part: compute it by "
        f"gnsfast.Linear.cross_entropy. {leave_out(name)}"
    )


def explain_no_backward(followed: Followed) -> str:
    """Why no norm was measured in a block: there was no backward pass, or it reached only
    parameters that have no norms.
    """
    lost = [leaf for leaf in followed.leaves if leaf.left_out]
    if not lost:
        return NO_BACKWARD
    first = min(lost, key=lambda leaf: leaf.left_out == EXCLUDED)
    return (
        "No backward pass inside the block reached a parameter that has norms. Of those without "
        f"norms, {first.name}: {first.left_out}. gnsfast.coverage(model) lists the others. If "
        f"there was no backward pass at all: {RUN_BACKWARD}"
    )


def refuse_nothing(followed: Followed) -> None:
    """Raise since a model has no norms at all."""
    first = next(leaf for leaf in followed.leaves if leaf.left_out)
    name = type(followed.structure.model).__name__
    raise ObservationError(
        f"No parameter of {name} has per-sample norms. {first.name}: {first.left_out}. "
        "gnsfast.coverage(model) lists the others, and GradientNoiseScale(model, "
        "unit='micro_batch') needs no per-sample norms."
    )


def leave_out(name: str) -> str:
    """The remedy that is left for any parameter."""
    return f"gnsfast.configure(model, exclude=[{name!r}]) leaves it out."


def explain_unseen(name: str) -> str:
    """Why a parameter has no norms although it got a gradient."""
    return (
        f"{name} got a gradient, but no function of torch took it inside the block, so its norms "
        "would be missing. Either a kernel or an autograd function of its own takes it, as those "
        "of Liger-Kernel and of fused losses do, or the forward pass ran before the block, or "
        f"backward(inputs=...) left it out. In place of a fused loss use "
        f"gnsfast.Linear.cross_entropy. {leave_out(name)}"
    )


def explain_sums(
    p: Tensor,
    name: str,
    ours: float,
    real: float,
    samples: float,
    model: float,
    is_half: bool,
) -> str | None:
    """What is wrong if not all of a parameter's gradient was measured, or None.

    ``ours`` is the squared norm that the probes saw, ``real`` that of the gradient. ``samples`` is
    the sum of the samples' squared norms, and ``model`` the same over all parameters. A gradient
    that is zero in exact arithmetic consists of rounding errors, which are small beside ``model``.
    Overflows are not checked, because a gradient scaler skips them.
    """
    # bfloat16 autocast moved the squared norm of a replayed bias of 3 channels by 1 %. Where
    # samples cancel, torch's own gradient is off by rounding errors r = 2^-8 of theirs, which moves
    # its squared norm by 2 r sqrt(ours samples) <= 3e-2 ours + 5e-4 samples.
    is_half |= p.dtype.itemsize < 4
    tolerance, cancelled = (3e-2, 5e-4) if is_half else (1e-3, 1e-6)
    if not math.isfinite(real + ours + samples + model):
        return None
    if not ours and real > 1e-10 * model:
        return explain_unseen(name)
    if abs(ours - real) <= tolerance * max(ours, real) + cancelled * samples + 1e-10 * model:
        return None
    return (
        f"{name}: the squared norm of its gradient is {real:.6g}, but the part that was measured "
        f"has {ours:.6g}. A kernel or an autograd function of its own also takes it, or a penalty "
        f"on the weights, so its norms would be wrong. {leave_out(name)}"
    )


MESSAGES = {
    "padded": (
        "Samples without tokens (those beyond num_samples, or with 0 in tokens) have a "
        "gradient, so tokens is not what the loss counts. If several rows end in padding, it "
        "lies between documents: count it in num_samples, with 0 in tokens."
    ),
    "empty": (
        "Samples with tokens have no gradient at all, so padding was counted. For each sample "
        "tokens is what the loss counts, which is 0 for padding."
    ),
    "apart": (
        "The processes have different gradients at the end of gns.update(). Gradients must be "
        "averaged there by DistributedDataParallel, by fully_shard, or by hand inside the block, "
        "after the last backward pass. If nobody averages them, or the optimizer does so in its "
        "step, use GradientNoiseScale(model, source='local'), which reads no gradient. (FSDP2 does "
        "not average its ignored_params: freeze them, or average each as it arrives, by "
        "p.register_post_accumulate_grad_hook(lambda p: "
        "dist.all_reduce(p.grad.div_(dist.get_world_size()))). Processes that train models of "
        "their own each need a process_group of their own.)"
    ),
    "parts": (
        "Tensor-parallel processes measured different gradients of parameters that are no DTensor, "
        "such as {whole}. Each process has the gradient of its own heads, tokens or rows, and "
        "squared norms of parts do not add up, not even if the gradients are summed later. Let "
        "torch know the parts. For a norm of which the input is split: "
        "SequenceParallel(sequence_dim=...) with the dimension that is split. For a parameter of "
        "which each process holds a part: nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])). Or "
        "leave it out before training: gnsfast.configure(model, exclude=[...])."
    ),
    "zeroed": (
        "All gradients are zero at the end of gns.update(). Call optimizer.zero_grad() after the "
        "block."
    ),
    "stale": (
        "Gradients were not zero when an update began, so they are not those of its passes. Call "
        "optimizer.zero_grad() before gns.update()."
    ),
}
"""What to say of a flag. The first that is raised is the cause of the others."""


EXCESS = (
    "The gradient at the end of an update is larger than those of its micro-batches together. "
    "Either a backward pass ran in gns.update() but outside of gns.microbatch, or the gradient "
    "was multiplied inside the block."
)
"""What to say where no parameter is known to be the cause."""


def refuse_flags(parameters: Iterable[str], whole: list[str], flags: Any) -> None:
    """Raise if the ``Flags`` [1, ...] of all updates show a wrong norm, by their cause. Each
    tensor-parallel process should have the ``whole`` ones.
    """
    for name, message in MESSAGES.items():
        if getattr(flags, name).any():
            raise ObservationError(message.format(whole=", ".join(whole[:3])))
    of_units = zip(parameters, flags.surplus[0].tolist(), flags.unseen[0].tolist())
    for name, surplus, unseen in of_units:
        if surplus != 0:  # NaN too
            raise ObservationError(explain_calls(name, surplus + 1))
        if unseen:
            raise ObservationError(explain_unseen(name))


GONE = (
    "No parameter has a gradient at the end of gns.update(). Call optimizer.zero_grad() after the "
    "block. If the optimizer runs inside the backward pass, use source='local'."
)


def explain_penalty(error: BaseException | None, took_graphs: bool) -> None:
    """Raise in place of torch's ``error`` about a gradient of a gradient, and say what helps.
    ``took_graphs``: a gradient in the block was to have a graph of its own.
    """
    if "once_differentiable" in str(error) or (took_graphs and "used in the graph" in str(error)):
        raise ObservationError(PENALTY) from error


PENALTY = (
    "A gradient of a gradient is taken in the block, as a penalty on gradients and the "
    "residual of a differential equation do "
    "(create_graph=True), and what is measured has none. Run the pass with the penalty outside of "
    "the block, or use GradientNoiseScale(model, unit='micro_batch'), which needs no per-sample "
    "norms. With gradients='torch' and on_error='skip' training goes on, and the update is dropped."
)

RUN_BACKWARD = (
    "run forward and backward in it, with loss.backward(). autograd.grad, backward(inputs=...) and "
    "create_graph=True are not measured."
)

NO_BACKWARD = f"No backward pass went through the model inside the block: {RUN_BACKWARD}"
