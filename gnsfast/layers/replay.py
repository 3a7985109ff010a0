# SPDX-License-Identifier: Apache-2.0
"""The route for layers that have no kernel: backward replays their forward, one sample at a time.

It is slower, but exact. The layer's own gradient stays that of torch; only the norms of its
parameters come from the replay. The replay must give the outputs of the forward pass. If it does
not (dropout, state, an argument whose samples were not found), the call counter becomes NaN, and
the check that reads it names the module. Buffers are restored after each replay. The module's own
hooks do not run again; those on submodules run once more for each sample.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from gnsfast import reference
from gnsfast.combinations import refuse, tensor_parallel
from gnsfast.errors import ObservationError
from gnsfast.layers.drop_in import Converted, DropIn, Opened
from gnsfast.tensors import accumulate_dtype

_PLAIN = (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, type(None))


def is_plain(value: object) -> bool:
    """Whether a replay can repeat a call with this argument: nothing that the call may change."""
    return isinstance(value, _PLAIN)


def replay_dim(shape: Sequence[int], B: int, batch_dim: int) -> int | None:
    """The dimension in which a replay looks for the samples of an argument or output; None if it
    takes that for something they share.
    """
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
            Replayed._watch = torch.compiler.disable(Replayed._watch)  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output if self._measuring() is None else self._watch(output, args, kwargs)

    def _watch(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self._measured
        refuse(
            self.gnsfast.route, tensor_parallel(*self.claimed_parameters().values()), opened.name
        )
        leaves, spec = pytree.tree_flatten(output)
        inputs = pytree.tree_leaves((args, kwargs))
        if odd := [type(a).__name__ for a in inputs if not is_plain(a)]:
            raise self._replay_error(
                f"a second call may change its argument of type {odd[0]}"
                + (" (say use_cache=False to the model)" if odd[0].endswith("Cache") else "")
            )
        B = opened.samples
        seen = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        if odd := [type(t).__name__ for t in leaves if not is_plain(t)]:
            raise self._replay_error(
                f"its output of type {odd[0]} is not made of tensors, tuples, lists and dicts"
            )
        dims = []
        for i in seen:
            dim = self._dim(leaves[i], B)
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
        replay = _Replay(self, args, kwargs, seen, dims, B)
        self.know(half=self.gnsfast.half or replay.autocast[2])
        watched = _ReplayFunction.apply(
            opened.probe, replay, len(seen), *(leaves[i] for i in seen), *replay.tensors
        )
        for i, t in zip(seen, watched):
            leaves[i] = t
        return pytree.tree_unflatten(leaves, spec)

    def _dim(self, t: Tensor, B: int) -> int | None:
        """The dimension of an argument or output that holds the samples; None if there is none."""
        batch_dim = self.gnsfast.layout.batch_dim
        if isinstance(self, nn.MultiheadAttention):
            batch_dim = 0 if self.batch_first else 1
        return replay_dim(t.shape, B, batch_dim)

    def _replay_error(self, reason: str) -> ObservationError:
        return ObservationError(
            f"{self._measured.name} ({type(self).__name__}): its parameters have no kernel, and it "
            f"cannot be replayed sample by sample: {reason}. Leave it out: convert(model, "
            f"exclude=[{self._measured.name!r}])."
        )


class _Replay:
    """One call of a module, kept so that backward can repeat it for each sample."""

    def __init__(
        self,
        module: Replayed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: list[int],
        dims: list[int],
        B: int,
    ) -> None:
        self.module, self.seen, self.dims, self.B = module, seen, dims, B
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

        def only_b(t: Any) -> Any:
            dim = self.module._dim(t, self.B) if isinstance(t, Tensor) else None
            return t if dim is None else t.narrow(dim, b, 1)

        leaves = list(self.plain)
        for i, t in zip(self.places, tensors):
            leaves[i] = only_b(t)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        kind, dtype, enabled = self.autocast
        module = self.module
        try:
            with _closed(module), _swapped(module, parameters), _same_buffers(module):
                with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
                    output = module.forward(*args, **kwargs)
        except Exception as e:
            raise module._replay_error(f"{type(e).__name__}: {e}") from e
        outputs = pytree.tree_leaves(output)
        return [outputs[i] for i in self.seen]


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers at the end, so that a running mean counts the forward pass alone."""
    kept = [(b, b._version, b.detach().clone()) for b in module.buffers()]
    names = [(m, dict(m._buffers)) for m in module.modules() if m._buffers]
    try:
        yield
    finally:
        for m, buffers in names:
            m._buffers.update(buffers)
        with torch.no_grad():
            for b, version, value in kept:
                if b._version != version:
                    b.copy_(value)


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
    for m, name, p in saved:
        m._parameters[name] = new[id(p)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, name, p in saved:
            m._parameters[name] = p


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, replay: _Replay, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.count = replay, count
        replay.tensors = []
        outputs = tensors[:count]
        ctx.save_for_backward(*tensors)
        # Clones: an in-place operation may follow, but the replay is compared with these values.
        return tuple(t.clone() for t in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        replay: _Replay = ctx.replay
        saved = ctx.saved_tensors
        rows = _probe_rows(replay, saved[: ctx.count], saved[ctx.count :], douts)
        return rows, None, None, *douts, *(None for _ in saved[ctx.count :])


def _probe_rows(
    replay: _Replay,
    outputs: tuple[Tensor, ...],
    tensors: tuple[Tensor, ...],
    douts: tuple[Tensor | None, ...],
) -> Tensor:
    used = [i for i, d in enumerate(douts) if d is not None]
    own = replay.module.claimed_parameters()
    parameters = {n: own[n].detach().requires_grad_() for n in replay.names}
    totals = {
        n: torch.zeros_like(p, dtype=accumulate_dtype(p.dtype)) for n, p in parameters.items()
    }
    parts: list[list[Tensor]] = [[] for _ in parameters]
    same: list[Tensor] = []
    reached: set[str] = set()

    def sample(b: int, t: Tensor, i: int) -> Tensor:
        return t.narrow(max(replay.dims[i], 0), b, 1)

    for b in range(replay.B):
        replayed = replay(b, parameters, tensors)
        for i in used:
            output = sample(b, outputs[i], i)
            if replayed[i].shape != output.shape:
                shape = list(replayed[i].shape)
                raise replay.module._replay_error(
                    f"a single sample gave an output of shape {shape}"
                )
            same.append(_close(replayed[i].detach(), output))
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if own_outputs := [i for i in used if replayed[i].requires_grad]:
            grads = torch.autograd.grad(
                [replayed[i] for i in own_outputs],
                list(parameters.values()),
                [sample(b, d, i) for i in own_outputs if (d := douts[i]) is not None],
                allow_unused=True,
            )
        for k, (n, g) in enumerate(zip(parameters, grads)):
            if g is not None:
                totals[n] += g
                reached.add(n)
            parts[k].append(totals[n].new_zeros(1) if g is None else reference.norm(g))
    norms = [[(*of_samples, reference.norm(totals[n]))] for n, of_samples in zip(totals, parts)]
    rows = reference.probe_rows(norms, replay.B, norms[0][0][-1])
    for i in used:
        if replay.dims[i] < 0 and (d := douts[i]) is not None:  # a table: do all samples use it?
            same.append(~((d[:1] != 0).any() & ~(d[1:] != 0).any()))
    if same:
        rows[:, -1] = torch.where(torch.stack(same).all(), 1.0, torch.nan)
    for k, n in enumerate(parameters):
        if n not in reached:  # not used by the forward: a gradient it has came another way
            rows[k, -1] *= 0.0
    return rows


OUT_OF_RANGE = 1e5
"""Outputs larger than this many times the first decile are taken for constants of a mask."""


def _close(replayed: Tensor, output: Tensor) -> Tensor:
    """Whether a replay gave what the forward pass gave, up to rounding.

    The tolerance is relative to the largest output that is in the range of the others: a mask's
    -1e9 must not hide their errors.
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
