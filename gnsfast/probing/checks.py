# SPDX-License-Identifier: Apache-2.0
"""Checks for everything that would silently make a norm wrong, and their error messages."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from gnsfast.combinations import REPEATED, reason
from gnsfast.conversion import fused_loss_of, project_of
from gnsfast.layers import ATTEND_TO_EACH_OTHER, DropIn, in_parts

BETWEEN = (
    "Gradients were changed between two micro-batches of an update, by another backward pass, "
    "clipping, or zero_grad without gns.update(). Put each backward pass of an update into its own "
    "gns.microbatch(...) block, and call zero_grad after gns.update() only."
)


def mark(p: Tensor) -> tuple[int, int] | None:
    """A value that changes whenever ``p.grad`` is written to."""
    if p.grad is None:
        return None
    # Some writes to a DTensor change its own version, others that of its local tensor. Clipping
    # changes neither.
    return id(p.grad), p.grad._version + getattr(p.grad, "_local_tensor", p.grad)._version


def may_repeat(module: DropIn) -> bool:
    """Whether a module may be called several times. An embedding that shares its weight may, since
    links make any number of its uses exact.
    """
    return module.gnsfast.tie is not None and module.gnsfast.route == "embedding"


def explain_calls(path: str, module: DropIn, calls: float) -> str:
    """Why the norms are wrong after ``calls`` calls in one block. A NaN means that a replay gave
    other outputs, or that the samples of an index are not clear.
    """
    where = f"{path or 'the model'} ({type(module).__name__})"
    if calls != calls and module.gnsfast.route == "embedding":
        return (
            f"{where}: its index has no batch dimension. An index [1, T] counts as positions that "
            "all samples share, an index [B] as one entry for each sample. Here that is not clear, "
            "for one of these reasons: an irregular index [1, T], consecutive numbers [B], a pass "
            "that used only the first sample's rows, or one gradient for all samples' rows (a sum "
            "over dimension 0). Check num_samples. If all samples share the index, call "
            f"convert(model, broadcast=[{path!r}]). {leave_out(path)}"
        )
    if calls != calls and module.gnsfast.route in ("in_projection", "out_projection"):
        return f"{where}: {ATTEND_TO_EACH_OTHER}"
    if calls != calls:
        return (
            f"{where}: replaying it sample by sample gave other outputs than its forward pass. It "
            "has dropout or a state, or the samples were not found in one of its arguments. "
            f"{leave_out(path)}"
        )
    many = f"{where}: backward went through it {int(calls)} times in one block"
    once = "A block takes one forward and one backward pass."
    if module.gnsfast.repeated:
        return (
            f"{many}, where all calls of one backward pass count as one. {once} Activation "
            "checkpointing with use_reentrant=True runs several backward passes: set "
            f"use_reentrant=False. {in_parts(path, module)}{leave_out(path)}"
        )
    apart = reason(module.gnsfast.route, module.gnsfast.features(REPEATED))
    replay = f"replay=[{path!r}], " if apart else ""
    return (
        f"{many}, and the norms of several calls do not add up. {once} If the model calls this "
        f"module several times in one pass, call convert(model, {replay}repeated=[{path!r}]), "
        f"which joins the calls. {in_parts(path, module)}{leave_out(path)}"
    )


def leave_out(path: str) -> str:
    """The remedies that are left for any module."""
    or_exclude = f", and convert(model, exclude=[{path!r}]) leaves the module out" if path else ""
    return f"convert(model, example=batch) looks for a route{or_exclude}."


def explain_unseen(name: str, path: str, model: nn.Module) -> str:
    """Why a parameter has no norms if it got a gradient although its module was not called."""
    if project := project_of(model.get_submodule(path)):
        return (
            f"{name} got a gradient, but gnsfast's {path!r} was not called, so its norms would be "
            f"missing. {project} bound a forward of its own to the module: switch that kernel off. "
            f"{leave_out(path)}"
        )
    if project := fused_loss_of(model, path):
        return (
            f"{name} got a gradient, but its module {path!r} was not called, so its norms would be "
            f"missing. The model's forward is that of {project}, whose fused loss takes the weight "
            f"as a tensor. Compute the loss with {path}.cross_entropy(hidden, labels), which keeps "
            f"no logits in memory either, or switch off the fused loss of {project}. "
            f"{leave_out(path)}"
        )
    return (
        f"{name} got a gradient, but its module {path!r} was not called, so its norms would be "
        "missing. Either the weight is used as a tensor, as fused kernels and losses do, or its "
        "forward ran before the block, or backward(inputs=...) left it out. In place of a fused "
        f"loss use the head's own cross_entropy. {leave_out(path)}"
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
    """What is wrong if not all of a parameter's gradient passed through its modules, or None.

    ``ours`` is the squared norm that the probes saw, ``real`` that of the gradient. ``samples`` is
    the sum of the samples' squared norms, and ``model`` the same over all parameters. A gradient
    that is zero in exact arithmetic consists of rounding errors, which are small beside ``model``.
    Overflows are not checked, because a gradient scaler skips them.
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
        f"{name}: the squared norm of its gradient is {real:.6g}, but the part that passed through "
        f"{where} has {ours:.6g}. The weight is also used outside of its module, as in F.linear(x, "
        "module.weight), a fused loss or a penalty on the weights, so its norms would be wrong. "
        f"{leave_out(next(iter(modules)))}"
    )


def explain_flags(flags: list[float], takes_norm: bool = True) -> str | None:
    """What the flags of an update (``FLAGS`` in ``estimator/exchange.py``) say is wrong, or None.
    ``takes_norm`` says whether giving ``grad_norm`` is a remedy.
    """
    written, stale, another, padded, empty, apart, norms, weights = flags
    if padded:
        return (
            "Samples without tokens (those beyond num_samples, or with 0 in tokens) have a "
            "gradient, so tokens is not what the loss counts. If several rows end in padding, it "
            "lies between documents: count it in num_samples, with 0 in tokens."
        )
    if empty:
        return (
            "Samples with tokens have no gradient at all, so padding was counted. For each sample "
            "tokens is what the loss counts, which is 0 for padding."
        )
    if norms:
        return (
            "The processes gave different values of grad_norm to gns.update(). Each must give the "
            "norm of the whole gradient, in a pipeline the norm over all stages."
        )
    if another:
        return (
            "The grad_norm given to gns.update() is not the 2-norm of the gradient from the "
            "backward passes. It has another norm_type, leaves parameters out, or was taken after "
            "clipping, or after a GradScaler unscaled the gradients. Write gns.update(grad_norm="
            "clip_grad_norm_(model.parameters(), max_norm)), whose norm_type is 2. In the last "
            "case pass grad_scaler=scaler to GradientNoiseScale."
        )
    if weights:
        return (
            "The pipeline's stages got different tokens or scale, though they see the same "
            "samples. Give gns.microbatch the same values on each stage."
        )
    if apart:
        return (
            "The processes have different gradients at gns.update(), so nobody has averaged them. "
            "Wrap the model in DistributedDataParallel or fully_shard, or pass a process_group "
            "that holds this process alone. If you average gradients by hand, do it before "
            "gns.update(grad_norm=...), and give the norm of the average. FSDP2 does not average "
            "its ignored_params: leave them out of fully_shard's ignored_params, freeze them, or "
            "average each as it arrives, by p.register_post_accumulate_grad_hook(lambda p: "
            "dist.all_reduce(p.grad.div_(dist.get_world_size())))."
        )
    if stale:
        return (
            "Gradients were not zero before the first micro-batch of an update. Call "
            "optimizer.zero_grad() between gns.update() and the next micro-batch. After a pass "
            "that no update should count, such as a dry run, call gns.discard() too."
        )
    return explain_rewritten(takes_norm) if written else None


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


NO_BACKWARD = (
    "No backward pass went through the model inside the block. Run forward and backward in it, "
    "with loss.backward(): autograd.grad, backward(inputs=...) and create_graph=True are not "
    "measured."
)
