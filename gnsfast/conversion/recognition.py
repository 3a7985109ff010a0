# SPDX-License-Identifier: Apache-2.0
"""Recognises layers whose own forward gives the same bits as a layer that has a kernel.

The results on random input decide, in the dtypes that models mix. The code must also be straight
(``straight.py``), so that it does the same for every other input.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnsfast import layers
from gnsfast.conversion.straight import forward_of, is_straight
from gnsfast.functional import RMS_NORM_VARIANTS
from gnsfast.layers import DropIn, eps_of

RMS_NORMS: dict[str, type[DropIn]] = {
    "llama": layers.LlamaRMSNorm,
    "olmo": layers.OlmoRMSNorm,
    "t5": layers.T5RMSNorm,
    "gemma": layers.GemmaRMSNorm,
    "float32": layers.Float32RMSNorm,
    "qwen": layers.QwenRMSNorm,
    "unit": layers.UnitRMSNorm,
    "torch": layers.TorchRMSNorm,
    "as_it_is": layers.PlainRMSNorm,
    "narrow": layers.NarrowRMSNorm,
}
LAYER_NORMS: tuple[type[DropIn], ...] = (
    *(layers.OwnLayerNorm, layers.ChannelsFirstLayerNorm),
    *(layers.Float32LayerNorm, layers.ChannelsFirstFloat32LayerNorm),
)
IN_FLOAT32 = {RMS_NORMS[n] for n in ("llama", "olmo", "gemma", "float32", "qwen", "unit")}
IN_FLOAT32 |= {*LAYER_NORMS[2:]}
"""They compute in float32 under autocast and without it."""
CHANNELS_FIRST = *LAYER_NORMS[1::2], layers.OwnGroupNorm
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
)
"""Dtypes of the input and of the parameters. A layer that does not accept a mixture is recognised
by the others, since it raises an error for that mixture in any case.
"""
SCALES = torch.tensor([[1e-3], [1.0], [1e3]])
"""Scales of the input's rows: the first shows the effect of an epsilon, the last that of a clamp.
"""


Tried = dict[Any, type[DropIn] | None]
"""What trials of earlier modules gave: class, shapes and settings -> the drop-in."""


def recognised(module: nn.Module, tried: Tried | None = None) -> type[DropIn] | None:
    """The drop-in that computes the same as ``module``, or None. Modules that are alike, as the
    norms of all blocks are, need one trial, of 30 ms: ``tried`` keeps it.
    """
    own = {n: p for n, p in module._parameters.items() if p is not None}
    arguments = inspect.signature(module.forward).parameters.values()
    if module._modules or "forward" in vars(module) or len(arguments) != 1:
        return None
    if not own.keys() <= {"weight", "bias"} or "weight" not in own:
        return None
    candidates = _candidates(module, own)
    if not candidates or not is_straight(forward := forward_of(module, type(module))):
        return None
    if forward.without_autocast:
        candidates = [c for c in candidates if c in IN_FLOAT32]
    shapes = {name: _shape(module, name, p) for name, p in own.items()}
    settings = ((s.name, s.kind, repr(s.value)) for s in forward.settings)
    key = type(module), *shapes.items(), *settings
    tried = {} if tried is None else tried
    if key not in tried:
        tried[key] = _by_trial(module, candidates, shapes)
    return tried[key]


def _by_trial(
    module: nn.Module, candidates: list[type[DropIn]], shapes: dict[str, tuple[int, ...]]
) -> type[DropIn] | None:
    """The first of the ``candidates`` that agrees with a module in every trial."""
    for channels_first in (False, True):
        left = [c for c in candidates if (c in CHANNELS_FIRST) == channels_first]
        for x, parameters in _inputs(module, shapes, channels_first):
            if left and not (left := _alike(module, left, x, parameters)):
                break
        if left:
            return left[0]
    return None


def _candidates(module: nn.Module, own: dict[str, nn.Parameter]) -> list[type[DropIn]]:
    """The drop-ins that a module's class and the shapes of its parameters allow. An embedding with
    ``padding_idx`` is not among them, since a forward does not show how backward treats it.
    """
    if isinstance(module, nn.Linear):
        return [layers.CastLinear]
    if isinstance(module, nn.Embedding):
        odd = module.padding_idx is not None or module.max_norm is not None
        return [] if odd or module.sparse or module.scale_grad_by_freq else [layers.OwnEmbedding]
    if own["weight"].ndim != 1 or any(p.shape != own["weight"].shape for p in own.values()):
        return []
    if isinstance(module, nn.GroupNorm):
        return [layers.OwnGroupNorm]
    return [*(() if "bias" in own else RMS_NORMS.values()), *LAYER_NORMS]


def _shape(module: nn.Module, name: str, p: Tensor) -> tuple[int, ...]:
    """The shape of a parameter in a trial, small where its size does not matter."""
    if isinstance(module, nn.Linear):
        return (3, 4) if name == "weight" else (3,)
    return (min(len(p), 5), 8) if isinstance(module, nn.Embedding) else tuple(p.shape)


def _inputs(
    module: nn.Module, shapes: dict[str, tuple[int, ...]], channels_first: bool
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Random input and parameters, for each mixture of dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn: Any = dict(generator=generator, device="cpu")
    rows, width = shapes["weight"][0], shapes["weight"][-1]
    for x_dtype, dtype in DTYPES:
        parameters = {name: torch.randn(*s, **drawn).to(dtype) for name, s in shapes.items()}
        if isinstance(module, nn.Embedding):
            every = torch.arange(rows, device="cpu")  # and rows so long that none may be shortened
            yield torch.stack([every, every.flip(0)]), {"weight": 1e3 * parameters["weight"]}
            continue
        x = torch.randn(2, 3, width, **drawn) * SCALES
        if channels_first:
            x = torch.stack([x, -x], 1).permute(0, 3, 1, 2).contiguous()
        yield x.to(x_dtype), parameters
        if not channels_first:  # a mean over dimension 2 is not one over the last
            yield x[:, None].to(x_dtype), parameters


def _alike(
    module: nn.Module, candidates: list[type[DropIn]], x: Tensor, parameters: dict[str, Tensor]
) -> list[type[DropIn]]:
    """The ``candidates`` that agree with the module's forward in training and evaluation mode."""
    for training in (True, False):
        theirs = _result(_twin(module, training), x, parameters)
        if theirs is None:
            if {x.dtype, *(p.dtype for p in parameters.values())} <= {torch.float32, torch.int64}:
                return []
            continue
        candidates = [
            c for c in candidates if _same(_result(_plain(c, module), x, parameters), theirs)
        ]
    return candidates


Forward = Callable[[Tensor, dict[str, Tensor]], Tensor]


def _twin(module: nn.Module, training: bool) -> Forward:
    """The module's own forward, with other parameters and buffers."""

    def forward(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        none = {name: None for name, p in module._parameters.items() if p is None}
        twin = object.__new__(type(module))
        twin.__dict__ = vars(module) | {
            "_parameters": none | parameters,
            "_buffers": {n: b if b is None else b.clone() for n, b in module._buffers.items()},
            "training": training,
        }
        y: Tensor = type(module).forward(twin, x)
        return y

    return forward


def _plain(drop_in: type[DropIn], module: nn.Module) -> Forward:
    """What a drop-in computes without a probe."""

    def forward(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        w, b = parameters["weight"], parameters.get("bias")
        if drop_in is layers.CastLinear:
            return F.linear(x, w.to(x.dtype), b if b is None else b.to(x.dtype))
        if drop_in is layers.OwnEmbedding:
            return F.embedding(x, w)
        if drop_in is layers.OwnGroupNorm:
            groups: Any = module.num_groups
            return F.group_norm(x, groups, w, b, eps_of(module))
        if drop_in in LAYER_NORMS:
            dtype, first = x.dtype, drop_in in CHANNELS_FIRST
            if issubclass(drop_in, layers.Float32LayerNorm):
                x, w, b = x.float(), w.float(), None if b is None else b.float()
            x = x.permute(0, 2, 3, 1) if first else x
            y = F.layer_norm(x, w.shape, w, b, eps_of(module)).to(dtype)
            return y.permute(0, 3, 1, 2) if first else y
        variant = next(name for name, cls in RMS_NORMS.items() if cls is drop_in)
        return RMS_NORM_VARIANTS[variant][0](x, w, eps_of(module))

    return forward


class _Result(NamedTuple):
    """An output, and the gradients of one loss with respect to input and parameters."""

    y: Tensor
    grads: list[Tensor | None]


def _result(forward: Forward, x: Tensor, parameters: dict[str, Tensor]) -> _Result | None:
    """The result of a forward, or None if it fails, as for a mixture of dtypes."""
    x = x.clone().requires_grad_(x.is_floating_point())
    own = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            y = forward(x, own)
            weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device)
            leaves = [t for t in (x, *own.values()) if t.requires_grad]
            grads = torch.autograd.grad(y, leaves, weights.view(y.shape), allow_unused=True)
    except Exception:  # the module only has parameters like those of such a layer
        return None
    return _Result(y, list(grads))


def _same(ours: _Result | None, theirs: _Result) -> bool:
    """Whether the outputs agree bit for bit, and the gradients up to rounding."""
    if ours is None or ours.y.dtype != theirs.y.dtype or not torch.equal(ours.y, theirs.y):
        return False
    return all(map(_near, ours.grads, theirs.grads))


def _near(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.layout != b.layout:
        return a is b
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)  # norms round to float32
    tolerance = 16 * eps * b.abs().max().nan_to_num().item()
    return torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
