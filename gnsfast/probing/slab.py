# SPDX-License-Identifier: Apache-2.0
"""The probes of a whole model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.combinations import CUDA, DOCUMENTS, TIED, reason, refuse
from gnsfast.errors import ObservationError
from gnsfast.functional import Documents
from gnsfast.layers import DropIn, Opened, Tie


class Unit(NamedTuple):
    """A parameter, or a block of one, whose norms are looked at by themselves."""

    parameter: str
    module: str
    block: tuple[slice, ...]


class Sides(NamedTuple):
    """What is measured beside the norms of samples: the modules that have a row more for each
    parameter, for a metric, and those that have columns for ``num_groups`` groups of samples.
    """

    metric: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    num_groups: int = 0


NO_SIDES = Sides()


class Read(NamedTuple):
    """What a pass left, float64: of each of the K units, and of all rows under a metric, the sum of
    the samples' squared norms and the squared norm of their sum; the calls of each of R rows.
    """

    sums_2K: Tensor
    metric_2: Tensor
    calls_R: Tensor


class ProbeSlab:
    """The probes of all covered modules of a model, row views of one tensor per device.

    ``grad`` of a device is [rows, B + 2 + G] and receives, in place, what backward adds: one
    zeroing and one reading serve all modules and all that is measured, and addresses stay the same
    while the slab is kept. The rows of a module are those of its parameters, then those under a
    metric.
    """

    def __init__(self, model: nn.Module, num_samples: int, sides: Sides = NO_SIDES) -> None:
        self.num_samples, self.sides = num_samples, sides
        self.modules = {name: m for name, m in model.named_modules() if _covered(m)}
        self.rows: dict[str, list[tuple[str, torch.device, int]]] = {}
        self.units: dict[tuple[str, str], Unit] = {}
        self.weighed: dict[torch.device, list[tuple[int, nn.Parameter]]] = {}
        self._spans: dict[str, tuple[torch.device, int, int]] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        owners: dict[torch.device, list[int]] = {}
        labels: dict[torch.device, list[tuple[str, str]]] = {}
        index: dict[tuple[str, str], int] = {}
        for path, module in self.modules.items():
            parameters, own = module.probed_parameters(), module.probe_rows()
            device = next(iter(parameters.values())).device
            owner = owners.setdefault(device, [])
            first = len(owner)
            self._spans[path] = device, first, len(own)
            for row, (name, part, block) in enumerate(own, first):
                if name in module.gnsfast.uncovered:
                    owner.append(NOBODY)
                    labels.setdefault(device, []).append(("", ""))
                    continue
                full = names[id(parameters[name])]
                self.rows.setdefault(full, []).append((path, device, row))
                where = ".".join(filter(None, (full.rpartition(".")[0], part)))
                self.units.setdefault((full, part), Unit(full, where, block))
                owner.append(index.setdefault((full, part), len(index)))
                labels.setdefault(device, []).append((path, full))
            if path in sides.metric:
                owner += [METRIC] * len(own)
                weighed = self.weighed.setdefault(device, [])
                weighed += [(first + row, p) for row, p in enumerate(parameters.values())]
        self._refuse_untied()
        width = num_samples + 2 + sides.num_groups
        self.grad = {d: torch.zeros(len(o), width, device=d) for d, o in owners.items()}
        self.constants = {
            d: torch.zeros(len(owners[d]), 2, dtype=torch.float64, device=d) for d in self.weighed
        }
        self._zeros = {device: torch.zeros_like(grad) for device, grad in self.grad.items()}
        self.labels = [label for of_device in labels.values() for label in of_device]
        self._owners = owners
        self._probes: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int], Tensor] = {}
        self._open: dict[str, tuple[str, int]] = {}

    @cached_property
    def _owner(self) -> dict[torch.device, Tensor]:
        """The unit of each row. Sums of rows that are no unit's come last: first nobody's, then
        those under a metric.
        """
        K = len(self.units)
        last = {NOBODY: K, METRIC: K + 1}
        return {
            device: torch.tensor([last.get(o, o) for o in owners], device=device)
            for device, owners in self._owners.items()
        }

    @cached_property
    def _plain(self) -> dict[torch.device, Tensor]:
        """The rows of ``labels``: those that are not under a metric."""
        return {
            device: torch.tensor(
                [row for row, o in enumerate(owners) if o != METRIC], device=device
            )
            for device, owners in self._owners.items()
        }

    @cached_property
    def _grouped(self) -> dict[torch.device, Tensor]:
        """The rows of modules that measure groups."""
        rows: dict[torch.device, list[int]] = {}
        for path in self.sides.groups:
            device, first, count = self._spans[path]
            rows.setdefault(device, []).extend(range(first, first + count))
        return {device: torch.tensor(own, device=device) for device, own in rows.items()}

    def _refuse_untied(self) -> None:
        for name, rows in self.rows.items():
            paths = list(dict.fromkeys(path for path, _, _ in rows))
            ties = {self.modules[path].gnsfast.tie for path in paths}
            if len(paths) > 1 and (len(ties) > 1 or None in ties):
                users = ", ".join(map(repr, paths))
                raise ValueError(
                    f"{name} is shared by {users}: call gnsfast.convert(model), which ties them"
                )
        tied: dict[Tie, tuple[str, object]] = {}
        for path, module in self.modules.items():
            if module.gnsfast.tie is not None:
                first, weight = tied.setdefault(module.gnsfast.tie, (path, module.weight))
                if module.weight is not weight:
                    raise ValueError(
                        f"{first!r} and {path!r} shared one weight at gnsfast.convert(model) and "
                        "have two now: tie them again, or call convert again"
                    )

    def taking(self, feature: str) -> frozenset[str]:
        """The modules that measure a ``feature`` of the table, where all that share a parameter do
        and all their parameters are covered.
        """
        taking = {
            path
            for path, m in self.modules.items()
            if not reason(m.route, [feature, *([TIED] if m.gnsfast.tie is not None else [])])
            and not m.gnsfast.uncovered.keys() & m.probed_parameters().keys()
        }
        while True:
            apart = {
                path
                for rows in self.rows.values()
                if not (paths := {path for path, _, _ in rows}) <= taking
                for path in paths & taking
            }
            if not apart:
                return frozenset(taking)
            taking -= apart

    def left_out(self, taking: frozenset[str]) -> tuple[str, ...]:
        """The parameters that modules other than these hold too."""
        return tuple(
            name for name, rows in self.rows.items() if not {path for path, _, _ in rows} <= taking
        )

    @property
    def version(self) -> int:
        """Changes when a backward pass reaches a probe; read without waiting for a device."""
        return sum(grad._version for grad in self.grad.values())

    def read(self, device: torch.device) -> Read:
        """What the last pass left, on ``device``, without waiting for it."""
        B, K = self.num_samples, len(self.units)
        sums = torch.zeros(2, K + 2, dtype=torch.float64, device=device)
        calls = []
        for where, grad in self.grad.items():
            rows = torch.stack([grad[:, :B].sum(1, dtype=torch.float64), grad[:, B].double()])
            sums.index_add_(1, self._owner[where].to(device), rows.to(device, non_blocking=True))
            of_rows = grad[:, B + 1].index_select(0, self._plain[where])
            calls.append(of_rows.to(device, torch.float64, non_blocking=True))
        return Read(sums[:, :K], sums[:, K + 1], torch.cat(calls) if calls else sums.new_zeros(0))

    def groups(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Over the modules that measure groups, float64: each sample's squared norm [B], and that
        of each group's sum [G].
        """
        B = self.num_samples
        p_B = torch.zeros(B, dtype=torch.float64, device=device)
        q_G = torch.zeros(self.sides.num_groups, dtype=torch.float64, device=device)
        for where, rows in self._grouped.items():
            grad = self.grad[where].index_select(0, rows)
            p_B += grad[:, :B].sum(0, dtype=torch.float64).to(device, non_blocking=True)
            q_G += grad[:, B + 2 :].sum(0, dtype=torch.float64).to(device, non_blocking=True)
        return p_B, q_G

    def weighed_rows(self, path: str) -> Tensor:
        """[P, B + 2]: a module's rows under the metric, as the last pass left them."""
        device, first, count = self._spans[path]
        return self.grad[device][first + count : first + 2 * count]

    def module_sqnorms(self, path: str) -> Tensor:
        """[B] float64: each sample's squared norm over a module's rows."""
        device, first, count = self._spans[path]
        rows = self.grad[device][first : first + count, : self.num_samples]
        return rows.sum(0, dtype=torch.float64)

    def sample_sqnorms(self, device: torch.device) -> Tensor:
        """[B] float64: each sample's squared norm over all rows, as the last pass left it."""
        total = torch.zeros(self.num_samples, dtype=torch.float64, device=device)
        for where, grad in self.grad.items():
            plain = grad[:, : self.num_samples].index_select(0, self._plain[where])
            total += plain.sum(0, dtype=torch.float64).to(device, non_blocking=True)
        return total

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass, or of one that measures no side."""
        return [self._probe(*self._open.get(path, (path, 1))) for path in self.modules]

    def refuse_graph(self) -> None:
        """With ``create_graph=True`` autograd puts new tensors in the place of the slab's views."""
        odd = [key for key, p in self._probes.items() if p.grad is not self._views[key]]
        for key in odd:
            self._probes[key].grad = self._views[key]
        if odd:
            raise ObservationError(
                f"{odd[0][0] or 'the model'}: backward(create_graph=True) has no per-sample norms: "
                "run the pass to measure without it"
            )

    def open(
        self,
        documents: Documents | None = None,
        members: Sequence[Tensor] = (),
        moments: Mapping[str, Sequence[Tensor]] = {},
    ) -> None:
        """Zero the slab and let the modules fill it.

        ``documents`` are the samples where they are packed into rows, ``members`` the samples of
        each group, ``moments`` v of the parameters of each module whose metric is known; their
        ``constants`` are filled in before.
        """
        if documents is not None:
            self._refuse_documents()
        if taken := [path for path, m in self.modules.items() if m.is_open]:
            raise ObservationError(
                f"{taken[0] or 'the model'}: a probe is open on it already. Leave the other "
                "per_sample_sqnorms block of this model first."
            )
        for grad in self.grad.values():
            grad.zero_()
        placed = {d: documents and documents.to(d) for d in self.grad}
        groups = {d: tuple(m.to(d, non_blocking=True) for m in members) for d in self.grad}
        for path, module in self.modules.items():
            device, first, count = self._spans[path]
            v, constants = tuple(moments.get(path, ())), None
            if v:
                constants = self.constants[device][first : first + count]
            own_groups = groups[device] if path in self.sides.groups else ()
            probe = self._probe(path, 1 + bool(v))
            name = path or type(module).__name__
            module.open_probe(Opened(probe, name, placed[device], own_groups, v, constants))

    def _probe(self, path: str, measures: int) -> Tensor:
        """The leaf whose gradient is the module's rows; made once."""
        key = self._open[path] = path, measures
        if key not in self._probes:
            device, first, count = self._spans[path]
            rows = slice(first, first + measures * count)
            groups = self.sides.num_groups if path in self.sides.groups else 0
            columns = slice(0, self.num_samples + 2 + groups)
            self._probes[key] = self._zeros[device][rows, columns].detach().requires_grad_()
            self._probes[key].grad = self._views[key] = self.grad[device][rows, columns]
        return self._probes[key]

    def _refuse_documents(self) -> None:
        for path, module in self.modules.items():
            more = [TIED] if module.gnsfast.tie is not None else []
            more += [CUDA] if self._spans[path][0].type != "cpu" else []
            refuse(module.route, [DOCUMENTS, *more], path)

    def close(self) -> None:
        """Make all modules plain torch modules again."""
        for module in self.modules.values():
            module.close_probe()


NOBODY, METRIC = -1, -2
"""Rows that are no unit's: those of uncovered parameters, and those under a metric."""


def _covered(module: nn.Module) -> bool:
    return isinstance(module, DropIn) and bool(
        module.probed_parameters().keys() - module.gnsfast.uncovered
    )
