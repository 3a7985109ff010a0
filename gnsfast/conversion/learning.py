# SPDX-License-Identifier: Apache-2.0
"""Finds the route and the layout of each module from an example."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from gnsfast.combinations import REPEATED, reason
from gnsfast.conversion.evidence import Evidence, SamplesMeet, Steps
from gnsfast.conversion.layouts import SHARES, laid
from gnsfast.conversion.prints import SHARED, Lost, Rows
from gnsfast.conversion.routes import KERNELS, cost_of_replays, may_copy, replayed
from gnsfast.layers import (
    DropIn,
    Embedding,
    OutProjection,
    Replayed,
    SampleLayout,
    is_around,
    replay_dim,
    weight_hooks,
)


class Learned(NamedTuple):
    """What an example has shown. Dicts have the names of modules as keys.

    ``layouts``, ``reasons`` (why there are no norms) and ``notes`` speak for themselves. ``replay``
    are modules to replay with all their submodules, ``repeated`` those whose calls are joined.
    ``shared`` holds the places of the arguments that all samples of a replayed module share.
    ``copies`` says how a module uses copies of its parameters, ``uncopied`` which parameters cannot
    have copies, and why.
    """

    layouts: dict[str, SampleLayout] = {}
    reasons: dict[str, str] = {}
    notes: dict[str, str] = {}
    replay: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    shared: dict[str, frozenset[int]] = {}
    copies: dict[str, Steps] = {}
    uncopied: dict[str, dict[str, str]] = {}


def learn(
    model: nn.Module,
    example: Any,
    batch_dim: int | None,
    routes: Mapping[str, type[DropIn]],
    claims_of: Mapping[str, tuple[str, ...]],
    asked: Collection[str] = (),
) -> Learned:
    """Run ``model`` without gradients on samples of ``example``, and learn from its tensors.

    Args:
        routes, claims_of: the class that each module would become without an example, and the
            parameters that it is responsible for.
        asked: the modules that the user wants to replay.

    Raises:
        TypeError, ValueError: if the example is not a call of the model with two samples or more,
            or if the samples depend on each other.
    """
    if meta := [n for n, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"example: {meta[0]} is on the meta device. Load the weights first.")
    if lazy := [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise ValueError(f"example: {lazy[0]} has no shape yet. Run a forward pass first.")
    try:
        return _Learner(model, example, batch_dim or 0, routes, claims_of, asked).learned()
    except SamplesMeet as first:
        if batch_dim is not None or not any(map(_is_sequence_first, model.modules())):
            raise
        try:
            return _Learner(model, example, 1, routes, claims_of, asked).learned()
        except Exception:  # dimension 1 holds no samples either, so the first error says more
            raise first from None


def _is_sequence_first(module: nn.Module) -> bool:
    return not getattr(module, "batch_first", True)


class Request(NamedTuple):
    """Why no kernel can find a module's norms, and the innermost module that a replay may run."""

    why: str
    start: str


class _Learner:
    def __init__(
        self,
        model: nn.Module,
        example: Any,
        batch_dim: int,
        routes: Mapping[str, type[DropIn]],
        claims_of: Mapping[str, tuple[str, ...]],
        asked: Collection[str],
    ) -> None:
        self.asked = asked
        self.named, self.routes, self.batch_dim = dict(model.named_modules()), routes, batch_dim
        self.parameters: dict[str, list[nn.Parameter]] = {}
        for path, claims in claims_of.items():
            if claims:
                own = dict(self.named[path].named_parameters())
                self.parameters[path] = [own[name] for name in claims]
        self.evidence = Evidence(model, example, batch_dim, self._owners(), self._bases())
        self.layouts: dict[str, SampleLayout] = {}
        self.notes: dict[str, str] = {}
        self.repeated: set[str] = set()
        self.tables: set[str] = set()  # what all samples share, and is made for each of them
        self.requests: dict[str, Request] = {}
        self.claims_of = claims_of
        self.copies: dict[str, Steps] = {}
        self.uncopied: dict[str, dict[str, str]] = {}

    def _owners(self) -> dict[int, set[str]]:
        owners: dict[int, set[str]] = {}
        for path, parameters in self.parameters.items():
            for p in parameters:
                owners.setdefault(id(p), set()).add(path)
                if issubclass(self.routes.get(path, DropIn), OutProjection):
                    owners[id(p)].add(_parent(path))
        return owners

    def _bases(self) -> dict[str, type[nn.Module]]:
        """For each module whose class wraps the forward of a torch class: that torch class."""
        around = {path: cls for path, cls in self.routes.items() if is_around(cls)}
        return {
            path: next(base for base in KERNELS if issubclass(cls, base))
            for path, cls in around.items()
        }

    def learned(self) -> Learned:
        self.evidence.refuse_mixing()
        self._copy()
        for path, cls in self.routes.items():
            if path not in self.copies or self.uncopied[path]:
                self._learn(path, cls)
        if self.tables and not self.evidence.takes_tables(self.tables):
            for path in self.tables:
                self.layouts.pop(path, None)
                why = "all samples share its output, and the model takes no copy for each sample"
                self.requests[path] = Request(why, self._around(path))
            self.tables.clear()
        learned = self._replays()
        said = [EVALUATED] * (not self.evidence.trains) + [TIED] * self.evidence.ties_losses()
        if said:
            own = {path: [learned.notes.get(path, ""), *said] for path in self.routes}
            notes = {path: "; ".join(filter(None, each)) for path, each in own.items()}
            learned = learned._replace(notes=learned.notes | notes)
        return learned

    def _copy(self) -> None:
        """Find the modules without a kernel in which each sample can use its own parameters."""
        wanted = {}
        for path, parameters in self.parameters.items():
            cls, claims = self.routes.get(path, Replayed), self.claims_of[path]
            plain = issubclass(cls, Replayed) and may_copy(self.named[path], claims)
            used = any(self.evidence.users(p) for p in parameters)
            if plain and not used and path not in self.asked and self.batch_dim == 0:
                trained = [n for n, p in zip(claims, parameters) if p.requires_grad]
                if trained and all(self.evidence.counts(path)):
                    wanted[path] = trained
        if wanted:
            self.copies, self.uncopied = self.evidence.copied(wanted)
            self.notes |= dict.fromkeys(self.copies, "each sample uses a copy of it")

    def _learn(self, path: str, cls: type[DropIn]) -> None:
        """Find a module's layout, or request a replay of it or of a module around it."""
        request = self._used_as_tensor(path) or self._called_oddly(path, cls)
        if request is None and not any(self.evidence.own_counts(path)):
            self.layouts[path] = SampleLayout(self.batch_dim)
            if not issubclass(cls, OutProjection):  # attention takes its weight without a call
                self.notes[path] = "the example does not call it"
        elif request is None and issubclass(cls, Replayed):
            request = self._without_kernel(path)
        elif request is None:
            request = self._lay_out(path, cls)
        if request is not None:
            self.requests[path] = request

    def _used_as_tensor(self, path: str) -> Request | None:
        users = set().union(*(self.evidence.users(p) for p in self.parameters[path]))
        callers = {call.caller for call in self.evidence.calls(path)}
        if weight_hooks(self.named[path]):  # they run in the module that calls this one
            users -= callers
        if not users:
            return None
        where = " and ".join(sorted(repr(user) if user else "the model" for user in users))
        why = f"its weight is also used as a tensor in {where}"
        return Request(why, _common(users | callers, path))

    def _called_oddly(self, path: str, cls: type[DropIn]) -> Request | None:
        """A request for a module whose number of calls no kernel can handle."""
        counts = self.evidence.own_counts(path)
        if not any(counts):
            if issubclass(cls, OutProjection) or not self._is_passed_over(path):
                return None
            why = "the example calls other modules of its list, but not this one"
            return Request(why, _parent(path))
        if len({*counts}) > 1:
            why = "how often the model calls it depends on the batch"
            return Request(why, self._around(path))
        alone = reason(cls.gnsfast.route, [REPEATED]) or issubclass(cls, Replayed)
        if counts[0] > 1 and alone and not self._may_repeat(path, cls):
            return Request(f"the model calls it {counts[0]} times", self._around(path))
        return None

    def _without_kernel(self, path: str) -> Request:
        """A request for a module whose parameters have no kernel."""
        if self._gives_table(path):
            self.tables.add(path)
        if why := self._not_replayable(path):
            return Request(why, self._around(path))
        self.layouts[path] = SampleLayout(self.batch_dim)
        return Request("its parameters have no kernel", path)

    def _is_passed_over(self, path: str) -> bool:
        """Whether a module is the part of a list of which only other parts are called, such as an
        expert that no token reached.
        """
        while path:
            above = _parent(path)
            listed = isinstance(self.named[above], (nn.ModuleList, nn.ModuleDict))
            if listed and not any(self.evidence.counts(path)):
                names = (f"{above}.{name}" for name in self.named[above]._modules)
                if any(any(self.evidence.counts(name)) for name in names):
                    return True
            path = above
        return False

    def _around(self, path: str) -> str:
        """The innermost module around a module and all that call it."""
        return _common({call.caller for call in self.evidence.calls(path)}, path)

    def _may_repeat(self, path: str, cls: type[DropIn]) -> bool:
        """Whether several calls are exact without joining them, as for an embedding that shares its
        weight: links connect all its uses.
        """
        shared = {id(p) for p in self.parameters[path]}
        others = (ps for other, ps in self.parameters.items() if other != path)
        return issubclass(cls, Embedding) and any(id(p) in shared for ps in others for p in ps)

    def _lay_out(self, path: str, cls: type[DropIn]) -> Request | None:
        """Find the layout that fits all calls of a module, or return a request if there is none."""
        calls = [laid(cls, *call) for call in self.evidence.own_inputs(path)]
        lost = [each for each in calls if isinstance(each, Lost)]
        found = [each for each in calls if not isinstance(each, Lost)]
        if len({layout for layout, _ in found}) > 1:
            lost.append(Lost("its calls have their samples in different places"))
        if lost:
            return Request(lost[0].reason, self._around(path))
        layout, note = found[0]
        self.layouts[path] = layout._replace(known=True)
        if note == SHARES:
            self.tables.add(path)
        if len(calls) > 1 and not self._may_repeat(path, cls):
            self.repeated.add(path)
            note = f"its {len(calls)} calls are joined" + (f"; {note}" if note else "")
        self.notes[path] = note
        return None

    def _gives_table(self, path: str) -> bool:
        """Whether a module gives a table [1, ...] that all samples share."""
        if {*self.evidence.counts(path)} != {1}:
            return False
        outputs = zip(self.evidence.calls(path)[0].outputs, self.evidence.outputs(path))
        return any(
            rows == SHARED and print_ is not None and len(print_.shape) > 2 and print_.shape[0] == 1
            for print_, rows in outputs
        )

    def _not_replayable(self, path: str) -> str:
        """Why a replay cannot find the samples of a module. Empty if it can."""
        module, calls = self.named[path], self.evidence.calls(path)
        if {*self.evidence.counts(path)} != {1}:
            return "it is not called exactly once"
        call = calls[0]
        if not call.plain:
            return "it takes or returns an object that a second call may change"
        if not issubclass(self.routes.get(path, DropIn), Replayed):
            if why := replayed(module).reason:
                return why
        if self.evidence.draws(path):
            return "it contains dropout, and a replay would draw other masks"
        for side, found in (
            (call.inputs, self.evidence.inputs(path)),
            (call.outputs, self.evidence.outputs(path)),
        ):
            for place, (print_, rows) in enumerate(zip(side, found)):
                if print_ is None:
                    continue
                B = self.evidence.num_samples
                seen = replay_dim(module, print_.shape, place, B, self.batch_dim)
                if rows == SHARED and seen is None and (side is call.inputs or path in self.tables):
                    continue
                if rows != Rows(seen if seen is not None else -1):
                    why = rows.reason if isinstance(rows, Lost) else "each sample has several rows"
                    return f"it takes or returns a tensor of shape {list(print_.shape)}, and {why}"
        return ""

    def _replays(self) -> Learned:
        """Choose the replays that are worth their cost."""
        around: dict[str, list[str]] = {}
        reasons: dict[str, str] = {}
        for path, (why, start) in self.requests.items():
            place = self._place(start)
            if place is None:
                reasons[path] = why
            else:
                around.setdefault(place, []).append(path)
        worth = {place for place, paths in around.items() if self._is_worth(place, paths)}
        failed = self.evidence.failed_replays(worth)
        for place, paths in around.items():
            cost = cost_of_replays([self.named[place]])
            if place in worth and place not in failed:
                self.notes[place] = f"replayed: the backward pass {cost}"
                continue
            for path in paths:
                self.layouts.pop(path, None)
                why = self.requests[path].why
                reasons[path] = (
                    f"{why}; a replay of it failed: {failed[place]}"
                    if place in failed
                    else f"{why}. convert(model, example=..., replay=[{place!r}]) covers it: the "
                    f"backward pass then {cost}"
                )
        whole = frozenset(p for p in worth - failed.keys() if around[p] != [p])
        shared = {
            place: frozenset(i for i, r in enumerate(self.evidence.inputs(place)) if r == SHARED)
            for place in worth - failed.keys()
        }
        for path in self.copies.keys() & self.requests.keys() - reasons.keys():  # it is replayed
            del self.copies[path]
        for path in self.copies.keys() & reasons.keys():
            self.uncopied[path] = dict.fromkeys(self.uncopied[path], reasons.pop(path))
        repeated = frozenset(self.repeated)
        found = self.layouts, reasons, self.notes, whole, repeated, shared
        return Learned(*found, self.copies, self.uncopied)

    def _is_worth(self, place: str, paths: list[str]) -> bool:
        """Whether a replay of ``place`` is worth the norms of ``paths``."""
        gained = _elements([p for path in paths for p in self.parameters[path]])
        replayed = _elements(self.named[place].parameters())
        few = replayed <= FEW * _elements(self.named[""].parameters())
        return place in self.asked or gained >= (WORTH_OF_FEW if few else WORTH) * replayed

    def _place(self, start: str) -> str | None:
        """The innermost module from ``start`` outwards that can be replayed; None if none can."""
        while self._not_replayable(start):
            if not start:
                return None
            start = _parent(start)
        return start


WORTH, WORTH_OF_FEW, FEW = 0.5, 0.05, 0.02
"""A replay must find norms for half of the parameters that it runs, or for a twentieth if it runs
at most a fiftieth of the model's. Measured times would choose other routes in each process."""

TIED = (
    "the loss of two samples is neither the sum of their losses nor between them, as with a "
    "contrastive or load-balancing loss: check the norms with gnsfast.verify"
)
EVALUATED = "found in evaluation mode, because random numbers in training hide or mix the samples"


def _elements(parameters: Any) -> int:
    return sum({id(p): p.numel() for p in parameters}.values())


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _common(users: set[str], path: str) -> str:
    """The innermost module around all of these."""
    first, *others = (user.split(".") for user in (*users, _parent(path)))
    depth = next(
        (i for i, part in enumerate(first) if any(o[i : i + 1] != [part] for o in others)),
        len(first),
    )
    return ".".join(first[:depth])
