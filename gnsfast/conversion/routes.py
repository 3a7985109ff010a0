# SPDX-License-Identifier: Apache-2.0
"""Finds the route to the norms of a module's own parameters, or the reason why there is none."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from gnsfast import layers
from gnsfast.conversion.recognition import Tried, recognised
from gnsfast.conversion.straight import forward_of
from gnsfast.layers import (
    ATTENTION,
    DropIn,
    Experts,
    MultiheadAttention,
    OwnForward,
    Replayed,
    Router,
    Setting,
    SinkAttention,
    combine,
    experts_reason,
    is_float8,
    is_parametrized_class,
    moves_in_a_call,
    owns_router,
    owns_sinks,
    rebased,
    user_class,
    weight_hooks,
)
from gnsfast.tensors import is_dtensor, is_wrapper


class Route(NamedTuple):
    """The class that a module becomes. With None the module stays as it is, and ``reason`` says
    why.
    """

    cls: type | None
    reason: str = ""


KERNELS: dict[type[nn.Module], type[DropIn]] = {
    nn.Linear: layers.Linear,
    nn.Embedding: layers.Embedding,
    nn.EmbeddingBag: layers.EmbeddingBag,
    nn.Bilinear: layers.Bilinear,
    nn.LayerNorm: layers.LayerNorm,
    nn.RMSNorm: layers.RMSNorm,
    nn.Conv1d: layers.Conv1d,
    nn.Conv2d: layers.Conv2d,
    nn.Conv3d: layers.Conv3d,
    nn.ConvTranspose1d: layers.ConvTranspose1d,
    nn.ConvTranspose2d: layers.ConvTranspose2d,
    nn.ConvTranspose3d: layers.ConvTranspose3d,
    nn.MultiheadAttention: MultiheadAttention,
    nn.GroupNorm: layers.GroupNorm,
    nn.InstanceNorm1d: layers.InstanceNorm1d,
    nn.InstanceNorm2d: layers.InstanceNorm2d,
    nn.InstanceNorm3d: layers.InstanceNorm3d,
    nn.BatchNorm1d: layers.BatchNorm1d,
    nn.BatchNorm2d: layers.BatchNorm2d,
    nn.BatchNorm3d: layers.BatchNorm3d,
    nn.SyncBatchNorm: layers.SyncBatchNorm,
}


def original_class(cls: type) -> type:
    """The class that a module had before ``convert``."""
    if is_parametrized_class(cls) and issubclass(cls, DropIn):
        (base,) = cls.__bases__
        return rebased(cls, original_class(base))
    if (original := user_class(cls)) is not cls:
        return original
    return next((base for base, drop_in in KERNELS.items() if drop_in is cls), cls)


CONTAINERS = (nn.ParameterList, nn.ParameterDict)
LISTS = (nn.ModuleList, nn.ModuleDict, *CONTAINERS)
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


def uses_children_as_tensors(module: nn.Module) -> bool:
    """Whether a module is known to use its children's parameters without calling the children."""
    mamba = "A_log" in module._parameters and hasattr(module, "conv1d")
    attention = isinstance(module, nn.MultiheadAttention)
    other = attention and _attention_route(module).cls is None
    return mamba or other or _rebuilt_by_peft(module) or _uses_dora(module)


def _uses_dora(module: nn.Module) -> bool:
    """Whether peft divides the adapter's output by norms of all its weights (DoRA)."""
    return len(getattr(module, "lora_magnitude_vector", ())) > 0


def _rebuilt_by_peft(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__module__.startswith("peft.") and cls.__name__ == "MultiheadAttention"


def _attention_route(module: nn.Module) -> Route:
    """The kernel for attention whose code and output projection are torch's own, else None."""
    attention: Any = nn.MultiheadAttention
    out: Any = module.out_proj
    cls = original_class(type(module))
    plain = original_class(type(out)) in (nn.Linear, NonDynamicallyQuantizableLinear)
    if not plain or not own_parameters(module).keys() <= {*ATTENTION}:
        return Route(None)
    if _computed(module) or _computed(out):
        return Route(None)
    if cls is attention:
        return Route(MultiheadAttention)
    if _reaches_super(cls, attention):
        return Route(combine(cls, MultiheadAttention, over=False))
    return Route(None)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters, and those of the containers that it holds."""
    own = {n: p for n, p in module._parameters.items() if p is not None}
    for child_name, child in held(module).items():
        own |= {f"{child_name}.{n}": p for n, p in child.named_parameters()}
    return own


def held(module: nn.Module) -> dict[str, nn.Module]:
    """The children whose parameters a module uses as its own: bare containers, as for LoRA
    embeddings, and the parametrizations from which torch computes its weights.
    """
    if isinstance(module, LISTS):
        return {}
    children = dict(module.named_children())
    computed = {"parametrizations"} if parametrize.is_parametrized(module) else set()
    return {n: c for n, c in children.items() if isinstance(c, CONTAINERS) or n in computed}


def route_of(module: nn.Module, tried: Tried | None = None) -> Route:
    """The route of a module that owns parameters. ``tried`` is of modules before it."""
    if isinstance(module, DropIn):
        return Route(type(module))
    own = module._parameters
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return Route(None, "it is a lazy module without a shape: run a forward pass first")
    if any(p is not None and p.is_complex() for p in own.values()):
        return Route(None, "its parameters are complex numbers")
    if _computed(module):
        return replayed(module)
    if is_float8(module):
        return Route(combine(type(module), layers.Float8Linear, over=True))
    for base, drop_in in KERNELS.items():
        if isinstance(module, base):
            return _drop_in(module, base, drop_in, tried)
    if (
        type(module).__module__ == "transformers.pytorch_utils"
        and type(module).__name__ == "Conv1D"
    ):
        return Route(combine(type(module), layers.TransposedLinear, over=True))
    if owns_sinks(module):
        return Route(combine(type(module), SinkAttention, over=True))
    if (reason := experts_reason(module)) is not None:
        return Route(None if reason else combine(type(module), Experts, over=True), reason)
    if owns_router(module):
        return Route(combine(type(module), Router, over=True))
    return _own_way(module, tried)


def _own_way(module: nn.Module, tried: Tried | None) -> Route:
    """The route of a module with its own forward: a kernel if it computes the same, or a replay."""
    drop_in = recognised(module, tried)
    return replayed(module) if drop_in is None else Route(combine(type(module), drop_in, over=True))


def settings_of(module: nn.Module, cls: type[DropIn]) -> tuple[Setting, ...]:
    """What decides the branches of a module's own forward, if its route ``cls`` stands for it."""
    if not issubclass(cls, OwnForward):
        return ()
    return forward_of(module, original_class(type(module))).settings


def _computed(module: nn.Module) -> bool:
    """Whether a module's weight is computed from other parameters."""
    by_torch = parametrize.is_parametrized(module) or bool(weight_hooks(module))
    return by_torch or _computed_in_a_hook(module)


def _computed_in_a_hook(module: nn.Module) -> bool:
    """The same for hooks that are not torch's, told by the names of their parameters. A replay does
    not run such hooks.
    """
    own = module._parameters
    named = "weight_g" in own or any(n.endswith("_orig") for n in own)
    return named and bool(module._forward_pre_hooks) and not weight_hooks(module)


def may_copy(module: nn.Module, claims: tuple[str, ...]) -> bool:
    """Whether a module might work with a copy of the parameters in ``claims`` for each sample."""
    own = own_parameters(module)
    odd = isinstance(module, (torch.jit.ScriptModule, *CONTAINERS)) or _computed(module)
    lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
    real = all(p.is_floating_point() for p in own.values())
    return bool(claims) and own.keys() >= {*claims} and real and not (odd or lazy)


def _drop_in(
    module: nn.Module, base: type[nn.Module], drop_in: type[DropIn], tried: Tried | None
) -> Route:
    if any(is_wrapper(p) and not is_dtensor(p) for p in own_parameters(module).values()):
        return replayed(module)  # a quantized weight, whose gradient may be quantized too
    if base is nn.MultiheadAttention:
        route = _attention_route(module)
        return replayed(module) if route.cls is None else route
    own = own_parameters(module).keys()
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
        module.sparse or module.scale_grad_by_freq
    ):
        return Route(
            None, "its gradients are sparse or scaled by frequency (sparse, scale_grad_by_freq)"
        )
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return replayed(module)
    if not own <= {"weight", "bias"} or "weight" not in own:
        return replayed(module)
    if type(module) is base:
        return Route(drop_in)
    if _reaches_super(type(module), base):
        return Route(combine(type(module), drop_in, over=False))
    return _own_way(module, tried)


def _reaches_super(cls: type, base: type) -> bool:
    """Whether the code of every forward between ``cls`` and torch's class calls the next one."""
    for c in cls.__mro__[: cls.__mro__.index(base)]:
        for name in ("forward", "_conv_forward", "_apply_instance_norm"):
            code = getattr(c.__dict__.get(name), "__code__", None)
            if name in c.__dict__ and (code is None or not _calls_next(code)):
                return False
    return True


def _calls_next(code: Any) -> bool:
    names = code.co_names
    inner = "_conv_forward" in names or "_apply_instance_norm" in names
    return inner or ("__class__" in code.co_freevars and "forward" in names)


def _draws(module: nn.Module) -> bool:
    """Whether a module has dropout."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, RANDOM) and getattr(module, "p", 1.0) > 0


def cost_of_replays(modules: Iterable[nn.Module]) -> str:
    """What a backward pass does to replay these modules, counted in layers without children."""
    layers = len({id(m) for root in modules for m in root.modules() if not m._modules})
    return (
        f"runs {'one layer' if layers == 1 else f'{layers} layers'} again for each sample, one "
        f"after another ({64 * layers:,} calls in a batch of 64)"
    )


def replayed(module: nn.Module) -> Route:
    """The route of a module without a kernel: a replay, unless that would change the outputs."""
    if isinstance(module, CONTAINERS):
        return Route(None, "it is a container of parameters that no module uses as its own")
    if isinstance(module, torch.jit.ScriptModule):
        return Route(None, "it is a TorchScript module, whose forward cannot be replayed")
    if isinstance(module, nn.EmbeddingBag):
        return Route(None, "it is an embedding bag with mode='max', or with a forward of its own")
    parts = list(module.modules())
    if any(map(_computed_in_a_hook, parts)):
        return Route(None, "a hook outside of the module computes its weight from other parameters")
    if any(map(moves_in_a_call, parts)):
        return Route(None, "its spectral norm is updated several times in each call")
    if isinstance(module, nn.MultiheadAttention) and weight_hooks(module.out_proj):
        return Route(
            None, "the attention does not run the hook that computes its output projection"
        )
    if _rebuilt_by_peft(module):
        return Route(None, "peft puts other weights into this attention in every forward pass")
    if any(map(_draws, parts)) or (
        isinstance(module, nn.MultiheadAttention) and module.dropout > 0
    ):
        return Route(None, "it contains dropout, and a replay would draw other masks")
    cls = type(module)
    if is_parametrized_class(cls):
        (base,) = cls.__bases__
        return Route(rebased(cls, combine(base, Replayed, over=True)))
    return Route(combine(cls, Replayed, over=True))
