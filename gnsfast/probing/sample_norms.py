# SPDX-License-Identifier: Apache-2.0
"""``per_sample_sqnorms`` measures the per-sample gradient norms of one backward pass."""

import math
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from gnsfast.arguments import integer
from gnsfast.errors import ObservationError
from gnsfast.functional import document_slots
from gnsfast.probing import checks
from gnsfast.probing.checks import NO_BACKWARD
from gnsfast.probing.gradient_watch import GradientWatch
from gnsfast.probing.slabs import Slabs


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
        model: a module made of gnsfast's layers, usually through ``gnsfast.convert``.
        num_samples: B, the number of samples in the one forward and backward pass of the block.
        cu_seqlens: needed if samples are documents packed into rows: integers [documents + 1]. If
            all rows of the batch are one list, they are the first row of each document, and then
            the end of the last. ``gnsfast.cu_seqlens`` makes them from position ids. Documents
            beyond ``num_samples`` are padding. Documents must not attend to each other, so the
            attention mask must be block-diagonal.
        audit: compares the gradient that arrives at each parameter with what passed through its
            modules, in the ``"first"`` pass of a module or ``"always"``. It finds weights that are
            also used as tensors, and reads the gradients once more. Parameters that are sharded or
            have a user's hook are not audited.

    The block yields a mapping from parameter names to [B] float32, whose method ``total()`` gives
    [B] over all parameters. It leaves out trainable parameters that no module covers, which
    ``gnsfast.coverage(model)`` lists. A parameter without a gradient in this pass has norm zero.
    Other threads must not run the model while the block is open.

    Raises:
        SampleShapeError: in the forward pass, if an input does not have ``num_samples`` samples.
        ObservationError: at the start of the block, if a batch norm uses the statistics of its
            batch. At its end, if backward did not go through a module exactly once, or if a weight
            was used outside of its module. The message names the module.

    No check finds packed documents that attend to each other, a load-balancing loss that the caller
    of a mixture of experts asks for by keyword, or a table [1, T] that is looked up once and
    divided by its own norm. (Inside the block it is looked up for each sample.)

    Only ``gnsfast.verify`` finds rows that are as many as the samples but are not samples (tokens
    that a mask selects, an expert's tokens), samples that the model sorts, and a loss term on a
    table [1, ...] alone. Such a table is looked up once for each sample, so that the term counts B
    times: exclude it.

    On a GPU tensor cores truncate as they accumulate, so half-precision norms of long samples come
    out low. In a simulation with independent tokens, a squared norm was low by 1.9e-5 at 8,192
    tokens and by 1.8e-4 at 70,000. This was not measured on a GPU.

    Source: Goodfellow 2015 (arXiv 1510.01799); Gray et al. 2024 (arXiv 2411.00999).

    >>> model = gnsfast.convert(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2)))
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
        audit: str = "first",
    ) -> None:
        if audit not in ("first", "always"):
            raise ValueError(f"audit must be 'first' or 'always', not {audit!r}")
        self._num_samples = slots = integer("num_samples", num_samples, 0)
        self._documents = None
        if cu_seqlens is not None:
            slots = max(len(cu_seqlens) - 1, 0)
            self._documents = document_slots(cu_seqlens, num_samples, slots)
        slabs = Slabs.of(model)
        slabs.refresh(model)
        self._slab = slabs.slab(model, slots)
        if not self._slab.rows:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter in a gnsfast module: call "
                "gnsfast.convert(model) first"
            )
        self._model, self._parameters = model, self._slab.parameters
        self._always = audit == "always"

    def __enter__(self) -> SampleNorms:
        self._norms = SampleNorms()
        self._slab.open(self._documents)
        modules = self._slab.modules
        audited = [
            name
            for name, rows in self._slab.rows.items()
            if self._always or not all(modules[path].gnsfast.audited for path, _, _ in rows)
        ]
        try:
            self._watch = GradientWatch(self._parameters, audited)
        except RuntimeError:
            self._slab.close()
            raise
        sharded = self._parameters.keys() - self._watch.watched
        self._before = {name: checks.mark(self._parameters[name]) for name in sharded}
        return self._norms

    def _got_gradient(self, name: str) -> bool:
        """Whether a parameter got a gradient in this pass."""
        if name in self._before:
            return checks.mark(self._parameters[name]) != self._before[name]
        return name in self._watch.arrived

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._watch.stop()
        self._slab.close()
        if kind is not None:
            self._slab.forget()
            return
        try:
            self._check()
        except ObservationError:
            self._slab.forget()
            raise
        rows = {d: grad[:, : self._num_samples].unbind() for d, grad in self._slab.grad.items()}
        norms = self._norms._norms = {}
        for name, ((_, device, row), *more) in self._slab.rows.items():
            norms[name] = sum((rows[d][r] for _, d, r in more), rows[device][row])

    def _check(self) -> None:
        """Raise where a norm would be wrong."""
        self._slab.refuse_odd_pass()
        found = [sums.tolist() for sums in self._slab.sums()]
        sums = dict(zip(self._slab.devices, found))
        self._check_calls(sums)
        self._check_sums(sums)

    def _check_calls(self, sums: "Sums") -> None:
        """Raise unless every module was called once, or its parameter got no gradient at all."""
        for name, rows in self._slab.rows.items():
            counts = []
            for path, device, row in rows:
                module, c = self._slab.modules[path], sums[device][row][2]
                counts.append(c)
                module.called(c)
                if c not in (0, 1) and not (c > 1 and checks.may_repeat(module)):
                    raise ObservationError(checks.explain_calls(path, module, c))
            if not any(counts) and self._got_gradient(name):
                raise ObservationError(checks.explain_unseen(name, rows[0][0], self._model))
        if not any(row[2] != 0 for rows in sums.values() for row in rows):
            raise ObservationError(NO_BACKWARD)

    def _check_sums(self, sums: "Sums") -> None:
        """Raise unless all of each audited gradient passed through the parameter's modules."""
        whole = sum(row[0] for rows in sums.values() for row in rows)
        for name, norms in self._watch.norms.items():
            p, rows = self._parameters[name], self._slab.rows[name]
            of_samples, ours = (sum(sums[d][r][i] for _, d, r in rows) for i in (0, 1))
            real = sum(norm.item() ** 2 for norm in norms)
            modules = {path: self._slab.modules[path] for path, _, _ in rows}
            if wrong := checks.explain_sums(p, name, modules, ours, real, of_samples, whole):
                raise ObservationError(wrong)
            for module in modules.values():
                seen = bool(module.gnsfast.calls) and math.isfinite(real + ours)
                module.know(audited=module.gnsfast.audited or seen)


Sums = dict[torch.device, list[list[float]]]
"""The rows of ``ProbeSlab.sums`` of each device."""
