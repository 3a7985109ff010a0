# SPDX-License-Identifier: Apache-2.0
"""The probes of a whole model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.combinations import CUDA, DOCUMENTS, reason, refuse
from gnsfast.errors import ObservationError
from gnsfast.functional import Documents
from gnsfast.layers import DropIn, Opened, Tie


class Unit(NamedTuple):
    """A parameter, or a block of one, that has norms of its own."""

    parameter: str
    module: str
    block: tuple[slice, ...]


class Sides(NamedTuple):
    """What is measured beside the samples' norms. The modules of ``metric`` have one more row for
    each parameter; those of ``groups`` have columns for ``num_groups`` groups of samples.
    """

    metric: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    num_groups: int = 0


NO_SIDES = Sides()


class Read(NamedTuple):
    """What a pass left, float64: the sum of the samples' squared norms and the squared norm of
    their sum, for each of the K units and for all rows under a metric together; and the calls of
    each of the R rows.
    """

    sums_2K: Tensor
    metric_2: Tensor
    calls_R: Tensor


class ProbeSlab:
    """The probes of all covered modules of a model, and their gradients: views of one tensor for
    each device.

    Backward adds to ``grad`` [rows, B + 2 + G] of a device in place. So it is zeroed and read once
    for all modules, and its address stays the same while the slab is kept. A module has a row for
    each parameter, then the same rows under a metric.
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
        self._measures: dict[str, int] = {}  # of each module, in the last pass

    @cached_property
    def _owner(self) -> dict[torch.device, Tensor]:
        """The index of each row's unit. Rows without a unit come after the K units: K for those of
        uncovered parameters, K + 1 for those under a metric.
        """
        K = len(self.units)
        last = {NOBODY: K, METRIC: K + 1}
        return {
            device: torch.tensor([last.get(o, o) for o in owners]).to(device, non_blocking=True)
            for device, owners in self._owners.items()
        }

    @cached_property
    def _plain(self) -> dict[torch.device, Tensor]:
        """The rows that are not under a metric, in the order of ``labels``."""
        return {
            device: torch.tensor([row for row, o in enumerate(owners) if o != METRIC]).to(
                device, non_blocking=True
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
        return {
            device: torch.tensor(own).to(device, non_blocking=True) for device, own in rows.items()
        }

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
        """The modules that measure a ``feature`` of ``combinations``. All their parameters are
        covered, and all modules that share one of them measure the feature too.
        """
        taking = {
            path
            for path, m in self.modules.items()
            if not reason(m.gnsfast.route, m.gnsfast.features(feature))
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
        """The parameters that a module not in ``taking`` holds."""
        return tuple(
            name for name, rows in self.rows.items() if not {path for path, _, _ in rows} <= taking
        )

    @property
    def version(self) -> int:
        """A number that changes when backward reaches a probe; it waits for no device."""
        return sum(grad._version for grad in self.grad.values())

    def read(self, device: torch.device) -> Read:
        """What the last pass left, moved to ``device``, without waiting for it."""
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
        """float64, over the modules that measure groups: each sample's squared norm [B], and the
        squared norm of each group's sum [G].
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

    def sample_sqnorms(self, device: torch.device) -> Tensor:
        """[B] float64: each sample's squared norm over all rows, from the last pass."""
        total = torch.zeros(self.num_samples, dtype=torch.float64, device=device)
        for where, grad in self.grad.items():
            plain = grad[:, : self.num_samples].index_select(0, self._plain[where])
            total += plain.sum(0, dtype=torch.float64).to(device, non_blocking=True)
        return total

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass; before a first pass, those without a metric."""
        return [self._probe(path, self._measures.get(path, 1)) for path in self.modules]

    def refuse_graph(self) -> None:
        """Raise after ``create_graph=True``, which replaces the slab's views by new tensors."""
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

        ``documents`` says where packed samples begin, ``members`` holds the samples of each group,
        and ``moments`` v of the parameters of each module whose metric is known. The caller fills
        in their ``constants`` first.
        """
        if documents is not None:
            self._refuse_documents()
        if taken := [path for path, m in self.modules.items() if m.is_open]:
            raise ObservationError(
                f"{taken[0] or 'the model'}: a probe is open on it already. End the other "
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
            measures = self._measures[path] = 1 + bool(v)
            probe = self._probe(path, measures)
            name = path or type(module).__name__
            module.open_probe(Opened(probe, name, placed[device], own_groups, v, constants))

    def _probe(self, path: str, measures: int) -> Tensor:
        """The leaf whose gradient is the module's rows; it is made once and kept."""
        key = path, measures
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
            where = () if self._spans[path][0].type == "cpu" else (CUDA,)
            refuse(module.gnsfast.route, module.gnsfast.features(DOCUMENTS, *where), path)

    def close(self) -> None:
        """Make all modules plain torch modules again."""
        for module in self.modules.values():
            module.close_probe()


NOBODY, METRIC = -1, -2
"""Owners of rows without a unit: those of uncovered parameters, and those under a metric."""


def _covered(module: nn.Module) -> bool:
    return isinstance(module, DropIn) and bool(
        module.probed_parameters().keys() - module.gnsfast.uncovered
    )
