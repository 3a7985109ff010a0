# SPDX-License-Identifier: Apache-2.0
"""The drop-in for ``torch.nn.Embedding``."""

import torch
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Converted, DropIn
from gnsfast.layers.own_forward import OwnForward
from gnsfast.tensors import is_dtensor


class Embedding(DropIn, nn.Embedding):
    """``torch.nn.Embedding`` whose backward can also yield per-sample squared gradient norms.

    An index of shape [1, T] that B samples share, such as position ids, is looked up once for each
    of them. Embeddings with ``sparse`` or ``scale_grad_by_freq`` have no per-sample norms, as
    ``gnsfast.coverage`` shows.

    >>> layer = gnsfast.Embedding(4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 2) as norms:
    ...     layer(torch.tensor([[1, 1], [0, 2]])).sum().backward()
    >>> norms["weight"]  # gradients of a repeated id are added, then squared
    tensor([12.,  6.])
    """

    gnsfast = Converted("embedding")

    def forward(self, input: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input)
        if is_dtensor(self.weight) and self.max_norm is not None:
            raise NotImplementedError(
                f"{opened.name}: a tensor-parallel embedding with max_norm has no per-sample "
                f"norms. Leave it out: convert(model, exclude=[{opened.name!r}])."
            )
        B, layout, tie = opened.samples, self.gnsfast.layout, self.gnsfast.tie
        packed = opened.documents is not None
        sequence_first = layout.batch_dim == 1 and input.ndim > 1 and input.shape[1] == B
        shared = input.ndim > 1 and input.shape[0] == 1 and B > 1 and not sequence_first
        shared &= not packed
        if layout.broadcast and not packed:
            input, shared = input.expand(B, *input.shape[-1:]), True
        elif shared:
            input = input.expand(B, *input.shape[1:])
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(
                    self.weight, input.contiguous(), self.max_norm, self.norm_type
                )
        y, link = functional.embedding(
            input,
            self.weight,
            opened.probe,
            self._plan_for(input, features=0),
            () if tie is None else tie.links(opened.name),
            padding_idx=self.padding_idx,
            tied=tie is not None,
            shared=shared,
            bare=input.ndim == 1 and B > 1 and not (packed or layout.fold),
            known=layout.known or layout.broadcast,
        )
        if tie is not None and link is not None:
            tie.uses = (*tie.uses, link)
        return y


class OwnEmbedding(OwnForward, Embedding):
    """Drop-in for embeddings with a forward of their own that does the same."""
