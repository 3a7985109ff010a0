# SPDX-License-Identifier: Apache-2.0
"""The drop-in for the routers of mixtures of experts."""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnsfast import functional
from gnsfast.combinations import refuse, tensor_parallel
from gnsfast.layers.batch_rows import BatchRows
from gnsfast.layers.drop_in import Converted


class Router(BatchRows):
    """Drop-in for a router that owns its weight. Its one call of ``F.linear`` with this weight goes
    through ``functional.linear``, and the rest of its code runs unchanged.
    """

    gnsfast = Converted("router")
    weight: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._measuring() is None:
            return super().forward(hidden_states, *args, **kwargs)
        sharded = tensor_parallel(self.weight, hidden_states)
        refuse(self.gnsfast.route, sharded, self._measured.name)
        interleaved = self._interleaved()
        if hidden_states.ndim == 2:
            self._sample_of(hidden_states)
        else:
            interleaved = self._batch_dim(hidden_states, features=1) == 1
        mode = _OwnLinear(self, hidden_states.shape[:-1].numel(), interleaved)
        with mode:
            output = super().forward(hidden_states, *args, **kwargs)
        if mode.calls != 1:
            raise self._refuse(f"its weight went into {mode.calls} calls of F.linear, not into one")
        return output

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, interleaved: bool) -> Tensor:
        """``F.linear`` that fills the probe. ``x`` has the shape that the router's code gave it."""
        probe = self._measured.probe
        if self._measured.documents is not None:
            plan = functional.Plan(starts=self._starts(x, features=1))
            return functional.linear(x, weight, bias, probe, plan)
        if not interleaved:
            return functional.linear(x, weight, bias, probe)
        x_TBH = x.reshape(-1, self._measured.samples, x.shape[-1])
        y_TBE = functional.linear(x_TBH, weight, bias, probe, functional.Plan(batch_dim=1))
        return y_TBE.reshape(*x.shape[:-1], len(weight))


CASTS = (Tensor.to, Tensor.type, Tensor.float)


class _OwnLinear(TorchFunctionMode):
    """Sends ``F.linear`` with a router's weight, also cast to another dtype, through
    ``functional.linear``.
    """

    def __init__(self, router: Router, rows: int, interleaved: bool) -> None:
        super().__init__()
        self.router, self.rows, self.interleaved, self.calls = router, rows, interleaved, 0
        self.weights = [router.weight]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            result = func(*args, **(kwargs or {}))
            if func in CASTS and self._own(args[0]):
                self.weights.append(result)
            return result
        x, weight, bias = _operands(*args, **(kwargs or {}))
        if not self._own(weight):
            return F.linear(x, weight, bias)
        self.calls += 1
        if x.shape[:-1].numel() != self.rows or (bias is None) == (
            "bias" in self.router.gnsfast.claims
        ):
            raise self.router._refuse(
                f"its F.linear got an input of shape {list(x.shape)} and "
                f"{'no' if bias is None else 'a'} bias, which do not fit the {self.rows} rows of "
                "the router"
            )
        return self.router._linear(x, weight, bias, self.interleaved)

    def _own(self, t: Tensor) -> bool:
        return any(t is w for w in self.weights)


def _operands(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def owns_router(module: nn.Module) -> bool:
    """Whether this is a router of transformers: a weight [E, H], perhaps a bias, no children, and a
    forward that calls ``linear`` and ``topk``.
    """
    if isinstance(module, Router):
        return True
    own = {n: p for n, p in module._parameters.items() if p is not None}
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_names if code else ()
    return (
        type(module).__module__.startswith("transformers.models.")
        and list(own) in (["weight"], ["weight", "bias"])
        and own["weight"].ndim == 2
        and not list(module.children())
        and "linear" in names
        and "topk" in names
    )
