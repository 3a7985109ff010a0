# SPDX-License-Identifier: Apache-2.0
"""The probes of a whole model, parameter by parameter."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gnsfast.arguments import check_choice
from gnsfast.errors import ObservationError
from gnsfast.following import Facts, Followed, Leaf, Rows, unwrapped
from gnsfast.functional import Ragged, graphs_of_gradients
from gnsfast.parallel import in_context_parallel
from gnsfast.probing import checks
from gnsfast.table import BatchHook, Table, Take


class ProbeSlab:
    """The probes of all covered parameters of a model, and what the last pass left in them.

    A parameter has one row, which backward delivers as the gradient of its probes. ``rows`` holds
    the rows [1, B + 2 + G] of the parameters that the last pass has reached, after ``read``.
    ``caller`` is the model with the wrappers that the user calls. ``gradients`` says who makes
    those of its blocks: ``"fused"`` kernels, or ``"torch"``. ``take`` cuts samples out of the batch
    that the first block learns from. ``is_split``: the pass ran inside
    torch's ``context_parallel``.
    """

    def __init__(
        self, caller: nn.Module, gradients: str = "fused", take: Take | None = None
    ) -> None:
        self._caller, self._norms_alone, self._take = caller, gradients == "torch", take
        if gradients != "fused":  # the check takes 2 µs
            check_choice("gradients", gradients, ("fused", "torch"))
        self.model = unwrapped(caller)
        self.followed = Followed.of(self.model)
        self.refresh()
        self._on_learned: Callable[[], None] | None = None
        self._hook: BatchHook | None = None
        self.num_samples, self.is_split = 0, False
        self._graphs = 0

    def refresh(self) -> None:
        """Take over which parameters have norms."""
        self.leaves = self._measured()
        self.parameters = {leaf.name: leaf.parameter for leaf in self.leaves}
        self._of_device: dict[torch.device, list[Leaf]] = {}
        for leaf in self.leaves:
            self._of_device.setdefault(leaf.parameter.device, []).append(leaf)
        self.devices = list(self._of_device)
        self.rows = Rows.of(())

    def _measured(self) -> list[Leaf]:
        """The parameters that have norms by now."""
        return self.followed.structure.covered

    def order(self, device: torch.device) -> Tensor:
        """On ``device``, the number of the parameter of each row in ``sums``."""
        place = {leaf: k for k, leaf in enumerate(self.leaves)}
        found = [place[leaf] for leaves in self._of_device.values() for leaf in leaves]
        return torch.tensor(found, dtype=torch.int64, device=device)

    @property
    def is_half(self) -> bool:
        """Whether the model computes in half precision."""
        table = self.followed.table
        return (table is not None and table.is_half) or any(leaf.is_half for leaf in self.leaves)

    @property
    def left_out(self) -> list[str]:
        """The trained parameters that have no norms."""
        return [leaf.name for leaf in self.followed.leaves if leaf.name not in self.parameters]

    @property
    def covered(self) -> float:
        """The share of the trained elements that have norms."""
        sizes = {leaf.name: leaf.parameter.numel() for leaf in self.followed.leaves}
        missing = sum(sizes[name] for name in self.left_out)
        return 1.0 - missing / max(1, sum(sizes.values()))

    @property
    def covered_norm(self) -> float:
        """The share of the squared gradient norms that is measured, of the samples that the model
        was learnt from; NaN where no batch has shown it.
        """
        if not self.left_out:
            return 1.0
        table: Table | None = self.followed.table
        return math.nan if table is None else table.covered_norm

    def lost(self) -> list[str]:
        """Those that a batch has shown to have no norms since ``refresh``."""
        now = {leaf.name for leaf in self._measured()}
        return [name for name in self.parameters if name not in now]

    @property
    def idle(self) -> list[str]:
        """The parameters that backward did not reach."""
        rows = self.rows
        if rows.leaves == self.leaves:
            return []
        return [leaf.name for leaf in self.leaves if leaf not in rows]

    def rows_of(self, leaf: Leaf) -> Tensor:
        """The rows of a parameter, which are zeros where backward did not go."""
        return self.rows[leaf] if leaf in self.rows else torch.zeros_like(leaf.probe)

    def sums(self) -> list[Tensor]:
        """float64 [R, 3] on each of ``devices``: the sum of the samples' squared norms, the squared
        norm of their sum, and how many uses of each parameter were reached (``calls_of``).
        """
        return [self._sums(leaves) for leaves in self._of_device.values()]

    def _sums(self, leaves: list[Leaf]) -> Tensor:
        B, own = self.num_samples, self.rows.tensors
        if self.rows.leaves != leaves:
            own = [self.rows_of(leaf) for leaf in leaves]
        grad = torch.cat(own)
        samples, rest, _ = grad.split_with_sizes([B, 2, grad.shape[1] - B - 2], 1)
        return torch.cat([samples.sum(1, True, dtype=torch.float64), rest.double()], 1)

    @property
    def uses(self) -> tuple[int, ...]:
        """How many uses of each parameter the pass had."""
        return tuple([leaf.this_pass.uses or leaf.known_uses or 1 for leaf in self.leaves])

    def each(self) -> list[Tensor]:
        """float32 [rows, B + 2 + G] on each device: a row of each parameter that was reached."""
        parts: dict[torch.device, list[Tensor]] = {}
        for leaf, rows in self.rows.items():
            if leaf.name in self.parameters:
                parts.setdefault(rows.device, []).append(rows)
        return [torch.cat(rows) for rows in parts.values()]

    @property
    def is_reached(self) -> bool:
        """Whether backward has reached a probe of the last pass."""
        return self.followed.passes.is_reached

    def read(self) -> None:
        """Take what the pass left in the probes. Raise after ``create_graph=True``, which gives
        gradients a graph of their own, if a batch norm was put into training mode inside the block,
        if a parameter was replaced in it, and for parameters that the pass used in a way that gives
        no norms.
        """
        self.followed.refuse_batch_statistics()
        if self.followed.structure.is_changed:
            raise ObservationError(
                "A parameter of the model was replaced inside the block, whose norms would be "
                "those of the one before. Change a model between blocks."
            )
        self.rows = self.followed.passes.rows()
        # The rows of uses that were joined are not what backward left.
        unusual = self.leaves if self.followed.passes.is_unusual else ()
        of_joined = [leaf for leaf in unusual if leaf.this_pass.joined]
        joined = (p.grad for leaf in of_joined for p in (leaf.probe, leaf.pair))
        left = (*self.rows.tensors, *(grad for grad in joined if grad is not None))
        if any(rows.requires_grad for rows in left):
            raise ObservationError(
                "A pass with backward(create_graph=True) has no per-sample norms. Run the pass "
                "that you measure without it."
            )
        if self.took_graphs:
            raise ObservationError(checks.PENALTY)
        for leaf in [leaf for leaf in self.leaves if leaf.is_ordered]:
            if leaf.is_unordered:
                leaf.fail(
                    f"{leaf.this_pass.functions} functions take it, not the number of the table, "
                    "in some of which the samples lie in another way. gnsfast.learn(model, batch) "
                    "with this batch shows them"
                )
        for leaf in self.leaves if self.followed.passes.is_unusual else ():
            if leaf.this_pass.failed:
                raise ObservationError(
                    f"{leaf.name}: {leaf.this_pass.failed}. If this is no mistake, leave it out: "
                    f"gnsfast.configure(model, exclude=[{leaf.name!r}])."
                )

    def open(
        self,
        num_samples: int,
        ragged: Ragged | None = None,
        facts: Mapping[str, Facts] = {},
        learned: Callable[[], None] | None = None,
    ) -> None:
        """Forget the last pass and let the parameters fill the probes.

        ``ragged`` says whose rows a ragged batch has, ``facts`` what is measured of each parameter
        beside the norms. ``learned`` is called in place of ``refresh`` when a batch has shown
        something.
        """
        self.num_samples, self.is_split = num_samples, False
        self._on_learned, self._graphs = learned, graphs_of_gradients[0]
        self._begin(facts, ragged)

    def _begin(self, facts: Mapping[str, Facts], ragged: Ragged | None) -> None:
        followed = self.followed
        followed.refuse_batch_statistics()
        self.rows = Rows.of(())
        followed.open(self.num_samples, facts, ragged, self, self._norms_alone)
        followed.passes.watch(self)
        if BatchHook.is_needed(followed, self.num_samples, ragged):
            where = followed, self._caller, self.num_samples, ragged
            self._hook = BatchHook(*where, self.learned, self._take)

    def learned(self) -> None:
        """What is called when a batch has shown something: ``refresh``, or what ``open`` got."""
        (self._on_learned or self.refresh)()
        self._graphs = graphs_of_gradients[0]

    @property
    def took_graphs(self) -> bool:
        """Whether a gradient in the block was to have a graph of its own (``create_graph``)."""
        return graphs_of_gradients[0] != self._graphs

    def arrives(self) -> None:
        """Look at what is active while backward runs."""
        self.is_split |= in_context_parallel()

    def close(self) -> None:
        """Make the model what it was."""
        self._on_learned = None
        self._stop()

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.followed.passes.watch(None)
        if self.followed.watcher() is self:  # else its block is closed
            self.followed.close()

    def forget(self) -> None:
        """Make new probes for the next pass, since the graph of a failed pass may hold the old."""
        self.followed.passes.forget_probes()


def calls_of(reached: Tensor, uses: Tensor) -> Tensor:
    """1 for parameters that a pass has reached, plus how many times too often, from how many of
    their ``uses`` were reached. NaN stands for a use that gave no norms.
    """
    return (reached != 0).double() + (reached - uses).clamp(min=0.0)
