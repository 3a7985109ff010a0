# SPDX-License-Identifier: Apache-2.0
"""The state in which a module begins a forward pass, so that a replay can begin in the same one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from gnsfast.layers.computed import weight_hooks


class Begun(NamedTuple):
    """The state of a module at the beginning of a forward pass. ``buffers`` are those of the module
    and its submodules, which a spectral norm continues from. ``caching`` says whether
    ``parametrize.cached`` was active, and ``cached`` for which modules it already had weights.
    """

    buffers: list[tuple[nn.Module, dict[str, Tensor | None]]]
    caching: int
    cached: list[nn.Module]


def begun(module: nn.Module) -> Begun:
    """The state in which ``module`` begins its forward pass."""
    cached = {key[0] for key in parametrize._cache}
    return Begun(
        [(m, _copies(m._buffers)) for m in module.modules()],
        parametrize._cache_enabled,
        [m for m in module.modules() if id(m) in cached],
    )


@contextmanager
def begin_again(module: nn.Module, before: Begun) -> Iterator[None]:
    """Let ``module`` begin as it did before, with its present parameters. At the end the buffers
    and computed weights of the forward pass are restored.

    If a hook or a cache had computed a weight before the forward pass, it is computed again from
    the vectors of its spectral norm, which are not updated.
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
