# SPDX-License-Identifier: Apache-2.0
"""The route for layers that have no kernel: backward replays their forward, one sample at a time.

This is slower, but exact. The layer's own gradient stays that of torch, and only the norms of its
parameters come from the replay. The replay must give the outputs of the forward pass. If it does
not, because of dropout, a state, or an argument whose samples were not found, the call counter
becomes NaN, and the check that reads it names the module. Buffers are restored after each replay.
The module's own hooks do not run again, but hooks on submodules run once more for each sample.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gnsfast import reference
from gnsfast.combinations import refuse, tensor_parallel
from gnsfast.errors import ObservationError
from gnsfast.functional import Calls
from gnsfast.layers.begun import Begun, begin_again, begun
from gnsfast.layers.drop_in import Converted, DropIn, Opened
from gnsfast.tensors import accumulate_dtype

EAGER = (
    "gnsfast replays a layer that has no kernel, and torch.compile cannot trace a replay. Compile "
    "without fullgraph=True, or leave the layer out: convert(model, exclude=[...]). "
    "gnsfast.coverage(model) shows such layers with the route 'replay'."
)
Gradients = tuple[Tensor | None, ...]
"""The gradients of a module's parameters, with None for a parameter that the call does not use."""

_PLAIN = (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, type(None))


def is_plain(value: object) -> bool:
    """Whether a replay can repeat a call with this argument, because no call can change it."""
    return isinstance(value, _PLAIN)


def replay_dim(
    module: nn.Module, shape: Sequence[int], place: int, B: int, batch_dim: int
) -> int | None:
    """The dimension in which a replay finds the samples of the argument or output at ``place``.
    None if all samples share that argument.
    """
    if isinstance(module, nn.RNNBase):  # the states, which come after the rows, are [L, B, H]
        dim = 0 if module.batch_first and place == 0 else 1
        return dim if len(shape) == 3 and shape[dim] == B else None
    if isinstance(module, nn.MultiheadAttention):
        batch_dim = 0 if module.batch_first else 1
    if len(shape) > 2 and shape[batch_dim] == B:
        return batch_dim
    return 0 if shape and shape[0] == B else None


class Replayed(DropIn):
    """Drop-in for a module without a kernel: backward replays its forward for each sample."""

    gnsfast = Converted("replay")

    def open_probe(self, opened: Opened) -> None:
        super().open_probe(opened)
        # The compiler cannot trace a replay. To import it just to disable it would take a second.
        if "torch._dynamo" in sys.modules and not hasattr(Replayed._watch, "_torchdynamo_disable"):
            for name in ("_watch", "_begin"):
                eager = torch.compiler.disable(getattr(Replayed, name), reason=EAGER)
                setattr(Replayed, name, eager)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._opened is not None and self._opened.plan.calls is not None:
            features = self._opened.plan.features(self.gnsfast.route, False, False, False)
            refuse(self.gnsfast.route, features, self._opened.name)  # _watch itself is eager
        if self._measuring() is None:
            return super().forward(*args, **kwargs)
        before = self._begin()
        return self._watch(super().forward(*args, **kwargs), args, kwargs, before)

    def _begin(self) -> Begun:
        return begun(self)

    def _watch(
        self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Begun
    ) -> Any:
        opened = self._measured
        refuse(
            self.gnsfast.route, tensor_parallel(*self.claimed_parameters().values()), opened.name
        )
        if any(isinstance(a, PackedSequence) for a in args):
            raise self._replay_error("a packed sequence interleaves the rows of its samples")
        leaves, spec = pytree.tree_flatten(output)
        inputs = pytree.tree_leaves((args, kwargs))
        if odd := [type(a).__name__ for a in inputs if not is_plain(a)]:
            raise self._replay_error(
                f"a second call may change its argument of type {odd[0]}"
                + (" (call the model with use_cache=False)" if odd[0].endswith("Cache") else "")
            )
        B = opened.samples
        seen = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        if odd := [type(t).__name__ for t in leaves if not is_plain(t)]:
            raise self._replay_error(
                f"its output contains a {odd[0]}, and not only tensors, tuples, lists and dicts"
            )
        dims = []
        for i in seen:
            dim = self._dim(leaves[i], i, B)
            if dim is None and leaves[i].ndim > 2 and leaves[i].shape[0] == 1:
                leaves[i] = leaves[i].expand(B, *leaves[i].shape[1:])  # samples share this table
                dims.append(-1)
                continue
            if dim is None:
                shape = list(leaves[i].shape)
                raise self._replay_error(
                    f"its output of shape {shape} has no dimension of {B} samples"
                )
            dims.append(dim)
        replay, probe = _Replay(self, args, kwargs, before, seen, dims, B), opened.probe
        narrow = any(t.dtype.itemsize < 4 for t in replay.tensors if t.is_floating_point())
        self.know(half=self.gnsfast.half or replay.autocast[2] or narrow)
        if (calls := opened.plan.calls) is not None:
            (probe,) = calls.enter(self.gnsfast.route, opened.plan, (probe,))
        watched = _ReplayFunction.apply(
            probe, calls, replay, len(seen), *(leaves[i] for i in seen), *replay.tensors
        )
        for i, t in zip(seen, watched):
            leaves[i] = t
        return pytree.tree_unflatten(leaves, spec)

    def by_sample(
        self, call: "RecordedCall", parameters: dict[str, Tensor], same: list[Tensor]
    ) -> Callable[[int], Gradients]:
        """A function from b to sample b's gradient of each parameter, in one call."""
        return partial(call.gradients, parameters, same)

    def _dim(self, t: Tensor, place: int, B: int) -> int | None:
        """The dimension of an argument or output that holds the samples, or None."""
        return replay_dim(self, t.shape, place, B, self.gnsfast.layout.batch_dim)

    def _replay_error(self, reason: str) -> ObservationError:
        return ObservationError(
            f"{self._measured.name} ({type(self).__name__}): gnsfast has no kernel for its "
            f"parameters, and it cannot be replayed sample by sample: {reason}. Leave it out: "
            f"convert(model, exclude=[{self._measured.name!r}])."
        )


class _Replay:
    """One call of a module, kept so that backward can repeat it for each sample."""

    def __init__(
        self,
        module: Replayed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Begun,
        seen: list[int],
        dims: list[int],
        B: int,
    ) -> None:
        self.module, self.before, self.seen, self.dims, self.B = module, before, seen, dims, B
        self.names = list(module.probed_parameters())
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.places = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        self.tensors = [leaves[i].detach() for i in self.places]  # autograd saves and checks them
        self.plain = [None if isinstance(t, Tensor) else t for t in leaves]
        kind = next((t.device.type for t in leaves if isinstance(t, Tensor)), "cpu")
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(
        self, b: int, parameters: dict[str, Tensor], tensors: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """The outputs that require a gradient, from sample b alone of the arguments ``tensors``."""

        leaves = list(self.plain)
        for i, t in zip(self.places, tensors):
            shared = i in self.module.gnsfast.shared
            dim = None if shared else self.module._dim(t, i, self.B)
            leaves[i] = t if dim is None else t.narrow(dim, b, 1)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        kind, dtype, enabled = self.autocast
        module = self.module
        try:
            with _closed(module), _swapped(module, parameters), torch.enable_grad():
                with torch.autocast(kind, dtype, enabled), begin_again(module, self.before):
                    output = module.forward(*args, **kwargs)
        except Exception as e:
            raise module._replay_error(f"{type(e).__name__}: {e}") from e
        outputs = pytree.tree_leaves(output)
        return [outputs[i] for i in self.seen]


@contextmanager
def _closed(module: nn.Module) -> Iterator[None]:
    """Close the probes of the module and its submodules during the replay."""
    open_ones = [(m, m._opened) for m in module.modules() if isinstance(m, DropIn) and m.is_open]
    for m, _ in open_ones:
        m._opened = None
    try:
        yield
    finally:
        for m, opened in open_ones:
            m._opened = opened


@contextmanager
def _swapped(module: Replayed, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Put other tensors in place of the module's parameters, wherever in it they appear."""
    claimed = module.claimed_parameters()
    new = {id(claimed[name]): tensor for name, tensor in tensors.items()}
    saved = [
        (m, name, p) for m in module.modules() for name, p in m._parameters.items() if id(p) in new
    ]
    recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    flat = [m._flat_weights for m in recurrent]  # what their forward uses
    for m, name, p in saved:
        m._parameters[name] = new[id(p)]  # type: ignore[assignment]
    for m, weights in zip(recurrent, flat):
        m._flat_weights = [new.get(id(p), p) for p in weights]
    try:
        yield
    finally:
        for m, weights in zip(recurrent, flat):
            m._flat_weights = weights
        for m, name, p in saved:
            m._parameters[name] = p


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, calls: Calls | None, replay: _Replay, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.replay, ctx.count = calls, replay, count
        replay.tensors = []
        outputs = tensors[:count]
        ctx.save_for_backward(*tensors)
        # Clones: an in-place operation may follow, but the replay is compared with these values.
        return tuple(t.clone() for t in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        saved = tuple(t.detach() for t in ctx.saved_tensors)
        call = RecordedCall(ctx.replay, saved[: ctx.count], saved[ctx.count :], douts)
        rows = _probe_rows([call]) if ctx.calls is None else ctx.calls.hold(call, _probe_rows)
        return rows, None, None, None, *douts, *(None for _ in call.tensors)


class RecordedCall(NamedTuple):
    """A call in backward: the outputs and inputs of its forward, and its output gradients."""

    replay: _Replay
    outputs: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    douts: tuple[Tensor | None, ...]

    @property
    def used(self) -> list[int]:
        """The outputs that the loss depends on."""
        return [i for i, d in enumerate(self.douts) if d is not None]

    def _sample(self, b: int, t: Tensor, i: int) -> Tensor:
        return t.narrow(max(self.replay.dims[i], 0), b, 1)

    def gradients(self, parameters: dict[str, Tensor], same: list[Tensor], b: int) -> Gradients:
        """Sample b's gradient of each parameter. A flag is added to ``same``, which says whether
        the outputs of the replay agree with those of the forward pass.
        """
        replayed = self.replay(b, parameters, self.tensors)
        for i in self.used:
            output = self._sample(b, self.outputs[i], i)
            if replayed[i].shape != output.shape:
                shape = list(replayed[i].shape)
                raise self.replay.module._replay_error(
                    f"for a single sample it returned an output of shape {shape}"
                )
            same.append(_close(replayed[i].detach(), output))
        own = [i for i in self.used if replayed[i].requires_grad]
        if not own:
            return (None,) * len(parameters)
        return torch.autograd.grad(
            [replayed[i] for i in own],
            list(parameters.values()),
            [self._sample(b, d, i) for i in own if (d := self.douts[i]) is not None],
            allow_unused=True,
        )

    def shared_tables(self) -> list[Tensor]:
        """For each output that is a shared table: whether all samples use it."""
        tables = [self.douts[i] for i in self.used if self.replay.dims[i] < 0]
        return [~((d[:1] != 0).any() & ~(d[1:] != 0).any()) for d in tables if d is not None]


def _probe_rows(calls: list[RecordedCall]) -> Tensor:
    """The probe rows of a module. A sample's gradient is the sum over all calls."""
    replay = calls[0].replay
    own = replay.module.claimed_parameters()
    parameters = {n: own[n].detach().requires_grad_() for n in replay.names}
    totals = [torch.zeros_like(p, dtype=accumulate_dtype(p.dtype)) for p in parameters.values()]
    parts: list[list[Tensor]] = [[] for _ in parameters]
    same: list[Tensor] = []
    reached: set[int] = set()
    of = [replay.module.by_sample(call, parameters, same) for call in calls]
    for b in range(replay.B):
        each = [gradients(b) for gradients in of]
        for k, (total, of_calls) in enumerate(zip(totals, zip(*each))):
            found = [g for g in of_calls if g is not None]
            if found:
                g = found[0] if len(found) == 1 else sum(t.to(total.dtype) for t in found)
                total += g
                reached.add(k)
            parts[k].append(reference.norm(g) if found else total.new_zeros(1))
    norms = [[(*of_samples, reference.norm(t))] for t, of_samples in zip(totals, parts)]
    rows = reference.probe_rows(norms, replay.B, norms[0][0][-1])
    same += [t for call in calls for t in call.shared_tables()]
    if same:
        rows[:, -1] = torch.where(torch.stack(same).all(), 1.0, torch.nan)
    for k in range(len(parameters)):
        if k not in reached:  # the forward does not use it, so any gradient came another way
            rows[k, -1] *= 0.0
    return rows


OUT_OF_RANGE = 1e5
"""Outputs larger than this many times the first decile count as constants of a mask."""


def _close(replayed: Tensor, output: Tensor) -> Tensor:
    """Whether a replay and the forward pass gave the same output, up to rounding.

    The tolerance is relative to the largest output in the range of the others, so that the -1e9 of
    a mask does not hide their errors.
    """
    tolerance = max(1e-4, 4 * torch.finfo(output.dtype).eps)
    size, finite = output.abs(), output.isfinite()
    plain = size[finite & (size > 0)]
    scale = size.new_zeros(())
    if plain.numel():
        small = plain.kthvalue(1 + plain.numel() // 10).values
        scale = plain[plain <= OUT_OF_RANGE * small].amax()
    close = (replayed - output).abs() <= tolerance * torch.maximum(size, scale)
    equal = (replayed == output) | (replayed.isnan() & output.isnan())
    return torch.where(finite, close, equal).all()
