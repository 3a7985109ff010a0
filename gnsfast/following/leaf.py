# SPDX-License-Identifier: Apache-2.0
"""A trainable parameter while a block is open, and the tensors that are made of it."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnsfast.following.checkpoints import recomputing
from gnsfast.following.layouts import ANY_NUMBER, RAGGED, SHARED, UNKNOWN, Layout, Lengths, Place
from gnsfast.following.owners import owners_of
from gnsfast.functional import Groups, Link, RowMap
from gnsfast.torch_internals import in_backward, pytree, unfollowed

compiling = torch.compiler.is_dynamo_compiling


class Row(NamedTuple):
    """A row of the table: one call that takes a parameter, or a tensor made of it. ``name`` is that
    of its function, and ``arguments`` and ``results`` say where the samples are; None stands for
    parameters and for other values. ``chosen`` is not empty if the data chose its rows, from
    tensors in which a sample had so many rows. ``sizes`` are those of a sample in the first tensor
    that holds the samples. A row that ``is_assumed`` is that of a sibling.
    """

    name: str
    arguments: tuple[Place | None, ...] = ()
    results: tuple[Place, ...] = ()
    chosen: frozenset[int] = frozenset()
    sizes: tuple[int, ...] = ()
    is_assumed: bool = False

    def argument(self, i: int) -> Place | None:
        """Where the samples lie in argument number ``i``."""
        return self.arguments[i] if i < len(self.arguments) else UNKNOWN

    def result(self, k: int) -> Place:
        """Where the samples lie in result number ``k``."""
        return self.results[k] if k < len(self.results) else UNKNOWN

    def is_like(self, other: "Row") -> bool:
        """Whether the samples lie in the same way, of any number of rows and of any size."""
        return _any_rows(self) == _any_rows(other)

    def suits(self, has_rows: bool) -> bool:
        """Whether it is of a batch of the same kind: one that ``has_rows`` of unequal numbers."""
        places = (*self.arguments, *self.results)
        return not any(isinstance(p, Layout) if has_rows else p == RAGGED for p in places)

    def is_of_another(self, i: int, x: Tensor, B: int) -> bool:
        """Whether argument number ``i`` of a call, ``x`` with B samples, shows that it is another
        than that of the table: the first tensor that held the samples has other dimensions, or rows
        that the data have chosen where those of a sibling were not.
        """
        is_alike = x.ndim == len(self.sizes) + 1
        if is_alike and not self.is_assumed:
            return False
        holders = (k for k, place in enumerate(self.arguments) if isinstance(place, Layout))
        if i != next(holders, None):
            return False
        return not is_alike or (not compiling() and owners_of(x, B) is not None)

    @property
    def is_use(self) -> bool:
        """Whether the parameter meets the data here."""
        return any(isinstance(place, (Layout, str)) and place != SHARED for place in self.results)


def _any_rows(row: Row) -> Row:
    def without(place: Any) -> Any:
        return place._replace(several=bool(place.several)) if isinstance(place, Layout) else place

    arguments, results = (tuple(map(without, places)) for places in (row.arguments, row.results))
    return row._replace(arguments=arguments, results=results, sizes=(), is_assumed=False)


class Facts(NamedTuple):
    """What is measured of a leaf beside the norm of each sample: groups of samples."""

    groups: Groups | None = None


NOTHING = Facts()

ADD_UP = (
    "the norms of several passes do not add up. A block takes one forward and one backward pass. A "
    "loss in parts, as torchtitan's ChunkedLossWrapper, runs one for each part: compute it by "
    "gnsfast.Linear.cross_entropy, or gnsfast.functional.linear_cross_entropy"
)


def nobody() -> None:
    """A weak reference to what is gone."""


@dataclass(slots=True)
class LeafPass:
    """What the open block has found about a parameter.

    ``failed`` says why its norms would be wrong, ``joined`` that they are those of a sum over
    several uses, and ``parts`` are what these left in backward, by use. Of a pass it counts the
    ``functions`` that took the parameter, apart from those ``functions_in_backward`` that a
    checkpoint runs again, and its ``uses``, of which ``spans`` are the pieces.
    ``links`` are those of embeddings, for a head that shares their weight; then it ``is_taken``.
    """

    failed: str = ""
    joined: bool = False
    parts: "Mapping[object, tuple[Expression, Any]] | None" = None
    functions: int = 0
    functions_in_backward: int = 0
    uses: int = 0
    spans: "tuple[Span | None, ...]" = ()
    links: tuple[Link, ...] = ()
    is_taken: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether a pass has come to a function that takes it."""
        return bool(self.functions or self.uses)


class Notes:
    """What the leaves of a model share in a pass. ``is_unusual``: the norms of one would be wrong,
    or its uses have left parts that are joined. Else nobody looks at each leaf.
    """

    is_unusual = False


class Leaf:
    """A trainable parameter: its probes, and what the table says of it. ``this_pass`` tells of
    the open block's last one.

    ``current`` is the tensor that the model calculates with, which under FSDP2 is not the parameter
    itself. ``batches`` are for each batch of the table the calls that take it, in their order, and
    ``routes`` the functions in which it meets the data. ``lengths`` say how much longer the samples
    of this pass are. ``probe`` is for uses of this leaf, ``pair`` for those of this leaf and the
    ``next`` one together. ``facts`` are for its plans, and so are ``maps`` of the rows of a batch
    that ``is_ragged``; packed documents are in ``rows`` rows, 0 where that is not known. All leaves
    of a model share ``lengths`` and ``notes``. ``recent`` are uses of earlier passes, by the
    number of the function (``uses.begin``). ``made`` are the tensors that are made of it.
    ``known_uses`` and ``is_known_joined`` tell of uses in compiled code, which does not count.
    ``left_out`` says why it has no norms, and ``refused`` why it has none in any table.
    ``is_opaque``: no function that takes it can be seen. ``is_half``: data in half precision has
    met it. ``is_ordered``: the samples lie in other ways in some of its calls than in others of the
    same name. ``norms_alone``: torch's own functions give the outputs and gradients of the open
    block, and kernels the norms alone.
    """

    def __init__(self, name: str, p: nn.Parameter, index: int) -> None:
        self.name, self.parameter, self.index = name, p, index
        self.current: Tensor = p
        self.whole = Expression((self,), SAME, lambda value: value(self), is_whole=True)
        self.twin: Tensor | None = None
        self.next: Leaf | None = None
        self.samples = 0
        self.lengths, self.notes = Lengths(), Notes()
        self.probe: Any = None
        self.pair: Any = None
        self.facts = NOTHING
        self.maps: tuple[RowMap, ...] = ()
        self.is_ragged = False
        self.rows = 0
        self.recent: dict[tuple[int, int], Any] = {}
        self.made: list[weakref.ref[Tensor]] = []
        self.refused, self.is_opaque = "", False
        self.is_sharded, self.is_half = hasattr(p, "placements"), False
        self.is_shared = False  # by several modules
        self.norms_alone = False
        self.known_uses, self.is_known_joined = 1, False
        self.forget()
        self.open()

    def forget(self) -> None:
        """Know nothing of a table."""
        self.learn([])
        self.left_out = self.refused

    def learn(self, batches: Sequence[Sequence[Row]], routes: tuple[str, ...] = ()) -> None:
        """Take over what the table says of it."""
        self.batches, self.routes = [*map(tuple, batches)], routes
        self.is_learned = bool(self.batches)
        self.recent.clear()
        self.by_name: dict[str, Row] = {}
        self.is_ordered = False
        self._has_links = False
        for rows in self.batches:
            for row in rows:
                first = self.by_name.setdefault(row.name, row)
                if not first.is_like(row):  # only its place in the order tells which it is
                    # What has no samples has no layout that another one's could be taken for.
                    copies = (isinstance(p, Layout) for p in (*row.results, *first.results))
                    self.is_ordered |= any(row.arguments) or any(copies)
                    lost = (UNKNOWN,) * len(row.arguments), (UNKNOWN,) * len(row.results)
                    self.by_name[row.name] = Row(row.name, *lost)
            named = [row.name for row in rows if row.is_use]
            heads = {*named[-1:]} <= HEADS and {*named[:-1]} == {"embedding"}
            self._has_links |= heads or (self.is_shared and {*named} == {"embedding"})

    def open(self) -> None:
        """Forget the block before."""
        self.this_pass = LeafPass()
        if self.is_sharded:  # FSDP2 frees it between passes
            self.twin = self.whole.twin = None

    @property
    def has_owners(self) -> bool:
        """Whether the user tells whose each row is."""
        return self.is_ragged and not self.maps[0].is_list

    @property
    def lanes(self) -> int:
        """How many parts of the batch ``steps`` tell apart: samples, or the rows that hold packed
        documents.
        """
        return self.rows if self.is_ragged else self.samples

    def fits(self, layout: Layout, shape: torch.Size) -> bool:
        """Whether the samples may lie so in a tensor of this shape, of a call that takes it."""
        B, rows = self.lanes, layout.several
        if not layout.fits(shape, B):
            return False
        if layout.interleaved > 1:  # as many in turn as a call before had of each sample
            if compiling() or not self.lengths.has(layout.interleaved):
                return False
        if not rows or rows == ANY_NUMBER or compiling():
            return True
        return self.lengths.allows(rows, shape[layout.dim] // max(B, 1))

    @property
    def expected(self) -> int:
        """How many uses a pass has, each of which counts once in backward."""
        return self.this_pass.uses or self.known_uses

    def row(self, name: str, fits: "Callable[[Row], bool]") -> Row | None:
        """The row of the next function that takes this parameter, which ``fits`` its tensors. None
        if no table says anything of it; a row whose places are ``UNKNOWN`` if the table has none.
        """
        if compiling():  # a counter would need a graph for each of its values
            return self.by_name.get(name, Row(name)) if self.is_learned else None
        if in_backward():  # a checkpoint runs it again
            number = self.this_pass.functions_in_backward
            self.this_pass.functions_in_backward = number + 1
        else:
            number = self.this_pass.functions
            self.this_pass.functions = number + 1
        if not self.is_learned:
            return None
        known = [rows[number % len(rows)] for rows in self.batches if rows]
        named = [row for row in known if row.name == name]
        for row in named:
            if len(named) == 1 or (row.suits(self.has_owners) and fits(row)):
                return row
        return self.by_name.get(name) or Row(name)

    def uncount(self) -> None:
        """Let ``row`` be asked for the same function once more."""
        if in_backward():
            self.this_pass.functions_in_backward -= 1
        else:
            self.this_pass.functions -= 1

    @property
    def is_unordered(self) -> bool:
        """Whether the pass had another number of calls than the table, some of which only their
        order tells from others.
        """
        number = self.this_pass.functions
        return self.is_ordered and all(number % max(len(rows), 1) for rows in self.batches)

    @property
    def is_tied(self) -> bool:
        """Whether links join its uses. They have no sums of groups of documents."""
        return self._has_links and (not self.is_ragged or self.facts.groups is None)

    @property
    def is_lost_in_graphs(self) -> bool:
        """Whether its uses must be joined, which only eager code does."""
        return self.is_known_joined or (self._has_links and not self.is_tied)

    @property
    def is_over(self) -> bool:
        """Whether backward has gone through a use of it, and is not running."""
        reached = self.this_pass.parts or self.probe.grad is not None or self.pair.grad is not None
        return bool(reached) and not in_backward()

    def fail(self, why: str) -> None:
        """Note that the norms of this pass would be wrong; the first reason counts."""
        self.this_pass.failed = self.this_pass.failed or why
        self.notes.is_unusual = True


NO_ROWS = frozenset[int]()

HEADS = {"linear", "linear_cross_entropy"}
"""Functions that take links from an embedding with the same weight."""


class Span(NamedTuple):
    """A piece of a parameter's memory."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, t: Tensor) -> "Span":
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        start = int(t.storage_offset())
        return cls(t.untyped_storage().data_ptr(), start, start + last + 1)

    def is_apart(self, other: "Span | None") -> bool:
        """Whether two pieces have no element in common."""
        if other is None or self.storage != other.storage:
            return False
        return self.end <= other.start or other.end <= self.start


LINK = Span(0, 0, 0)
"""A use that a link joins with others. It is apart from these alone."""

SAME, MADE, ROWS = "same", "made", "rows"
"""What an expression is. ``SAME``: each element of the parameter at most once and unchanged, so
that norms are kept. ``ROWS``: rows of a table, at ids that all samples share. ``MADE``: anything
else.
"""


class Expression:
    """What a tensor made of parameters and constants alone is made of.

    ``make`` computes it from a function that gives a tensor for each leaf. ``span`` is the piece of
    the parameter's memory that it is, if it is one. ``rows`` are the ids and the padding index of
    ``ROWS``. ``is_shifted``: a constant was added or the sign changed, so that its memory is not
    that of the parameter.
    """

    def __init__(
        self,
        leaves: tuple[Leaf, ...],
        kind: str,
        make: Callable[[Callable[[Leaf], Tensor]], Tensor],
        *,
        span: Span | None = None,
        rows: tuple[Tensor, int | None] | None = None,
        is_whole: bool = False,
        is_shifted: bool = False,
    ) -> None:
        self.leaves, self.kind, self.make, self.span, self.rows = leaves, kind, make, span, rows
        self.is_whole, self.is_shifted = is_whole, is_shifted
        self.twin: Tensor | None = None

    def graph(self) -> Tensor:
        """The same tensor in a graph of its own, which leads to a ``twin`` of each leaf. Each
        sample's gradient is pulled back through it.
        """
        if self.twin is None:
            with torch.enable_grad(), unfollowed():
                self.twin = self.make(twin_of)
        return self.twin

    def note_use(self, name: str = "") -> None:
        """Note a use by function ``name``. Several uses of the same elements are joined, as is what
        arithmetic made, but not an embedding and a head that a link joins.
        """
        if recomputing():
            return
        span = LINK if self.is_linked(name) else self.span
        for leaf in self.leaves:
            this_pass = leaf.this_pass
            if this_pass.uses:
                if leaf.is_over:
                    leaf.fail("it is used again after a backward pass of this block, and " + ADD_UP)
                this_pass.joined |= span is None or not all(map(span.is_apart, this_pass.spans))
            this_pass.joined |= self.kind != SAME
            this_pass.uses += 1
            this_pass.spans += (span,)

    def fail(self, why: str) -> None:
        """Note that the norms of all its leaves would be wrong in this pass."""
        for leaf in self.leaves:
            leaf.fail(why)

    def is_linked(self, name: str) -> bool:
        """Whether a use by function ``name`` makes or takes the links of a tie."""
        leaf = self.leaves[0]
        if not leaf.is_tied or not self.is_whole:
            return False
        if name == "embedding":
            return not leaf.this_pass.is_taken or in_backward()
        return name in HEADS and bool(leaf.this_pass.links) and not leaf.this_pass.is_taken

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code follows it: nothing is joined there."""
        return self.kind != MADE and not self.leaves[0].is_known_joined

    @property
    def is_joined(self) -> bool:
        """Whether the rows of one use are not yet those of the parameter."""
        return self.kind != SAME or self.leaves[0].this_pass.joined

    @property
    def is_parted(self) -> bool:
        """The same where no kernel has all tokens: it has no groups of documents."""
        leaf = self.leaves[0]
        return self.is_joined or (leaf.is_ragged and leaf.facts is not NOTHING)


def twin_of(leaf: Leaf) -> Tensor:
    """A leaf of a graph of its own, with the value of the parameter."""
    if leaf.twin is None:
        value = leaf.current.detach().as_subclass(Tensor)
        if leaf.is_sharded:  # FSDP2 frees the whole parameter between passes
            value = value.clone() if value.untyped_storage().size() else torch.zeros_like(value)
        leaf.twin = value.requires_grad_()
    return leaf.twin


def expression_of(t: Any) -> Expression | None:
    """What a tensor made of parameters alone is made of; None for any other value."""
    return getattr(t, "_gnsfast", None)


def fail(tree: Any, why: str) -> None:
    """Note that the norms of the parameters in ``tree``, and of those that tensors in it are made
    of, would be wrong in this pass.
    """
    for t in pytree.tree_leaves(tree):
        if (expression := expression_of(t)) is not None:
            expression.fail(why)


def first_leaf(expressions: list[Expression]) -> Leaf:
    """The leaf of ``expressions`` whose steps tell what a function is: the first in the model."""
    first = expressions[0].leaves[0]
    for expression in expressions[1:]:  # Dynamo knows no min(key=)
        leaf = expression.leaves[0]
        if leaf is not first.next and leaf.index < first.index:  # a number would be in the graph
            first = leaf
    return first
