# SPDX-License-Identifier: Apache-2.0
"""The drop-in for torchao's ``Float8Linear``.

Its weight gradient is dyᵀx of float8 casts, and most recipes scale a cast by the largest number in
the whole batch. A sample's gradient comes from its rows of these casts, so the gradients of all
samples add up to that of the layer. A sample by itself would be cast with another scale, which
changed the norms of a small model by up to 5 %. ``gnsfast.verify`` shows this difference, because
it runs single samples.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.layers.replay import Gradients, RecordedCall, Replayed
from gnsfast.tensors import accumulate_dtype

WHERE = "torchao.float8.float8_linear"


def is_float8(module: nn.Module) -> bool:
    """Whether a module is torchao's ``Float8Linear``."""
    return any(c.__name__ == "Float8Linear" and c.__module__ == WHERE for c in type(module).__mro__)


def without_casts(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module. For a ``Float8Linear`` it leaves out the casts, whose scale ties
    samples together.
    """
    if not is_float8(module):
        return module.forward
    layer: Any = module
    return lambda input: F.linear(input, layer.weight, layer.bias)


def cast(t_NF: Tensor, how: Any, role: str, layer: Any) -> Tensor:
    """An operand of the weight gradient after torchao's cast, in the precision in which products
    are added. The weight gradient sums over its rows.
    """
    acc = accumulate_dtype(t_NF.dtype)
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    if how.scaling_type.name == "DISABLED":
        return t_NF.to(acc)
    found = scaling.hp_tensor_to_float8_dynamic(
        t_NF,
        how.target_dtype,
        layer.linear_mm_config,
        gemm_input_role=tensors.GemmInputRole[role],
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=scaling.get_maybe_axiswise_dim(0, how.scaling_granularity),
        round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
    )
    values: Tensor = found._data.to(acc) / found._scale
    return values


class Float8Linear(Replayed):
    """Drop-in for ``Float8Linear``. Each sample's gradient comes from the casts of the batch."""

    config: Any

    def by_sample(
        self, call: RecordedCall, parameters: dict[str, Tensor], same: list[Tensor]
    ) -> Callable[[int], Gradients]:
        x, dy, config = call.tensors[0], call.douts[0], self.config
        assert dy is not None  # the layer has one output, and backward has come through it
        x, acc = x.to(dy.dtype), accumulate_dtype(dy.dtype)
        dim = max(call.replay.dims[0], 0)

        def rows(t: Tensor, how: Any, role: str) -> Tensor:
            return cast(t.reshape(-1, t.shape[-1]), how, role, self).view(t.shape)

        casts = (
            rows(dy, config.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT"),
            rows(x, config.cast_config_input_for_grad_weight, "INPUT"),
        )

        def gradients(b: int) -> Gradients:
            dy_TO, x_TI = (t.select(dim, b).reshape(-1, t.shape[-1]) for t in casts)
            plain_TO = dy.select(dim, b).reshape(-1, dy.shape[-1]).to(acc)
            own = {"weight": lambda: dy_TO.T @ x_TI, "bias": lambda: plain_TO.sum(0)}
            return tuple(own[name]() for name in parameters)

        return gradients
