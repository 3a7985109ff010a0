# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of an update under Adam's metric, which is the diagonal
P = 1 / (√(v / (1 - beta2^t)) + eps) of the optimizer's last step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.side import Block, Setup, Side
from gnsfast.following import Facts
from gnsfast.noise_scale import loss_factors, summarize_adam
from gnsfast.reference import metric_sqnorm
from gnsfast.tensors import is_dtensor, local_part, whole

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


ONE = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
"""s and eps of a parameter without a v, whose numbers are not used."""


class AdamMetric(Side):
    """Σ_b ‖g_b‖²_P and ‖Σ_b g_b‖²_P, over all parameters that have norms.

    It uses the v of the beginning of the update. If a parameter gets a gradient but has no v, as
    before the optimizer's first step, the numbers of the update are NaN.

    Under FSDP2 the backward pass needs all of v. The first micro-batch of a measured update gathers
    it from the processes, and each keeps it, 4 bytes a parameter, until ``update()``.
    """

    name, width = "adam", 2

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._optimizer, self._local = setup.settings.optimizer, setup.settings.local
        parameters: dict[str, Any] = setup.slab.parameters
        self._names = {p: name for name, p in parameters.items()}
        self._sharded = {p for p in self._names if is_dtensor(p)}
        self._group_of = _parameter_groups(self._optimizer, self._names)
        self._constants: dict[str, Tensor] = {}
        self._moments: dict[nn.Parameter, Tensor] = {}
        self._gathered: dict[nn.Parameter, Tensor] = {}  # those of sharded parameters, whole
        self._marks: list[Any] = []

    def open(self, block: Block) -> Mapping[str, Facts]:
        first, found = not block.before, {p: self._moment(p, n) for p, n in self._names.items()}
        moments = {p: v for p, v in found.items() if v is not None}
        if first:
            self._moments, self._marks = moments, self._mark(moments)
        self._refuse_step(moments)
        if not moments:
            return {}
        if self._sharded:
            if first or self._local:
                self._gathered = {p: whole(v) for p, v in moments.items() if p in self._sharded}
            moments = moments | self._gathered
        constants, of_name = self._constants_of(moments), {self._names[p]: p for p in moments}
        asked = {}
        for leaf in self.setup.slab.followed.leaves:
            if (p := of_name.get(leaf.name)) is not None:
                asked[leaf.name] = Facts(v=moments[p], constants_12=constants[leaf.name])
            else:
                asked[leaf.name] = Facts(constants_12=ONE.to(leaf.parameter.device))
        return asked

    def passed(self) -> list[Tensor]:
        return self.setup.slab.sums(measure=1)

    def leave_out(self, names: Sequence[str]) -> None:
        for p in [p for p, name in self._names.items() if name in names]:
            del self._names[p]
            self._moments.pop(p, None)
        self._marks = self._mark(self._moments)

    def finish(
        self, passes: list[Pass], by_probe: bool, loss_scale: Tensor | None
    ) -> Tensor | None:
        self._gathered = {}
        idle = set.intersection(*(each.idle for each in passes))
        if any(p not in self._moments and name not in idle for p, name in self._names.items()):
            return torch.full((), torch.nan, dtype=torch.float64)
        if by_probe:
            return None
        self._refuse_step(self._moments)
        q = torch.zeros((), dtype=torch.float64, device=self.setup.device)
        constants = self._constants_of(self._moments)
        for p, v in self._moments.items():
            if p.grad is not None:
                constants_2 = constants[self._names[p]][0]
                found = metric_sqnorm(local_part(p.grad.detach()), local_part(v), constants_2)
                q += (found / self.setup.processes.copies(p.grad)).to(q.device)
        return q

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        metric_2 = torch.zeros(2, dtype=torch.float64, device=device)
        for each in update.passes:
            for t in each.left[self.name]:
                own = t[:, :2].sum(0).to(device)
                metric_2 += loss_factors.without_scale(own, each.loss_scale)
        if (q := update.left[self.name]) is None:  # the probes have it
            return metric_2
        q = loss_factors.without_scale(q.to(device), update.loss_scale)
        p = metric_2[0] + 0.0 * q  # NaN where a v is missing
        return torch.stack([p, q * self.setup.processes.divisor**2])

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        return {"adam": summarize_adam(numbers, window.scalars, self._local, (), decay)}

    def _moment(self, p: nn.Parameter, name: str) -> Tensor | None:
        """v of a parameter, or None before the optimizer's first step."""
        state = self._optimizer.state.get(p)
        if not state:
            return None
        key = "max_exp_avg_sq" if self._group_of[p]["amsgrad"] else "exp_avg_sq"
        v = state.get(key)
        if not isinstance(v, Tensor) or "step" not in state:
            raise ValueError(
                f"The optimizer's state of {name} has no {key} and step, but {sorted(state)}. "
                "metric='adam' reads the state of torch.optim.Adam and AdamW."
            )
        plain = type(v) is Tensor
        if p in self._sharded:
            plain = is_dtensor(v) and _placed(v) == _placed(p) and type(local_part(v)) is Tensor
        if not plain or v.dtype not in FLOATS or v.shape != p.shape or v.device != p.device:
            raise ValueError(
                f"The optimizer's {key} of {name} is a {type(v).__name__} of {v.dtype} "
                f"{list(v.shape)} on {v.device}. metric='adam' needs a plain floating-point tensor "
                "of the parameter's shape, device and sharding, so 8-bit and offloaded optimizers "
                "do not work."
            )
        return v

    def _constants_of(self, moments: Mapping[Any, Tensor]) -> dict[str, Tensor]:
        """s and eps [1, 2] of each parameter that has a v, always in the same memory. They are
        computed on the device that holds the optimizer's step count, so nothing waits for it.
        """
        by_device: dict[Any, list[tuple[str, Tensor, Any, float]]] = {}
        for p in moments:
            step, group = torch.as_tensor(self._step(p)), self._group_of[p]
            of_row = self._names[p], step, group["betas"][1], group["eps"]
            by_device.setdefault((step.device, p.device), []).append(of_row)
        found: dict[str, Tensor] = {}
        for (where, to), rows in by_device.items():
            names, steps, betas, eps = zip(*rows)
            t, beta2 = torch.stack(steps).double().flatten(), _numbers(betas, where)
            values_R2 = torch.stack([(1 - beta2**t).rsqrt(), _numbers(eps, where)], 1)
            for name, value_12 in zip(names, values_R2.to(to, non_blocking=True).split(1)):
                own = self._constants.setdefault(name, torch.empty_like(value_12))
                found[name] = own.copy_(value_12)
        return found

    def _step(self, p: nn.Parameter) -> Any:
        return self._optimizer.state[p]["step"]

    def _mark(self, moments: Mapping[nn.Parameter, Tensor]) -> list[Any]:
        steps = [self._step(p) for p in moments]
        counts = [t._version if isinstance(t, Tensor) else t for t in steps]
        return [(id(v), v._version, count) for v, count in zip(moments.values(), counts)]

    def _refuse_step(self, moments: Mapping[nn.Parameter, Tensor]) -> None:
        """Raise if the optimizer has stepped, because the whole update must use one v. With
        ``local`` each pass is measured by itself, so there is nothing to compare.
        """
        if not self._local and self._mark(moments) != self._marks:
            raise ObservationError(
                "The optimizer has stepped since the first micro-batch of the update, so its "
                "second moments are no longer those of the measured norms. Call gns.update() "
                "before optimizer.step()."
            )


def _parameter_groups(optimizer: Any, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, Any]:
    """The optimizer's group of each parameter. Raises if the optimizer is not Adam."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ValueError(
            f"{kind} spreads the second moments over processes, but metric='adam' needs each "
            "process's own. Use torch.optim.AdamW under DistributedDataParallel or fully_shard."
        )
    held = {p: group for group in optimizer.param_groups for p in group["params"]}
    for p, name in names.items():
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
    return {p: held[p] for p in names}


def _placed(t: Any) -> Any:
    """How a DTensor is spread."""
    return t.device_mesh, t.placements


def _numbers(values: Sequence[Any], where: torch.device) -> Tensor:
    """A float64 tensor on a device, from numbers or scalar tensors."""
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=torch.float64).to(where, non_blocking=True)
    scalars = (torch.as_tensor(v, dtype=torch.float64).to(where).flatten() for v in values)
    return torch.cat([*scalars])
