# SPDX-License-Identifier: Apache-2.0
"""What the batches of a model show: where the samples lie, and whether the norms are right.

The first batch in a block shows this, before the model gets it. A part of the model that is called
by itself shows its own. Later batches show what the first one did not reach.
"""

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gnsfast.errors import ObservationError, SampleShapeError, first_line
from gnsfast.following.checkpoints import not_reentrant
from gnsfast.following.examples import FEW, Arrangement, Example, lists_of
from gnsfast.following.hooks import Hook
from gnsfast.following.later import MORE, Later
from gnsfast.following.layouts import Layout
from gnsfast.following.leaf import Leaf, nobody
from gnsfast.following.learning import Learned, Trial, learn, learn_skipped
from gnsfast.following.options import EXCLUDED
from gnsfast.following.passes import Passes
from gnsfast.following.proof import Proof, meeting, prove, refuse_mixed_documents
from gnsfast.following.structure import Structure
from gnsfast.parallel import shared
from gnsfast.tensors import tensors_of


@dataclass
class _Block:
    """What belongs to an open block: the model or the wrapper of it that is called, what that got,
    or the function that the user gave to ``run`` in its place. ``is_shown_again``: that has been
    learnt from, after the first batch.
    """

    caller: Any = nobody
    batch: Any = None
    run: Callable[..., Any] | None = None
    is_shown_again: bool = False
    hooks: list[Any] = field(default_factory=list)


class Batches:
    """What the batches that a model got in its blocks have shown.

    ``proof`` says how far the norms are proven. ``is_learned``: every module was seen.
    ``is_learning``: the model runs to show something. ``is_half``: it computes in half precision.
    ``is_by_run``: a function that the user gave has shown all that a pass runs, in modules or not.
    ``watcher`` is a weak reference to the owner of the open block, whose ``learned()`` is called
    when a batch has shown something.
    """

    def __init__(self, structure: Structure, passes: Passes) -> None:
        self._structure, self._passes = structure, passes
        self._groups = structure.groups
        self.proof = Proof(NOT_BEGUN)
        self.is_learned = self.is_half = self.is_by_run = False
        self.is_learning = self._is_apart = self._is_blind = False
        self._learned: Learned | None = None
        self._known: dict[Any, Learned] = {}  # what batches of some size, or form, have shown
        self._later = Later(structure, passes)
        self._looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._block, self.watcher = _Block(), nobody
        structure.running.on_unseen = weakref.WeakMethod(self._show_unseen)

    @property
    def is_begun(self) -> bool:
        """Whether a batch has shown something."""
        return bool(self._looked)

    def watch(self, caller: nn.Module) -> None:
        """See what ``caller``, the model or a wrapper of it, gets from here on, and its parts."""
        self._block.caller = weakref.ref(caller)
        model = self._structure.model
        parts = {*self._parts}
        if not self.is_learned:
            new = (m for m in model.modules() if m not in self._looked)
            parts.update(m for m in new if not isinstance(m, torch.jit.ScriptModule))
        for m in (caller, *(parts - {model, caller})):
            before = m.register_forward_pre_hook(Hook(self._before), with_kwargs=True, prepend=True)
            self._block.hooks.append(before)
            if m is caller or m in self._parts:
                self._block.hooks.append(m.register_forward_hook(Hook(self._after)))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what the model, or a part that is not called by it, gets in a pass of the user."""
        if self.is_learning or torch.compiler.is_compiling():
            return
        if module is self._block.caller():
            if torch.is_grad_enabled():
                self.show(args, kwargs)
            return
        # What gets no tensor, such as a parametrization, shows nothing.
        if torch.is_grad_enabled() and tensors_of((args, kwargs)):
            self.learn(module, args, kwargs)
        if module in self._parts:
            self._run_begins(module, self._structure.leaves_of(module))

    def end(self) -> None:
        """End what a block began."""
        self._unwatch()
        self._block, self._structure.given = _Block(), ()
        self._later.end(self.proof)

    def _unwatch(self) -> None:
        for hook in self._block.hooks:
            hook.remove()
        self._block.hooks.clear()

    def show(self, args: Any, kwargs: Any, run: Callable[..., Any] | None = None) -> None:
        """Show the batch of the open block, before the model that gets it runs; or ``run`` in its
        place.

        Raises:
            SampleShapeError: if none of its tensors has as many samples as the block.
        """
        structure, documents = self._structure, self._passes.asked.documents
        self._run_begins(self._block.caller(), structure.leaves)
        self._block.run, self._block.batch = run, (args, kwargs)
        self._block.is_shown_again = False
        structure.given = args, kwargs
        given = tensors_of((args, kwargs))
        self._refuse_shapes(given)
        if documents is None and self._learned is not None:
            self._later.see(given, self._learned)
            if len(self._known) > 2:  # by sizes and by form
                own = self._known.get(self._later.sizes) or self._known.get(self._later.form)
                if own is not None and own is not self._learned:
                    self._use(own)
            if self._may_learn_again:
                is_new = self._later.is_new(self.proof)
                if is_new or self._later.is_due:  # a loss alone shows nothing but by a proof
                    results = self._learned.results
                    is_new |= not any(isinstance(place, Layout) for place in results)
                    self._learn_again(is_new)
        self._later.fail_wrong()
        self.learn(structure.model, args, kwargs)
        if documents is not None and not self._is_apart:
            self._see_documents_apart(args, kwargs)

    @property
    def _may_learn_again(self) -> bool:
        """Whether the batch of the open block can show more than the first one: it has several
        samples, its passes need no other process, and no CUDA graph is captured.
        """
        samples, _, documents = self._passes.asked
        learned, alone = self._learned, samples < 2 or documents is not None
        if learned is None or learned.is_joint or self._block.batch is None or self._groups:
            return False
        return not (alone or _is_capturing())

    def _refuse_shapes(self, given: list[Tensor]) -> None:
        """Raise if no tensor of a batch has the samples, or the tokens, of the block."""
        samples, _, documents = self._passes.asked
        shapes = [t.shape for t in given]
        if not shapes or (documents is not None and self._rows_in(given)):
            return
        if documents is None:
            is_known = samples < 2 or any(_holds(shape, samples) for shape in shapes)
            if is_known or lists_of(self._block.batch, samples):
                return
        name = type(self._structure.model).__name__
        some = ", ".join(str(list(shape)) for shape in shapes[:4])
        if documents is not None:
            raise SampleShapeError(
                f"{name}: cu_seqlens ends at token {documents.tokens}, but the model got tensors "
                f"of shape {some}, none of which has so many tokens in its leading dimensions. If "
                "padding follows, add it as a last document."
            )
        raise SampleShapeError(
            f"{name}: the block has {samples} samples, but the model got tensors of shape {some}, "
            "none of which has dimension 0 or 1 of that size. Check num_samples."
        )

    def _rows_in(self, given: list[Tensor]) -> int:
        """How many rows of a batch hold the packed documents; 0 if that is not known."""
        documents = self._passes.asked.documents
        assert documents is not None
        found = (_rows_of(t.shape, documents.tokens) for t in given)
        return next((rows for rows in found if rows), 0)

    def _show_unseen(self) -> None:
        """Learn again, once in a pass, where the model takes a parameter that no batch has shown in
        use.
        """
        if self._may_learn_again and not (self.is_learning or self._block.is_shown_again):
            self._learn_again()
            self._later.fail_wrong()

    def _run_begins(self, module: nn.Module, leaves: list[Leaf]) -> None:
        """Note that a module runs, whose calls of functions are counted from its start."""
        running = self._structure.running
        for leaf in () if running.modules else leaves:
            leaf.found.functions = 0
        running.modules.add(module)
        running.is_known = True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the model, or a part, has run."""
        if not self.is_learning and not torch.compiler.is_compiling():
            if not (self.is_by_run and module is self._structure.model):
                self._structure.running.modules.discard(module)
            if module is self._block.caller() and torch.is_grad_enabled():
                self._fail_in_another_order()

    def _fail_in_another_order(self) -> None:
        """Note which parameters of those whose steps are told by their order have others now."""
        for leaf in [leaf for leaf in self._structure.leaves if leaf.is_ordered]:
            number, before = leaf.found.functions, len(leaf.steps)
            if number and number != before:
                leaf.fail(
                    f"{number} functions take it, and in the first batch {before} did, in some of "
                    "which the samples lie in another way"
                )

    def learn(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn from what ``module``, the model or a part of it, gets in the open block, and prove
        it. A block of one sample shows nothing.
        """
        samples, _, documents = self._passes.asked
        structure, leaves = self._structure, self._structure.leaves_of(module)
        is_part = module is not structure.model
        if documents is not None:
            samples = self._rows_in(tensors_of((args, kwargs)))
            if not is_part or module not in self._looked:
                for leaf in leaves:
                    leaf.rows = samples
        alone = samples < 2 and documents is None
        if module in self._looked or not leaves or (alone and not self._groups):
            if self._is_blind and not alone:
                raise ObservationError(BLIND)
            return
        structure.given = args, kwargs
        begun = time.perf_counter()
        if not is_part and documents is None:
            self._later.begin(tensors_of((args, kwargs)))
        ways, why = self._ways(module, args, kwargs, samples)
        is_own = bool(ways)
        lost = leaves if is_part and not (is_own or alone) else []
        found = Proof("" if lost else why)
        if self._groups:  # a process without samples runs the passes of the others
            some = Example.of(args, kwargs, samples) or Example.without_samples(args, kwargs)
            ways = ways[:1] or [some]
        if structure.on_any(is_own):
            trials = [self._trial(module, leaves, batch) for batch in ways]
            found = self._learned_from(trials, is_own)
        elif documents is None or self._groups:
            self._is_blind = alone
        else:  # the next batch may show more
            self._join(found)
            return
        found = found._replace(lost=found.lost | {leaf.name: why for leaf in lost})
        self._see(module)
        for leaf in leaves:
            leaf.left_out = leaf.left_out or found.left_out.get(leaf.name, "")
        found = found._replace(seconds=time.perf_counter() - begun)
        self._join(found)
        _report(module, leaves, found)
        if (watcher := self.watcher()) is not None:
            watcher.learned()

    def _ways(
        self, module: nn.Module, args: Any, kwargs: Any, samples: int
    ) -> tuple[list[Example], str]:
        """The batch in each way in which it may hold its samples, and what it means if there is
        none. Of several rows that a part gets nothing says whether they belong to one.
        """
        documents, is_part = self._passes.asked.documents, module is not self._structure.model
        if documents is not None:
            example = Example.of_documents(args, kwargs, samples, documents)
            return [] if example is None else [example], ROWS_ARE_NO_SAMPLES
        name, given = type(module).__name__, tensors_of((args, kwargs))
        why = f"no argument of {name} has {samples} samples"
        if samples < 2 or (is_part and not any(samples in t.shape[:2] for t in given)):
            return [], why
        ways = Example.all_of(args, kwargs, samples, dims=MOST if is_part else 2)
        if is_part and ways and (ways[0].is_unclear or (self._groups and len(ways) > 1)):
            return [], f"{name} {UNCLEAR}"
        return ways, why

    def _see(self, module: nn.Module) -> None:
        """Note that a module is learnt, with all that it calls."""
        model = self._structure.model
        self._looked.update(module.modules())
        if module is model:
            self.is_learned = True
        else:
            self._parts.add(module)
            more = (m for m in model.modules() if m is not model and m not in self._looked)
            self.is_learned = not any(self._structure.leaves_of(m) for m in more)
        if self._block.hooks:  # compiled code runs best without those that are not needed now
            self._unwatch()
            self.watch(self._block.caller())

    def _join(self, found: Proof) -> None:
        """Take over the proof of the model, or of one part more."""
        self.proof = found if self.proof.reason == NOT_BEGUN else self.proof.joined(found)

    def _learn_again(self, is_new: bool = True) -> None:
        """Prove it with this batch too, and learn the parameters that no batch has used; or if it
        is not new, see whether samples meet in it. What fits no other batch is learnt by itself.
        """
        structure, learned, later = self._structure, self._learned, self._later
        assert learned is not None
        args, kwargs = self._block.batch
        held = learned.held if learned.form == self._later.form and any(learned.held) else ()
        batch = Example.of(args, kwargs, self._passes.asked.samples, learned.arrangement, held)
        if batch is None or self._passes.is_reached:  # backward has begun
            return
        trial = self._trial(structure.model, structure.leaves, batch)
        trial = trial._replace(example=batch.few(learned.n), learned=learned)
        with self._looking(structure.leaves):
            if not is_new:
                later.wrong |= meeting(trial, later.some_of(batch.n))
                return
            self._block.is_shown_again = True
            unseen = [leaf for leaf in structure.covered if leaf.is_learned and leaf.is_unseen]
            if unseen:
                more = learn(trial)
                more.tell(unseen, is_part=False)
                learned.take_over(more, unseen)
            proof = later.prove(trial)
            if proof.lost and not proof.wrong:
                proof = self._learned_apart(trial, proof)
        later.wrong |= proof.wrong
        self.proof = self.proof.later(proof)

    def _learned_apart(self, trial: Trial, proof: Proof) -> Proof:
        """Learn a batch in which the samples lie in other ways than in those before, as an image
        does among texts, if that gives it the norms that are lost in its ``proof``.
        """
        try:
            own = learn(trial)
        except Exception:  # the model's own, whatever it is: it takes another number of samples
            return proof
        self._use(own)
        new = self._later.prove(trial._replace(learned=own))
        if new.reason or new.wrong or new.lost.keys() >= proof.lost.keys():
            self._use(trial.learned)
            return proof
        self._know(own)
        self._later.proofs += MORE
        return new

    def _know(self, learned: Learned) -> None:
        """Keep what the batch of the open block has shown, for batches of its size or its form."""
        self._known[self._later.sizes] = learned
        self._known.setdefault(self._later.form, learned)
        self._later.use(learned)

    def _use(self, learned: Learned) -> None:
        """Let the parameters know what one of several batches has shown."""
        self._learned = learned
        self._later.use(learned)
        learned.tell(self._structure.leaves, is_part=False)
        self._later.see(tensors_of(self._block.batch), learned)

    def _trial(self, module: nn.Module, leaves: list[Leaf], batch: Example) -> Trial:
        """What is tried with a batch of the model, or of a part."""
        run, is_part = self._block.run, module is not self._structure.model
        called = module if run is None or is_part else run
        return Trial(self._structure, self._passes, module, called, leaves, batch, batch)

    def _learned_from(self, trials: list[Trial], is_own: bool) -> Proof:
        """Learn from the first way to hold its samples that the model takes. Where another one is
        proven as well, which of them is right cannot be seen. Processes that shard the parameters
        take over what the first of them has learnt whose example has samples of its own
        (``is_own``).
        """
        found: list[tuple[Arrangement, Proof]] = []
        leaves, is_part = trials[0].leaves, trials[0].is_part
        known = [(leaf, leaf.steps, leaf.routes) for leaf in leaves]
        with self._looking(leaves):
            for trial in trials[::-1]:  # what the last one shows stays
                for leaf, steps, routes in known if found and is_part else ():
                    leaf.learn([*steps], routes)
                tried = self._learned_from_one(trial, trial is trials[0], is_own)
                if isinstance(tried, Proof):
                    found.append((trial.batch.arrangement, tried))
            if found and (found[-1][1].reason or found[-1][1].left_out):
                if (better := self._learned_without_one(trials[0])) is not None:
                    return better
        if not found:
            return Proof(f"the model does not take some of the samples of its batch ({tried})")
        *others, (usual, proof) = found
        for way, other in others:
            if not other.reason and _flaws(other) <= _flaws(proof):
                unclear = f"{TWO_WAYS} {usual}, as is usual, or {way}"
                wrong = {name: f"{why}. Or {unclear}" for name, why in proof.left_out.items()}
                if proof.reason or is_part:
                    wrong = {leaf.name: unclear for leaf in leaves}
                return proof._replace(reason=unclear, wrong=wrong)
        return proof

    def _learned_without_one(self, trial: Trial) -> Proof | None:
        """Learn as if one tensor of the batch held no samples, as times that are as many by chance.
        The proof of that; None unless it proves all for just one of the tensors.
        """
        learned, batch = self._learned, trial.batch
        held = [k for k, layout in enumerate(batch.layouts) if layout is not None]
        if trial.is_part or self._groups or learned is None or len(held) < 2:
            return None
        found: list[tuple[Proof | None, Learned]] = []
        for without in held if batch.n > FEW else ():
            own = [k in held and k != without for k in range(len(batch.layouts))]
            some = Example.of(batch.args, batch.kwargs, batch.n, batch.arrangement, own)
            if some is not None:
                tried = self._learned_from_one(trial._replace(batch=some), False, True, [FEW])
                if isinstance(tried, Proof) and not (tried.reason or tried.left_out):
                    found.append((tried, self._learned or learned))
        proof, shown = found[0] if len(found) == 1 else (None, learned)
        self._known.clear()
        self._know(shown)
        self._use(shown)
        return proof

    def _learned_from_one(
        self, trial: Trial, is_usual: bool, is_own: bool, sizes: Sequence[int] = ()
    ) -> Proof | str:
        """Learn from as many samples as the model takes, or say why it takes no number of them, or
        none of the ``sizes``.
        """
        batch, groups, error = trial.batch, self._groups, ""
        usual = (FEW,) if groups else (FEW, FEW + 1, FEW + 2, batch.n)
        for n in dict.fromkeys(sizes or usual):
            trial = trial._replace(example=batch.few(n))
            try:
                learned = learn(trial)
                break
            except Exception as own:  # the model's own, whatever it is
                if is_usual and trial.takes():  # then it is an error of ours
                    raise
                error = error or first_line(own)
        else:
            return error
        if groups:
            _, learned = shared((is_own, learned), _first_own, groups)
        else:
            learned = learned.joined(learn_skipped(trial._replace(learned=learned)))
        learned.tell(trial.leaves, trial.is_part)
        self.is_half |= learned.is_half
        if not trial.is_part:
            self._learned, self.is_by_run = learned, self._block.run is not None
            self._known.clear()
            self._know(learned)
        if self._structure.on_any(not is_own):
            return Proof("a process has no batch of several samples")
        return prove(trial._replace(learned=learned))

    @contextmanager
    def _looking(self, leaves: list[Leaf]) -> Iterator[None]:
        """Run the model for our own ends, and then let the user's pass begin."""
        model, inside = self._structure.model, self._structure.running.modules
        # What other parts of the model have found, or functions before this one:
        used = [(own, own.found, own.twin) for own in leaves if own.found.is_begun]
        outside = model not in inside
        inside.add(model)
        self.is_learning = True
        try:
            # A checkpoint around the model must not count what is saved here. (A result that is
            # saved as it is would hold its graph, which would hold it.)
            own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
            with _in_eager_mode(), own_hooks, not_reentrant(), _without_modes():
                yield
        finally:
            self.is_learning = False
            self._passes.begin(self._passes.asked, leaves)
            if outside:
                inside.discard(model)
            for leaf, found, twin in used:
                leaf.found = found
                if leaf.is_sharded:  # else it has kept the twin
                    leaf.twin = twin

    def _see_documents_apart(self, args: Any, kwargs: Any) -> None:
        """Raise if packed documents attend to each other."""
        structure, (samples, _, documents) = self._structure, self._passes.asked
        leaves, learned = structure.leaves, self._learned or Learned()
        assert documents is not None
        if not (structure.units or (leaves[0].rows > 1 and not learned.results)):
            batch = Example.without_samples(args, kwargs, samples)
            trial = self._trial(structure.model, leaves, batch)._replace(learned=learned)
            with self._looking(leaves):
                refuse_mixed_documents(trial, documents)
        self._is_apart = True


TWO_WAYS = (
    "its samples may lie in two ways, and gnsfast.configure(model, example=...) with another "
    "number of them shows which:"
)
MOST = 5
"""Of so many dimensions of what a part gets each may hold the samples."""
UNCLEAR = (
    "is a part that the model does not call, and what it gets does not show where its samples are: "
    "consecutive numbers, as many as samples, may be positions that all samples share, and as many "
    "features or tokens as samples may be those of one sample. With "
    "gnsfast.configure(model, example=..., run=...) the whole pass shows which"
)
ROWS_ARE_NO_SAMPLES = "rows of packed documents are not samples here"
NOT_BEGUN = "no batch has gone through the model in a block"
BLIND = (
    "The parameters are sharded, and in the first block every process had one sample, so nothing "
    "is known of several. Before this block call gnsfast.configure(model, example=batch) on every "
    "process."
)


def _first_own(a: tuple[bool, Learned], b: tuple[bool, Learned]) -> tuple[bool, Learned]:
    """What the first of two processes has learnt that has samples of its own."""
    return a if a[0] or not b[0] else b


def _flaws(proof: Proof) -> tuple[bool, int]:
    """What tells a better proof from others."""
    return bool(proof.reason), len(proof.unproven | {*proof.left_out})


def _report(module: nn.Module, leaves: list[Leaf], found: Proof) -> None:
    """A line in the log, which is a warning where parameters have no norms."""
    left_out = [leaf for leaf in leaves if leaf.left_out and leaf.left_out != EXCLUDED]
    some = left_out or found.reason or found.of_loss
    level = logging.WARNING if some else logging.INFO
    few = "; ".join(f"{leaf.name}: {leaf.left_out}" for leaf in left_out[:3])
    logging.getLogger("gnsfast").log(
        level,
        "%s: the first batch showed %d of %d parameters in %.2f s, %s.%s",
        type(module).__name__,
        len(leaves) - len(left_out),
        len(leaves),
        found.seconds,
        f"not proven ({found.reason})" if found.reason else "proven" + _but(found.of_loss),
        f" Left out: {few}" + (", ..." if len(left_out) > 3 else "") if few else "",
    )


def _but(of_loss: str) -> str:
    return f", but not for the model's own loss ({of_loss})" if of_loss else ""


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _in_eager_mode() -> AbstractContextManager[Any]:
    """Compiled parts run in eager mode. To ask costs a second where nothing is compiled."""
    compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _without_modes() -> AbstractContextManager[Any]:
    """A selective checkpoint would keep results of our passes, or take those that it has kept. To
    import what disables modes takes long where there is none.
    """
    has_modes = torch._C._len_torch_dispatch_stack()
    return _disable_current_modes() if has_modes else nullcontext()


def _holds(shape: torch.Size, samples: int) -> bool:
    """Whether a tensor may hold the samples, or the offsets of one bag of each and the end."""
    return samples in shape[:2] or shape == (samples + 1,)


def _rows_of(shape: torch.Size, tokens: int) -> int:
    """How many rows hold ``tokens`` tokens in a tensor of the batch; 0 if it does not hold them."""
    if shape[:1].numel() == tokens:
        return 1
    return shape[0] if shape[:2].numel() == tokens else 0
