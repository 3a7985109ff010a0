# SPDX-License-Identifier: Apache-2.0
"""What the layers share: rows into samples, the size of a probe, autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

Link = tuple[Tensor, Tensor, Tensor]
"""An earlier use of a tied embedding: its ids [B, S] and its two link outputs, both [B, S, D]."""


class Metric(NamedTuple):
    """A second probe, of squared norms under a diagonal metric, and what the metric is made of.

    ``probe`` is float32 zeros [P, B + 2]; the metric of a parameter with ``moments`` v is
    1 / (√v s + eps), where ``constants`` [P, 2] holds s and eps, in the order of the probe's rows.
    For Adam's v after t steps s is 1 / √(1 - beta2^t).

    >>> x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    >>> probe, weighed = (torch.zeros(1, 3 + 2, requires_grad=True) for _ in range(2))
    >>> s_eps, v = torch.tensor([[2.0, 1.0]]), torch.full((2, 5), 0.25)
    >>> metric = gnsfast.functional.Metric(weighed, s_eps, (v,))
    >>> gnsfast.functional.linear(x, w, None, probe, metric=metric).sum().backward()
    >>> torch.allclose(weighed.grad[0, :3], probe.grad[0, :3] / 2)
    True
    """

    probe: Tensor
    constants: Tensor
    moments: tuple[Tensor, ...]

    def inputs(self, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
        """The probe, the constants, and v of each of ``parameters``, None for one without a row."""
        moments = iter(self.moments)
        trained = [p is not None and p.requires_grad for p in parameters]
        return self.probe, self.constants, *(next(moments) if t else None for t in trained)


def metric_inputs(
    metric: Metric | None, starts: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What a layer takes for its ``metric``; as many times None without one.

    Raises ValueError with ``starts``.
    """
    if metric is None:
        return (None,) * (2 + len(parameters))
    if starts is not None:
        raise ValueError("documents of packed rows (starts) have no norms under a metric")
    return metric.inputs(*parameters)


def samples_first(x: Tensor, B: int, batch_dim: int) -> Tensor:
    """``x`` as [B, T, features]; rows are folded into their samples where there are more rows than
    samples.
    """
    if batch_dim == 1 and x.ndim > 2:
        x = x.transpose(0, 1)
    rows = x.shape[:-1].numel()
    T = rows // B if B else 0
    if T * B != rows:
        raise ValueError(f"{rows} rows of an input of shape {list(x.shape)} are not {B} samples")
    return x.reshape(B, T, x.shape[-1])


def samples_back(t: Tensor, shape: torch.Size, batch_dim: int) -> Tensor:
    """The reverse of ``samples_first``: [B, T, features] in the shape that the rows came in."""
    if batch_dim == 1 and len(shape) > 2:
        return t.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return t.reshape(shape)


def num_samples(probe: Tensor) -> int:
    """B of a probe [P, B + 2]."""
    return probe.shape[1] - 2


def check_probe(probe: Tensor, parameters: int) -> None:
    """A probe of another shape would be filled with something else than it says."""
    if probe.ndim != 2 or probe.shape[0] != parameters or probe.dtype != torch.float32:
        raise ValueError(
            f"probe must be float32 [{parameters}, B + 2], a row for each trainable parameter, not "
            f"{probe.dtype} {list(probe.shape)}: after a parameter was frozen, unfrozen or "
            "parametrized, call gnsfast.convert(model) again, outside of an open block"
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a matrix product of ``x``; None while it is off, and for
    float64, which it leaves alone.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Backward computes in the dtypes that forward chose, inside or outside of the user's autocast
    block.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
