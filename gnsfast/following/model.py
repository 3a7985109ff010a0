# SPDX-License-Identifier: Apache-2.0
"""A model whose parameters are followed: what is known of it between blocks."""

import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnsfast.eager import EAGER
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.following import proof
from gnsfast.following.dispatch import attach, chance_of, detach, prepare_compiler
from gnsfast.following.hooks import Hook
from gnsfast.following.layouts import Place
from gnsfast.following.leaf import NOTHING, Facts, Leaf
from gnsfast.following.learning import FEW, Example, Learned, learn
from gnsfast.following.options import EXCLUDED, excluded_names
from gnsfast.following.sample_gradients import settle
from gnsfast.functional import Documents
from gnsfast.kept import kept_buffers, kept_chance, kept_modes
from gnsfast.parallel import parameter_groups, parameters_at_rest, sharding_groups, shared
from gnsfast.tensors import map_tensors, tensors_of, whole


class Followed:
    """The trainable parameters of a model, and what its first batch has shown of them.

    ``proof`` says how far the norms are proven. ``call_when_learned`` tells when a batch has shown
    which parameters have norms.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._version = _registrations[0]
        names = excluded_names(model)
        at_rest = parameters_at_rest(model)
        self._inside: set[nn.Module] = set()
        of: dict[int, Leaf] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and not nn.parameter.is_lazy(p):
                leaf = of[id(p)] = Leaf(name, at_rest[name], len(of))
                leaf.inside = self._inside
                leaf.left_out = EXCLUDED if name in names else ""
        self.leaves = list(of.values())
        for leaf, after in zip(self.leaves, self.leaves[1:]):
            if leaf.name.rpartition(".")[0] == after.name.rpartition(".")[0]:
                leaf.next = after
        self._held = [(m._parameters, n, p) for m in model.modules() for n, p in _own(m)]
        self._facts = [(p.requires_grad, p.device) for _, _, p in self._held]
        self._probes: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        kinds = nn.modules.batchnorm._BatchNorm
        self._batch_norms = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]
        self._units = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self._groups = sharding_groups(leaf.parameter for leaf in self.leaves)
        self._watched: set[Any] = set()
        self._arrives: Callable[[], Callable[[], None] | None] = _none
        self._hooks: list[Any] = []
        self._part_hooks: list[Any] = []
        self._release: Callable[[], object] = _none
        self.is_open = self.is_learning = self.is_learned = False
        self._on_learned: Callable[[], Callable[[], None] | None] = _none
        self._looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names_of = {m: n for n, m in model.named_modules() if m is not model}
        self._aliases = {
            n: of[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in of
        }
        for leaf, holders in Counter(self._aliases.values()).items():
            leaf.is_shared = holders > 1
        self._now: Any = (0, {}, None)
        self._batch: Any = None  # what the model got in the open block
        self._few, self._again = FEW, 0
        self._wrong_later: dict[str, str] = {}
        self._sizes: list[float] = []
        self._now_sizes: list[float] = []
        self._run: Callable[..., Any] | None = None
        self.proof = proof.Proof(NOT_BEGUN)
        self.observed: set[str] | None = None
        self.is_audited = self.is_half = self.is_apart = False
        self._is_blind = self._is_bare = False
        self._caller: Any = _none
        self._places: list[Place] = []
        self._learned: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> "Followed":
        """What is known of ``model``. It begins anew where parameters were changed or frozen."""
        found = _known.get(model)
        if found is None or not found.is_current():
            found = _known[model] = cls(model)
        return found

    @staticmethod
    def forget(model: nn.Module) -> None:
        """Learn anew, such as with other options."""
        _known.pop(model, None)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def covered(self) -> list[Leaf]:
        """The leaves that have norms."""
        return [leaf for leaf in self.leaves if not leaf.left_out]

    @property
    def mixing(self) -> list[tuple[str, nn.Module]]:
        """The batch norms that use the statistics of the batch, which tie samples together."""
        return [(n, m) for n, m in self._batch_norms if m.training or m.running_mean is None]

    def is_current(self) -> bool:
        """Whether the model has the same parameters, of which the same are trained."""
        if self._version != _registrations[0]:
            model = self.model
            now = [(m._parameters, n, p) for m in model.modules() for n, p in _own(m)]
            same = len(now) == len(self._held) and all(
                a is b and n == o and p is q for (a, n, p), (b, o, q) in zip(now, self._held)
            )
            if not (same or self._units):
                return False
            self._version = _registrations[0]
        if self._units:  # FSDP2 swaps parameters in and out
            return True
        return all(
            own.get(name) is p and p.requires_grad is trained and p.device == device
            for (own, name, p), (trained, device) in zip(self._held, self._facts)
        )

    def open(
        self,
        caller: nn.Module,
        samples: int,
        facts: Mapping[str, Facts] = {},
        documents: Documents | None = None,
        in_stages: bool = False,
    ) -> None:
        """Follow the parameters from here on. ``caller`` is the wrapper that the user calls.
        ``in_stages``: a pipeline calls ``next_pass`` before each forward of a stage, and a batch
        that no such call tells of shows nothing.
        """
        if self.is_open:
            raise ObservationError(
                "A block is open on this model already. End the other per_sample_sqnorms or "
                "gns.microbatch block first."
            )
        self.is_open, self._caller = True, weakref.ref(caller)
        self._open(samples, facts, documents)
        leaves = {id(leaf.parameter): leaf for leaf in self.leaves}
        sharded = {id(own.sharded_param): own for own in self._sharded()} if self._units else {}
        for key, own in sharded.items():
            if (leaf := leaves.get(key)) is not None:
                self._hooks.append(_Gathered(own, leaf, lambda: self._is_bare))
        for leaf in self.leaves:
            leaf.has_turns = in_stages
            if id(leaf.parameter) not in sharded:
                attach(leaf, leaf.parameter)
        prepare_compiler()
        if in_stages:
            return
        hook = caller.register_forward_pre_hook(Hook(self._before), with_kwargs=True, prepend=True)
        self._hooks += [hook, caller.register_forward_hook(Hook(self._after))]
        for part in self._parts:
            self._hooks.append(part.register_forward_pre_hook(Hook(self._enter)))
            self._hooks.append(part.register_forward_hook(Hook(self._after)))
        unseen = {id(leaf.parameter) for leaf in self._unseen} if self.is_learned else ()
        for m in self.model.modules() if unseen else ():
            if any(id(p) in unseen for _, p in _own(m)):
                seen = Hook(self._before_unseen)
                hook = m.register_forward_pre_hook(seen, with_kwargs=True, prepend=True)
                self._hooks.append(hook)
        if not self.is_learned:
            self._part_hooks = [
                m.register_forward_pre_hook(Hook(self._before_part), with_kwargs=True, prepend=True)
                for m in self.model.modules()
                if m not in self._looked and m is not self.model
            ]
        outside = hasattr(caller, "_orig_mod")  # a hook of torch.compile's wrapper runs eagerly
        if not (self._looked or outside) and samples > 1:
            self._release = EAGER.hold(self) if "torch._dynamo" in sys.modules else _none

    def _sharded(self) -> Iterator[Any]:
        """FSDP2's records of its parameters."""
        return (p for _, group in parameter_groups(self.model) for p in group.fsdp_params)

    def _open(
        self,
        samples: int,
        facts: Mapping[str, Facts],
        documents: Documents | None,
        leaves: Sequence[Leaf] | None = None,
    ) -> None:
        """Begin a pass for some ``leaves``, or for all."""
        starts = None if documents is None else documents.starts
        if leaves is None:
            leaves, self._now = self.leaves, (samples, facts, documents)
        probes = self._probes_for(samples, facts)
        for leaf in leaves:
            probe, pair = probes[leaf.index]
            probe.grad = pair.grad = None
            own = facts.get(leaf.name, NOTHING)
            if own is not leaf.facts or starts is not leaf.starts:
                leaf.plans.clear()
            leaf.facts = own
            if starts is not leaf.starts:
                leaf.starts = starts if starts is None else starts.to(leaf.current.device)
                leaf.tokens = 0 if documents is None else documents.tokens
            leaf.probe, leaf.pair, leaf.samples = probe, pair, samples
            leaf.open()

    def _probes_for(self, samples: int, facts: Mapping[str, Facts]) -> list[tuple[Tensor, Tensor]]:
        """Leaves of zeros [M, B + 2 + G], which store one number each."""
        some = next(iter(facts.values()), NOTHING)
        groups = 0 if some.groups is None else len(some.groups.sizes_G)
        measures = 1 + (some.constants_12 is not None)
        key = samples, groups, measures
        if key == (self._now[0], groups, measures):
            self._key = key
        if key not in self._probes:
            if len(self._probes) >= PROBES:
                oldest = next(iter(self._probes))
                self._watched.discard(oldest)
                del self._probes[oldest]
            made = []
            for leaf in self.leaves:
                zero = torch.zeros((), dtype=torch.float32, device=leaf.parameter.device)
                own, pair = (zero.expand(n * measures, samples + 2 + groups) for n in (1, 2))
                made.append((own.requires_grad_(), pair.requires_grad_()))
            self._probes[key] = made
        return self._probes[key]

    def call_on_arrival(self, arrives: Callable[[], None] | None) -> None:
        """Call ``arrives``, a method, whenever backward reaches a probe of the open pass."""
        self._arrives = _none if arrives is None else weakref.WeakMethod(arrives)
        if arrives is None or self._key in self._watched:
            return
        self._watched.add(self._key)  # once: a hook takes 8 µs to register, and 1 to run
        own = weakref.ref(self)  # Python cannot see that C++ holds it
        for probe in self.probes:
            probe.register_post_accumulate_grad_hook(partial(_arrived, own))

    def call_when_learned(self, learned: Callable[[], None]) -> None:
        """Call ``learned``, a method, when a batch of the open block has shown something."""
        self._on_learned = weakref.WeakMethod(learned)

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open pass."""
        return _probes_of(self.leaves)

    @property
    def is_reached(self) -> bool:
        """Whether backward has reached a probe of the last pass."""
        return any(probe.grad is not None for probe in self.probes)

    def forget_probes(self) -> None:
        """Make new probes for the next pass, since the graph of a failed pass may hold the old."""
        self._probes.clear()
        self._watched.clear()

    @contextmanager
    def next_pass(self, stage: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """A pass of a pipeline's stage, which has its own samples."""
        for leaf in self._leaves_of(stage):
            if leaf.joined:
                leaf.fail("a pipeline's stage uses it several times in a pass")
            leaf.next_pass()
        if torch.is_grad_enabled():
            self.learn(stage, args, kwargs)
        self._inside.add(stage)
        yield
        self._inside.discard(stage)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn from the first batch, before the model gets it, and see that a batch has as many
        samples as the block.
        """
        if self.is_learning or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.show(args, kwargs)

    def show(self, args: Any, kwargs: Any, run: Callable[..., Any] | None = None) -> None:
        """Show the batch of the open block, before the model that gets it runs; or ``run`` in its
        place.

        Raises:
            SampleShapeError: if none of its tensors has as many samples as the block.
        """
        self._inside.add(self._caller())
        self._run = run
        samples, _, documents = self._now
        shapes = [t.shape for t in tensors_of((args, kwargs))]
        some = ", ".join(str(list(shape)) for shape in shapes[:4])
        if documents is not None:
            if shapes and not self._rows_in(args, kwargs):
                raise SampleShapeError(
                    f"{type(self.model).__name__}: cu_seqlens ends at token {documents.tokens}, "
                    f"but the model got tensors of shape {some}, none of which has so many tokens "
                    "in its leading dimensions. If padding follows, add it as a last document."
                )
        elif samples > 1 and shapes and not any(_holds(shape, samples) for shape in shapes):
            raise SampleShapeError(
                f"{type(self.model).__name__}: the block has {samples} samples, but the model got "
                f"tensors of shape {some}, none of which has dimension 0 or 1 of that size. Check "
                "num_samples."
            )
        self._batch = args, kwargs
        if (
            self._again
            and not self._groups
            and self.proof.unproven
            and not documents
            and samples > 1
        ):
            self._learn_again(args, kwargs, samples)
        self._fail_wrong()
        self.learn(self.model, args, kwargs)
        if documents is not None and not self.is_apart:
            self._see_documents_apart(args, kwargs, documents)
        if documents is None:
            self._note_growth(args, kwargs, samples)

    def _rows_in(self, args: Any, kwargs: Any) -> int:
        """How many rows of a batch hold the packed documents; 0 if that is not known."""
        tokens = self._now[2].tokens
        found = (_rows_of(t.shape, tokens) for t in tensors_of((args, kwargs)))
        return next((rows for rows in found if rows), 0)

    def _note_growth(self, args: Any, kwargs: Any, samples: int) -> None:
        """Note how much longer than in the first batch the samples of this batch are."""
        sizes = _sizes(args, kwargs, samples)
        if sizes == self._now_sizes or len(sizes) != len(self._sizes):
            return
        self._now_sizes = sizes
        ratios = {new / old for new, old in zip(sizes, self._sizes) if old}
        growth = frozenset({1.0} | ratios | {r * r for r in ratios})
        for leaf in self.leaves:
            leaf.growth = growth

    def _before_unseen(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn again when the model comes to a module that the batches before did not reach."""
        if self.is_learning or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        samples, _, documents = self._now
        if self._batch is None or self._groups or samples < 2 or documents is not None:
            return
        unseen = {id(leaf.parameter) for leaf in self._unseen}
        if any(id(p) in unseen for _, p in _own(module)):
            given, named = self._batch
            self._learn_again(given, named, samples)
            self._fail_wrong()

    def _fail_wrong(self) -> None:
        """Note which parameters a later batch has shown to be wrong."""
        for leaf in self.covered if self._wrong_later else ():
            if leaf.name in self._wrong_later:
                leaf.fail(self._wrong_later[leaf.name])

    @property
    def _unseen(self) -> list[Leaf]:
        """The leaves that no batch has shown in use."""
        own = (leaf for leaf in self.covered if leaf.is_learned)
        return [leaf for leaf in own if not leaf.steps and not leaf.routes]

    def _before_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn from what a part of a model gets that is not called as a whole."""
        if self.is_learning or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        # What gets no tensor, such as a parametrization, shows nothing.
        if self.is_open and any(True for _ in tensors_of((args, kwargs))):
            self.learn(module, args, kwargs)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Note that a part that is called by itself runs."""
        if not self.is_learning and not torch.compiler.is_compiling():
            self._inside.add(module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the model, or a part, has run."""
        if not self.is_learning and not torch.compiler.is_compiling():
            self._inside.discard(module)

    def learn(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn from what ``module``, the model or a part of it, gets in the open block, and prove
        it. A block of one sample shows nothing.
        """
        samples, _, documents = self._now
        leaves = self._leaves_of(module)
        if documents is not None:
            samples = self._rows_in(args, kwargs)
            if module is self.model or module not in self._looked:
                for leaf in leaves:
                    leaf.rows = samples
        alone = samples < 2 and documents is None
        if module in self._looked or (alone and not self._groups):
            if self._is_blind and not alone:
                raise ObservationError(BLIND)
            return
        begun = time.perf_counter()
        more: Iterator[Example] = iter(())
        if documents is None:
            more = iter(()) if alone else Example.several(args, kwargs, samples)
            example = next(more, None)
        else:
            example = Example.of_documents(args, kwargs, samples, documents)
        own = 0 if example is None else example.n
        n = shared(own, _smaller, self._groups)
        if not n and documents is not None:
            found = proof.Proof("rows of packed documents are not samples here")
            self._join(found)
            if not self._groups:  # the next batch may show more
                return
        self._looked.update(module.modules())
        if module is not self.model:
            self._parts.add(module)
            self._inside.add(module)
            self._hooks.append(module.register_forward_hook(Hook(self._after)))
        self.is_learned = module is self.model or all(
            m in self._looked for m in self.model.modules() if m is not self.model
        )
        if module is self.model and documents is None:
            self._sizes = _sizes(args, kwargs, samples)
        if n and self._groups:
            if example is None:
                example = Example.of(args, kwargs, samples) if alone else None
                example = example or Example.without_samples(args, kwargs, n)
            example = example.part([k % example.n for k in range(n)])
            found = self._learned_from(module, leaves, [example], bool(own))
        elif example is not None:
            found = self._learned_from(module, leaves, chain([example], more), True)
        else:
            self._is_blind = alone
            why = f"no argument of {type(module).__name__} has {samples} samples"
            lost = module is not self.model and not alone
            found = proof.Proof(why, {leaf.name: why for leaf in leaves if lost})
        if module is not self.model and _counts(args, kwargs, samples):
            found = found._replace(wrong=found.wrong | {leaf.name: POSITIONS for leaf in leaves})
        for leaf in leaves:
            leaf.left_out = leaf.left_out or found.wrong.get(leaf.name, "")
        found = found._replace(seconds=time.perf_counter() - begun)
        self._join(found)
        _report(module, leaves, found)
        if self.is_learned:
            _remove(self._part_hooks)
        if (call := self._on_learned()) is not None:
            call()

    def _join(self, found: proof.Proof) -> None:
        """Take over the proof of the model, or of one part more."""
        self.proof = found if self.proof.reason == NOT_BEGUN else self.proof.joined(found)

    def _learn_again(self, args: Any, kwargs: Any, samples: int) -> None:
        """Prove it with a later batch too, since the first one gave some parameters no gradient.
        Those that it did not use are learnt.
        """
        example = Example.of(args, kwargs, samples, self._few)
        self._again -= 1
        if example is None:
            return
        unseen = self._unseen
        with self._looking(self.leaves):
            self._open(example.n, {}, None)
            learned = self._learned
            if unseen:
                learn(unseen, self.model, example, self._as_it_was, self._on_any).tell(
                    unseen, is_part=False
                )
            found = self._prove(self.model, self.leaves, example, learned)
        self._wrong_later |= found.wrong
        if not found.reason:
            self.proof = self.proof._replace(unproven=self.proof.unproven & found.unproven)

    def _called(self, module: nn.Module) -> Callable[..., Any]:
        """What is called with an example of a module."""
        return self._run if self._run is not None and module is self.model else module

    def _leaves_of(self, module: nn.Module) -> list[Leaf]:
        """The leaves that a module holds, also those that another one holds too."""
        if module is self.model:
            return self.leaves
        at = self._names_of[module]
        found = {leaf.index: leaf for n, leaf in self._aliases.items() if n.startswith(f"{at}.")}
        return [found[k] for k in sorted(found)]

    def _learned_from(
        self, module: nn.Module, leaves: list[Leaf], examples: Iterable[Example], is_own: bool
    ) -> proof.Proof:
        """Learn from the first of ``examples``, and from others where the model does not take it,
        or where something else is as many as its samples. Processes that shard the parameters take
        over what the first of them has learnt whose example has samples of its own (``is_own``).
        """
        learned: Learned | None = None
        error, held = "", self._as_it_was
        with self._looking(leaves):
            for tried in examples:
                self._open(tried.n, {}, None, leaves)
                try:
                    learned = learn(leaves, self._called(module), tried, held, self._on_any)
                except Exception as own:  # the model's own, whatever it is
                    error = error or proof.first_line(own)
                    continue
                example = tried
                if not learned.unclear:
                    break
            if learned is None:
                what = "does not take some of the samples of its batch"
                return proof.Proof(f"the model {what} ({error})")
            if self._groups:
                learned = self._shared(leaves, learned, is_own)
            learned.tell(leaves, is_part=module is not self.model)
            for leaf in learned.unclear:
                leaf.left_out = UNCLEAR
            self.is_half |= learned.is_half
            if module is self.model:
                self._places, self._few, self._again = learned.results, example.n, AGAIN
                self._learned = learned
            if self._on_any(not is_own):
                return proof.Proof("a process has no batch of several samples")
            return self._prove(module, leaves, example, learned)

    def _on_any(self, here: bool) -> bool:
        """Whether something holds on any of the processes that shard the parameters."""
        return shared(here, bool.__or__, self._groups)

    def _shared(self, leaves: list[Leaf], learned: Learned, is_own: bool) -> Learned:
        """What the first process has learnt that has samples of its own."""
        own = learned.by(lambda leaf: leaf.name)
        _, first = shared((is_own, own), lambda a, b: b if b[0] and not a[0] else a, self._groups)
        named = {leaf.name: leaf for leaf in leaves}
        found: Learned = first.by(named.get)
        return found

    @contextmanager
    def _looking(self, leaves: list[Leaf]) -> Iterator[None]:
        """Run the model for our own ends, and then let the user's pass begin."""
        samples, facts, documents = self._now
        used = {leaf: leaf.state() for leaf in leaves if leaf.uses}  # by other parts of the model
        outside = self.model not in self._inside
        self._inside.add(self.model)
        self.is_learning = True
        try:
            # A checkpoint around the model must not count what is saved here.
            own_hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
            with _in_eager_mode(), own_hooks:
                yield
        finally:
            self.is_learning = False
            self._open(samples, facts, documents, leaves)
            if outside:
                self._inside.discard(self.model)
            for leaf, state in used.items():
                vars(leaf).update(state)

    def _see_documents_apart(self, args: Any, kwargs: Any, documents: Documents) -> None:
        """Raise if packed documents attend to each other: a loss of every second document must give
        the others no gradient.
        """
        self.is_apart, samples, rows = True, self._now[0], self.leaves[0].rows
        if self._units or (rows > 1 and not self._places):
            return
        for k in (0, 1):
            with self._looking(self.leaves), self._as_it_was(), torch.enable_grad():
                self._open(samples, {}, documents)
                given, named = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
                results = tensors_of(self.model(*given, **named))
                loss = proof.loss_of_documents(results, self._places, documents, rows, k)
                if loss is None:
                    return
                try:
                    self._fill_probes(loss, self.leaves)
                except RuntimeError:  # as of a checkpoint with use_reentrant=True
                    return
                for leaf, own in self.rows().items():
                    norms = own[0, :samples]
                    mixed = norms[1 - k :: 2].sum() > 1e-12 * norms[k::2].sum()
                    if leaf.failed or leaf.left_out or not mixed:
                        continue
                    self.is_apart = False
                    raise ObservationError(
                        f"{type(self.model).__name__}: the packed documents attend to each other, "
                        f"as the gradients of {leaf.name} show. The attention mask must be "
                        "block-diagonal: position_ids that begin again at 0 with every document "
                        "for models of transformers, attn_mask [rows * heads, T, T] for "
                        "torch.nn.MultiheadAttention."
                    )

    def _prove(
        self, module: nn.Module, leaves: list[Leaf], example: Example, learned: Learned
    ) -> proof.Proof:
        """The proof of an example, in evaluation mode where the model draws random numbers."""
        if any(own.unsharded_accumulated_grad is not None for own in self._sharded()):
            return proof.Proof("FSDP2 held back gradients of an earlier pass")
        groups = [group for _, group in parameter_groups(self.model)]
        if any(getattr(group, "reduce_scatter_unused_params", False) for group in groups):
            return proof.Proof("FSDP2 reduces gradients of unused parameters too")
        found = self._compared(module, leaves, example, learned)
        if found.reason == DRAWS:
            with kept_modes(module):
                module.eval()
                own = self._compared(module, leaves, example, learned)
            found = own._replace(wrong=found.wrong | own.wrong)
        return found._replace(wrong=shared(found.wrong, _either, self._groups))

    def _compared(
        self, module: nn.Module, leaves: list[Leaf], example: Example, learned: Learned
    ) -> proof.Proof:
        n, own = example.n, example.replaced(-1)
        self._open(n, {}, None, leaves)
        before = chance_of(self._parameters())
        with self._as_it_was(), torch.enable_grad():
            results = [*map(whole, tensors_of(self._called(module)(*own.args, **own.kwargs)))]
            for leaf in leaves:
                leaf.known_uses, leaf.is_known_joined = leaf.expected, leaf.joined
            failed = {leaf.name: leaf.failed for leaf in leaves if leaf.failed}
            if self._on_any(chance_of(self._parameters()) != before):
                return proof.Proof(DRAWS, failed)
            weights = proof.weighed(results, learned.results, n)
            if self._on_any(not weights):
                return proof.Proof("no result of the model belongs to single samples", failed)
            try:
                self._fill_probes(proof.loss_of(results, weights), leaves)
            except RuntimeError as error:  # as of a checkpoint with use_reentrant=True
                return proof.Proof(proof.first_line(error), failed)
            norms = {leaf: rows[0, :n] for leaf, rows in self.rows(leaves).items()}
        failed = {leaf.name: leaf.failed for leaf in leaves if leaf.failed}
        open_leaves = [leaf for leaf in self.leaves if detach(leaf.current)]
        self._is_bare = True
        try:
            # Torch 2.13's gradients of a batch norm in evaluation mode are wrong for one image that
            # is stored channels-last.
            copies = 1 + bool(self._batch_norms)
            truth = proof.truths(
                leaves, self._called(module), example, weights, self._as_it_was, copies
            )
        finally:
            self._is_bare = False
            for leaf in open_leaves:
                attach(leaf, leaf.current)
        if isinstance(truth, str):
            return proof.Proof(truth, failed)
        zero = torch.zeros(n, device="cpu")
        covered = [leaf for leaf in leaves if leaf.name not in failed]
        found = {leaf: norms.get(leaf, zero) for leaf in covered}
        judged = proof.judge(leaves, found, truth, 5e-2 if learned.is_half else 1e-3)
        return judged._replace(wrong=failed | judged.wrong)

    @staticmethod
    def _fill_probes(loss: Tensor, leaves: list[Leaf]) -> None:
        """A backward pass of ``loss`` that reaches the probes of ``leaves`` and nothing else."""
        probes = _probes_of(leaves)
        for t, g in zip(probes, torch.autograd.grad(loss, probes, allow_unused=True)):
            t.grad = g

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore buffers and random state, and run no hook of a parameter meanwhile."""
        hooked = [(p, p._backward_hooks) for p in self._parameters() if p._backward_hooks]
        cached = parametrize._cache
        for p, _ in hooked:
            p._backward_hooks = None
        try:
            parametrize._cache = {}  # what one pass computes has the graph of that pass
            with kept_buffers(self.model), kept_chance(self.model):
                yield
        finally:
            parametrize._cache = cached
            for p, hooks in hooked:
                p._backward_hooks = hooks

    def _parameters(self) -> list[Any]:
        return [leaf.current for leaf in self.leaves]

    def rows(self, leaves: Sequence[Leaf] | None = None) -> dict[Leaf, Tensor]:
        """The probe rows [M, B + 2 + G] of the leaves that the last pass reached."""
        found: dict[Leaf, Tensor] = {}
        leaves = self.leaves if leaves is None else leaves
        for leaf in leaves:
            own = []
            if leaf.probe.grad is not None:
                own.append((leaf, leaf.probe.grad))
            if leaf.pair.grad is not None:
                assert leaf.next is not None
                own += [(leaf, leaf.pair.grad[0::2]), (leaf.next, leaf.pair.grad[1::2])]
            for each, rows in own:
                found[each] = found[each] + rows if each in found else rows
        if any(leaf.parts for leaf in leaves):
            B = leaves[0].samples
            with torch.no_grad():
                for leaf, rows in settle(list(leaves), B).items():
                    if leaf in found:  # of uses that were not joined, if it is not zeros
                        rows[:, B + 1].masked_fill_(found[leaf][:, B + 1] != 0, torch.inf)
                    found[leaf] = rows
                for leaf in leaves:
                    leaf.parts.clear()
        for leaf in found:
            if leaf.is_known_joined and not leaf.uses:
                leaf.fail("compiled code uses it several times, which only eager code joins")
        return found

    def close(self) -> None:
        """Make the model what it was."""
        self._inside.clear()
        self._caller = _none
        self._release()
        _remove(self._hooks)
        _remove(self._part_hooks)
        for leaf in self.leaves:
            detach(leaf.parameter)
            if leaf.current is not leaf.parameter:
                detach(leaf.current)
                leaf.current = leaf.parameter
            leaf.links = ()
            leaf.twin = leaf.whole.twin = None
            leaf.parts.clear()
        self.is_open, self._on_learned, self._batch = False, _none, None


PROBES = 8
"""How many numbers of samples the probes are kept for. A run with more of them makes probes
again."""

UNCLEAR = (
    "it is repeated as often as there are samples, but not for them: measure another number of "
    "samples"
)

AGAIN = 2
"""So many later batches are looked at where the first one gave some parameters no gradient."""

POSITIONS = (
    "it is looked up at consecutive numbers, as many as samples, by a part that the model does not "
    "call: these may be positions that all samples share, or a number for each sample. With "
    "gnsfast.configure(model, example=...) the whole pass shows which"
)
NOT_BEGUN = "no batch has gone through the model in a block"
BLIND = (
    "The parameters are sharded, and in the first block every process had one sample, so nothing "
    "is known of several. Before this block call gnsfast.configure(model, example=batch) on every "
    "process."
)
DRAWS = "the model draws random numbers"

_registrations = [0]
"""How many parameters and modules were registered so far: a change of a model is then noticed
without a walk over its modules in each block. (A replaced parameter is noticed in its place.)"""


def _registered(module: nn.Module, name: str, value: Any) -> None:
    if value is not None:
        _registrations[0] += 1


nn.modules.module.register_module_parameter_registration_hook(_registered)
nn.modules.module.register_module_module_registration_hook(_registered)

_known: "weakref.WeakKeyDictionary[nn.Module, Followed]" = weakref.WeakKeyDictionary()


def _report(module: nn.Module, leaves: Sequence[Leaf], found: proof.Proof) -> None:
    """A line in the log, which is a warning where parameters have no norms."""
    left_out = [leaf for leaf in leaves if leaf.left_out and leaf.left_out != EXCLUDED]
    level = logging.WARNING if left_out else logging.INFO
    few = "; ".join(f"{leaf.name}: {leaf.left_out}" for leaf in left_out[:3])
    logging.getLogger("gnsfast").log(
        level,
        "%s: the first batch showed %d of %d parameters in %.2f s, %s.%s",
        type(module).__name__,
        len(leaves) - len(left_out),
        len(leaves),
        found.seconds,
        f"not proven ({found.reason})" if found.reason else "proven",
        f" Left out: {few}" + (", ..." if len(left_out) > 3 else "") if few else "",
    )


def _in_eager_mode() -> AbstractContextManager[Any]:
    """Compiled parts run in eager mode. To ask costs a second where nothing is compiled."""
    compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _sizes(args: Any, kwargs: Any, samples: int) -> list[float]:
    """How many elements the tensors of a batch have for each sample."""
    given = [t for t in tensors_of((args, kwargs)) if samples in t.shape[:2]]
    return [t.numel() / samples for t in given] if samples else []


def _counts(args: Any, kwargs: Any, samples: int) -> bool:
    """Whether an argument is a list of consecutive numbers, as many as samples."""
    return samples > 1 and any(
        t.shape == (samples,) and not t.is_floating_point() and bool((t.diff() == 1).all())
        for t in tensors_of((args, kwargs))
    )


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module._parameters.items() if p is not None)


def _probes_of(leaves: list[Leaf]) -> list[Tensor]:
    return [probe for leaf in leaves for probe in (leaf.probe, leaf.pair)]


def _none() -> None:
    return None


def _same(t: Tensor) -> Tensor:
    return t


def _holds(shape: torch.Size, samples: int) -> bool:
    """Whether a tensor may hold the samples, or the offsets of one bag of each and the end."""
    return samples in shape[:2] or shape == (samples + 1,)


def _rows_of(shape: torch.Size, tokens: int) -> int:
    """How many rows hold ``tokens`` tokens in a tensor of the batch; 0 if it does not hold them."""
    if shape[:1].numel() == tokens:
        return 1
    return shape[0] if shape[:2].numel() == tokens else 0


def _arrived(followed: "weakref.ref[Followed]", probe: Tensor) -> None:
    own = followed()
    if own is not None and (arrives := own._arrives()) is not None:
        arrives()


class _Gathered:
    """Follows a parameter whenever FSDP2 puts the gathered one into its module, before a forward or
    a method that was registered as one.
    """

    def __init__(self, own: Any, leaf: Leaf, is_bare: Callable[[], bool]) -> None:
        gathers, self._own = own.to_unsharded, own

        def to_unsharded() -> None:
            gathers()
            if not is_bare():
                attach(leaf, own._unsharded_param)

        own.to_unsharded = to_unsharded
        if hasattr(own, "_unsharded_param"):  # it may be in its module already
            attach(leaf, own._unsharded_param)

    def remove(self) -> None:
        del self._own.to_unsharded


def _smaller(a: int, b: int) -> int:
    """The smaller number of samples of two processes that have several."""
    return min(a, b) or max(a, b)


def _either(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    return b | a
