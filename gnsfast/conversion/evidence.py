# SPDX-License-Identifier: Apache-2.0
"""Runs a model on parts of an example, and compares the passes to find each module's samples."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from gnsfast.conversion.examples import example_of
from gnsfast.conversion.looks import Call, Look, Prints
from gnsfast.conversion.prints import SHARED, Lost, Rows, Samples, rows_of, taken
from gnsfast.conversion.trials import Copying, Wanted, failures
from gnsfast.kept import kept, kept_chance
from gnsfast.layers import BATCH_NORM, batch_statistics_error

Steps = tuple[tuple[Any, str], ...]
"""How a module uses copies of its parameters (``functional.Use.seen``)."""


class SamplesMeet(ValueError):
    """The model mixes samples: what it computes for one of them depends on the others."""


class Evidence:
    """Four passes: over all samples, over all in another order, and two over one or two samples.

    The model runs in training mode without dropout. In a model that is in evaluation mode, batch
    norms stay in evaluation mode. If other randomness hides the samples, the whole model runs in
    evaluation mode, and ``trains`` is False.

    Args:
        owners: id of a parameter -> the modules that may use it.
        bases: module -> torch's class, for modules whose class wraps the forward of a torch class.
            Their own calls are those of torch's forward.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        batch_dim: int,
        owners: Mapping[int, Collection[str]],
        bases: Mapping[str, type[nn.Module]],
    ) -> None:
        self.model, self._owners, self._bases = model, owners, bases
        self._named = dict(model.named_modules())
        self._given = example_of(model, example, batch_dim)
        self._example = self._given.cut()
        self.trains = True
        self._random: set[str] = set()
        self._see()
        if any(isinstance(r, Lost) for r in self._all_rows()) and self._is_random():
            self.trains = False
            self._see()

    @property
    def num_samples(self) -> int:
        """The samples of the first pass."""
        return len(self._samples.whole)

    def counts(self, path: str) -> list[int]:
        """How often each pass called a module."""
        return [len(look.calls.get(path, ())) for look in self._looks]

    def calls(self, path: str) -> list[Call]:
        """The calls of a module in the first pass."""
        return self._looks[0].calls.get(path, [])

    def own_counts(self, path: str) -> list[int]:
        """How often each pass called a layer's own forward, inside of what its class adds."""
        return [len(look.own(path)) for look in self._looks]

    def own_inputs(self, path: str) -> list[tuple[Prints, list[Rows | Lost | None]]]:
        """The inputs of each of these calls, and where the samples lie in them."""
        sides = zip(*([call.inputs for call in look.own(path)] for look in self._looks))
        return [(prints[0], self._rows(list(prints))) for prints in sides]

    def users(self, parameter: nn.Parameter) -> set[str]:
        """The innermost modules that used a parameter that is not theirs."""
        return self._looks[0].elsewhere.get(id(parameter), set())

    def inputs(self, path: str, call: int = 0) -> list[Rows | Lost | None]:
        """Where the samples lie in each argument of a module. None marks what is not a tensor."""
        return self._rows([look.calls[path][call].inputs for look in self._looks])

    def outputs(self, path: str, call: int = 0) -> list[Rows | Lost | None]:
        """The same for its outputs."""
        return self._rows([look.calls[path][call].outputs for look in self._looks])

    def draws(self, path: str) -> bool:
        """Whether a module draws random numbers, as dropout does. A replay would draw others."""
        return path in self._random

    def takes_tables(self, modules: Collection[str]) -> bool:
        """Whether the outputs stay the same if these modules run once for each sample on what all
        samples share: an index [T], or whatever gives a table [1, ...].
        """
        try:
            look = self._look(self._samples.whole, modules)
        except Exception:  # any error says that the model wants the table [T, D]
            return False
        pairs = zip(self._looks[0].calls[""][0].outputs, look.calls[""][0].outputs)
        return all(a is b or (a and b and a.same(b)) for a, b in pairs)

    def ties_losses(self) -> bool:
        """Whether a number that the model returns for two samples is neither the sum of the numbers
        of each sample nor between them, as with most contrastive losses.
        """
        given = self.outputs("")
        pooled = [i for i, rows in enumerate(given) if isinstance(rows, Lost) and rows.pooled]
        if not pooled or len(self._samples.part) > 1:
            return False
        part, other, both = *self._looks[2:], self._look([0, 1])
        sides = (look.calls[""][0].outputs for look in (part, other, both))
        numbers = zip(*([outputs[i] for i in pooled] for outputs in sides))
        return any(
            _is_tied(*(p.values.item() for p in each if p is not None))
            for each in numbers
            if all(p is not None and p.shape in ((), (1,)) for p in each)
        )

    def failed_replays(self, paths: Collection[str]) -> dict[str, str]:
        """The modules that cannot be replayed on a single sample, and why."""
        return self._look(self._samples.whole, replays=paths).failed if paths else {}

    def copied(self, wanted: Wanted) -> tuple[dict[str, Steps], dict[str, dict[str, str]]]:
        """For each module: how it uses copies of its parameters, and the parameters whose copies
        do not get the gradients of single samples, with the reason.

        Two passes show how the copies are used. In two more, each sample has different copies: its
        values must then be the same by itself and among the others.
        """
        trials = [Copying(wanted, own, False) for own in (self._samples.whole, self._samples.part)]
        try:
            for each in trials:
                self._look_copying(each)
        except Exception as error:  # a user's model, which may ask for a real parameter
            why = (
                "the model does not run with a copy of it for each sample "
                f"({type(error).__name__}: {error})"
            )
            return {}, {path: dict.fromkeys(names, why) for path, names in wanted.items()}
        failed = failures(wanted, trials)
        left = {p: [n for n in names if n not in failed[p]] for p, names in wanted.items()}
        left = {path: names for path, names in left.items() if names}
        if left and not self._tells_apart(left):
            for path in [p for p in left if not self._tells_apart({p: left[p]})]:
                why = "the samples could not be told apart when each had a copy of it"
                failed[path] |= dict.fromkeys(left.pop(path), why)
        return {path: tuple(trials[0].uses[path].seen.items()) for path in left}, failed

    def _tells_apart(self, wanted: Wanted) -> bool:
        """Whether a sample's copies change the values of that sample alone."""
        order = self._samples.whole, self._samples.turned, self._samples.part
        whole, *others = (self._look_copying(Copying(wanted, own, True)) for own in order)
        agree = all(self._agree(whole, look, own) for look, own in zip(others, order[1:]))
        return agree and self._adds_up(wanted)

    def _adds_up(self, wanted: Wanted) -> bool:
        """For a model that returns only numbers of all samples, such as its loss: whether changing
        all samples' copies changes them by the sum or the mean of the single changes. Nothing else
        shows what the model does after its last module.
        """
        given, whole = self.outputs(""), self._samples.whole
        if not given or not all(isinstance(rows, Lost) and rows.pooled for rows in given):
            return True
        if len(self._samples.part) > 1:
            return False
        changed = self._changes(wanted, whole)
        alone = [self._changes(wanted, [b]) for b in whole]
        if not changed or any(len(each) != len(changed) for each in alone):
            return False
        return all(
            any(abs(total - sum(each) / n) <= 0.02 * abs(total) for n in (1, len(whole)))
            for total, *each in zip(changed, *alone)
        )

    def _changes(self, wanted: Wanted, samples: list[int]) -> list[float]:
        """How much the numbers that the model returns change with the copies of ``samples``."""
        looks = [self._look_copying(Copying(wanted, samples, moved)) for moved in (False, True)]
        pairs = zip(*(look.calls[""][0].outputs for look in looks))
        return [
            b.values.double().sum().item() - a.values.double().sum().item()
            for a, b in pairs
            if a is not None and b is not None
        ]

    def _agree(self, whole: Look, other: Look, samples: list[int]) -> bool:
        """Whether both passes agree on ``samples``, wherever it is clear which rows are theirs."""
        for path, calls in whole.calls.items():
            pairs = zip(calls, other.calls.get(path, ()), range(min(self.counts(path))))
            for ours, theirs, k in pairs:
                sides = zip(
                    ours.inputs + ours.outputs,
                    theirs.inputs + theirs.outputs,
                    self.inputs(path, k) + self.outputs(path, k),
                )
                for a, b, rows in sides:
                    if a is None or b is None or not isinstance(rows, Rows) or rows == SHARED:
                        continue
                    own = taken(a.values, rows, samples)
                    if own.shape != b.values.shape or not b.like(own):
                        return False
        return True

    def _look_copying(self, copying: Copying) -> Look:
        return self._look(copying.samples, copying=copying)

    def refuse_mixing(self) -> None:
        """Raise for the first module that takes separate samples and returns them mixed. If there
        is none, raise for the first layer whose input is mixed.
        """
        for path in self._looks[0].calls:
            for call in range(min(self.counts(path))):
                mixed = _mixed(self.outputs(path, call))
                if mixed is None or _mixed(self.inputs(path, call)):
                    continue
                module = self._named[path]
                if isinstance(module, BATCH_NORM):
                    raise SamplesMeet(str(batch_statistics_error(path, module)))
                raise self._meeting(path, mixed.reason)
        for path in {path for paths in self._owners.values() for path in paths}:
            for _, found in self.own_inputs(path):
                first = next((rows for rows in found if rows is not None), None)
                if isinstance(first, Lost) and (first.mixed or first.pooled):
                    around = self.calls(path)[0].caller
                    how = f"what {path!r} gets for one sample depends on the others"
                    raise self._meeting(around, how)

    def _meeting(self, path: str, how: str) -> SamplesMeet:
        name = f"{path or 'the model'} ({type(self._named[path]).__name__})"
        other = ""
        if self._example.batch_dim == 0:
            other = (
                " If the samples lie along dimension 1, call convert(model, example=..., "
                "batch_dim=1)."
            )
        return SamplesMeet(
            f"{name} ties the samples of a batch together: {how}. So no sample has a gradient of "
            "its own, neither in this module nor in the layers before it. Leave this part out of "
            f"the pass that you measure.{other}"
        )

    def _see(self) -> None:
        B = self._example.num_samples
        whole, turned, part, other = [*range(B)], [*range(B)][::-1], [1], [0]
        try:
            looks = [self._look(whole), self._look(turned)]
            try:
                looks.append(self._look(part))
            except Exception:  # some models do not take one sample: batch norm, a bare squeeze()
                part, other = [1, 2], [0, 1]
                if B == 2:
                    raise
                looks.append(self._look(part))
            looks.append(self._look(other))
        except Exception as error:
            if B < self._given.num_samples:  # some take no other number of rows: pairs, groups
                self._example = self._given
                return self._see()
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    f"gnsfast.convert ran the model on {B} samples of the example, and on fewer. "
                    "The example must be what the model itself is called with: leave labels out "
                    "if its forward takes none."
                )
            raise
        self._looks, self._samples = looks, Samples(whole, turned, part, other)
        self._random |= looks[0].random
        self._found: dict[tuple[int, ...], Rows | Lost] = {}  # by the prints, which the looks keep

    def _look(
        self,
        samples: list[int],
        expanded: Collection[str] = (),
        replays: Collection[str] = (),
        seed: int = 0,
        copying: Copying | None = None,
    ) -> Look:
        model = self.model
        with kept(model), _same_attributes(model), kept_chance(model) as seed_all:
            seed_all(seed)
            if not self.trains:
                model.eval()
            elif not model.training:  # models are loaded like this; batch norms may have to stay
                frozen = [m for m in model.modules() if isinstance(m, BATCH_NORM)]
                model.train()
                for module in frozen:
                    module.training = False
            size, dim = len(samples), self._example.batch_dim
            known = model, self._owners, self._bases
            look = Look(*known, size, dim, expanded, replays, copying)
            with self._example.around():
                return look.run(*self._example.of(samples))

    def _is_random(self) -> bool:
        """Whether another seed gives other numbers, although dropout is off."""
        other = self._look(self._samples.whole, seed=1)
        first = self._looks[0]
        return first.calls.keys() != other.calls.keys() or any(
            a is not None and b is not None and not a.same(b)
            for path in first.calls
            for mine, theirs in zip(first.calls[path], other.calls[path])
            for a, b in zip(mine.inputs + mine.outputs, theirs.inputs + theirs.outputs)
        )

    def _all_rows(self) -> Iterator[Rows | Lost | None]:
        for path in self._looks[0].calls:
            for call in range(min(self.counts(path))):
                yield from self.inputs(path, call)

    def _rows(self, sides: list[Prints]) -> list[Rows | Lost | None]:
        if len({len(side) for side in sides}) > 1:
            return [Lost("the number of tensors in it depends on the batch")]
        found: list[Rows | Lost | None] = []
        for prints in zip(*sides):
            key = tuple(map(id, prints))
            if all(p is None for p in prints):
                found.append(None)
                continue
            if key not in self._found:
                self._found[key] = rows_of(prints, self._samples)
            found.append(self._found[key])
        return found


def _mixed(found: list[Rows | Lost | None]) -> Lost | None:
    return next((rows for rows in found if isinstance(rows, Lost) and rows.mixed), None)


def _is_tied(one: float, other: float, both: float) -> bool:
    slack = 0.02 * max(abs(one), abs(other), abs(both))  # a balance loss beside the model's own
    between = min(one, other) - slack <= both <= max(one, other) + slack
    return not between and abs(one + other - both) > slack


@contextmanager
def _same_attributes(model: nn.Module) -> Iterator[None]:
    """Restore at the end the parameters and submodules, which of them are trained, and the
    attributes of modules, such as states and caches.
    """
    held = [(m, dict(vars(m))) for m in model.modules()]
    tables = [
        (t, dict(t)) for m in model.modules() for t in (m._parameters, m._modules, m._buffers)
    ]
    trainable = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for module, attributes in held:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        own: Any
        for own, contents in tables:
            for name in own.keys() - contents.keys():
                del own[name]
            own.update(contents)
        for p, trained in trainable:
            p.requires_grad_(trained)
