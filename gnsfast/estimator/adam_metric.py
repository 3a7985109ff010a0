# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of an update under Adam's metric, which is the diagonal
P = 1 / (√(v / (1 - beta2^t)) + eps) of the optimizer's last step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.combinations import METRIC, TENSOR_PARALLEL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import NoiseScale, loss_factors, summarize_adam
from gnsfast.parallel import Processes, parameters_at_rest
from gnsfast.probing import ProbeSlab
from gnsfast.reference import metric_sqnorm
from gnsfast.tensors import is_dtensor, local_part

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class NoMetric:
    """The measurement of an update without a metric. It does nothing and adds no numbers."""

    width = 0
    modules: frozenset[str] = frozenset()

    def open(self, slab: ProbeSlab, first: bool) -> dict[str, list[Tensor]]:
        """v of the parameters, for each module whose metric is known. ``first`` says that this
        micro-batch begins an update.
        """
        return {}

    def finish(self, by_probe: bool, touched: set[str]) -> Tensor | None:
        """This process's share of q, from ``.grad``. None if the probes have it."""
        return None

    def numbers(
        self, metric_2: Tensor, q: Tensor | None, loss_scale: Tensor | None
    ) -> list[Tensor]:
        """This process's share of p and q, [2], from the sums of the probes and from ``finish``."""
        return []

    def refuse_norm(self) -> None:
        """Raise if ``grad_norm`` is not enough."""

    def added(
        self, result: NoiseScale, metric: Tensor, scalars: Tensor, decay: float | None
    ) -> NoiseScale:
        """``result`` with the noise scale under the metric, from the window's p and q [U, 2]."""
        return result


class AdamMetric(NoMetric):
    """Σ_b ‖g_b‖²_P and ‖Σ_b g_b‖²_P, over the parameters whose layers support a metric.

    It uses the v of the beginning of the update. If a parameter gets a gradient but has no v, as
    before the optimizer's first step, the numbers of the update are NaN.

    Under FSDP2 the backward pass needs all of v. The first micro-batch of a measured update gathers
    it from the processes, and each keeps it, 4 bytes a parameter, until ``update()``.
    """

    width = 2

    def __init__(
        self,
        model: nn.Module,
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self._optimizer, self._local = settings.optimizer, settings.local
        self._processes = processes
        if processes.tensor > 1:
            refuse(None, [METRIC, TENSOR_PARALLEL])
        self.modules = slab.taking(METRIC)
        self.left_out = slab.left_out(self.modules)
        if not self.modules:
            raise ValueError(
                f"No layer of {type(model).__name__} has norms under Adam's metric. Linear, "
                "Embedding, LayerNorm, RMSNorm and similar layers have them. Leave metric='adam' "
                "out."
            )
        parameters = parameters_at_rest(model)
        at_rest = dict(zip(model.parameters(), parameters.values()))
        self._own = {
            path: [at_rest[p] for p in slab.modules[path].probed_parameters().values()]
            for path in self.modules
        }
        taken = {p for own in self._own.values() for p in own}
        self._names = {p: name for name, p in parameters.items() if p in taken}
        self._called = {name: p for p, name in self._names.items()}
        self._sharded = {p for p in self._names if is_dtensor(p)}
        self._group_of = _parameter_groups(self._optimizer, self._names)
        self._slab: ProbeSlab | None = None
        self._moments: dict[nn.Parameter, Tensor] = {}
        self._gathered: dict[nn.Parameter, Tensor] = {}  # those of sharded parameters, whole
        self._marks: list[Any] = []
        self._device = device

    @staticmethod
    def of(
        model: nn.Module,
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
        device: torch.device,
    ) -> NoMetric:
        """The measurement that the settings ask for. Its numbers are on ``device``."""
        if settings.optimizer is None:
            return NoMetric()
        return AdamMetric(model, slab, settings, processes, device)

    def open(self, slab: ProbeSlab, first: bool) -> dict[str, list[Tensor]]:
        found = {p: self._moment(p, name) for p, name in self._names.items()}
        moments = {p: v for p, v in found.items() if v is not None}
        if first:
            self._moments, self._marks = moments, self._mark(moments)
        self._refuse_step(moments)
        if self._sharded:
            if first or self._local:
                self._gathered = {p: _whole(v) for p, v in moments.items() if p in self._sharded}
            moments = moments | self._gathered
        self._slab = slab
        for device, rows in slab.weighed.items():
            self._fill(slab.constants[device], rows)
        return {
            path: [moments[p] for p in own]
            for path, own in self._own.items()
            if moments.keys() >= {*own}
        }

    def finish(self, by_probe: bool, touched: set[str]) -> Tensor | None:
        self._gathered = {}
        if any(name in touched and p not in self._moments for p, name in self._names.items()):
            return torch.full((), torch.nan, dtype=torch.float64)
        if by_probe:
            return None
        self._refuse_step(self._moments)
        assert self._slab is not None
        q = torch.zeros((), dtype=torch.float64, device=self._device)
        left = dict(self._moments)
        for device, rows in self._slab.weighed.items():
            constants = self._slab.constants[device].unbind()
            for row, name in rows:
                constants_2, p = constants[row], self._called[name]
                v = left.pop(p, None)  # a tied weight has several rows
                if v is not None and p.grad is not None:
                    found = metric_sqnorm(local_part(p.grad.detach()), local_part(v), constants_2)
                    q += (found / self._processes.copies(p.grad)).to(q.device)
        return q

    def numbers(
        self, metric_2: Tensor, q: Tensor | None, loss_scale: Tensor | None
    ) -> list[Tensor]:
        if q is None:
            return [metric_2]
        q = loss_factors.without_scale(q.to(metric_2.device), loss_scale)
        p = metric_2[0] + 0.0 * q  # NaN where a v is missing
        return [torch.stack([p, q * self._processes.divisor**2])]

    def refuse_norm(self) -> None:
        raise ValueError(
            "metric='adam' needs the gradients, not their norm. Call gns.update() without "
            "grad_norm, before clipping."
        )

    def added(
        self, result: NoiseScale, metric: Tensor, scalars: Tensor, decay: float | None
    ) -> NoiseScale:
        found = summarize_adam(metric, scalars, self._local, self.left_out, decay)
        return replace(result, adam=found)

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

    def _fill(self, constants_R2: Tensor, weighed: list[tuple[int, str]]) -> None:
        """Fill in s and eps of each row whose parameter has a v. They are computed on the device
        that holds the optimizer's step count, so nothing waits for that device.
        """
        by_device: dict[torch.device, list[tuple[int, Tensor, Any, float]]] = {}
        for row, name in weighed:
            p = self._called[name]
            if p in self._moments:
                step, group = torch.as_tensor(self._step(p)), self._group_of[p]
                of_row = row, step, group["betas"][1], group["eps"]
                by_device.setdefault(step.device, []).append(of_row)
        for where, found in by_device.items():
            rows, steps, betas, eps = zip(*found)
            t, beta2 = torch.stack(steps).double().flatten(), _numbers(betas, where)
            values = torch.stack([(1 - beta2**t).rsqrt(), _numbers(eps, where)], 1)
            to = constants_R2.device
            index = torch.tensor(rows).to(to, non_blocking=True)
            constants_R2.index_copy_(0, index, values.to(to, non_blocking=True))

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


def _whole(t: Any) -> Tensor:
    """All of a DTensor."""
    whole: Tensor = t.full_tensor()
    return whole


def _numbers(values: Sequence[Any], where: torch.device) -> Tensor:
    """A float64 tensor on a device, from numbers or scalar tensors."""
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=torch.float64).to(where, non_blocking=True)
    scalars = (torch.as_tensor(v, dtype=torch.float64).to(where).flatten() for v in values)
    return torch.cat([*scalars])
