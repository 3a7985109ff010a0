# SPDX-License-Identifier: Apache-2.0
"""The drop-in for ``torch.nn.EmbeddingBag``."""

import torch
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Converted, DropIn


class EmbeddingBag(DropIn, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` whose backward can also yield per-sample squared gradient norms.

    Each bag is a sample. Layers with mode "max", ``sparse`` or ``scale_grad_by_freq`` have no
    per-sample norms, as ``gnsfast.coverage`` shows.

    >>> layer = gnsfast.EmbeddingBag(4, 3, mode="sum")
    >>> with gnsfast.per_sample_sqnorms(layer, 2) as norms:
    ...     layer(torch.tensor([1, 1, 0]), torch.tensor([0, 2])).sum().backward()
    >>> norms["weight"]  # gradients of a repeated id are added, then squared
    tensor([12.,  3.])
    """

    gnsfast = Converted("embedding_bag")

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input, offsets, per_sample_weights)
        if offsets is None:
            plan = self._plan_for(input, features=1)
        else:  # there is one offset for each bag
            bags = offsets[:-1] if self.include_last_offset else offsets
            plan = self._plan_for(bags, features=0)
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(
                    self.weight, input.contiguous(), self.max_norm, self.norm_type
                )
        return functional.embedding_bag(
            input,
            self.weight,
            opened.probe,
            plan,
            offsets=offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
