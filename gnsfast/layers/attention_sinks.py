# SPDX-License-Identifier: Apache-2.0
"""The drop-in for attention modules of transformers that own attention sinks (gpt-oss)."""

import inspect
from typing import Any

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.errors import ObservationError
from gnsfast.layers.drop_in import Converted, DropIn
from gnsfast.reference import MAX_HEAD_DIM
from gnsfast.tensors import is_dtensor

NAME = "gnsfast_sinks"
"""The name of gnsfast's function among transformers' attention functions."""


class SinkAttention(DropIn):
    """Drop-in for an attention module whose ``sinks`` [H] take part in its softmax.

    While a probe is open, ``functional.attention`` computes the attention instead of transformers'
    ``"eager"``. Other implementations are refused, because they do not pass their mask as a tensor.
    Calls that ask for attention weights are refused too.
    """

    gnsfast = Converted("attention", ("sinks",))
    sinks: Tensor
    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (opened := self._measuring()) is None:
            return super().forward(*args, **kwargs)
        used = self.config._attn_implementation
        if used not in ("eager", None):
            raise ObservationError(
                f"{opened.name}: attention sinks have norms only with attn_implementation='eager', "
                f"which gnsfast replaces by a fused kernel, and not with {used!r}. Call "
                "model.set_attn_implementation('eager'), or leave the sinks out: convert(model, "
                f"exclude=[{opened.name!r}])."
            )
        _register()
        config = self.config
        self.config = _Redirected(config)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config = config


class _Redirected:
    """A configuration that names gnsfast's attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    asked = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    refused = {
        f"attention dropout ({dropout})": dropout,
        "attention weights as an output (output_attentions)": asked,
        "a softcap": kwargs.get("softcap"),
        "sinks that are not its parameter": s_aux is not None and s_aux is not module.sinks,
        "tensor parallelism": is_dtensor(module.sinks) or is_dtensor(query),
    }
    if reasons := [reason for reason, found in refused.items() if found]:
        raise ObservationError(
            f"{module._measured.name}: attention sinks have no norms with {reasons[0]}. Leave them "
            f"out: convert(model, exclude=[{module._measured.name!r}])."
        )
    module._batch_dim(query, features=3)
    # The mask alone is enough. If it is known to be causal, later keys can be skipped.
    causal = type(module).__name__ in CAUSAL and query.shape[2] == key.shape[2]
    try:
        o = functional.attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=causal,
            window=sliding_window if causal else None,
            scale=scaling,
            sinks=module.sinks,
            probe=module._measured.probe,
        )
    except (NotImplementedError, ValueError) as error:
        raise ObservationError(
            f"{module._measured.name}: {str(error).rstrip('.')}. Leave it out: convert(model, "
            f"exclude=[{module._measured.name!r}])."
        ) from error
    return o.transpose(1, 2).contiguous(), None


CAUSAL = ("GptOssAttention",)


def owns_sinks(module: nn.Module) -> bool:
    """Whether ``SinkAttention`` takes this module: its only parameter is ``sinks``, and its forward
    asks transformers for the attention function.
    """
    own = {n for n, p in module._parameters.items() if p is not None}
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_names if code else ()
    width = getattr(module, "head_dim", 0)
    one_width = getattr(module, "v_head_dim", width) == width and width <= MAX_HEAD_DIM
    dispatched = "ALL_ATTENTION_FUNCTIONS" in names and hasattr(module, "config")
    return own == {"sinks"} and dispatched and one_width
