# SPDX-License-Identifier: Apache-2.0
"""A model whose parameters are followed: what is known of it, and its open block."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gnsfast.errors import ObservationError
from gnsfast.following.dispatch import attach, detach, open_beside, prepare_compiler, release
from gnsfast.following.leaf import Facts, Leaf, Row, nobody
from gnsfast.following.passes import Asked, Passes
from gnsfast.following.structure import Structure
from gnsfast.functional import Ragged
from gnsfast.torch_internals import gathered_parameters


class Followed:
    """A model whose parameters are followed while a block is open.

    ``structure`` are its parameters, ``passes`` their probes, and ``table`` says where the samples
    are in their calls; None until one was learnt. ``is_learning``: the model runs for our own ends.
    ``is_audited``: one pass was found to have measured all of the gradients. ``watcher`` is a weak
    reference to the owner of the open block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structure = Structure(model)
        self.leaves = self.structure.leaves
        self.passes = Passes(self.leaves)
        self.table: Any = None
        self.is_open = self.is_learning = self.is_audited = False
        self.watcher: Callable[[], Any] = nobody
        self._gathered: list[_Gathered] = []

    @classmethod
    def of(cls, model: nn.Module) -> "Followed":
        """What is known of ``model``. It begins anew where parameters were changed or frozen."""
        known = _known.get(model)
        if known is None or not known.structure.is_current():
            known = _known[model] = cls(model)
        return known

    @staticmethod
    def forget(model: nn.Module) -> None:
        """Begin anew, such as with other options."""
        _known.pop(model, None)

    @property
    def mixing(self) -> list[tuple[str, nn.Module]]:
        """The batch norms that use the statistics of the batch, which tie samples together."""
        norms = self.structure.batch_norms
        return [(n, m) for n, m in norms if m.training or m.running_mean is None]

    def refuse_batch_statistics(self) -> None:
        """Raise if a batch norm would use the statistics of the batch."""
        for name, module in self.mixing:
            raise ObservationError(
                f"{name or 'the model'} ({type(module).__name__}): batch statistics tie the "
                "samples together, so no per-sample gradient exists. Call eval() on it, use "
                "GroupNorm or LayerNorm instead, or measure with GradientNoiseScale(model, "
                "unit='micro_batch')."
            )

    def learn(
        self,
        *batches: Mapping[str, Sequence[Row]],
        routes: Mapping[str, tuple[str, ...]] = {},
    ) -> None:
        """Let the parameters know their rows of the table, for each batch that it was learnt
        from."""
        for leaf in self.leaves:
            rows = [batch.get(leaf.name, ()) for batch in batches]
            leaf.learn(rows, routes.get(leaf.name, ()))

    def forget_table(self) -> None:
        """Let everything be as before a table was told."""
        self.table = None
        for leaf in self.leaves:
            leaf.forget()

    def open(
        self,
        samples: int,
        facts: Mapping[str, Facts] = {},
        ragged: Ragged | None = None,
        watcher: Any = None,
        norms_alone: bool = False,
    ) -> None:
        """Follow the parameters from here on. If ``watcher`` is deleted before ``close``, that is
        called. ``norms_alone``: torch's own functions give the outputs and gradients.
        """
        if self.is_open:
            raise ObservationError(
                "A block is open on this model already. End the other per_sample_sqnorms, "
                "gns.update or gns.microbatch block first."
            )
        structure = self.structure
        if watcher is not None:
            self.watcher = weakref.ref(watcher, self._abandoned)
        self.is_open = True
        self.passes.asked = Asked(samples, facts, ragged, norms_alone)
        try:
            open_beside[0] += norms_alone
            self.passes.begin(self.passes.asked)
            sharded = {id(record.sharded_param): record for record in structure.sharded()}
            for leaf in self.leaves:
                if (record := sharded.get(id(leaf.parameter))) is None:
                    attach(leaf, leaf.parameter)
                else:
                    self._gathered.append(_Gathered(record, leaf, structure))
            prepare_compiler()
        except BaseException:
            self.close()
            raise

    def _abandoned(self, watcher: "weakref.ref[Any]") -> None:
        self.close()

    def close(self) -> None:
        """Make the model what it was. What an error has left undone is done by the next call."""
        for gathered in self._gathered:
            gathered.remove()
        self._gathered.clear()
        for leaf in self.leaves:
            detach(leaf.parameter)
            if leaf.current is not leaf.parameter:
                detach(leaf.current)
                leaf.current = leaf.parameter
            if leaf.made:
                release(leaf)
            if leaf.twin is not None:
                leaf.twin = leaf.whole.twin = None
            if leaf.this_pass.links:
                leaf.this_pass.links = ()
            if leaf.this_pass.parts:
                leaf.this_pass.parts = None
        open_beside[0] -= self.is_open and self.passes.asked.norms_alone
        self.is_open, self.watcher = False, nobody


_known: "weakref.WeakKeyDictionary[nn.Module, Followed]" = weakref.WeakKeyDictionary()
"""No value may hold a module of its model, or the model would never be freed."""


class _Gathered:
    """Follows a parameter whenever FSDP2 puts the gathered one into its module, before a forward or
    a method that was registered as one.
    """

    def __init__(self, record: Any, leaf: Leaf, structure: Structure) -> None:
        gathers, self._record = record.to_unsharded, record

        def to_unsharded() -> None:
            gathers()
            if not structure.is_bare:
                attach(leaf, gathered_parameters(record)[0])

        record.to_unsharded = to_unsharded
        if (
            gathered := gathered_parameters(record)[0]
        ) is not None:  # perhaps in its module already
            attach(leaf, gathered)

    def remove(self) -> None:
        """Leave FSDP2's record as it was."""
        del self._record.to_unsharded
