# SPDX-License-Identifier: Apache-2.0
"""The probes of a whole model."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.combinations import CUDA, DOCUMENTS, reason, refuse
from gnsfast.errors import ObservationError
from gnsfast.functional import Calls, Documents, Groups, Plan
from gnsfast.layers import (
    BATCH_NORM,
    DropIn,
    Opened,
    Tie,
    batch_statistics_error,
    uses_batch_statistics,
)
from gnsfast.parallel import parameters_at_rest


class Unit(NamedTuple):
    """A parameter, or a block of one, that has norms of its own."""

    parameter: str
    module: str
    block: tuple[slice, ...]


class Sides(NamedTuple):
    """What is measured beside the samples' norms. Modules in ``metric`` have one more row for each
    parameter, and modules in ``groups`` have columns for ``num_groups`` groups of samples.
    """

    metric: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    num_groups: int = 0


NO_SIDES = Sides()


class ProbeSlab:
    """The probes of all covered modules of a model, and what the last pass left in them.

    A module has a row for each parameter, then the same rows under a metric. Backward delivers them
    as the gradient of the module's probe, without a copy. ``grad`` holds the rows of all modules.
    """

    def __init__(self, model: nn.Module, num_samples: int, sides: Sides = NO_SIDES) -> None:
        self.num_samples, self.sides = num_samples, sides
        self.modules = {name: m for name, m in model.named_modules() if _covered(m)}
        self._batch_norms = [(n, m) for n, m in model.named_modules() if isinstance(m, BATCH_NORM)]
        self.rows: dict[str, list[tuple[str, torch.device, int]]] = {}
        self.units: dict[tuple[str, str], Unit] = {}
        self.weighed: dict[torch.device, list[tuple[int, str]]] = {}
        self._spans: dict[str, tuple[torch.device, int, int]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        at_rest = parameters_at_rest(model)
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
                self.parameters[full] = at_rest[full]
                self.rows.setdefault(full, []).append((path, device, row))
                where = ".".join(filter(None, (full.rpartition(".")[0], part)))
                self.units.setdefault((full, part), Unit(full, where, block))
                owner.append(index.setdefault((full, part), len(index)))
                labels.setdefault(device, []).append((path, full))
            if path in sides.metric:
                owner += [METRIC] * len(own)
                weighed = self.weighed.setdefault(device, [])
                own_names = (names[id(p)] for p in parameters.values())
                weighed += [(first + row, name) for row, name in enumerate(own_names)]
        self._refuse_untied()
        self.devices = list(owners)
        self.constants = {
            d: torch.zeros(len(owners[d]), 2, dtype=torch.float64, device=d) for d in self.weighed
        }
        self._zero = {d: torch.zeros((), dtype=torch.float32, device=d) for d in owners}
        self.labels = [label for of_device in labels.values() for label in of_device]
        self._owners = owners
        self._ties = {m.gnsfast.tie for m in self.modules.values()} - {None}
        self._repeated = [path for path, m in self.modules.items() if m.gnsfast.repeated]
        self._probes: dict[tuple[str, int], Tensor] = {}
        self._measures: dict[str, int] = {}  # of each module, in the last pass
        self._opened: dict[str, Opened] = {}  # without documents, groups, metric
        self._at_end: Callable[[], None] | None = None
        self._at_start: Callable[[], None] | None = None
        self._waiting = False
        self._hooked: set[tuple[str, int]] = set()

    def owners(self, device: torch.device) -> Tensor:
        """On ``device``, the index of each row's unit. Rows without one of the K units have the
        index K if their parameter is not covered, and K + 1 if they are under a metric.
        """
        K = len(self.units)
        last = {NOBODY: K, METRIC: K + 1}
        found = [last.get(o, o) for o in chain(*self._owners.values())]
        return torch.tensor(found, dtype=torch.int64, device=device)

    def plain(self, device: torch.device) -> Tensor:
        """On ``device``, the rows that are not under a metric, in the order of ``labels``."""
        rows = _not_weighed(chain(*self._owners.values()))
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def _refuse_untied(self) -> None:
        for name, rows in self.rows.items():
            paths = list(dict.fromkeys(path for path, _, _ in rows))
            ties = {self.modules[path].gnsfast.tie for path in paths}
            if len(paths) > 1 and (len(ties) > 1 or None in ties):
                users = ", ".join(map(repr, paths))
                raise ValueError(
                    f"{name} is shared by {users}. Call gnsfast.convert(model), which links them."
                )
        tied: dict[Tie, tuple[str, object]] = {}
        for path, module in self.modules.items():
            if module.gnsfast.tie is not None:
                first, weight = tied.setdefault(module.gnsfast.tie, (path, module.weight))
                if module.weight is not weight:
                    raise ValueError(
                        f"{first!r} and {path!r} shared one weight when gnsfast.convert(model) was "
                        "called, and have two different weights at this point. Share the weight "
                        "again, or call gnsfast.convert(model) again."
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
        """The parameters of modules that are not in ``taking``."""
        return tuple(
            name for name, rows in self.rows.items() if not {path for path, _, _ in rows} <= taking
        )

    @property
    def reached(self) -> bool:
        """Whether backward has reached a probe of the last pass."""
        return any(probe.grad is not None for probe in self._probes.values())

    @cached_property
    def grad(self) -> dict[torch.device, Tensor]:
        """[R, B + 2] on each device: the rows of the last pass, which are zero where backward did
        not go.
        """
        parts: dict[torch.device, list[Tensor]] = {d: [] for d in self.devices}
        for path, (device, _, count) in self._spans.items():
            rows = count * (1 + (path in self.sides.metric))
            found = self.rows_of(path)
            if found is not None:
                grouped = path in self.sides.groups
                parts[device].append(found[:, : self.num_samples + 2] if grouped else found)
            if missing := rows - (0 if found is None else len(found)):
                parts[device].append(self._zero[device].expand(missing, self.num_samples + 2))
        return {device: torch.cat(rows) for device, rows in parts.items()}

    def rows_of(self, path: str) -> Tensor | None:
        """[M P, B + 2 + G]: the rows that the last pass left in a module's probe, or None."""
        return self._probe(path, self._measures.get(path, 1)).grad

    def sums(self) -> list[Tensor]:
        """float64 [R, 3] on each of ``devices``: the sum of the samples' squared norms, the squared
        norm of their sum, and the calls of each row in the last pass.
        """
        B = self.num_samples
        return [
            torch.cat([grad[:, :B].sum(1, True, dtype=torch.float64), grad[:, B:].double()], 1)
            for grad in self.grad.values()
        ]

    def groups(self) -> list[Tensor]:
        """float32 [rows, B + 2 + G] on each device: the rows of modules that measure groups."""
        parts: dict[torch.device, list[Tensor]] = {}
        for path in self.sides.groups:
            if (found := self.rows_of(path)) is not None:
                parts.setdefault(found.device, []).append(found)
        return [torch.cat(rows) for rows in parts.values()]

    def sample_sqnorms(self) -> list[Tensor]:
        """[B] float64 on each device: each sample's squared norm over all rows but those under a
        metric, from the last pass.
        """
        found = []
        for device, grad in self.grad.items():
            rows = grad[:, : self.num_samples]
            if self.sides.metric:
                rows = rows.index_select(0, self._plain_of[device])
            found.append(rows.sum(0, dtype=torch.float64))
        return found

    @cached_property
    def _plain_of(self) -> dict[torch.device, Tensor]:
        """The rows of each device that are not under a metric."""
        return {
            d: torch.tensor(_not_weighed(owners)).to(d, non_blocking=True)
            for d, owners in self._owners.items()
        }

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass. Before the first pass, the probes without a metric."""
        return [self._probe(path, self._measures.get(path, 1)) for path in self.modules]

    def _refuse_batch_statistics(self) -> None:
        for path, module in self._batch_norms:
            if uses_batch_statistics(module):
                raise batch_statistics_error(path, module)

    def refuse_odd_pass(self) -> None:
        """Raise after ``create_graph=True``, which gives gradients a graph of their own, and if a
        batch norm was put into training mode inside the block.
        """
        self._refuse_batch_statistics()
        for (path, _), probe in self._probes.items():
            if probe.grad is not None and probe.grad.requires_grad:
                raise ObservationError(
                    f"{path or 'the model'}: a pass with backward(create_graph=True) has no "
                    "per-sample norms. Run the pass that you measure without it."
                )

    def open(
        self,
        documents: Documents | None = None,
        members: Sequence[Tensor] = (),
        moments: Mapping[str, Sequence[Tensor]] = {},
        at_end: Callable[[], None] | None = None,
        second: Mapping[str, tuple[Any, ...]] = {},
        at_start: Callable[[], None] | None = None,
    ) -> None:
        """Forget the last pass and let the modules fill the probes.

        ``documents`` says where packed samples begin. ``members`` holds the samples of each group.
        ``moments`` holds v of the parameters, for each module whose metric is known; the caller has
        filled in their ``constants``. ``at_end`` is called after each backward pass and its
        averages over processes, ``at_start`` when the first one has reached a probe. ``second``
        says where each module adds second moments (``Plan.second``). A batch norm that would use
        the statistics of the batch is refused.
        """
        self._refuse_batch_statistics()
        if documents is not None:
            self._refuse_documents()
        if taken := [path for path, m in self.modules.items() if m.is_open]:
            raise ObservationError(
                f"{taken[0] or 'the model'}: a probe is open on it already. End the other "
                "per_sample_sqnorms or gns.microbatch block of this model first."
            )
        self.__dict__.pop("grad", None)
        alone = documents is None and not members and not moments and not second
        openings = self._opened if alone else {}
        openings = openings or self._openings(documents, members, moments, second)
        self._opened = openings if alone else {}
        for tie in self._ties:
            tie.reset()
        for probe in self._probes.values():
            probe.grad = None
        self._watch_end(at_end)
        self._at_start = at_start
        for path, opened in openings.items():
            self.modules[path].open_probe(opened)
        for path in self._repeated:
            plan = openings[path].plan._replace(calls=Calls())
            self.modules[path].open_probe(openings[path]._replace(plan=plan))

    def _openings(
        self,
        documents: Documents | None,
        members: Sequence[Tensor],
        moments: Mapping[str, Sequence[Tensor]],
        second: Mapping[str, tuple[Any, ...]],
    ) -> dict[str, Opened]:
        """What each module is told to measure."""
        placed = {d: documents and documents.to(d) for d in self.devices}
        sets = Groups.of(*members) if members else None
        groups = {d: sets and sets.to(d) for d in self.devices}
        openings = {}
        for path, module in self.modules.items():
            device, first, count = self._spans[path]
            v, constants = tuple(moments.get(path, ())), None
            if v:
                constants = self.constants[device][first : first + count]
            own_groups = groups[device] if path in self.sides.groups else None
            measures = self._measures[path] = 1 + bool(v)
            # The model itself has no name, but a parameter's name can be given to ``exclude``.
            bare = module.gnsfast.route in ("copies", "replay")
            name = path or (module.gnsfast.claims[0] if bare else type(module).__name__)
            probe = self._probe(path, measures)
            facts: Any = dict(groups=own_groups, moments=v, constants_P2=constants, module=name)
            plan = Plan(**facts, second=second.get(path, ()))
            openings[path] = Opened(probe, name, self.num_samples, plan, placed[device])
        return openings

    def _probe(self, path: str, measures: int) -> Tensor:
        """The leaf whose gradient is the module's rows. It is made once and stores one number."""
        key = path, measures
        if key not in self._probes:
            device, _, count = self._spans[path]
            groups = self.sides.num_groups if path in self.sides.groups else 0
            shape = measures * count, self.num_samples + 2 + groups
            self._probes[key] = self._zero[device].expand(shape).requires_grad_()
        return self._probes[key]

    def _watch_end(self, at_end: Callable[[], None] | None) -> None:
        self._at_end, self._waiting = at_end, False
        for key, probe in self._probes.items() if at_end is not None else ():
            if key not in self._hooked:  # once: a hook takes 8 µs to register, and 1 to run
                self._hooked.add(key)
                # A method would keep the slab alive: Python cannot see that C++ holds it.
                arrives = weakref.WeakMethod(self._arrives)
                probe.register_post_accumulate_grad_hook(partial(_call, arrives))

    def _arrives(self, probe: Tensor) -> None:
        """Call ``at_end`` after this pass. A callback that another callback queues runs after the
        callbacks in which DDP and FSDP2 finish their gradients.
        """
        if self._at_end is None or self._waiting:
            return
        self._waiting = True
        if self._at_start is not None:
            self._at_start()
            self._at_start = None
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end))

    def _end(self) -> None:
        self._waiting = False
        if self._at_end is not None:
            self._at_end()

    def _refuse_documents(self) -> None:
        for path, module in self.modules.items():
            where = () if self._spans[path][0].type == "cpu" else (CUDA,)
            refuse(module.gnsfast.route, module.gnsfast.features(DOCUMENTS, *where), path)

    def close(self) -> None:
        """Make all modules plain torch modules again."""
        self._at_end = self._at_start = None
        for module in self.modules.values():
            module.close_probe()
        for tie in self._ties:
            tie.reset()

    def forget(self) -> None:
        """Make new probes for the next pass, since the graph of a failed pass may hold the old."""
        self._probes.clear()
        self._opened.clear()
        self._hooked.clear()


def _call(method: "weakref.WeakMethod[Any]", probe: Tensor) -> None:
    if (function := method()) is not None:
        function(probe)


NOBODY, METRIC = -1, -2
"""Owners of rows without a unit: rows of uncovered parameters, and rows under a metric."""


def _not_weighed(owners: Iterable[int]) -> list[int]:
    return [row for row, owner in enumerate(owners) if owner != METRIC]


def _covered(module: nn.Module) -> bool:
    return isinstance(module, DropIn) and bool(
        module.probed_parameters().keys() - module.gnsfast.uncovered
    )
