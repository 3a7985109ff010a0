# SPDX-License-Identifier: Apache-2.0
"""The drop-in for the experts of a mixture as transformers builds them (Mixtral, Qwen3-MoE,
gpt-oss): each weight is one tensor for all experts.

Legend: B samples, N rows (tokens of all samples), K experts of a token, S = N K pairs of row and
expert, E experts, H width.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.combinations import refuse, tensor_parallel
from gnsfast.functional import autocast_dtype
from gnsfast.layers.batch_rows import BatchRows
from gnsfast.layers.drop_in import Converted
from gnsfast.layers.router import owns_router

IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm")
"""The implementations of transformers that compute the same. Others are for quantized weights."""


class Experts(BatchRows):
    """Drop-in for the experts of transformers: ``gate_up_proj`` (or ``up_proj``) and ``down_proj``.

    While a probe is open it replaces their ``eager``, ``batched_mm`` or ``grouped_mm``
    implementation. Rows are sorted by expert and then by sample, so that each sample's rows of an
    expert are one segment. A load-balancing loss ties samples together. It is refused if
    ``config.output_router_logits`` asks for it, but it is not noticed if the caller passes that as
    a keyword.
    """

    gnsfast = Converted("experts")
    config: Any
    has_gate: bool
    is_transposed: bool
    down_proj: Tensor
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._measuring() is None:
            return super().forward(*args, **kwargs)
        if kwargs:
            bound = inspect.signature(super().forward).bind(*args, **kwargs)
            args = tuple(bound.arguments.values())
        return self._sorted(*args)

    def _sorted(self, x_NH: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        self._refuse_others(x_NH, expert_NK, weight_NK)
        B, (N, K) = self._measured.samples, expert_NK.shape
        E = len(self.down_proj)
        # An expert out of range is on another rank. Its rows come last and have no expert here.
        batched = self.config._experts_implementation == "batched_mm"
        if batched and not hasattr(self, "_is_expert_parallel"):
            # transformers 5.17 lacks this flag. Its last expert takes such rows with weight 0.
            expert_NK = expert_NK.clamp(0, E - 1)
        key_S = (expert_NK * B + self._sample_of(x_NH)[:, None]).flatten()
        key_S, order_S = key_S.sort(stable=True)
        segments = torch.arange(E * B + 1, device=key_S.device, dtype=key_S.dtype)
        starts = torch.searchsorted(key_S, segments, out_int32=True)
        y_SH = self._projected(up_name(self), x_NH[order_S // K], starts)
        y_SH = self._apply_gate(y_SH) if self.has_gate else self.act_fn(y_SH)
        y_SH = self._projected("down_proj", y_SH, starts)
        y_SH = y_SH * weight_NK.flatten()[order_S][:, None]
        # Back to [N, K, H], then summed over K without atomics, so that bits are reproducible.
        y_NKH: Tensor = y_SH[order_S.argsort()].unflatten(0, (N, K))
        return y_NKH.sum(1).to(x_NH.dtype)

    def _projected(self, name: str, x_SI: Tensor, starts: Tensor) -> Tensor:
        """Every row times its expert's part of parameter ``name``, whose probe rows it fills."""
        bias, probe = f"{name}_bias", self._measured.probe
        own = list(self.probed_parameters())
        rows = [own.index(n) for n in (name, bias) if n in own]
        # Autocast does not cast torch's grouped product, but it casts the others.
        cast = self.config._experts_implementation != "grouped_mm"
        return functional.grouped_linear(
            x_SI,
            getattr(self, name),
            self._parameters.get(bias),
            starts,
            probe[rows[0] : rows[-1] + 1] if rows else probe[:0],
            transposed=self.is_transposed,
            dtype=autocast_dtype(x_SI) if cast else None,
        )

    def _refuse_others(self, x_NH: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> None:
        used = self.config._experts_implementation
        if used not in IMPLEMENTATIONS:
            raise self._refuse(
                "experts have norms only with experts_implementation "
                f"{' or '.join(map(repr, IMPLEMENTATIONS[1:]))}, not with "
                f"experts_implementation={used!r}"
            )
        sharded = tensor_parallel(x_NH, *self._parameters.values())
        refuse(self.gnsfast.route, sharded, self._measured.name)
        if getattr(self.config, "output_router_logits", False) and getattr(
            self.config, "router_aux_loss_coef", 0.0
        ):
            raise self._refuse(
                "config.output_router_logits adds a load-balancing loss, which ties the samples "
                "together, so no sample has a gradient of its own",
                "Set it to False for the pass that you measure, or router_aux_loss_coef to 0.",
            )
        shapes = [list(t.shape) for t in (x_NH, expert_NK, weight_NK)]
        if x_NH.ndim != 2 or shapes[1] != shapes[2] or shapes[1][:-1] != shapes[0][:1]:
            raise self._refuse(
                "its arguments must be rows [N, H], experts [N, K] and weights [N, K], and have "
                f"the shapes {shapes}"
            )


def up_name(module: Any) -> str:
    """The name of the experts' first projection."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def experts_reason(module: nn.Module) -> str | None:
    """Why ``Experts`` cannot take a module, or an empty string if it can. None if the module's
    forward does not come from transformers' interface for experts.
    """
    code = getattr(type(module).forward, "__code__", None)
    if "experts_interface" not in getattr(code, "co_freevars", ()):
        return None
    flags = ("has_gate", "has_bias", "is_transposed")
    if any(not isinstance(getattr(module, flag, None), bool) for flag in flags):
        return f"it is a module of experts without the attributes {', '.join(flags)}"
    experts: Any = module
    if getattr(experts, "has_post_expert_norm", False):
        return "gnsfast has no kernel for a norm after each expert"
    names = [up_name(experts), "down_proj"]
    if experts.has_bias:
        names = [n for name in names for n in (name, f"{name}_bias")]
    shapes = {n: tuple(p.shape) for n, p in module._parameters.items() if p is not None}
    if list(shapes) != names or any(len(shapes[n]) != 3 for n in names if "bias" not in n):
        return f"gnsfast has no kernel for experts with the parameters {', '.join(shapes)}"
    up, down = (
        (s[0], *s[:0:-1]) if experts.is_transposed else s
        for s in (shapes[up_name(experts)], shapes["down_proj"])
    )
    if up != (down[0], down[2] * (1 + experts.has_gate), down[1]):
        return (
            f"gnsfast has no kernel for experts with weights of shapes {list(up)} and {list(down)}"
        )
    return ""


def rows_in_order(block: nn.Module, forward: Callable[..., Any], child: nn.Module) -> bool:
    """Whether ``block`` accepts only [B, T, H], not [N, H], and passes all rows to ``child`` in
    their order. Its ``forward`` runs with stand-ins for its children to find out.
    """
    like: Any = child
    H = like.weight.shape[1] if owns_router(child) else like.down_proj.shape[1 + like.is_transposed]
    given: list[Tensor] = []

    def stand_in(module: nn.Module | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            x: Tensor = next(iter((*args, *kwargs.values())))
            if module is child:
                given.append(x)
            if module is None or not owns_router(module):
                return torch.zeros_like(x)
            logits = x.new_zeros((x.shape[:-1].numel(), 1))
            return logits, logits, logits.long()

        return call

    twin = object.__new__(nn.Module)
    children = {name: stand_in(module) for name, module in block._modules.items()}
    twin.__dict__ = {**block.__dict__, "_modules": children, "training": False}
    x = torch.arange(6.0, device="cpu").reshape(2, 3, 1).expand(2, 3, H).contiguous()
    try:
        with torch.no_grad():
            forward(twin, x.clone())
    except Exception:  # another kind of block: what its children get is unknown
        return False
    try:
        with torch.no_grad():
            forward(twin, x.flatten(0, 1))
    except Exception:
        return len(given) == 1 and torch.equal(given[0], x.flatten(0, 1))
    return False
