# SPDX-License-Identifier: Apache-2.0
"""A model whose parameters are followed: what is known of it between blocks."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.following import proof
from gnsfast.following.dispatch import attach, detach
from gnsfast.following.learning import Example, Learned, batch_norms, learn
from gnsfast.following.leaf import NOTHING, Facts, Leaf
from gnsfast.following.sample_gradients import settle
from gnsfast.kept import kept_buffers, kept_chance, kept_modes
from gnsfast.tensors import tensors_of


class Followed:
    """The trainable parameters of a model, and what its first batch has shown of them.

    ``checked`` says how far the norms are proven: an empty string, or why they are not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.leaves = [Leaf(name, p, k) for k, (name, p) in enumerate(named)]
        for leaf, after in zip(self.leaves, self.leaves[1:]):
            if leaf.name.rpartition(".")[0] == after.name.rpartition(".")[0]:
                leaf.next = after
        self._held = [(m._parameters, n, p) for m in model.modules() for n, p in _own(m)]
        self._trained = [p.requires_grad for _, _, p in self._held]
        self._probes: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._units = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self._hooks: list[Any] = []
        self.is_open = self.is_learning = self.is_learned = False
        self.unproven = "no batch has gone through the model in a block"
        self.proof = proof.Proof(self.unproven)

    @classmethod
    def of(cls, model: nn.Module) -> "Followed":
        """What is known of ``model``. It begins anew where parameters were changed or frozen."""
        found = _known.get(model)
        if found is None or not found.is_current():
            found = _known[model] = cls(model)
        return found

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def is_current(self) -> bool:
        """Whether the model has the same parameters, of which the same are trained."""
        return all(
            own.get(name) is p and p.requires_grad is trained
            for (own, name, p), trained in zip(self._held, self._trained)
        )

    def open(self, samples: int, facts: dict[str, Facts] = {}, starts: Tensor | None = None) -> None:
        """Follow the parameters from here on."""
        self.is_open = True
        self._open(samples, facts, starts)
        sharded = {id(leaf.parameter): leaf for leaf in self.leaves if leaf.is_sharded}
        if self._units:
            self._hooks += [m.register_forward_pre_hook(_attaching(sharded)) for m in self._units]
        for leaf in self.leaves:
            if not (self._units and leaf.is_sharded):
                attach(leaf, leaf.parameter)
        if not self.is_learned:
            hook = self.model.register_forward_pre_hook(self._first, with_kwargs=True, prepend=True)
            self._hooks.append(hook)

    def _open(self, samples: int, facts: dict[str, Facts], starts: Tensor | None) -> None:
        for leaf, (probe, pair) in zip(self.leaves, self._probes_for(samples, facts)):
            probe.grad = pair.grad = None
            own = facts.get(leaf.name, NOTHING)
            if own is not leaf.facts or starts is not leaf.starts:
                leaf.plans.clear()
            leaf.facts, leaf.starts = own, starts
            leaf.tokens = 0 if starts is None else int(starts[-1])
            leaf.probe, leaf.pair, leaf.samples = probe, pair, samples
            leaf.open()

    def _probes_for(
        self, samples: int, facts: dict[str, Facts]
    ) -> list[tuple[Tensor, Tensor]]:
        """Leaves of zeros [M, B + 2 + G], which store one number each."""
        some = next(iter(facts.values()), NOTHING)
        groups = 0 if some.groups is None else len(some.groups.sizes_G)
        key = samples, groups, tuple(name for name, own in facts.items() if own.v is not None)
        if key not in self._probes:
            made = []
            for leaf in self.leaves:
                rows = 2 if facts.get(leaf.name, NOTHING).v is not None else 1
                zero = torch.zeros((), dtype=torch.float32, device=leaf.current.device)
                shape = rows, samples + 2 + groups
                pair = 2 * rows, samples + 2 + groups
                made.append(
                    (zero.expand(shape).requires_grad_(), zero.expand(pair).requires_grad_())
                )
            self._probes[key] = made
        return self._probes[key]

    def _first(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Learn from the first batch, before the model gets it."""
        if self.is_learning or self.is_learned or not torch.is_grad_enabled():
            return
        self.learn(args, kwargs)

    def learn(self, args: Any, kwargs: Any) -> None:
        """Learn from a batch of as many samples as the open block has, and prove it."""
        samples = self.leaves[0].samples
        self.is_learned = True
        if samples < 2:
            self.is_learned = False
            self.proof = proof.Proof("a block of one sample shows nothing")
            return
        example = Example.of(args, kwargs, samples)
        if example is None:
            self.proof = proof.Proof(f"no argument of the model has {samples} samples")
            return
        facts = {leaf.name: leaf.facts for leaf in self.leaves if leaf.facts is not NOTHING}
        starts = self.leaves[0].starts
        self.is_learning = True
        try:
            with torch.compiler.set_stance("force_eager"):
                learned = learn(self.leaves, self.model, example, self._as_it_was)
                self.proof = self._prove(example, learned)
        finally:
            self.is_learning = False
        for leaf in self.leaves:
            if leaf.name in self.proof.wrong:
                leaf.left_out = self.proof.wrong[leaf.name]
        self._open(samples, facts, starts)

    def _prove(self, example: Example, learned: Learned) -> proof.Proof:
        """The proof of an example. Where the model draws random numbers, it is in evaluation mode."""
        if self._units:
            return proof.Proof("its parameters are sharded (fully_shard)")
        found = self._compared(example, learned)
        if found.reason == DRAWS:
            with kept_modes(self.model):
                self.model.eval()
                found = self._compared(example, learned)
        return found

    def _compared(self, example: Example, learned: Learned) -> proof.Proof:
        n, own = example.n, example.replaced(-1)
        self._open(n, {}, None)
        before = torch.get_rng_state()
        with self._as_it_was(), torch.enable_grad():
            results = tensors_of(self.model(*own.args, **own.kwargs))
            drew = not torch.equal(torch.get_rng_state(), before)
            weights = proof.weighed(results, learned.results, n)
            if drew or not weights:
                why = DRAWS if drew else "no result of the model belongs to single samples"
                return proof.Proof(why)
            inputs = [t for leaf in self.leaves for t in (leaf.probe, leaf.pair)]
            values = [leaf.current for leaf in self.leaves]
            loss = proof.loss_of(results, weights)
            try:
                grads = torch.autograd.grad(loss, [*inputs, *values], allow_unused=True)
            except RuntimeError as error:  # as of a checkpoint with use_reentrant=True
                return proof.Proof(proof.first_line(error))
            for t, g in zip(inputs, grads):
                t.grad = g
            norms = {leaf: rows[0, :n] for leaf, rows in self.rows().items()}
        failed = {leaf.name: leaf.failed for leaf in self.leaves if leaf.failed}
        for leaf in self.leaves:
            detach(leaf.current)
        try:
            # Torch 2.13's gradients of a batch norm in evaluation mode are wrong for one image that
            # is stored channels-last.
            kinds = nn.modules.batchnorm._BatchNorm
            copies = 1 + any(isinstance(m, kinds) for m in self.model.modules())
            truth = proof.truths(
                self.leaves, self.model, example, weights, self._as_it_was, copies
            )
        finally:
            for leaf in self.leaves:
                attach(leaf, leaf.current)
        if isinstance(truth, str):
            return proof.Proof(truth, failed)
        zero = torch.zeros(n)
        covered = [leaf for leaf in self.leaves if leaf.name not in failed]
        own = {leaf: norms.get(leaf, zero) for leaf in covered}
        judged = proof.judge(covered, own, truth, 5e-2 if learned.is_half else 1e-3)
        return judged._replace(wrong=failed | judged.wrong)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore buffers and random state."""
        with kept_buffers(self.model), kept_chance(self.model):
            yield

    def rows(self) -> dict[Leaf, Tensor]:
        """The probe rows [M, B + 2 + G] of the leaves that the last pass reached."""
        found: dict[Leaf, Tensor] = {}
        for leaf in self.leaves:
            own = []
            if leaf.probe.grad is not None:
                own.append((leaf, leaf.probe.grad))
            if leaf.pair.grad is not None:
                assert leaf.next is not None
                own += [(leaf, leaf.pair.grad[0::2]), (leaf.next, leaf.pair.grad[1::2])]
            for each, rows in own:
                found[each] = found[each] + rows if each in found else rows
        if any(leaf.parts for leaf in self.leaves):
            B = self.leaves[0].samples
            with torch.no_grad():
                for leaf, rows in settle(self.leaves, B).items():
                    if leaf in found and bool((found[leaf][:, B + 1] != 0).any()):
                        leaf.fail("it is used in several ways that cannot be joined")
                    found[leaf] = rows
                for leaf in self.leaves:
                    leaf.parts.clear()
        return found

    def close(self) -> None:
        """Make the model what it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for leaf in self.leaves:
            detach(leaf.parameter)
            if leaf.current is not leaf.parameter:
                detach(leaf.current)
                leaf.current = leaf.parameter
            leaf.links = ()
            leaf.twin = leaf.whole.twin = None
        self.is_open = False


DRAWS = "the model draws random numbers"

_known: "weakref.WeakKeyDictionary[nn.Module, Followed]" = weakref.WeakKeyDictionary()


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module._parameters.items() if p is not None)


def _attaching(leaves: dict[int, Leaf]) -> Callable[..., None]:
    """A hook for the parameters that FSDP2 puts into a module for its forward pass only."""

    def attach_all(module: Any, args: Any) -> None:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for own in group.fsdp_params if group is not None else ():
                leaf = leaves.get(id(own.sharded_param))
                if leaf is not None and type(own._unsharded_param) is nn.Parameter:
                    attach(leaf, own._unsharded_param)

    return attach_all


__all__ = ["Followed", "batch_norms"]
