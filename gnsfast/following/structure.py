# SPDX-License-Identifier: Apache-2.0
"""The trainable parameters of a model: where it holds them, and how they are split."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gnsfast.following.dispatch import attach, detach, why_opaque
from gnsfast.following.functions import chance_of
from gnsfast.following.layouts import Lengths
from gnsfast.following.leaf import Leaf, Notes
from gnsfast.following.options import EXCLUDED, excluded_names
from gnsfast.kept import held_by, kept_chance, kept_grads, kept_state
from gnsfast.parallel import parameters_at_rest, sharding_groups, shared
from gnsfast.torch_internals import (
    BatchNorm,
    fresh_parametrizations,
    is_fully_sharded,
    parameter_groups,
    pytree,
)


class Structure:
    """The trainable parameters of a model, each of which is a leaf.

    ``groups`` are the groups of processes that split them, so that a forward pass needs all of
    them. ``is_gathered``: FSDP2 gathers some.
    ``lengths`` say how much longer samples are than those of the table's batch. ``is_bare``: the
    model runs without being followed. ``arguments`` are those of the batch that is learnt from.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._version = _registrations[0]
        self.lengths, self.notes = Lengths(), Notes()
        names, at_rest = excluded_names(model), parameters_at_rest(model)
        of: dict[int, Leaf] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and not nn.parameter.is_lazy(p):
                leaf = of[id(p)] = Leaf(name, at_rest[name], len(of))
                leaf.lengths, leaf.notes = self.lengths, self.notes
                leaf.is_opaque = bool(why := why_opaque(p))
                leaf.refused = leaf.left_out = EXCLUDED if name in names else why
        self.leaves = list(of.values())
        for leaf, after in zip(self.leaves, self.leaves[1:]):
            if leaf.name.rpartition(".")[0] == after.name.rpartition(".")[0]:
                leaf.next = after
        every = model.named_parameters(remove_duplicate=False)
        holders_of = Counter(of[id(p)] for _, p in every if id(p) in of)
        for leaf, holders in holders_of.items():
            leaf.is_shared = holders > 1
        self._held = [
            (m._parameters, n, p, p.requires_grad, p.get_device())
            for m in model.modules()
            for n, p in parameters_of(m)
        ]
        norms = ((n, m) for n, m in model.named_modules() if isinstance(m, BatchNorm))
        self._batch_norms = [(n, weakref.ref(m)) for n, m in norms]
        self.is_gathered = any(map(is_fully_sharded, model.modules()))
        self.groups = sharding_groups(leaf.parameter for leaf in self.leaves)
        self.is_bare = False
        self.arguments: tuple[Any, ...] = ()

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def batch_norms(self) -> list[tuple[str, Any]]:
        """The batch norms of the model, by name."""
        return [(n, m) for n, held in self._batch_norms if (m := held()) is not None]

    @property
    def covered(self) -> list[Leaf]:
        """The leaves that have norms."""
        return [leaf for leaf in self.leaves if not leaf.left_out]

    def is_current(self) -> bool:
        """Whether the model has the same parameters, of which the same are trained."""
        if self._version != _registrations[0]:
            model = self.model
            now = [(m._parameters, n, p) for m in model.modules() for n, p in parameters_of(m)]
            same = len(now) == len(self._held) and all(
                a is b and n == o and p is q for (a, n, p), (b, o, q, *_) in zip(now, self._held)
            )
            if not (same or self.is_gathered):
                return False
            self._version = _registrations[0]
        if self.is_gathered:  # FSDP2 swaps parameters in and out
            return True
        for parameters, name, p, is_trained, device in self._held:
            if (
                parameters.get(name) is not p
                or p.requires_grad is not is_trained
                or p.get_device() != device
            ):
                return False
        return True

    @property
    def is_changed(self) -> bool:
        """Whether a trained parameter was replaced since the last look."""
        if self._version == _registrations[0]:
            return False
        held = self._held
        return any(
            parameters.get(n) is not p for parameters, n, p, is_trained, _ in held if is_trained
        )

    def sharded(self) -> Iterator[Any]:
        """FSDP2's records of its parameters."""
        groups = parameter_groups(self.model) if self.is_gathered else ()
        return (p for _, group in groups for p in group.fsdp_params)

    def free_gathered(self) -> None:
        """Let FSDP2 gather parameters anew, whose parts have other values now."""
        modules: Iterator[Any] = self.model.modules()
        for module in modules if self.is_gathered else ():
            if is_fully_sharded(module):
                module.reshard()

    def on_any(self, here: bool) -> bool:
        """Whether something holds on any of the processes that shard the parameters."""
        return shared(here, bool.__or__, self.groups)

    def parameters(self) -> list[Any]:
        """The tensors that the model calculates with."""
        return [leaf.current for leaf in self.leaves]

    def chance(self) -> list[Any]:
        """What changes when the model draws random numbers."""
        held = held_by(self.model, pytree.tree_leaves(self.arguments))
        states = (g.get_state().tolist() for g in held if isinstance(g, torch.Generator))
        return [*chance_of(self.parameters()), *states]

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Do not follow the parameters of an open block meanwhile."""
        open_leaves = [leaf for leaf in self.leaves if detach(leaf.current)]
        was_bare, self.is_bare = self.is_bare, True
        try:
            yield
        finally:
            self.is_bare = was_bare
            for leaf in open_leaves:
                attach(leaf, leaf.current)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Restore the model's state, its gradients and the random state, and run no hook of a
        parameter meanwhile.
        """
        given = pytree.tree_leaves(self.arguments)
        state, chance = kept_state(self.model, given), kept_chance(self.model, given)
        torch.clear_autocast_cache()  # parameters have other values meanwhile
        try:
            # What parametrizations compute has the graph of this pass.
            with kept_grads(self.parameters()), state, chance, fresh_parametrizations():
                with torch.enable_grad():
                    yield
        finally:
            torch.clear_autocast_cache()


_registrations = [0]
"""How many parameters and modules were registered so far: a change of a model is then noticed
without a walk over its modules in each block. (A replaced parameter is noticed in its place.)"""


def _registered(module: nn.Module, name: str, value: Any) -> None:
    if value is not None:
        _registrations[0] += 1


nn.modules.module.register_module_parameter_registration_hook(_registered)
nn.modules.module.register_module_module_registration_hook(_registered)


def parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a module holds itself, by name."""
    if isinstance(module, torch.jit.ScriptModule):  # its parameters are no attributes of Python
        return
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
