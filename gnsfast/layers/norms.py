# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for ``torch.nn.LayerNorm``, ``torch.nn.RMSNorm`` and models' own RMS norms."""

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Converted, DropIn
from gnsfast.layers.own_forward import OwnForward


class LayerNorm(DropIn, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.LayerNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["bias"].round()
    tensor([245., 245., 245.])
    """

    gnsfast = Converted("layer_norm")

    def forward(self, input: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input)
        shape = self.normalized_shape
        plan = self._plan_for(input, features=len(shape))
        return functional.layer_norm(
            input, shape, self.weight, self.bias, opened.probe, plan, eps=self.eps
        )


EPS = ("eps", "variance_epsilon", "epsilon")
"""The attributes in which models keep the epsilon of their norms."""


def eps_of(module: nn.Module) -> float:
    """The epsilon of a model's own norm. The default is nanoGPT's, which stands in its code."""
    found = (getattr(module, name, None) for name in EPS)
    return next((eps for eps in found if isinstance(eps, float)), 1e-5)


class OwnLayerNorm(OwnForward):
    """Drop-in for models' own layer norms, which may have no bias."""

    gnsfast = Converted("layer_norm")
    weight: Tensor
    bias: Tensor | None

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        if self._measuring() is None:
            y: Tensor = super().forward(*x, **named)
            return y
        return self._normed(*x, *named.values())  # models call their argument what they like

    def _normed(self, x: Tensor) -> Tensor:
        return self._layer_norm(x, self.weight, getattr(self, "bias", None))

    def _layer_norm(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        plan, probe = self._plan_for(x, features=1), self._measured.probe
        return functional.layer_norm(x, w.shape, w, b, probe, plan, eps=eps_of(self))


class Float32LayerNorm(OwnLayerNorm):
    """Drop-in for layer norms that cast input and parameters to float32, then round."""

    def _normed(self, x: Tensor) -> Tensor:
        b = getattr(self, "bias", None)
        wide = x.float(), self.weight.float(), b if b is None else b.float()
        return self._layer_norm(*wide).to(x.dtype)


class _ChannelsFirst(OwnLayerNorm):
    def _normed(self, x: Tensor) -> Tensor:
        return super()._normed(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelsFirstLayerNorm(_ChannelsFirst, OwnLayerNorm):
    """Drop-in for layer norms over the channels of an input [B, C, H, W]."""


class ChannelsFirstFloat32LayerNorm(_ChannelsFirst, Float32LayerNorm):
    """The same in float32."""


class RMSNorm(DropIn, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.RMSNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["weight"].shape
    torch.Size([3])
    """

    gnsfast = Converted("rms_norm")

    def forward(self, x: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(x)
        plan = self._plan_for(x, features=len(self.normalized_shape))
        return functional.rms_norm(x, self.weight, opened.probe, plan, eps=self.eps)


class _ForeignRMSNorm(OwnForward):
    """Drop-in for models' own RMS norms. ``variant`` is that of ``functional.rms_norm``."""

    gnsfast = Converted("rms_norm")
    variant = ""
    weight: Tensor

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            y: Tensor = super().forward(*x, **named)
            return y
        (hidden_states,) = *x, *named.values()  # models call their argument what they like
        return functional.rms_norm(
            hidden_states,
            self.weight,
            opened.probe,
            self._plan_for(hidden_states, features=1),
            eps=eps_of(self),
            variant=self.variant,
        )


class LlamaRMSNorm(_ForeignRMSNorm):
    """For the RMS norms of Llama, Mistral and Qwen: normalise in float32, round, then multiply by
    the weight.
    """

    variant = "llama"


class OlmoRMSNorm(_ForeignRMSNorm):
    """For the RMS norms of OLMo 2: multiply by the weight in float32, then round."""

    variant = "olmo"


class T5RMSNorm(_ForeignRMSNorm):
    """For T5's layer norm: round only if the weight is half precision."""

    variant = "t5"


class GemmaRMSNorm(_ForeignRMSNorm):
    """For the RMS norms of Gemma: multiply by ``1 + weight`` in float32, then round."""

    variant = "gemma"


class Float32RMSNorm(_ForeignRMSNorm):
    """For the RMS norms of OLMo-core and litgpt: the weight too is cast to float32, then round."""

    variant = "float32"


class QwenRMSNorm(_ForeignRMSNorm):
    """For OLMo-core's RMS norms of Qwen: as Llama's, with the weight cast to the input's dtype."""

    variant = "qwen"


class UnitRMSNorm(_ForeignRMSNorm):
    """For litgpt's Gemma: add 1 to the weight in its own dtype, go on in float32, then round."""

    variant = "unit"


class PlainRMSNorm(_ForeignRMSNorm):
    """For RMS norms that compute in the dtype of their input."""

    variant = "as_it_is"


class NarrowRMSNorm(_ForeignRMSNorm):
    """The same, with the weight cast to the dtype of the input."""

    variant = "narrow"


class TorchRMSNorm(_ForeignRMSNorm):
    """For layers that call ``torch.nn.functional.rms_norm``."""

    variant = "torch"
