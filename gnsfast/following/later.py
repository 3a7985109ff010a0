# SPDX-License-Identifier: Apache-2.0
"""Which batches after the first one prove the norms again."""

import itertools
import operator
import random
from typing import Any

from torch import Tensor

from gnsfast.following.learning import Trial
from gnsfast.following.passes import Passes
from gnsfast.following.proof import Proof, prove
from gnsfast.following.structure import Structure


class Later:
    """The batches after the first one. One of another size, or for another mode of the model,
    proves the norms again (a few of these, and the first in which a tensor has samples of another
    size), and so does one after the first gradient of a parameter that had none.
    Of the others number 2, 8, 32, and so on show whether samples still do not meet.

    ``wrong`` are the parameters that they have shown to be wrong, with the reason. ``count`` is the
    number of this batch.
    """

    def __init__(self, structure: Structure, passes: Passes) -> None:
        self._structure, self._passes, self._growth = structure, passes, structure.growth
        self.wrong: dict[str, str] = {}
        self.count = 0
        self._late: set[str] = set()  # what the last block gave its first gradient
        self._proven: set[Any] = set()
        self._grown: set[int] = set()  # tensors whose samples had another size in one of these
        self._reached: set[str] = set()

    def begin(self, given: list[Tensor]) -> None:
        """Note the tensors of the first batch, which is proven by itself."""
        self._growth.sizes = [(size, size) for size in self._sizes(given)]
        self.count, self._proven = 1, {self._kind}

    def see(self, given: list[Tensor]) -> None:
        """Note how much longer than in the first batch the samples of this batch are."""
        sizes, before = self._sizes(given), self._growth.sizes
        if len(sizes) == len(before):
            self._growth.sizes = [(now, first) for now, (_, first) in zip(sizes, before)]

    def end(self, proof: Proof) -> None:
        """Note which parameters the pass of a block, whose rows are not kept, gave a gradient that
        had none when they were to be proven.
        """
        if (rows := self._passes.last) is None:
            return
        B, names = self._passes.asked.samples, proof.unproven - self._reached
        found = [leaf for leaf in rows.leaves if leaf.name in names] if names else ()
        self._late = {leaf.name for leaf in found if rows[leaf][0, :B].any()}
        self._passes.last = None

    def is_new(self, proof: Proof) -> bool:
        """Whether the batch of the open block shows what no batch has shown that has proven it."""
        self.count += 1
        late = self._late & proof.unproven
        grown = {k for k, (now, first) in enumerate(self._growth.sizes) if now != first}
        is_first = len(self._proven) <= SEVERAL or not grown <= self._grown
        is_other = self._kind not in self._proven and is_first
        if is_other:
            self._proven.add(self._kind)
            self._grown |= grown
        self._reached |= late
        self._late = set()
        return is_other or bool(late)

    def prove(self, trial: Trial) -> Proof:
        """The proof of this batch, which shows too how the rows of its samples grow."""
        growth, names = self._growth, {leaf.name for leaf in self._structure.covered}
        tried: dict[str, set[tuple[int, int]]]
        growth.tried = tried = {}
        try:
            proof = prove(trial)
            right = names - {*proof.wrong} - proof.unproven if not proof.reason else set()
            for name in right & {*tried}:
                growth.proven[name] = growth.proven.get(name, set()) | tried[name]
        finally:
            growth.tried = None
        self.wrong |= proof.wrong
        return proof

    @property
    def is_due(self) -> bool:
        """Whether it is to show that samples do not meet. Of n batches log4(n) do so."""
        bits = self.count.bit_length()
        return bits % 2 == 0 and self.count == 1 << bits - 1

    def some_of(self, samples: int) -> list[int]:
        """The half of the samples that have a part in its loss, another one each time: of two that
        have changed places it has one or the other every second time.
        """
        return random.Random(self.count).sample(range(samples), samples // 2)

    def fail_wrong(self) -> None:
        """Note in the open pass which parameters they have shown to be wrong."""
        for leaf in self._structure.covered if self.wrong else ():
            if leaf.name in self.wrong:
                leaf.fail(self.wrong[leaf.name])

    def _sizes(self, given: list[Tensor]) -> list[int]:
        """How many elements the tensors of a batch have for each sample, and how many parts of
        them, such as the frames of a video.
        """
        samples, sizes = self._passes.asked.samples, []
        for t in given:
            if samples and samples in t.shape[:2]:
                own = [n for d, n in enumerate(t.shape) if d != t.shape[:2].index(samples)]
                sizes += [*itertools.accumulate(own, operator.mul)] or [1]
        return sizes

    @property
    def _kind(self) -> tuple[Any, ...]:
        """What tells this batch from those that have proven it."""
        sizes = [now for now, _ in self._growth.sizes]
        return self._structure.model.training, self._passes.asked.samples, *sizes


SEVERAL = 2
"""So many other sizes and modes prove it again."""
