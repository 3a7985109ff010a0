# SPDX-License-Identifier: Apache-2.0
"""The factors by which losses, scalers and parallel training multiply gradients.

A norm means nothing without its factor. The per-sample norms have the factor of the *local*
backward pass, and ``.grad`` at the end of an update has that of the *final* gradient.

====================================  =======================  ================================
who                                   per-sample norms (p)     ``.grad``, read for q
====================================  =======================  ================================
mean loss over n samples              1/n                      1/n
mean loss over N tokens               L_b/N                    L_b/N
sum loss                              1 (L_b per token)        same
``scale=s`` (s = 1/A, 1/num_items)    s                        s, summed over micro-batches
DDP, FSDP2 on R processes             1                        1/R: they average
FSDP2 with a divide factor f          1                        1/f
DDP under ``no_sync``, FSDP2 without  1                        1/R at the last micro-batch
gradient sync
tensor parallel processes             1: each has the whole    1: their shards add
``GradScaler`` with scale s           s                        s, and 1 after ``unscale_``
====================================  =======================  ================================

All of them enter squared. ``.grad`` is read at the end of the block of an update, before anybody
can clip it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from gnsfast.arguments import check_positive
from gnsfast.errors import ObservationError
from gnsfast.noise_scale.statistics import length_variance
from gnsfast.torch_internals import scaler_states

SCALARS = 8
"""The number of scalars that ``microbatch_scalars`` returns and ``coefficients`` takes."""


def microbatch_scalars(
    num_samples: int,
    tokens: float | Tensor | None,
    scale: float | Tensor,
    loss_reduction: str,
    local: bool,
    device: torch.device,
) -> Tensor:
    """The scalars of a micro-batch that determine its samples' weights u_b = a L_b.

    Their sums over micro-batches and processes describe an update. In order: n, N = Σ L_b, 1,
    N² / n, Σ u_b (squared when ``local``), a² n, and two parts of Σ u_b²: the known part, and the
    factor of Var L. The second is not zero where only the total of tokens is known; Var L is then
    estimated from the window. Returns float64 [SCALARS].
    """
    n: float | Tensor = float(num_samples)
    total: float | Tensor
    squares: float | Tensor
    unknown: float | Tensor
    if tokens is None:
        total, squares, unknown = n, n, 0.0
    elif isinstance(tokens, Tensor) and tokens.ndim == 1:
        lengths = _float64(tokens, device)
        n = (lengths > 0).sum().double()  # a row without tokens is padding
        total, squares, unknown = lengths.sum(), lengths.square().sum(), 0.0
    else:
        total = _float64(tokens, device) if isinstance(tokens, Tensor) else float(tokens)
        squares, unknown = total * total / n, n - 1.0
    if isinstance(scale, Tensor):
        scale = _float64(scale, device)
    a = scale / total if loss_reduction == "mean" else scale
    parts = scalars_of(n, total, squares, unknown, a, local)
    if isinstance(total, Tensor) or isinstance(a, Tensor):
        return torch.stack(
            [torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts]
        )
    return _vector(parts, device)


def scalars_of(
    n: Any, total: Any, squares: Any, unknown: Any, a: Any, local: bool
) -> tuple[Any, ...]:
    """The scalars of ``n`` samples with u_b = ``a`` L_b, in the order of ``microbatch_scalars``.
    ``total`` is Σ L_b, ``squares`` the known part of Σ L_b², ``unknown`` the factor of Var L.
    """
    u = a * total
    square = a * a
    return (
        *(n, total, 1.0, total * total / n, u * u if local else u),
        *(square * n, square * squares, square * unknown),
    )


@functools.lru_cache(64)
def _vector(parts: tuple[float, ...], device: torch.device) -> Tensor:
    """It is made once for all updates of the same kind: nobody writes to it."""
    return torch.tensor(parts, dtype=torch.float64).to(device, non_blocking=True)


def _float64(t: Tensor, device: torch.device) -> Tensor:
    return t.to(device, torch.float64, non_blocking=True)


def misplaced(sqnorm_B: Tensor, tokens: Tensor) -> list[Tensor]:
    """1.0 where any sample without tokens has a gradient, and where any with tokens has none."""
    lengths = torch.zeros_like(sqnorm_B)
    lengths[: len(tokens)] = _float64(tokens, sqnorm_B.device)
    padded, empty = (lengths == 0) & (sqnorm_B > 0), (lengths > 0) & (sqnorm_B == 0)
    return [padded.any().double(), empty.any().double()]


@dataclass(frozen=True)
class Coefficients:
    """V, U₂ and the weights of tr Σ and |G|² (see ``statistics``) of K updates, float64 [K].

    ``unequal`` is the root mean square, over samples, of a token's weight a over its mean over
    tokens: 1 where all passes weigh tokens alike. NaN for passes that are measured by themselves.
    """

    v: Tensor
    u2: Tensor
    weight: Tensor
    pairs: Tensor
    samples: Tensor
    unequal: Tensor


def coefficients(scalars: Tensor, local: bool) -> Coefficients:
    """The coefficients of K updates from their summed scalars [K, SCALARS]."""
    samples, tokens, passes, ratio, u, square, known, unknown = scalars.unbind(1)
    mean_length = tokens.sum() / samples.sum()
    variance = length_variance(samples.sum(), tokens.sum(), passes.sum(), ratio.sum())
    v = u if local else u.square()
    u2 = known + unknown * variance
    mean_square = square / samples  # of a, over samples
    square_mean = mean_square if local else v / tokens.square()  # of a, over tokens
    if bool((mean_square <= (1 + 1e-6) * square_mean).all()):
        weight = square_mean * samples * mean_length.square()
    else:  # each pass takes a mean of its own, which has nothing of the tokens of the others
        weight = v / samples
    return Coefficients(
        v=v,
        u2=u2,
        weight=weight,
        pairs=(v - u2) / (weight * (samples - (passes if local else 1.0))),
        samples=samples,
        unequal=v * torch.nan if local else (mean_square / square_mean).sqrt(),
    )


def per_token(norms: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """Norms [..., 2] and scalars [..., SCALARS] of passes that are measured by themselves, as if
    each token weighed 1: what a pass divides its loss by then matters no more.
    """
    samples, square = scalars[..., :1], scalars[..., 5:6]
    a2 = torch.where(samples > 0, square / samples, 1.0)
    return norms / a2, torch.cat([scalars[..., :4], scalars[..., 4:] / a2], -1)


def loss_scale(scaler: GradScaler | None) -> Tensor | None:
    """The factor that ``scaler.scale(loss)`` put on this micro-batch, on its device.

    It reads the scaler's own tensor, because ``get_scale()`` would wait for the device.
    """
    return None if scaler is None or not scaler.is_enabled() else scaler._scale


def without_scale(sqnorm: Tensor, scale: Tensor | None) -> Tensor:
    """A squared norm without the factor that a gradient scaler put on its gradient."""
    if scale is None:
        return sqnorm
    return sqnorm / scale.to(sqnorm.device, torch.float64, non_blocking=True).square()


def unscaled(scaler: GradScaler | None) -> bool:
    """Whether the scaler's ``unscale_`` or ``step`` has already divided the gradients."""
    if scaler is None or not scaler.is_enabled():
        return False
    states = scaler_states(scaler)
    done = {state["stage"] is not OptState.READY for state in states}
    if len(done) > 1:
        raise ObservationError(
            "the grad_scaler has unscaled the gradients of one optimizer, but not of another: call "
            "scaler.unscale_(optimizer) after the gns.update() block"
        )
    return done == {True}


def check_factors(
    num_samples: int, tokens: float | Tensor | None, scale: float | Tensor | None
) -> None:
    """Raise ValueError for invalid ``tokens`` or ``scale``."""
    if isinstance(tokens, Tensor):
        if tokens.shape not in ((), (num_samples,)):
            raise ValueError(
                "tokens must be the micro-batch's total or one number for each sample "
                f"[{num_samples}], such as its count of tokens or the weight of its class, "
                f"not a tensor of shape {list(tokens.shape)}"
            )
    elif tokens is not None and not isinstance(tokens, (int, float)):
        raise ValueError(
            f"tokens must be a number or a tensor [{num_samples}], not {type(tokens).__name__}"
        )
    elif tokens is not None:
        check_positive(**{f"tokens, where it is not a tensor [{num_samples}],": tokens})
    if isinstance(scale, Tensor):
        if scale.ndim:
            raise ValueError(f"scale must be one number, not a tensor of shape {list(scale.shape)}")
    elif scale is not None:
        check_positive(scale=scale)
