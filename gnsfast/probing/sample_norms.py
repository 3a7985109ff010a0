# SPDX-License-Identifier: Apache-2.0
"""``per_sample_sqnorms`` measures the per-sample gradient norms of one backward pass."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.arguments import integer
from gnsfast.errors import ObservationError
from gnsfast.following import Followed, unwrapped
from gnsfast.functional import ragged_of
from gnsfast.probing import checks
from gnsfast.probing.audit import ArrivedNorms, Audit
from gnsfast.probing.slab import ProbeSlab, calls_of
from gnsfast.table import Table


class SampleNorms(Mapping[str, Tensor]):
    """A mapping from parameter names to each sample's squared gradient norm, [B] float32. It can be
    read when the ``per_sample_sqnorms`` block has ended.
    """

    def __init__(self) -> None:
        self._norms: dict[str, Tensor] | None = None

    def _done(self) -> dict[str, Tensor]:
        if self._norms is None:
            raise ObservationError(
                "The norms are complete when the per_sample_sqnorms block has ended. Read them "
                "after it."
            )
        return self._norms

    def __getitem__(self, name: str) -> Tensor:
        return self._done()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._done())

    def __len__(self) -> int:
        return len(self._done())

    def total(self) -> Tensor:
        """Each sample's squared gradient norm over all covered parameters together, [B]."""
        norms = list(self._done().values())
        device = norms[0].device
        return torch.stack([n.to(device, torch.float64) for n in norms]).sum(0).to(torch.float32)


class per_sample_sqnorms:
    """A context manager that measures every sample's squared gradient norm in one backward pass.

    For each covered parameter p and each sample b the result equals ``autograd.grad(loss_b,
    p)[0].square().sum()``, where loss_b is sample b's share of the loss. A loss that is a mean over
    B samples scales the squared norms by 1 / B².

    Args:
        model: any model. Nothing in it is changed.
        num_samples: B, the number of samples in the one forward and backward pass of the block.
        cu_seqlens: needed if samples are documents packed into rows: integers [documents + 1]. If
            all rows of the batch are one list, they are the first row of each document, and then
            the end of the last. ``gnsfast.cu_seqlens`` makes them from position ids. Documents
            beyond ``num_samples`` are padding. Documents must not attend to each other, so the
            attention mask must be block-diagonal. Two more passes of the first batch see to it.
        rows: needed if samples have unequal numbers of rows, such as graphs that are batched as
            one: integers [N] on the CPU, the sample (0 to num_samples - 1) of each row, in any
            order, or a list or a dictionary of several, for rows of several kinds, such as nodes
            and edges. A tensor whose first dimension has N rows belongs to the map of N rows.
            Tensors with a row for each sample need no map.
        audit: compares the gradient that arrives at each parameter with what was measured, in the
            ``"first"`` pass of a model or ``"always"``. It finds functions that torch does not
            show, and reads the gradients once more. Parameters that are sharded or have a user's
            hook are not audited.
        table: what ``gnsfast.learn`` has found out about the model, which its blocks execute from
            here on. By default the first batch that the model gets in a block is learnt from, once.
        gradients: who makes ``.grad``. ``"fused"``: the kernels that square each sample's gradient,
            at the least cost; the last bits differ from torch's. ``"torch"``: torch's own
            functions, so outputs and gradients have the bits that they have without the block. The
            norms then cost one more product of each weight's gradient.

    The block yields a mapping from parameter names to [B] float32, whose method ``total()`` gives
    [B] over all parameters. Parameters whose norms were not proven when the table was learnt are
    left out, and ``gnsfast.coverage(model)`` says why. A parameter without a gradient in this pass
    has norm zero. That norm b is that of sample b of the batch assumes that the model keeps the
    order of its samples, as it did when its table was learnt. Other threads must not run the model
    while the block is open.

    Raises:
        ObservationError: at the start of the block, if a batch norm uses the statistics of its
            batch. At its end, if backward went through the model twice, if a call is not in the
            table or does not fit its row, or if a gradient arrived that no function of torch gave.
            The message names the parameter.

    No check finds samples that only some batches tie together. Only ``gnsfast.verify`` sees the
    own loss of the user.

    On a GPU tensor cores truncate as they accumulate, so half-precision norms of long samples come
    out low. In a simulation with independent tokens, a squared norm was low by 1.9e-5 at 8,192
    tokens and by 1.8e-4 at 70,000. This was not measured on a GPU.

    Source: Goodfellow 2015 (arXiv 1510.01799); Gray et al. 2024 (arXiv 2411.00999).

    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2))
    >>> with gnsfast.per_sample_sqnorms(model, 3) as norms:
    ...     model(torch.randn(3, 5)).sum().backward()
    >>> norms["0.weight"].shape, norms.total().shape
    (torch.Size([3]), torch.Size([3]))
    """

    def __init__(
        self,
        model: nn.Module,
        num_samples: int,
        *,
        cu_seqlens: Tensor | None = None,
        rows: Any = None,
        audit: str = "first",
        table: Table | None = None,
        gradients: str = "fused",
    ) -> None:
        if audit not in ("first", "always"):
            raise ValueError(f"audit must be 'first' or 'always', not {audit!r}")
        self._num_samples = slots = integer("num_samples", num_samples, 0)
        self._ragged = ragged_of(cu_seqlens, rows, num_samples)
        if self._ragged is not None:
            slots = self._ragged.slots
        if table is not None:
            table.tell(Followed.of(unwrapped(model)))
        self._slab, self._slots = ProbeSlab(model, gradients), slots
        if not self._slab.followed.leaves:
            raise ValueError(f"{type(model).__name__} has no trainable parameter to measure")
        if not self._slab.leaves:
            checks.refuse_nothing(self._slab.followed)
        self._always = audit == "always"

    def __enter__(self) -> SampleNorms:
        slab, followed = self._slab, self._slab.followed
        self._norms = SampleNorms()
        slab.open(self._slots, self._ragged)
        is_audited = self._always or not followed.is_audited
        try:
            self._arrived = ArrivedNorms(slab.parameters, is_audited)
        except RuntimeError:
            slab.close()
            raise
        return self._norms

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        slab = self._slab
        self._arrived.stop()
        try:
            checks.explain_penalty(error, slab.took_graphs)
            if kind is None:
                self._check()
                B = self._num_samples
                self._norms._norms = {leaf.name: slab.rows_of(leaf)[0, :B] for leaf in slab.leaves}
        finally:
            if kind is not None or self._norms._norms is None:
                slab.forget()
            slab.close()

    def _check(self) -> None:
        """Raise where a norm would be wrong."""
        slab, cpu = self._slab, torch.device("cpu")
        slab.read()
        none = torch.zeros(0, 3, dtype=torch.float64, device=cpu)
        found = torch.cat([none, *(sums.cpu() for sums in slab.sums())])
        rows_K3 = torch.zeros_like(found).index_copy_(0, slab.order(cpu), found)
        uses = torch.tensor(slab.uses, dtype=torch.float64, device=cpu)
        calls_K = calls_of(rows_K3[:, 2], uses).tolist()
        if not slab.leaves:
            checks.refuse_nothing(slab.followed)
        arrived = self._arrived.names & slab.parameters.keys()  # by now some may be left out
        if not any(calls_K) and not any(slab.parameters[name].grad is not None for name in arrived):
            raise ObservationError(checks.explain_no_backward(slab.followed))
        for name, calls in zip(slab.parameters, calls_K):
            if calls not in (0, 1):
                raise ObservationError(checks.explain_calls(name, calls))
            if not calls and name in arrived:
                raise ObservationError(checks.explain_unseen(name))
        if not self._arrived.norms:
            return
        # A parameter that is left out by now was watched too.
        read = self._arrived.norms.items()
        norms = {name: parts for name, parts in read if name in slab.parameters}
        audit = Audit([*slab.parameters], cpu)
        audit.add(rows_K3[None, :, :2].mT, [norms])
        if wrong := audit.check(slab.parameters, slab.is_half):
            raise ObservationError(wrong)
        slab.followed.is_audited = True
