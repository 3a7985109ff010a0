# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of an update under Adam's metric, which is the diagonal P = 1 / (√v s + eps) of
the optimizer's last step t, with s = 1 / √(1 - beta2^t).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.estimator.micro_batch_noise import (
    MicroBatchSide,
    scalars_of_pass,
    trained,
    weights_of_units,
)
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.side import Block, Setup
from gnsfast.following import Facts
from gnsfast.noise_scale import loss_factors, summarize_adam
from gnsfast.tensors import accumulate_dtype

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AdamMetric(MicroBatchSide):
    """Σ_k ‖g_k‖²_P and ‖Σ_k g_k‖²_P of an update's micro-batches k, over all trained parameters.

    It uses the v of the beginning of the update. If a parameter gets a gradient but has no v, as
    before the optimizer's first step, the numbers of the update are NaN.
    """

    name, width = "adam", 3

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, trained(setup.model))
        self._optimizer = setup.settings.optimizer
        self._group_of = _parameter_groups(self._optimizer, self.parameters)
        self._moments: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        self._sqnorms: dict[torch.device, Tensor] = {}  # of the open pass

    def open(self, block: Block) -> Mapping[str, Facts]:
        if not block.before:
            states = {name: self._moment(name) for name in self.parameters}
            moments = {name: v for name, v in states.items() if v is not None}
            self._moments, self._constants = moments, self._constants_of(moments)
        self._sqnorms = {}
        return {}

    def _arrived(self, name: str, grad: Tensor) -> None:
        found = self._sqnorm(name, grad)
        self._sqnorms[grad.device] = self._sqnorms.get(grad.device, 0.0) + found

    def _sqnorm(self, name: str, grad: Tensor) -> Tensor:
        """Σ P g² of a parameter's gradient, float64; NaN without a v."""
        if (v := self._moments.get(name)) is None:
            return torch.full((), torch.nan, dtype=torch.float64, device=grad.device)
        return metric_sqnorm(grad, v, self._constants[name])

    def passed(self) -> list[Tensor]:
        return [*self._sqnorms.values()]

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> Tensor:
        self._refuse_alone(len(passes))
        q = torch.zeros((), dtype=torch.float64, device=self.setup.device)
        for name, p in self.parameters.items():
            if p.grad is not None:
                found = self._sqnorm(name, p.grad.detach().to_dense())
                q += (found / self.setup.processes.copies(p.grad)).to(q.device)
        return q

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        p_and_squares = torch.zeros(2, dtype=torch.float64, device=device)
        for each in update.passes:
            for found in each.left[self.name]:
                p_and_squares[0] += loss_factors.without_scale(found.to(device), each.loss_scale)
            p_and_squares[1] += scalars_of_pass(each, self.setup.settings, device)[4].square()
        q = loss_factors.without_scale(update.left[self.name].to(device), update.loss_scale)
        p, squares = p_and_squares.unbind()
        return torch.stack([p, q * self.setup.processes.divisor**2, squares])

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        scalars = weights_of_units(window.scalars, numbers[:, 2:])
        return {"adam": summarize_adam(numbers[:, :2], scalars, decay)}

    def _moment(self, name: str) -> Tensor | None:
        """v of a parameter, or None before the optimizer's first step."""
        p = self.parameters[name]
        state = self._optimizer.state.get(p)
        if not state:
            return None
        key = "max_exp_avg_sq" if self._group_of[name]["amsgrad"] else "exp_avg_sq"
        v = state.get(key)
        if not isinstance(v, Tensor) or "step" not in state:
            raise ValueError(
                f"The optimizer's state of {name} has no {key} and step, but {sorted(state)}. "
                "metric='adam' reads the state of torch.optim.Adam and AdamW."
            )
        fits = v.shape == p.shape and v.device == p.device
        if type(v) is not Tensor or v.dtype not in FLOATS or not fits:
            raise ValueError(
                f"The optimizer's {key} of {name} is a {type(v).__name__} of {v.dtype} "
                f"{list(v.shape)} on {v.device}. metric='adam' needs a plain floating-point tensor "
                "of the parameter's shape and device, so 8-bit and offloaded optimizers do not "
                "work."
            )
        return v

    def _constants_of(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """s and eps [2] of each parameter that has a v. They are computed on the device that holds
        the optimizer's step count, so nothing waits for it.
        """
        by_device: dict[Any, list[tuple[str, Tensor, Any, float]]] = {}
        for name, v in moments.items():
            step, group = torch.as_tensor(self._step(name)), self._group_of[name]
            of_row = name, step, group["betas"][1], group["eps"]
            by_device.setdefault((step.device, v.device), []).append(of_row)
        found: dict[str, Tensor] = {}
        for (where, to), rows in by_device.items():
            names, steps, betas, eps = zip(*rows)
            t, beta2 = torch.stack(steps).double().flatten(), _numbers(betas, where)
            values_R2 = torch.stack([(1 - beta2**t).rsqrt(), _numbers(eps, where)], 1)
            found |= dict(zip(names, values_R2.to(to, non_blocking=True).unbind()))
        return found

    def _step(self, name: str) -> Any:
        return self._optimizer.state[self.parameters[name]]["step"]


def metric_sqnorm(g: Tensor, v: Tensor, constants_2: Tensor) -> Tensor:
    """Σ P g², a float64 scalar; ``constants_2`` holds s and eps. g is multiplied by √P before it is
    squared, because its square alone might underflow. One part of ``g`` is copied at a time.
    """
    acc = accumulate_dtype(g.dtype)
    s, eps = constants_2.to(acc).unbind()
    g_RN, v_RN = (t.flatten(0, -2) if t.ndim > 1 else t.reshape(1, -1) for t in (g, v))
    rows = max(1, (WEIGHED_CUDA if g.is_cuda else WEIGHED) // max(1, g_RN.shape[1]))
    scratch = torch.empty_like(g_RN[:rows], dtype=acc)
    found = []
    for own_g, own_v in zip(g_RN.split(rows), v_RN.split(rows)):
        root = torch.sqrt(own_v.to(acc), out=scratch[: len(own_v)]).mul_(s).add_(eps).rsqrt_()
        found.append(reference.sqnorm(root.mul_(own_g)))
    return torch.stack(found).sum()


WEIGHED = 1 << 17
"""So many elements of a gradient are multiplied by √P at a time on the CPU, in one scratch tensor,
because fresh memory would cost more than the square roots.
"""

WEIGHED_CUDA = 1 << 25
"""The same on a GPU, where each piece costs a few launches. It is 128 MiB beside the gradient."""


def _parameter_groups(
    optimizer: Any, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """The optimizer's group of each parameter. Raises if the optimizer is not Adam."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ValueError(
            f"{kind} spreads the second moments over processes, but metric='adam' needs each "
            "process's own. Use torch.optim.AdamW under DistributedDataParallel."
        )
    held = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items():
        if p not in held:
            raise ValueError(
                f"{name} is not among the optimizer's parameters. Give GradientNoiseScale the "
                "optimizer that trains the model, or freeze the parameter."
            )
        if not {"betas", "eps", "amsgrad"} <= held[p].keys():
            raise ValueError(
                f"metric='adam' needs torch.optim.Adam or AdamW (betas, eps, amsgrad), but {name} "
                f"is trained by {kind}"
            )
    return {name: held[p] for name, p in parameters.items()}


def _numbers(values: Sequence[Any], where: torch.device) -> Tensor:
    """A float64 tensor on a device, from numbers or scalar tensors."""
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=torch.float64).to(where, non_blocking=True)
    scalars = (torch.as_tensor(v, dtype=torch.float64).to(where).flatten() for v in values)
    return torch.cat([*scalars])
