# SPDX-License-Identifier: Apache-2.0
"""The drop-in for ``torch.nn.Embedding``."""

import torch
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.functional import num_samples
from gnsfast.layers.drop_in import Probed
from gnsfast.tensors import is_dtensor


class Embedding(Probed, nn.Embedding):
    """``torch.nn.Embedding`` whose backward can also yield per-sample squared gradient norms.

    An index of shape [1, T], shared by B samples (position ids), is looked up once for each of
    them. ``sparse`` and ``scale_grad_by_freq`` have no per-sample gradient here:
    ``gnsfast.coverage`` names them.

    >>> layer = gnsfast.Embedding(4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 2) as norms:
    ...     layer(torch.tensor([[1, 1], [0, 2]])).sum().backward()
    >>> norms["weight"]  # the repeated id adds before it is squared
    tensor([12.,  6.])
    """

    route = "embedding"
    _takes_documents = True
    takes_metric = True

    def forward(self, input: Tensor) -> Tensor:
        if not self._open():
            return super().forward(input)
        assert self._probe is not None
        if is_dtensor(self.weight) and (self._tie is not None or self.max_norm is not None):
            raise NotImplementedError(
                f"{self._probe_name}: a tensor-parallel embedding that is tied to a head, or has a "
                "max_norm, has no per-sample norms. "
                f"Leave it out: convert(model, exclude=[{self._probe_name!r}])."
            )
        B = num_samples(self._probe)
        sequence_first = self._samples.batch_dim == 1 and input.ndim > 1 and input.shape[1] == B
        shared = input.ndim > 1 and input.shape[0] == 1 and B > 1 and not sequence_first
        packed = self._documents is not None
        shared &= not packed
        if self._samples.broadcast and not packed:
            input, shared = input.expand(B, *input.shape[-1:]), False
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
            self._probe,
            padding_idx=self.padding_idx,
            batch_dim=self._batch_dim(input, features=0),
            tied=self._tie is not None,
            shared=shared,
            bare=input.ndim == 1 and B > 1 and not packed,
            starts=self._starts(input, features=0),
            links=() if self._tie is None else self._tie.uses,
            metric=self._metric,
            groups=self._groups,
        )
        if self._tie is not None and link is not None:
            self._tie.uses = (*self._tie.uses, link)
        return y
