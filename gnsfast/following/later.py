# SPDX-License-Identifier: Apache-2.0
"""Which batches after the first one prove the norms again."""

from typing import Any

from torch import Tensor

from gnsfast.following.passes import Passes
from gnsfast.following.proof import Proof
from gnsfast.following.structure import Structure


class Later:
    """The batches after the first one: those that follow it prove the norms again if it gave a
    parameter no gradient, later ones if one has got its first gradient, and any of another size,
    or for another mode of the model.

    ``wrong`` are the parameters that they have shown to be wrong, with the reason.
    """

    def __init__(self, structure: Structure, passes: Passes) -> None:
        self._structure, self._passes = structure, passes
        self.wrong: dict[str, str] = {}
        self._again = self._late = AGAIN
        self._is_first = False  # the last pass gave a parameter its first gradient
        self._proven: set[Any] = set()
        self._first: list[float] = []
        self._now: list[float] = []

    def begin(self, given: list[Tensor]) -> None:
        """Note the tensors of the first batch, which is proven by itself."""
        self._first = self._sizes(given)
        self._proven = {self._kind(self._first)}
        self.see(given)

    def see(self, given: list[Tensor]) -> None:
        """Note how much longer than in the first batch the samples of this batch are."""
        sizes = self._sizes(given)
        if sizes == self._now or len(sizes) != len(self._first):
            return
        self._now = sizes
        ratios = {new / old for new, old in zip(sizes, self._first) if old}
        growth = frozenset({1.0} | ratios | {r * r for r in ratios})
        for leaf in self._structure.leaves:
            leaf.growth = growth

    def end(self, proof: Proof) -> None:
        """Note whether the pass of a block, whose rows are not kept, gave a gradient to a parameter
        that had none when it was proven.
        """
        if (rows := self._passes.last) is None:
            return
        B = self._passes.asked.samples
        silent = [leaf for leaf in rows.leaves if leaf.name in proof.silent] if self._late else ()
        self._is_first = any(bool(rows[leaf][0, :B].any()) for leaf in silent)
        self._passes.last = None

    def are_due(self, proof: Proof) -> bool:
        """Whether the batch of the open block is to prove again what ``proof`` says."""
        kind = self._kind(self._now)
        other = kind not in self._proven and len(self._proven) <= AGAIN
        again = self._again and proof.unproven
        late = not again and self._late and self._is_first
        if not (other or again or late):
            return False
        self._again, self._late = self._again - bool(again), self._late - bool(late)
        self._proven.add(kind)
        return True

    def added(self, proof: Proof, found: Proof) -> Proof:
        """``proof`` after one of them has ``found`` more."""
        self.wrong |= found.wrong
        after = proof.later(found)
        if after.silent < proof.silent:  # more gates may open
            self._late = AGAIN
        return after

    def fail_wrong(self) -> None:
        """Note in the open pass which parameters they have shown to be wrong."""
        for leaf in self._structure.covered if self.wrong else ():
            if leaf.name in self.wrong:
                leaf.fail(self.wrong[leaf.name])

    def _sizes(self, given: list[Tensor]) -> list[float]:
        """How many elements the tensors of a batch have for each sample."""
        samples = self._passes.asked.samples
        return [t.numel() / samples for t in given if samples and samples in t.shape[:2]]

    def _kind(self, sizes: list[float]) -> tuple[Any, ...]:
        """What tells a batch from those that have proven it."""
        return self._structure.model.training, self._passes.asked.samples, *sizes


AGAIN = 2
"""So many later batches prove it again for each reason, and more while they show more."""
