# SPDX-License-Identifier: Apache-2.0
"""The detectors of everything that makes a norm wrong in silence, and what they say."""

import math

import torch
from torch import Tensor, nn

from gnsfast.conversion import fused_loss_of, project_of
from gnsfast.layers import DropIn


def mark(p: Tensor) -> tuple[int, int] | None:
    """Changes when a gradient is written to ``p.grad``."""
    if p.grad is None:
        return None
    # Some writes to a DTensor count on it, some on the tensor inside of it (clipping: on neither).
    return id(p.grad), p.grad._version + getattr(p.grad, "_local_tensor", p.grad)._version


def may_repeat(module: DropIn) -> bool:
    """A tied embedding links its uses to each other: any number of them is exact."""
    return module.gnsfast.tie is not None and module.route == "embedding"


def explain_calls(path: str, module: DropIn, calls: float) -> str:
    """Why norms of ``calls`` passes in one block are wrong; NaN is a replay that did not agree."""
    where = f"{path or 'the model'} ({type(module).__name__})"
    if calls != calls and module.route == "embedding":
        return (
            f"{where}: its index has no batch dimension (one row [1, T], or a bare [B]), which is "
            "taken for positions that all samples share, or for one index a sample. Here it is not "
            "clear: an irregular index [1, T], consecutive numbers [B], only the first sample's "
            "rows were used, or all samples' rows got one gradient (a sum over dimension 0). Check "
            "num_samples; say convert(model, broadcast=[...]) for an index that samples share. "
            f"{leave_out(path)}"
        )
    if calls != calls:
        return (
            f"{where}: replaying it sample by sample gave other outputs than its forward pass "
            f"(dropout, state, an argument whose samples were not found). {leave_out(path)}"
        )
    return (
        f"{where}: backward went through it {int(calls)} times in one block, and norms of several "
        "calls do not add. One block takes one forward and one backward pass. If the model calls "
        f"this module more than once, replay a module around it or leave it out. {leave_out(path)}"
    )


def leave_out(path: str) -> str:
    """The last remedy for a module; the root of a model has none."""
    return f"Leave it out: convert(model, exclude=[{path!r}])." if path else ""


def explain_unseen(name: str, path: str, model: nn.Module) -> str:
    """Why a parameter with a gradient but without a call of its module has no norms."""
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
        "the block, or backward(inputs=...) left it out): the weight is used as a tensor "
        "somewhere, as fused losses (instead: the head's own cross_entropy) and kernels do. Its "
        f"norms would be missing. {leave_out(path)}"
    )


def explain_sums(
    p: Tensor,
    name: str,
    paths: list[str],
    ours: float,
    real: float,
    samples: float,
    model: float,
) -> str | None:
    """Whether all of a parameter's gradient passed through its modules: None, or what did not.

    ``ours`` is the squared norm that the probes saw, ``real`` that of the gradient, ``samples`` the
    sum of the per-sample ones and ``model`` that over all parameters: beside it a gradient that is
    zero in exact arithmetic is rounding. An overflow that a gradient scaler will skip says nothing.
    """
    tolerance = 1e-3 if p.dtype in (torch.float32, torch.float64) else 3e-2
    if not math.isfinite(real + ours + samples + model):
        return None
    if abs(ours - real) <= tolerance * max(ours, real) + 1e-6 * samples + 1e-10 * model:
        return None
    where = " and ".join(repr(path) if path else "the model" for path in paths)
    return (
        f"{name}: the squared norm of its gradient is {real:.6g}, but what passed through "
        f"{where} has {ours:.6g}. The weight is also used outside of its "
        "module (F.linear(x, module.weight), a fused loss, a penalty on the weights), so its norms "
        f"would be wrong. {leave_out(paths[0])}"
    )


def explain_flags(flags: list[float]) -> str | None:
    """What the flags of ``exchange.py`` say, or None."""
    written, stale, another, padded, empty, apart, norms, weights = flags
    if padded:
        return (
            "samples without tokens (those beyond num_samples, or with 0 in tokens) have a "
            "gradient, so tokens are not what the loss counts. Where several rows end in padding, "
            "it lies between other documents: count it among num_samples, with 0 tokens"
        )
    if empty:
        return (
            "samples that were said to have tokens have no gradient at all: padding was counted. "
            "tokens are what the loss counts of each sample, 0 for padding"
        )
    if another:
        return (
            "the grad_norm handed over is not the 2-norm of the gradient that passed through the "
            "model (another norm_type, or a norm after clipping)"
        )
    if norms:
        return (
            "processes handed different grad_norms over: it is the norm of the whole gradient, of "
            "a pipeline that over all stages"
        )
    if weights:
        return (
            "the pipeline's stages were told different tokens or scale, though they see the same "
            "samples: give gns.microbatch the same on each"
        )
    if apart:
        return (
            "processes have different gradients at gns.update(), so nobody has averaged them: wrap "
            "the model in DistributedDataParallel or fully_shard, or pass the process's own "
            "process_group"
        )
    if stale:
        return (
            "gradients were not zero before the first micro-batch of an update: call "
            "optimizer.zero_grad() between gns.update() and the next micro-batch"
        )
    return REWRITTEN if written else None


REWRITTEN = (
    "gradients were written to after backward (clipping, a manual division or all_reduce), so "
    "their norm has another scale: call gns.update() before that, or hand the unclipped norm over, "
    "outside of the micro-batch: gns.update(grad_norm=clip_grad_norm_(...))"
)


NO_BACKWARD = (
    "no backward pass went through the model inside the block: run forward and backward in it "
    "(loss.backward(), not autograd.grad, backward(inputs=...) or create_graph=True)"
)
