# SPDX-License-Identifier: Apache-2.0
"""A model whose parameters are followed: what is known of it, and its open block."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gnsfast.eager import EAGER
from gnsfast.errors import ObservationError
from gnsfast.following.batches import Batches
from gnsfast.following.dispatch import attach, detach, prepare_compiler, release
from gnsfast.following.leaf import Facts, Leaf, nobody
from gnsfast.following.passes import Asked, Passes
from gnsfast.following.structure import Structure
from gnsfast.functional import Documents


class Followed:
    """A model whose parameters are followed while a block is open.

    ``structure`` are its parameters, ``passes`` their probes, and ``batches`` what its batches have
    shown. ``is_audited``: one pass was found to have measured all of the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structure = Structure(model)
        self.leaves = self.structure.leaves
        self.passes = Passes(self.leaves)
        self.batches = Batches(self.structure, self.passes)
        self.is_open = self.is_audited = False
        self._gathered: list[_Gathered] = []
        self._release: Callable[[], object] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "Followed":
        """What is known of ``model``. It begins anew where parameters were changed or frozen."""
        found = _known.get(model)
        if found is None or not found.structure.is_current():
            found = _known[model] = cls(model)
        return found

    @staticmethod
    def forget(model: nn.Module) -> None:
        """Learn anew, such as with other options."""
        _known.pop(model, None)

    @property
    def mixing(self) -> list[tuple[str, nn.Module]]:
        """The batch norms that use the statistics of the batch, which tie samples together."""
        norms = self.structure.batch_norms
        return [(n, m) for n, m in norms if m.training or m.running_mean is None]

    def open(
        self,
        caller: nn.Module,
        samples: int,
        facts: Mapping[str, Facts] = {},
        documents: Documents | None = None,
        in_stages: bool = False,
        watcher: Any = None,
    ) -> None:
        """Follow the parameters from here on. ``caller`` is the wrapper that the user calls.
        ``in_stages``: a pipeline calls ``next_pass`` before each forward of a stage, and a batch
        that no such call tells of shows nothing. ``watcher.learned()`` is called when a batch has
        shown something. If it is deleted before ``close``, that is called.
        """
        if self.is_open:
            raise ObservationError(
                "A block is open on this model already. End the other per_sample_sqnorms or "
                "gns.microbatch block first."
            )
        structure = self.structure
        if watcher is not None:
            self.batches.watcher = weakref.ref(watcher, self._abandoned)
        self.is_open, self.passes.asked = True, Asked(samples, facts, documents)
        self.passes.begin(self.passes.asked)
        structure.running.has_turns = in_stages
        sharded = {id(own.sharded_param): own for own in structure.sharded()}
        for leaf in self.leaves:
            if (own := sharded.get(id(leaf.parameter))) is None:
                attach(leaf, leaf.parameter)
            else:
                self._gathered.append(_Gathered(own, leaf, structure))
        if self.batches.is_by_run or structure.model._compiled_call_impl is not None:
            structure.running.modules.add(structure.model)  # no hook tells when it runs
        prepare_compiler()
        if in_stages:
            return
        if samples > 1 and "torch._dynamo" in sys.modules:
            # A hook of torch.compile's wrapper runs eagerly.
            if not (self.batches.is_begun or hasattr(caller, "_orig_mod")):
                self._release = EAGER.hold(self)
        self.batches.watch(caller)

    @contextmanager
    def next_pass(self, stage: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """A pass of a pipeline's stage, which has its own samples."""
        for leaf in self.structure.leaves_of(stage):
            if leaf.found.joined:
                leaf.fail("a pipeline's stage uses it several times in a pass")
            leaf.next_pass()
        if torch.is_grad_enabled():
            self.batches.learn(stage, args, kwargs)
        self.structure.running.modules.add(stage)
        yield
        self.structure.running.modules.discard(stage)

    def _abandoned(self, watcher: "weakref.ref[Any]") -> None:
        self.close()

    def close(self) -> None:
        """Make the model what it was."""
        self.batches.watcher = nobody
        self.structure.running.modules.clear()
        self.structure.running.is_known = False
        if self._release is not None:
            self._release()
        self.batches.end()
        for own in self._gathered:
            own.remove()
        self._gathered.clear()
        for leaf in self.leaves:
            detach(leaf.parameter)
            if leaf.current is not leaf.parameter:
                detach(leaf.current)
                leaf.current = leaf.parameter
            if leaf.made:
                release(leaf)
            leaf.found.links = ()
            leaf.twin = leaf.whole.twin = None
            leaf.found.parts.clear()
        self.is_open = False


_known: "weakref.WeakKeyDictionary[nn.Module, Followed]" = weakref.WeakKeyDictionary()


class _Gathered:
    """Follows a parameter whenever FSDP2 puts the gathered one into its module, before a forward or
    a method that was registered as one.
    """

    def __init__(self, own: Any, leaf: Leaf, structure: Structure) -> None:
        gathers, self._own = own.to_unsharded, own

        def to_unsharded() -> None:
            gathers()
            if not structure.is_bare:
                attach(leaf, own._unsharded_param)

        own.to_unsharded = to_unsharded
        if hasattr(own, "_unsharded_param"):  # it may be in its module already
            attach(leaf, own._unsharded_param)

    def remove(self) -> None:
        """Leave FSDP2's record as it was."""
        del self._own.to_unsharded
