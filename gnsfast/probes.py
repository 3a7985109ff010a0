# SPDX-License-Identifier: Apache-2.0
"""Opening and closing the probes of a model, and the per-sample norms of one backward pass."""

import math
import numbers
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast import checks
from gnsfast.documents import Documents, document_slots
from gnsfast.errors import ObservationError
from gnsfast.metric_rows import MetricRows
from gnsfast.probed import Probed, Tie
from gnsfast.watch import GradientWatch


class Unit(NamedTuple):
    """A parameter, or a block of one, whose norms are looked at by themselves."""

    parameter: str
    module: str
    block: tuple[slice, ...]


class ProbeSlab:
    """The probes of all covered modules of a model, row views of one tensor per device.

    ``grad`` of a device is [rows, B + 2] and receives, in place, what backward adds: one zeroing
    and one reduction serve all modules, and addresses stay the same while the slab is kept.
    """

    metric: MetricRows | None = None

    def __init__(self, model: nn.Module, num_samples: int) -> None:
        self.num_samples = num_samples
        self.modules = {name: m for name, m in model.named_modules() if _covered(m)}
        self.rows: dict[str, list[tuple[str, torch.device, int]]] = {}
        self.units: dict[tuple[str, str], Unit] = {}
        self._unit_of: dict[tuple[torch.device, int], int] = {}
        self.grad: dict[torch.device, Tensor] = {}
        self._probes: dict[str, Tensor] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        index: dict[tuple[str, str], int] = {}
        sizes: dict[torch.device, int] = {}
        spans: dict[str, tuple[torch.device, slice]] = {}
        for path, module in self.modules.items():
            parameters = module.probed_parameters()
            device = next(iter(parameters.values())).device
            start = sizes.get(device, 0)
            own = module.probe_rows()
            sizes[device] = start + len(own)
            spans[path] = device, slice(start, sizes[device])
            for row, (name, part, block) in enumerate(own, start):
                if name not in module._uncovered:
                    full = names[id(parameters[name])]
                    self.rows.setdefault(full, []).append((path, device, row))
                    unit = Unit(
                        full, ".".join(filter(None, (full.rpartition(".")[0], part))), block
                    )
                    self.units.setdefault((full, part), unit)
                    self._unit_of[device, row] = index.setdefault((full, part), len(index))
        self._refuse_untied()
        self._index_rows(sizes)
        for device, size in sizes.items():
            self.grad[device] = torch.zeros(size, num_samples + 2, device=device)
        zeros = {device: torch.zeros_like(grad) for device, grad in self.grad.items()}
        self._views: dict[str, Tensor] = {}
        for path, (device, span) in spans.items():
            probe = zeros[device][span].detach().requires_grad_()
            probe.grad = self._views[path] = self.grad[device][span]
            self._probes[path] = probe

    def _refuse_untied(self) -> None:
        for name, rows in self.rows.items():
            paths = list(dict.fromkeys(path for path, _, _ in rows))
            ties = {self.modules[path]._tie for path in paths}
            if len(paths) > 1 and (len(ties) > 1 or None in ties):
                users = ", ".join(map(repr, paths))
                raise ValueError(
                    f"{name} is shared by {users}: call gnsfast.convert(model), which ties them"
                )
        tied: dict[Tie, tuple[str, object]] = {}
        for path, module in self.modules.items():
            if module._tie is not None:
                first, weight = tied.setdefault(module._tie, (path, module.weight))
                if module.weight is not weight:
                    raise ValueError(
                        f"{first!r} and {path!r} shared one weight at gnsfast.convert(model) and "
                        "have two now: tie them again, or call convert again"
                    )

    def _index_rows(self, sizes: dict[torch.device, int]) -> None:
        """For ``collect``: which unit each row belongs to, and which module and parameter."""
        self.labels: list[tuple[str, str]] = []
        self._owner: dict[torch.device, Tensor] = {}
        of = {(d, r): (path, name) for name, rows in self.rows.items() for path, d, r in rows}
        for device, size in sizes.items():
            rows = [(device, row) for row in range(size)]
            owner = [self._unit_of.get(row, len(self.units)) for row in rows]
            self._owner[device] = torch.tensor(owner, device=device)
            self.labels += [of.get(row, ("", "")) for row in rows]

    @property
    def version(self) -> int:
        """Changes when a backward pass reaches a probe; read without waiting for a device."""
        return sum(grad._version for grad in self.grad.values())

    def collect(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What the last pass left, float64 on ``device``, without waiting for it.

        [2, K]: for each of the K ``units``, the sum of its samples' squared norms and the squared
        norm of their summed gradient. [R]: the calls of each row of ``labels``.
        """
        sums = torch.zeros(2, len(self.units) + 1, dtype=torch.float64, device=device)
        calls = []
        for where, grad in self.grad.items():
            rows = torch.stack([grad[:, :-2].sum(1, dtype=torch.float64), grad[:, -2].double()])
            sums.index_add_(1, self._owner[where].to(device), rows.to(device, non_blocking=True))
            calls.append(grad[:, -1].to(device, torch.float64, non_blocking=True))
        return sums[:, :-1], torch.cat(calls) if calls else sums.new_zeros(0)

    def module_sqnorms(self, path: str) -> Tensor:
        """[B] float64: each sample's squared norm over a module's rows."""
        return self._views[path][:, :-2].sum(0, dtype=torch.float64)

    def sample_sqnorms(self, device: torch.device) -> Tensor:
        """[B] float64: each sample's squared norm over all rows, as the last pass left it."""
        total = torch.zeros(self.num_samples, dtype=torch.float64, device=device)
        for grad in self.grad.values():
            total += grad[:, :-2].sum(0, dtype=torch.float64).to(device, non_blocking=True)
        return total

    @property
    def probes(self) -> list[Tensor]:
        return list(self._probes.values())

    def refuse_graph(self) -> None:
        """With ``create_graph=True`` autograd puts new tensors in the place of the slab's views."""
        odd = [path for path, p in self._probes.items() if p.grad is not self._views[path]]
        for path in odd:
            self._probes[path].grad = self._views[path]
        if odd:
            raise ObservationError(
                f"{odd[0] or 'the model'}: backward(create_graph=True) has no per-sample norms: "
                "run the pass to measure without it"
            )

    def open(self, documents: Documents | None = None) -> None:
        """Zero the slab and let the modules fill it; ``documents`` are the samples where they are
        packed into rows.
        """
        if documents is not None:
            self._refuse_documents()
        if taken := [path for path, m in self.modules.items() if m._probe is not None]:
            raise ObservationError(
                f"{taken[0] or 'the model'}: a probe is open on it already. Leave the other "
                "per_sample_sqnorms block of this model first."
            )
        for grad in self.grad.values():
            grad.zero_()
        here = {device: documents and documents.to(device) for device in self.grad}
        for path, module in self.modules.items():
            probe = self._probes[path]
            module.open_probe(probe, path or type(module).__name__, here[probe.device])

    def _refuse_documents(self) -> None:
        for path, module in self.modules.items():
            far = module._tie is not None and self._probes[path].device.type != "cpu"
            if far or not module._takes_documents:
                kind = "a tied weight on a GPU" if far else type(module).__name__
                raise ValueError(
                    f"{path or 'the model'}: {kind} has no norms for documents of packed rows "
                    f"(cu_seqlens). {checks.leave_out(path)}"
                )

    def close(self) -> None:
        """Make all modules plain torch modules again."""
        for module in self.modules.values():
            module.close_probe()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile, whose names are the user's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


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
        cu_seqlens: where samples are documents packed into rows: integers [documents + 1], the
            first row of each in all rows of the batch as one list, and the end of the last
            (``gnsfast.cu_seqlens`` makes them of position ids). Documents beyond ``num_samples``
            are padding. They must not attend to each other: the mask is block-diagonal.
        audit: what arrives at each parameter is compared with what passed through its modules in
            the ``"first"`` pass of a module, or ``"always"``: it finds weights that are also used
            as tensors, for one more read of the gradients. Sharded parameters, and those with a
            hook of the user's, are not audited.

    The block yields a mapping from parameter name to [B] float32, with ``total()`` [B] over all of
    them. A trainable parameter that no module covers is not in it; ``gnsfast.coverage(model)``
    names those. A parameter without a gradient in this pass has norm zero. While the block is open
    the model belongs to it: other threads must not run it.

    Raises:
        SampleShapeError: in forward, where an input does not have ``num_samples`` samples.
        ObservationError: at the end of the block, with the module's name, where backward did not go
            through a module exactly once, or its weight was used outside of it.

    What no check sees: documents of packed rows that attend to each other; a load-balancing loss
    that a model of experts is asked for by keyword; a table looked up once, [1, T], that is divided
    by its own norm (inside of the block it is looked up for each sample). And (``gnsfast.verify``
    sees these, except for the last): rows that are as many as the samples and are not samples
    (tokens picked by a mask, an expert's tokens); samples that the model sorts; a loss term on a
    table [1, ...] alone, which is looked up once for each sample and so counts B times (exclude
    it); batch norm in training mode, below which no sample has a gradient of its own.

    On a GPU tensor cores truncate as they accumulate, so half-precision norms of long samples come
    out low: by 1.9e-5 of a squared norm at 8,192 tokens and 1.8e-4 at 70,000, as simulated for
    independent tokens, not measured.

    Source: Goodfellow 2015 (arXiv 1510.01799); Gray et al. 2024 (arXiv 2411.00999).

    >>> model = gnsfast.convert(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2)))
    >>> with gnsfast.per_sample_sqnorms(model, 3) as norms:
    ...     model(torch.randn(3, 5)).sum().backward()
    >>> norms["0.weight"].shape, norms.total().shape
    (torch.Size([3]), torch.Size([3]))
    """

    def __init__(
        self,
        model: nn.Module,
        num_samples: int,
        *,
        cu_seqlens: Tensor | None = None,
        audit: str = "first",
    ) -> None:
        if audit not in ("first", "always"):
            raise ValueError(f"audit is 'first' or 'always', not {audit!r}")
        self._num_samples = slots = count("num_samples", num_samples, least=0)
        self._documents = None
        if cu_seqlens is not None:
            slots = max(len(cu_seqlens) - 1, 0)
            self._documents = document_slots(cu_seqlens, num_samples, slots)
        self._slab = ProbeSlab(model, slots)
        if not self._slab.rows:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter under a gnsfast module: "
                "call gnsfast.convert(model) first"
            )
        self._model, parameters = model, dict(model.named_parameters())
        self._parameters = {name: parameters[name] for name in self._slab.rows}
        self._always = audit == "always"

    def __enter__(self) -> SampleNorms:
        self._norms = SampleNorms()
        self._slab.open(self._documents)
        self._before = {name: checks.mark(p) for name, p in self._parameters.items()}
        audited = [
            name
            for name, rows in self._slab.rows.items()
            if self._always or not all(self._slab.modules[path]._audited for path, _, _ in rows)
        ]
        self._watch = GradientWatch(self._parameters, audited)
        return self._norms

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._watch.stop()
        self._slab.close()
        if kind is None:
            self._slab.refuse_graph()
            host = {d: grad.to("cpu", torch.float64) for d, grad in self._slab.grad.items()}
            self._check_calls({d: grad[:, -1].tolist() for d, grad in host.items()})
            self._check_sums(
                {d: grad[:, -2].tolist() for d, grad in host.items()},
                {d: grad[:, :-2].sum(1).tolist() for d, grad in host.items()},
            )
            self._norms._norms = {
                name: sum(self._slab.grad[d][r, :-2] for _, d, r in rows)[: self._num_samples]  # type: ignore[index]
                for name, rows in self._slab.rows.items()
            }

    def _touched(self, name: str) -> bool:
        """Whether this pass brought a gradient to the parameter."""
        if name in self._watch.watched:
            return name in self._watch.arrived
        return checks.mark(self._parameters[name]) != self._before[name]

    def _check_calls(self, calls: dict[torch.device, list[float]]) -> None:
        """Every module was called once, or its parameter got no gradient at all."""
        for name, rows in self._slab.rows.items():
            for path, device, row in rows:
                module, c = self._slab.modules[path], calls[device][row]
                module._calls = None if c != c else int(c)
                if c not in (0, 1) and not (c > 1 and checks.may_repeat(module)):
                    raise ObservationError(checks.explain_calls(path, module, c))
            if all(calls[d][r] == 0 for _, d, r in rows) and self._touched(name):
                raise ObservationError(checks.explain_unseen(name, rows[0][0], self._model))
        if not any(c != 0 for rows in calls.values() for c in rows):
            raise ObservationError(NO_BACKWARD)

    def _check_sums(
        self, sums: dict[torch.device, list[float]], samples: dict[torch.device, list[float]]
    ) -> None:
        """Is all of each summed gradient ours?"""
        whole = sum(map(sum, samples.values()))
        for name in self._watch.audited:
            p, rows = self._parameters[name], self._slab.rows[name]
            ours, of_samples = (sum(each[d][r] for _, d, r in rows) for each in (sums, samples))
            real = self._watch.sqnorms[name].item() if name in self._watch.sqnorms else 0.0
            paths = [path for path, _, _ in rows]
            if wrong := checks.explain_sums(p, name, paths, ours, real, of_samples, whole):
                raise ObservationError(wrong)
            for path in paths:
                module = self._slab.modules[path]
                module._audited |= bool(module._calls) and math.isfinite(real + ours)


def count(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``, whatever integer type it has."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if (whole := int(value)) >= least:
            return whole
    kind = "positive count" if least else "count of samples"
    raise ValueError(f"{name} must be a {kind}, not {value!r}")


NO_BACKWARD = (
    "no backward pass went through the model inside the block: run forward and backward in it "
    "(loss.backward(), not autograd.grad, backward(inputs=...) or create_graph=True)"
)
