# SPDX-License-Identifier: Apache-2.0
"""What a contestant does with a model, and the contestants that need torch alone."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gnsfast

Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]
"""A model, or a function in its place, and a batch -> the mean of its samples' losses."""
PIECE = 1 << 14


class Session:
    """Plain torch, and what the others share: ``run`` leaves ordinary gradients and norms."""

    def __init__(self, model: nn.Module, loss_of: Loss, batch: tuple[Tensor, ...], B: int) -> None:
        self.model, self.loss_of, self.batch, self.B = model, loss_of, batch, B
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._sqnorms: dict[str, Tensor] = {}
        self.take_over()

    def take_over(self) -> None:
        """Wrap or hook ``self.model``."""

    def run(self) -> None:
        """Forward and backward."""
        self.loss_of(self.model, self.batch).backward()

    def sqnorms(self) -> dict[str, Tensor]:
        """Parameter name -> [B]: the squared norm of each sample's share of the mean's gradient."""
        return self._sqnorms

    def once(self) -> None:
        """A pass that leaves nothing behind: what is timed of a layer."""
        self.run()
        self.clear()

    def clear(self) -> None:
        """Forget gradients and norms."""
        for tensor in (*self.parameters.values(), *self.batch):
            tensor.grad = None
        self._sqnorms = {}


class Gnsfast(Session):
    """This project."""

    def run(self) -> None:
        with gnsfast.per_sample_sqnorms(self.model, self.B) as norms:
            super().run()
        self._sqnorms = dict(norms)


class SingleSamples(Session):
    """The obvious way: a forward and backward pass for each sample alone. Of a batch with fewer
    than ``B`` samples the shares are those of a batch of ``B``; in float64 it is the gate's truth.
    """

    def run(self) -> None:
        sqnorms: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        moving = [t for t in self.batch if t.requires_grad]
        grads_in: list[list[Tensor]] = [[] for _ in moving]
        for b in range(len(self.batch[0])):
            sample = sample_of(self.batch, b)
            wanted = [*self.parameters.values(), *(t for t in sample if t.requires_grad)]
            grads = torch.autograd.grad(self.loss_of(self.model, sample), wanted)
            for (name, p), g in zip(self.parameters.items(), grads):
                sqnorms[name].append(row_sqnorms(g[None]) / self.B**2)
                if p.grad is None:
                    p.grad = g.div_(self.B)
                else:
                    p.grad.add_(g, alpha=1 / self.B)
            for found, g in zip(grads_in, grads[len(self.parameters) :]):
                found.append(g)
        for t, found in zip(moving, grads_in):
            t.grad = torch.cat(found).div_(self.B)
        self._sqnorms = {name: torch.cat(norms) for name, norms in sqnorms.items()}


class VmapGrad(Session):
    """``vmap(grad(loss of one sample))``; the samples' gradients are added into ``.grad``."""

    def take_over(self) -> None:
        # Attention's backward has no batching rule: torch says so, and loops over the samples.
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not")

    def run(self) -> None:
        batch = dict(enumerate(self.batch))
        moving = {i: t.detach() for i, t in batch.items() if t.requires_grad}
        still = {i: t for i, t in batch.items() if not t.requires_grad}

        def loss_of_one(
            parameters: dict[str, Tensor], moving: dict[int, Tensor], still: dict[int, Tensor]
        ) -> Tensor:
            sample = {**moving, **still}
            call = lambda *x: torch.func.functional_call(self.model, parameters, x)
            return self.loss_of(call, tuple(sample[i][None] for i in sorted(sample)))

        gradients = torch.func.vmap(torch.func.grad(loss_of_one, (0, 1)), (None, 0, 0))
        grads, grads_in = gradients(
            {name: p.detach() for name, p in self.parameters.items()}, moving, still
        )
        for i, g_in in grads_in.items():
            batch[i].grad = g_in.div_(self.B)
        while grads:
            name, g_BP = grads.popitem()
            self.parameters[name].grad = g_BP.mean(0)
            self._sqnorms[name] = row_sqnorms(g_BP) / self.B**2


def sample_of(batch: tuple[Tensor, ...], b: int) -> tuple[Tensor, ...]:
    """Sample b as a batch of one; its tensors are leaves of their own."""
    return tuple(t[b : b + 1].detach().requires_grad_(t.requires_grad) for t in batch)


def row_sqnorms(g_BP: Tensor) -> Tensor:
    """[B] squared norms of [B, ...], added up over pieces of a row.

    Over a whole row of 58M elements a CPU's ``vector_norm`` is off by 9e-3, over pieces of 16k by
    1e-7, and as fast. At least in float32.
    """
    g_BP, dtype = g_BP.flatten(1), torch.promote_types(g_BP.dtype, torch.float32)
    n = g_BP.shape[1] // PIECE
    pieces_BNP, rest_BP = g_BP[:, : n * PIECE].unflatten(1, (n, PIECE)), g_BP[:, n * PIECE :]
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=dtype)
    sqnorm_B: Tensor = norm(pieces_BNP).square().sum(1) + norm(rest_BP).square()
    return sqnorm_B
