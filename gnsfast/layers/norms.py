# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for ``torch.nn.LayerNorm``, ``torch.nn.RMSNorm`` and models' own RMS norms."""

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Probed


class LayerNorm(Probed, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.LayerNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["bias"].round()
    tensor([245., 245., 245.])
    """

    route = "layer_norm"
    _takes_documents = True
    takes_metric = True

    def forward(self, input: Tensor) -> Tensor:
        if not self._open():
            return super().forward(input)
        assert self._probe is not None
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self._probe,
            eps=self.eps,
            batch_dim=self._batch_dim(input, features=len(self.normalized_shape)),
            starts=self._starts(input, features=len(self.normalized_shape)),
            metric=self._metric,
            groups=self._groups,
        )


class RMSNorm(Probed, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.RMSNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["weight"].shape
    torch.Size([3])
    """

    route = "rms_norm"
    _takes_documents = True
    takes_metric = True

    def forward(self, x: Tensor) -> Tensor:
        if not self._open():
            return super().forward(x)
        assert self._probe is not None
        return functional.rms_norm(
            x,
            self.weight,
            self._probe,
            eps=self.eps,
            batch_dim=self._batch_dim(x, features=len(self.normalized_shape)),
            starts=self._starts(x, features=len(self.normalized_shape)),
            metric=self._metric,
            groups=self._groups,
        )


class _ForeignRMSNorm(Probed):
    """Over the RMS norms that models bring along; ``variant`` says how theirs applies its gain."""

    route = "rms_norm"
    _takes_documents = True
    takes_metric = True
    variant = ""
    weight: Tensor
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self._open():
            y: Tensor = super().forward(hidden_states)
            return y
        assert self._probe is not None
        eps = getattr(self, "variance_epsilon", None)
        return functional.rms_norm(
            hidden_states,
            self.weight,
            self._probe,
            eps=self.eps if eps is None else eps,
            variant=self.variant,
            batch_dim=self._batch_dim(hidden_states, features=1),
            starts=self._starts(hidden_states, features=1),
            metric=self._metric,
            groups=self._groups,
        )


class LlamaRMSNorm(_ForeignRMSNorm):
    """Over the RMS norms of Llama, Mistral, Qwen: normalised in float32, rounded, then times the
    weight.
    """

    variant = "llama"


class OlmoRMSNorm(_ForeignRMSNorm):
    """Over the RMS norms of OLMo 2: times the weight in float32, then rounded."""

    variant = "olmo"


class T5RMSNorm(_ForeignRMSNorm):
    """Over T5's layer norm: rounded only where the weight is narrow."""

    variant = "t5"


class GemmaRMSNorm(_ForeignRMSNorm):
    """Over the RMS norms of Gemma: times ``1 + weight`` in float32, then rounded."""

    variant = "gemma"
