# SPDX-License-Identifier: Apache-2.0
"""The checks for what would make a norm wrong in silence, and their messages."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from gnsfast.combinations import REPEATED, reason
from gnsfast.conversion import fused_loss_of, project_of
from gnsfast.layers import DropIn


def mark(p: Tensor) -> tuple[int, int] | None:
    """A value that changes when a gradient is written to ``p.grad``."""
    if p.grad is None:
        return None
    # Some writes to a DTensor count in its version, some in that of its local tensor, and clipping
    # in neither.
    return id(p.grad), p.grad._version + getattr(p.grad, "_local_tensor", p.grad)._version


def may_repeat(module: DropIn) -> bool:
    """Whether a module may be called several times: links make any number of uses of a tied
    embedding exact.
    """
    return module.gnsfast.tie is not None and module.gnsfast.route == "embedding"


def explain_calls(path: str, module: DropIn, calls: float) -> str:
    """Why the norms are wrong after ``calls`` calls in one block. NaN calls stand for a replay that
    gave other outputs, or an index whose samples are not clear.
    """
    where = f"{path or 'the model'} ({type(module).__name__})"
    if calls != calls and module.gnsfast.route == "embedding":
        return (
            f"{where}: its index has no batch dimension. A row [1, T] is taken for positions that "
            "all samples share, a bare [B] for one index a sample. Here that is not clear: an "
            "irregular index [1, T], consecutive numbers [B], only the first sample's rows were "
            "used, or all samples' rows got one gradient (a sum over dimension 0). Check "
            "num_samples; say convert(model, broadcast=[...]) for an index that samples share. "
            f"{leave_out(path)}"
        )
    if calls != calls:
        return (
            f"{where}: replaying it sample by sample gave other outputs than its forward pass "
            f"(dropout, state, an argument whose samples were not found). {leave_out(path)}"
        )
    many = f"{where}: backward went through it {int(calls)} times in one block"
    once = "One block takes one forward and one backward pass."
    if module.gnsfast.repeated:
        return (
            f"{many}, though the calls of a backward pass count as one. {once} Checkpointing with "
            "use_reentrant=True runs a backward pass for each part: say use_reentrant=False. "
            f"{leave_out(path)}"
        )
    apart = reason(module.gnsfast.route, module.gnsfast.features(REPEATED))
    replay = f"replay=[{path!r}], " if apart else ""
    return (
        f"{many}, and norms of several calls do not add. {once} If the model calls this module "
        f"more than once in a pass, say convert(model, {replay}repeated=[{path!r}]), which joins "
        "its calls; convert(model, example=batch) finds all such modules. "
        f"{leave_out(path)}"
    )


def leave_out(path: str) -> str:
    """The last remedies for a module."""
    or_exclude = f", or leave it out: convert(model, exclude=[{path!r}])" if path else ""
    return f"convert(model, example=batch) looks for its route{or_exclude}."


def explain_unseen(name: str, path: str, model: nn.Module) -> str:
    """Why a parameter that got a gradient without a call of its module has no norms."""
    if project := project_of(model.get_submodule(path)):
        return (
            f"{name} got a gradient, but {path!r} was not called: {project} bound a forward of its "
            f"own to it. Its norms would be missing. Switch that kernel off. {leave_out(path)}"
        )
    if project := fused_loss_of(model, path):
        return (
            f"{name} got a gradient, but its module {path!r} was not called: the model's forward "
            f"is that of {project}, whose fused loss takes a weight as a tensor. Its norms would "
            f"be missing. Compute the loss with {path}.cross_entropy(hidden, labels), which "
            f"keeps no logits either, or switch off the fused loss of {project}. {leave_out(path)}"
        )
    return (
        f"{name} got a gradient, but its module {path!r} was not called (or its forward ran before "
        "the block, or backward(inputs=...) left it out). Its norms would be missing. The weight "
        "is used as a tensor somewhere, as kernels and fused losses do; instead of a fused loss "
        f"use the head's own cross_entropy. {leave_out(path)}"
    )


def explain_sums(
    p: Tensor,
    name: str,
    modules: Mapping[str, DropIn],
    ours: float,
    real: float,
    samples: float,
    model: float,
) -> str | None:
    """What is wrong if not all of a parameter's gradient passed through its modules, else None.

    ``ours`` is the squared norm that the probes saw, ``real`` that of the gradient. ``samples`` is
    the sum of the samples' squared norms, ``model`` the same over all parameters; a gradient that
    is zero in exact arithmetic is rounding, small beside it. An overflow, which a gradient scaler
    will skip, is not checked.
    """
    # bfloat16 autocast moved the squared norm of a replayed bias of 3 channels by 1 %.
    half = p.dtype.itemsize < 4 or any(m.gnsfast.half for m in modules.values())
    tolerance = 3e-2 if half else 1e-3
    if not math.isfinite(real + ours + samples + model):
        return None
    if abs(ours - real) <= tolerance * max(ours, real) + 1e-6 * samples + 1e-10 * model:
        return None
    where = " and ".join(repr(path) if path else "the model" for path in modules)
    return (
        f"{name}: the squared norm of its gradient is {real:.6g}, but that of what passed through "
        f"{where} is {ours:.6g}. The weight is also used outside of its "
        "module (F.linear(x, module.weight), a fused loss, a penalty on the weights), so its norms "
        f"would be wrong. {leave_out(next(iter(modules)))}"
    )


def explain_flags(flags: list[float], takes_norm: bool = True) -> str | None:
    """What is wrong by the flags of an update (``FLAGS`` in ``estimator/exchange.py``), or None.
    ``takes_norm``: a ``grad_norm`` is a remedy.
    """
    written, stale, another, padded, empty, apart, norms, weights = flags
    if padded:
        return (
            "samples without tokens (those beyond num_samples, or with 0 in tokens) have a "
            "gradient, so tokens are not what the loss counts. If several rows end in padding, it "
            "lies between other documents: count it among num_samples, with 0 tokens"
        )
    if empty:
        return (
            "samples with tokens have no gradient at all: padding was counted. tokens are what the "
            "loss counts of each sample, 0 for padding"
        )
    if another:
        return (
            "the grad_norm given to gns.update() is not the 2-norm of the gradient that passed "
            "through the model: another norm_type, a norm after clipping, or one of gradients "
            "that a GradScaler has unscaled, where the estimator needs grad_scaler=scaler"
        )
    if norms:
        return (
            "processes gave different grad_norms to gns.update(): each must give the norm of the "
            "whole gradient, in a pipeline that over all stages"
        )
    if weights:
        return (
            "the pipeline's stages got different tokens or scale, though they see the same "
            "samples: give gns.microbatch the same on each"
        )
    if apart:
        return (
            "processes have different gradients at gns.update(), so nobody has averaged them: wrap "
            "the model in DistributedDataParallel or fully_shard, or pass a process_group of this "
            "process alone. To average them by hand, do so before gns.update(grad_norm=...) with "
            "the norm of the average"
        )
    if stale:
        return (
            "gradients were not zero before the first micro-batch of an update: call "
            "optimizer.zero_grad() between gns.update() and the next micro-batch, and after a pass "
            "that no update is to count, such as a dry run, gns.discard() too"
        )
    return explain_rewritten(takes_norm) if written else None


def explain_rewritten(takes_norm: bool) -> str:
    """That gradients are not those of the backward pass, and what to do."""
    why = (
        "gradients were written to after backward (clipping, a manual division or all_reduce), so "
        "their norm has another scale: call gns.update() before that"
    )
    if not takes_norm:
        return why
    return (
        f"{why}, or give it the unclipped norm, outside of the micro-batch: "
        "gns.update(grad_norm=clip_grad_norm_(...))"
    )


NO_BACKWARD = (
    "no backward pass went through the model inside the block: run forward and backward in it "
    "(loss.backward(), not autograd.grad, backward(inputs=...) or create_graph=True)"
)
