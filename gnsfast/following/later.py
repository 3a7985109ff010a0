# SPDX-License-Identifier: Apache-2.0
"""Which batches after the first one prove the norms again."""

import random
from collections import Counter
from itertools import zip_longest
from typing import Any

from torch import Tensor

from gnsfast.following.examples import form_of, sizes_of
from gnsfast.following.learning import Learned, Trial
from gnsfast.following.passes import Passes
from gnsfast.following.proof import Proof, prove
from gnsfast.following.structure import Structure


class Later:
    """The batches after the first one. One of another size, or for another mode of the model,
    proves the norms again (a few of these, and the first in which a tensor has samples of another
    size), and so does one after the first gradient of a parameter that had none.
    Of the others number 2, 8, 32, and so on show whether samples still do not meet.

    ``wrong`` are the parameters that they have shown to be wrong, with the reason. ``count`` is the
    number of this batch among those that lie as it does. So many other sizes and modes give
    ``proofs``. ``sizes`` are those of the samples of this batch, and ``form`` is what tells images
    from texts.
    """

    def __init__(self, structure: Structure, passes: Passes) -> None:
        self._structure, self._passes, self._growth = structure, passes, structure.growth
        self.wrong: dict[str, str] = {}
        self._counts = Counter[Any]()
        self._learned: Learned | None = None
        self._late: dict[str, Tensor] = {}  # whether the last block gave it its first gradient
        self.proofs = SEVERAL
        self._proven: set[Any] = set()
        self._grown: set[int] = set()  # tensors whose samples had another size in one of these
        self._reached: set[str] = set()
        self._seen: Any = None
        self._asked: Any = None
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self.form: tuple[Any, ...] = ()

    def begin(self, given: list[Tensor]) -> None:
        """Note the tensors of the first batch, which is proven by itself."""
        self.see(given)
        self._proven = {self.kind}

    def use(self, learned: Learned) -> None:
        """Begin to count the batches that lie as one that has been ``learned``, if it is new."""
        self._learned = learned
        self._counts[self._counted_as] = self._counts[self._counted_as] or 1

    @property
    def count(self) -> int:
        """The number of this batch among those of its form that lie as it does."""
        return self._counts[self._counted_as]

    @property
    def _counted_as(self) -> tuple[Any, ...]:
        return id(self._learned), self.form

    def see(self, given: list[Tensor], learned: Learned | None = None) -> None:
        """Note the sizes of this batch, and how much longer its samples are than those of the batch
        that has shown what is ``learned``, which is this one by default.
        """
        samples = self._passes.asked.samples
        seen = id(learned), samples, [(t.shape, t.dtype) for t in given]
        if seen == self._seen:  # as in most blocks
            return
        self._seen, sizes = seen, sizes_of(given, samples)
        self.sizes, self.form = tuple(map(tuple, sizes)), form_of(given)
        pairs = [*zip(sizes, sizes if learned is None else learned.sizes)]
        both = [pair for own, others in pairs for pair in zip_longest(own[: len(others)], others)]
        ends = [(own[0], others[0]) for own, others in pairs if own and others]
        found = {k: (now, old) for k, (now, old) in enumerate(both) if now}
        found[OF_ALL] = sum(now for now, _ in ends), sum(old for _, old in ends)
        is_other = learned is not None and learned.form != self.form
        self._growth.sizes = UNCHANGED if is_other else found if ends else {}
        self._growth.proven = {} if learned is None else learned.growth

    def end(self, proof: Proof) -> None:
        """Note which parameters the pass of a block, whose rows are not kept, gave a gradient that
        had none when they were to be proven. The next block asks, since the device may be busy.
        """
        rows, self._passes.last = self._passes.last, None
        if rows is not None:
            B, names = self._passes.asked.samples, proof.unproven - self._reached
            found = [leaf for leaf in rows.leaves if leaf.name in names] if names else ()
            self._late = {leaf.name: rows[leaf][0, :B].any() for leaf in found}

    def is_new(self, proof: Proof) -> bool:
        """Whether the batch of the open block shows what no batch has shown that has proven it."""
        self._counts[self._counted_as] += 1
        late = {name for name, has_come in self._late.items() if has_come} & proof.unproven
        self._late = {}
        asked = self._structure.model.training, self._seen
        if asked == self._asked and not late:  # as the batch before
            return False
        self._asked = asked
        self._reached |= late
        grown = {k for k, (now, first) in self._growth.sizes.items() if now != first}
        is_first = len(self._proven) <= self.proofs or not grown <= self._grown
        is_first |= not any(form == self.form for form, *_ in self._proven)
        is_other = self.kind not in self._proven and is_first
        if is_other:
            self._proven.add(self.kind)
            self._grown |= grown
        return is_other or bool(late)

    def prove(self, trial: Trial) -> Proof:
        """The proof of this batch, which shows too how the rows of its samples grow."""
        growth, names = self._growth, {leaf.name for leaf in self._structure.covered}
        tried: dict[str, set[tuple[int, int]]]
        growth.tried = tried = {}
        try:
            proof = prove(trial)
            right = names - {*proof.left_out} - proof.unproven if not proof.reason else set()
            for name in right & {*tried}:
                growth.proven[name] = growth.proven.get(name, set()) | tried[name]
        finally:
            growth.tried = None
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

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells this batch from those that have proven it."""
        return self.form, self._structure.model.training, self._passes.asked.samples, *self.sizes


UNCHANGED = {0: (1, 1)}
"""No rows grow: sizes of images and texts say nothing of each other."""

OF_ALL = -1
"""The number of the size of all tensors together, such as two sequences that are concatenated."""

SEVERAL = 2
"""So many other sizes and modes prove it again."""

MORE = 8
"""So many more do for each batch that was learnt by itself."""
