# SPDX-License-Identifier: Apache-2.0
"""Opening and closing the probes of a model, and the per-sample norms of one backward pass."""

import math
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.errors import ObservationError
from gnsfast.probed import Probed
from gnsfast.sharding import is_dtensor


class ProbeSlab:
    """The probes of all covered modules of a model, row views of one tensor per device.

    ``grad`` of a device is [rows, B + 2] and receives, in place, what backward adds: one zeroing
    and one reduction serve all modules, and addresses stay the same from step to step.
    """

    def __init__(self, model: nn.Module, num_samples: int) -> None:
        self.num_samples = num_samples
        self.modules = {name: m for name, m in model.named_modules() if _covered(m)}
        self.rows: dict[str, list[tuple[str, torch.device, int]]] = {}
        self.grad: dict[torch.device, Tensor] = {}
        self._probes: dict[str, Tensor] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        sizes: dict[torch.device, int] = {}
        spans: dict[str, tuple[torch.device, slice]] = {}
        for path, module in self.modules.items():
            parameters = module.probed_parameters()
            device = next(iter(parameters.values())).device
            start = sizes.get(device, 0)
            sizes[device] = start + len(parameters)
            spans[path] = device, slice(start, sizes[device])
            for row, (name, p) in enumerate(parameters.items(), start):
                if name not in module._uncovered:
                    self.rows.setdefault(names[id(p)], []).append((path, device, row))
        self._refuse_untied()
        for device, size in sizes.items():
            self.grad[device] = torch.zeros(size, num_samples + 2, device=device)
        zeros = {device: torch.zeros_like(grad) for device, grad in self.grad.items()}
        for path, (device, span) in spans.items():
            probe = zeros[device][span].detach().requires_grad_()
            probe.grad = self.grad[device][span]
            self._probes[path] = probe

    def _refuse_untied(self) -> None:
        for name, rows in self.rows.items():
            ties = {self.modules[path]._tie for path, _, _ in rows}
            if len(rows) > 1 and (len(ties) > 1 or None in ties):
                users = ", ".join(repr(path) for path, _, _ in rows)
                raise ValueError(
                    f"{name} is shared by {users}: call gnsfast.convert(model), which ties them"
                )

    def open(self) -> None:
        """Zero the slab and let the modules fill it."""
        for grad in self.grad.values():
            grad.zero_()
        if taken := [path for path, m in self.modules.items() if m._probe is not None]:
            raise ObservationError(
                f"{taken[0] or 'the model'}: a probe is open on it already. Leave the other "
                "per_sample_sqnorms block of this model first."
            )
        for path, module in self.modules.items():
            module.open_probe(self._probes[path], path or type(module).__name__)

    def close(self) -> None:
        """Make all modules plain torch modules again."""
        for module in self.modules.values():
            module.close_probe()


def _covered(module: nn.Module) -> bool:
    return isinstance(module, Probed) and bool(
        module.probed_parameters().keys() - module._uncovered
    )


class SampleNorms(Mapping[str, Tensor]):
    """Parameter name -> [B] float32 squared norms of every sample's gradient, complete once the
    block has ended.
    """

    def __init__(self) -> None:
        self._norms: dict[str, Tensor] | None = None

    def _done(self) -> dict[str, Tensor]:
        if self._norms is None:
            raise ObservationError(
                "the norms are complete when the per_sample_sqnorms block has ended: read them "
                "after it"
            )
        return self._norms

    def __getitem__(self, name: str) -> Tensor:
        return self._done()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._done())

    def __len__(self) -> int:
        return len(self._done())

    def total(self) -> Tensor:
        """[B]: each sample's squared gradient norm over all covered parameters together."""
        norms = list(self._done().values())
        device = norms[0].device
        return torch.stack([n.to(device, torch.float64) for n in norms]).sum(0).to(torch.float32)


class per_sample_sqnorms:
    """Every sample's squared gradient norm from the one backward pass inside the block.

    Equals, for each covered parameter and each sample b, ``autograd.grad(loss_b,
    p)[0].square().sum()`` where loss_b is the share that sample b has in the loss: a mean over B
    samples scales it by 1 / B².

    Args:
        model: a module made of gnsfast's layers, usually through ``gnsfast.convert``.
        num_samples: B, the samples of the one forward and backward pass inside the block.

    The block yields a mapping from parameter name to [B] float32, with ``total()`` [B] over all of
    them. A trainable parameter that no module covers is not in it; ``gnsfast.coverage(model)``
    names those. A parameter without a gradient in this pass has norm zero.

    Raises:
        SampleShapeError: in forward, where an input does not have ``num_samples`` samples.
        ObservationError: at the end of the block, with the module's name, where backward did not go
            through a module exactly once, or its weight was used outside of it.

    Source: Goodfellow 2015 (arXiv 1510.01799); Gray et al. 2024 (arXiv 2411.00999).

    >>> model = gnsfast.convert(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2)))
    >>> with gnsfast.per_sample_sqnorms(model, 3) as norms:
    ...     model(torch.randn(3, 5)).sum().backward()
    >>> norms["0.weight"].shape, norms.total().shape
    (torch.Size([3]), torch.Size([3]))
    """

    def __init__(self, model: nn.Module, num_samples: int) -> None:
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 0:
            raise ValueError(f"num_samples must be a count of samples, not {num_samples!r}")
        self._slab = ProbeSlab(model, num_samples)
        if not self._slab.rows:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter under a gnsfast module: "
                "call gnsfast.convert(model) first"
            )
        self._parameters = dict(model.named_parameters())
        self._norms = SampleNorms()

    def __enter__(self) -> SampleNorms:
        self._before = {name: _mark(self._parameters[name]) for name in self._slab.rows}
        self._unaudited = [name for name in self._slab.rows if self._wants_audit(name)]
        self._slab.open()
        return self._norms

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._slab.close()
        if kind is None:
            host = {
                device: grad.to("cpu", torch.float64) for device, grad in self._slab.grad.items()
            }
            self._check_calls(host)
            self._check_sums(host)
            self._norms._norms = {
                name: sum(self._slab.grad[d][r, :-2] for _, d, r in rows)  # type: ignore[misc]
                for name, rows in self._slab.rows.items()
            }

    def _touched(self, name: str) -> bool:
        """Whether this pass has written the parameter's gradient."""
        return _mark(self._parameters[name]) != self._before[name]

    def _check_calls(self, host: dict[torch.device, Tensor]) -> None:
        """Every module was called once, or its parameter got no gradient at all."""
        ran = False
        for name, rows in self._slab.rows.items():
            for path, device, row in rows:
                module = self._slab.modules[path]
                calls = host[device][row, -1].item()
                ran |= calls != 0
                module._calls = None if calls != calls else int(calls)
                if calls == 1 or (
                    calls > 1 and module._tie is not None and module.route == "embedding"
                ):
                    continue  # a tied embedding links its uses to each other: any number is exact
                if calls != 0:
                    raise ObservationError(_explain(path, module, calls))
            if all(not host[d][r, -1] for _, d, r in rows) and self._touched(name):
                raise ObservationError(
                    f"{name} got a gradient, but its module {rows[0][0]!r} was not called (or its "
                    "forward ran before the block): the weight is used as a tensor somewhere, as "
                    "fused losses and kernels do. Its norms would be missing. Leave the module "
                    f"out: convert(model, exclude=[{rows[0][0]!r}])."
                )
        if not ran:
            raise ObservationError(
                "no backward pass went through the model inside the block: run forward and "
                "backward in it (loss.backward(), not autograd.grad)"
            )

    def _wants_audit(self, name: str) -> bool:
        """Whether ``.grad`` will hold this pass alone, for a module not compared with it yet."""
        p = self._parameters[name]
        modules = [self._slab.modules[path] for path, _, _ in self._slab.rows[name]]
        if all(m._audited for m in modules) or _hooked(p) or _several_ranks():
            return False
        return p.grad is None or not p.grad.any()

    def _check_sums(self, host: dict[torch.device, Tensor]) -> None:
        """A first pass also compares each summed gradient with ``.grad``: is all of it ours?"""
        for name in self._unaudited:
            p, rows = self._parameters[name], self._slab.rows[name]
            ours = sum(host[d][r, -2].item() for _, d, r in rows)
            samples = sum(host[d][r, :-2].sum().item() for _, d, r in rows)
            real = 0.0 if p.grad is None else reference.sqnorm(p.grad.detach()).item()
            if not math.isfinite(real + ours):
                continue  # an overflow that a gradient scaler will skip says nothing
            tolerance = 1e-3 if p.dtype in (torch.float32, torch.float64) else 3e-2
            if abs(ours - real) > tolerance * max(ours, real) + 1e-6 * samples:
                raise ObservationError(
                    f"{name}: the squared norm of its gradient is {real:.6g}, but what passed "
                    f"through {' and '.join(repr(path) for path, _, _ in rows)} has {ours:.6g}. "
                    "The weight is also used outside of its module (F.linear(x, module.weight), "
                    "a penalty on the weights), so its norms would be wrong. Leave it out: "
                    f"convert(model, exclude=[{rows[0][0]!r}])."
                )
            for path, _, _ in rows:
                module = self._slab.modules[path]
                module._audited |= bool(module._calls)


def _several_ranks() -> bool:
    """Whether ``.grad`` is an average over processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def _mark(p: Tensor) -> tuple[int, int] | None:
    """Changes when a gradient is written to ``p.grad``."""
    return None if p.grad is None else (id(p.grad), p.grad._version)


def _hooked(p: Tensor) -> bool:
    """Whether someone else may change ``p.grad``, or holds it sharded."""
    sparse = p.grad is not None and p.grad.is_sparse
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks or is_dtensor(p) or sparse)


def _explain(path: str, module: Probed, calls: float) -> str:
    where = f"{path or 'the model'} ({type(module).__name__})"
    if calls != calls:
        return (
            f"{where}: replaying it sample by sample gave other outputs than its forward pass "
            "(dropout, state, or an argument whose samples were not found). Leave it out: "
            f"convert(model, exclude=[{path!r}])."
        )
    return (
        f"{where}: backward went through it {int(calls)} times in one block, and norms of several "
        "calls do not add. One block takes one forward and one backward pass; a module that a "
        "model calls more than once has no exact route: leave it out: convert(model, "
        f"exclude=[{path!r}])."
    )
