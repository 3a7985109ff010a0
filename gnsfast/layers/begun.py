# SPDX-License-Identifier: Apache-2.0
"""What a module begins a forward pass with, so that a replay can begin with the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from gnsfast.layers.computed import weight_hooks


class Begun(NamedTuple):
    """The buffers of a module and its submodules at the beginning of a forward pass: a spectral
    norm goes on from them. ``caching``, ``cached``: whether ``parametrize.cached`` held computed
    weights, and for which modules it had them already.
    """

    buffers: list[tuple[nn.Module, dict[str, Tensor | None]]]
    caching: int
    cached: list[nn.Module]


def begun(module: nn.Module) -> Begun:
    """What ``module`` begins its forward with."""
    cached = {key[0] for key in parametrize._cache}
    return Begun(
        [(m, _copies(m._buffers)) for m in module.modules()],
        parametrize._cache_enabled,
        [m for m in module.modules() if id(m) in cached],
    )


@contextmanager
def begin_again(module: nn.Module, before: Begun) -> Iterator[None]:
    """Let ``module`` begin as it did, with the parameters that it has. At the end it has the
    buffers and computed weights of the forward pass again.

    A weight that the forward pass found computed, by a hook or in a cache, is computed from the
    vectors that its spectral norm had come to, without going on from them.
    """
    buffers = [(m, dict(m._buffers)) for m, _ in before.buffers]
    weights = {name: vars(module)[name] for name, _ in weight_hooks(module)}
    parts = (part for m in before.cached for part in m.modules())
    done = [part for part in parts if isinstance(part, parametrizations._SpectralNorm)]
    modes = [(m, m.training) for m in done]
    cache = parametrize._cache, parametrize._cache_enabled
    try:
        parametrize._cache, parametrize._cache_enabled = {}, before.caching
        for m, values in before.buffers:
            m._buffers.update(_copies(values))
        for m in done:
            m.training = False
        _run_hooks(module)
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = cache
        for m, training in modes:
            m.training = training
        vars(module).update(weights)
        for m, values in buffers:
            m._buffers.clear()
            m._buffers.update(values)


def _run_hooks(module: nn.Module) -> None:
    mode = module.training
    module.training = False
    for _, hook in weight_hooks(module):
        hook(module, ())
    module.training = mode


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {n: None if b is None else b.detach().clone() for n, b in buffers.items()}
