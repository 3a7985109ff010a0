# SPDX-License-Identifier: Apache-2.0
"""The example for ``convert``: what the model is called with, and parts of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.tensors import map_tensors, tensors_of

MOST = 5
"""How many samples of the example are run. More show nothing new, and cost time."""


class Example(NamedTuple):
    """A call of the model, whose tensors have ``num_samples`` samples along ``batch_dim``.
    ``autocast`` maps each type of device to the dtype of autocast around the call, and to whether
    autocast is on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, tuple[torch.dtype, bool]]
    batch_dim: int = 0
    num_samples: int = 0

    def of(self, samples: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for some of the samples, in that order. All samples share a tensor of any
        other size.
        """

        def pick(t: Tensor) -> Tensor:
            dim = _sample_dim(t, self.batch_dim, self.num_samples)
            return t if dim is None else t.index_select(dim, torch.tensor(samples, device=t.device))

        args, kwargs = map_tensors(pick, (self.args, self.kwargs))
        return args, kwargs

    def cut(self) -> "Example":
        """The call for at most ``MOST`` samples."""
        few = min(self.num_samples, MOST)
        args, kwargs = self.of([i * self.num_samples // few for i in range(few)])
        return self._replace(args=args, kwargs=kwargs, num_samples=few)

    @contextmanager
    def around(self) -> Iterator[None]:
        """The autocast of the call."""
        with ExitStack() as contexts:
            for kind, (dtype, enabled) in self.autocast.items():
                contexts.enter_context(torch.autocast(kind, dtype, enabled))
            yield


def example_of(model: nn.Module, example: Any, batch_dim: int) -> Example:
    """The call of the model that ``example`` describes.

    Raises:
        TypeError: if it is neither a tensor, a tuple, a mapping nor a function.
        ValueError: if it has no tensor, fewer than two samples, or samples that are all equal.
    """
    call = _call_of(model, example)
    tensors = [t for t in tensors_of((call.args, call.kwargs)) if t.ndim]
    if not tensors:
        raise ValueError(
            "example: no argument of the model is a tensor with samples. Pass what the model is "
            "called with, such as convert(model, example=inputs)."
        )
    B = tensors[0].shape[batch_dim if tensors[0].ndim > 1 else 0]
    if B < 2:
        raise ValueError(
            f"example: its first tensor, of shape {list(tensors[0].shape)}, has size {B} along "
            f"dimension {batch_dim}. Fewer than two samples do not show which rows belong "
            "together: pass two or more."
        )
    if masks := [list(t.shape) for t in tensors[1:] if t.shape == (B, B)]:
        raise ValueError(
            f"example: a tensor of shape {masks[0]} could hold the {B} samples, or be a mask that "
            "they share. Pass an example with another number of samples."
        )
    call = call._replace(batch_dim=batch_dim, num_samples=B)
    few = call.cut()
    first, *others = (tensors_of(few.of([b])) for b in range(few.num_samples))
    if all(all(map(torch.equal, first, other)) for other in others):
        raise ValueError(
            "example: all samples are equal, so nothing tells them apart. Pass samples that "
            "differ, such as a batch of your data."
        )
    return call


def _sample_dim(t: Tensor, batch_dim: int, B: int) -> int | None:
    """The dimension of an argument that holds the samples. Masks of a sequence-first model are
    batch-first.
    """
    dims = (batch_dim, 0) if t.ndim > 1 else (0,)
    return next((d for d in dims if t.ndim and t.shape[d] == B), None)


def _call_of(model: nn.Module, example: Any) -> Example:
    if isinstance(example, Tensor):
        return Example((example,), {}, {})
    if isinstance(example, Mapping):
        return Example((), dict(example), {})
    if isinstance(example, (tuple, list)):
        return Example(tuple(example), {}, {})
    if callable(example) and not isinstance(example, nn.Module):
        return _caught(model, example)
    raise TypeError(
        "example must be what the model is called with: a tensor, a tuple of arguments, a dict of "
        f"keyword arguments, or a function that calls the model, not a {type(example).__name__}"
    )


class _Called(BaseException):
    """Ends a user's function as soon as it calls the model. It is a ``BaseException``, so an
    ``except Exception`` in the function does not catch it.
    """


def _caught(model: nn.Module, run: Callable[[], Any]) -> Example:
    """The call that ``run`` makes of the model."""
    calls: list[Example] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kinds = {t.device.type for t in (*model.parameters(), *model.buffers())}
        autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        }
        calls.append(Example(args, kwargs, autocast))
        raise _Called

    hook = model.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        run()
    except _Called:
        return calls[0]
    finally:
        hook.remove()
    raise ValueError(
        "example: the function returned without calling the model. It must call the model that "
        "convert is given."
    )
