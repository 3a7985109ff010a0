# SPDX-License-Identifier: Apache-2.0
"""Checks for everything that would silently make a norm wrong, and their error messages."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from gnsfast.errors import ObservationError
from gnsfast.following import EXCLUDED, Followed, unfollowed

BETWEEN = (
    "Gradients were changed between two micro-batches of an update, by another backward pass, "
    "clipping, or zero_grad without gns.update(). Put each backward pass of an update into its own "
    "gns.microbatch(...) block, and call zero_grad after gns.update() only."
)


Mark = tuple[int, int] | None
"""A value that changes whenever a gradient is written to."""


def mark(p: Tensor) -> Mark:
    """The mark of ``p.grad``."""
    return marks((p,))[0]


def marks(parameters: Iterable[Tensor]) -> list[Mark]:
    """The ``mark`` of each of ``parameters``."""
    found: list[Mark] = []
    with unfollowed():
        for p in parameters:
            grad: Any = p.grad
            if grad is None:
                found.append(None)
                continue
            version = grad._version
            # Some writes to a DTensor change its own version, others that of its local tensor.
            # Clipping changes neither.
            if (
                type(grad) is not Tensor
                and (local := getattr(grad, "_local_tensor", None)) is not None
            ):
                version += local._version
            found.append((id(grad), version))
    return found


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
    if abs(ours - real) <= tolerance * max(ours, real) + cancelled * samples + 1e-10 * model:
        return None
    return (
        f"{name}: the squared norm of its gradient is {real:.6g}, but the part that was measured "
        f"has {ours:.6g}. A kernel or an autograd function of its own also takes it, or a penalty "
        f"on the weights, so its norms would be wrong. {leave_out(name)}"
    )


FLAGS = "written", "stale", "another", "padded", "empty", "apart", "norms"
"""What may be wrong with updates. Gradients were ``written`` to after backward, or not zero before
the first micro-batch (``stale``). ``grad_norm`` is ``another`` than that of the probes. Samples
without tokens have gradients (``padded``), or samples with tokens have none (``empty``). Processes
have different gradients (``apart``) or different values of ``grad_norm`` (``norms``)."""

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
    "norms": (
        "The processes gave different values of grad_norm to gns.update(). Each must give the "
        "norm of the whole gradient."
    ),
    "another": (
        "The grad_norm given to gns.update() is not the 2-norm of the gradient from the "
        "backward passes. It has another norm_type, leaves parameters out, or was taken after "
        "clipping, or after a GradScaler unscaled the gradients. Write gns.update(grad_norm="
        "clip_grad_norm_(model.parameters(), max_norm)), whose norm_type is 2. In the last "
        "case pass grad_scaler=scaler to GradientNoiseScale."
    ),
    "apart": (
        "The processes have different gradients at gns.update(), so nobody has averaged them. "
        "Wrap the model in DistributedDataParallel or fully_shard, or pass a process_group "
        "that holds this process alone. If you average gradients by hand, do it before "
        "gns.update(grad_norm=...), and give the norm of the average. FSDP2 does not average "
        "its ignored_params: leave them out of fully_shard's ignored_params, freeze them, or "
        "average each as it arrives, by p.register_post_accumulate_grad_hook(lambda p: "
        "dist.all_reduce(p.grad.div_(dist.get_world_size())))."
    ),
    "stale": (
        "Gradients were not zero before the first micro-batch of an update. Call "
        "optimizer.zero_grad() between gns.update() and the next micro-batch. After a pass "
        "that no update should count, such as a dry run, call gns.discard() too."
    ),
}
"""What to say of a flag. The first that is raised is the cause of the others."""


def explain_flags(found: Sequence[float], takes_norm: bool = True) -> str | None:
    """What is wrong if one of ``FLAGS`` is not zero, or None. ``takes_norm``: giving ``grad_norm``
    is a remedy.
    """
    raised = {name for name, count in zip(FLAGS, found) if count}
    for name, message in MESSAGES.items():
        if name in raised:
            return message
    return explain_rewritten(takes_norm) if raised else None


GONE = (
    "No parameter has a gradient. Call gns.update() before optimizer.zero_grad(). If the optimizer "
    "runs inside the backward pass, use source='local'."
)


def explain_rewritten(takes_norm: bool) -> str:
    """The message that gradients are not those of the backward pass, with the remedy."""
    why = (
        "Gradients were changed after the backward pass (by clipping, a division or an "
        "all_reduce), so their norm has another scale. Call gns.update() before that"
    )
    if not takes_norm:
        return f"{why}."
    return (
        f"{why}, or give it the unclipped norm, outside of the micro-batch: "
        "gns.update(grad_norm=clip_grad_norm_(...))"
    )


def explain_penalty(error: BaseException | None) -> None:
    """Raise in place of torch's ``error`` about a gradient of a gradient, and say what helps."""
    if "once_differentiable" in str(error):
        raise ObservationError(PENALTY) from error


PENALTY = (
    "A gradient of a gradient is taken in the block, as a penalty on gradients does "
    "(create_graph=True), and what is measured has none. Run the pass with the penalty outside of "
    "the block, or use GradientNoiseScale(model, unit='micro_batch'), which needs no per-sample "
    "norms."
)

RUN_BACKWARD = (
    "run forward and backward in it, with loss.backward(). autograd.grad, backward(inputs=...) and "
    "create_graph=True are not measured."
)

NO_BACKWARD = f"No backward pass went through the model inside the block: {RUN_BACKWARD}"
