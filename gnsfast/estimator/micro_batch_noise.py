# SPDX-License-Identifier: Apache-2.0
"""Second moments of gradients over micro-batches and processes, instead of single samples.

The unit k is one backward pass of one process. Its gradient g_k = Σ u_b g_b, over its own samples,
arrives at a parameter before it is added to ``.grad`` and averaged over processes. With U_k = Σ u_b
over the samples of a unit, P = Σ g_k² (or Σ g_k g_kᵀ) and Q = (Σ g_k)² have the means

    E P = W G² + S,    E Q = V G² + S,    S = Σ_b u_b² C_b,    W = Σ U_k²,    V = (Σ U_k)²

so that G² = (Q - P) / (V - W) and S = P - W G² are unbiased, for units of any sizes: W takes the
place of U₂ = Σ u_b² of single samples (``noise_scale.statistics``), and nothing else changes. For n
units of b samples, S over the weight of C is b / (n - 1) · (Σ ḡ_k² - n ḡ²): the estimator of
Naganuma et al. 2026 (arXiv 2602.03001), who take a unit of each data-parallel process. C has n - 1
degrees of freedom in an update where single samples give n b - 1.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gnsfast.combinations import MICRO_BATCHES, SHARDED, SPECTRAL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator.settings import Settings
from gnsfast.parallel import parameters_at_rest
from gnsfast.probing import checks
from gnsfast.tensors import is_dtensor


class Arrivals:
    """Hands what arrives at ``parameters`` in each pass to ``take``, by the parameter's name."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], take: Callable[[str, Tensor], object]
    ) -> None:
        self._parameters, self._take = parameters, take
        self._left: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Watch a pass."""
        self._left = {*self._parameters}
        for name, p in self._parameters.items():
            hook = partial(_passed_on, weakref.ref(self), name)
            self._handles.append(p.register_hook(hook))

    def stop(self) -> None:
        """The reverse of ``start``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arriving(self, name: str, grad: Tensor | None) -> None:
        if grad is None:  # of an output that the loss does not use
            return
        if name not in self._left:
            raise ObservationError(
                f"{name} got its gradient in several parts in one pass, and no part is that of the "
                "whole micro-batch. Checkpoint with use_reentrant=False, and call backward once "
                "in each gns.microbatch block."
            )
        self._left.remove(name)
        self._take(name, grad.detach().to_dense())


def _passed_on(to: "weakref.ref[Arrivals]", name: str, grad: Tensor | None) -> None:
    """A hook that does nothing after the estimator is deleted."""
    if (arrivals := to()) is not None:
        arrivals._arriving(name, grad)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters that are trained; none of them may be sharded."""
    found = {name: p for name, p in parameters_at_rest(model).items() if p.requires_grad}
    if any(map(is_dtensor, found.values())):
        refuse([MICRO_BATCHES, SHARDED])
    return found


def measurable(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], feature: str, settings: Settings
) -> dict[str, nn.Parameter]:
    """The parameters that have a dual norm: all. In the spectral norm these are the matrices in
    ``settings.matrices``, or all matrices except for the weights of embeddings.
    """
    if feature != SPECTRAL:
        return dict(parameters)
    looked_up = (nn.Embedding, nn.EmbeddingBag)
    modules, at_rest = dict(model.named_modules()), parameters_at_rest(model)
    rows = {
        id(p)
        for name, p in at_rest.items()
        if isinstance(modules[name.rpartition(".")[0]], looked_up)
    }
    return {
        name: p
        for name, p in parameters.items()
        if p.ndim == 2
        and (id(p) not in rows if settings.matrices is None else p in settings.matrices)
    }


def refuse_numbers(p: Tensor, q: Tensor, scalars: Tensor, flags: Tensor, world: int) -> None:
    """Raise if the numbers of updates of a ``TwoBatchNoiseScale`` cannot be those of their
    micro-batches.
    """
    written, stale, another, one, square = flags.T
    apart = world * square - one.square() > 1e-5 * one.square()
    none = torch.zeros_like(one)
    own = [written, stale, another, none, none, apart, none, none]
    if wrong := checks.explain_flags(checks.Flags(*(float(flag.nansum()) for flag in own))):
        raise ObservationError(wrong)
    if bool((q > (1 + 1e-3) * scalars[:, 2] * p).any()):  # by Cauchy-Schwarz
        raise ObservationError(
            "The gradient of an update is larger than those of its micro-batches allow. A "
            "backward pass ran outside of gns.microbatch, or grad_norm or scale is not that of "
            "these gradients. With a gradient scaler pass grad_scaler=scaler."
        )
