# SPDX-License-Identifier: Apache-2.0
"""The probes of a whole model."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.functional import Documents
from gnsfast.layers import Probed, Tie
from gnsfast.probing import checks
from gnsfast.probing.metric_rows import MetricRows


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


def _covered(module: nn.Module) -> bool:
    return isinstance(module, Probed) and bool(
        module.probed_parameters().keys() - module._uncovered
    )
