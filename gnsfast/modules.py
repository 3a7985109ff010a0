# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over ``torch.nn``: same constructor, same state_dict, same outputs.

While a probe is open (see ``gnsfast.per_sample_sqnorms``) the backward pass of each also yields
every sample's squared gradient norm; otherwise they run the very code of their torch class.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast import functional
from gnsfast.functional._samples import num_samples
from gnsfast.probed import Probed, ProbeRow
from gnsfast.sharding import is_dtensor


class Linear(Probed, nn.Linear):
    """``torch.nn.Linear`` whose backward can also yield per-sample squared gradient norms.

    Equals ``torch.nn.Linear(in_features, out_features, bias)`` in everything else.

    >>> layer = gnsfast.Linear(5, 2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["weight"].shape
    torch.Size([3])
    """

    route = "linear"
    _takes_documents = True
    takes_metric = True
    _blocks = 1  # heads along its input that have a row of their own

    def probe_rows(self) -> list[ProbeRow]:
        """Of an attention's output projection each head's columns, where ``convert`` was told."""
        rows = super().probe_rows()
        if self._blocks == 1 or not rows or rows[0].parameter != "weight":
            return rows
        O, I = self.weight.shape
        size = I // self._blocks
        heads = [
            ProbeRow("weight", str(h), (slice(0, O), slice(h * size, (h + 1) * size)))
            for h in range(self._blocks)
        ]
        return [*heads, *rows[1:]]

    def forward(self, input: Tensor) -> Tensor:
        if not self._open():
            return super().forward(input)
        assert self._probe is not None
        links = () if self._tie is None else self._tie.take(self._probe_name)
        return functional.linear(
            input,
            self.weight,
            self.bias,
            self._probe,
            batch_dim=self._batch_dim(input, features=1),
            starts=self._starts(input, features=1),
            links=links,
            metric=self._metric,
            groups=self._groups,
        )

    def cross_entropy(self, input: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """The cross entropy of this head's outputs, without them in memory as a whole.

        Equals ``F.cross_entropy(self(input).flatten(0, -2).float(), labels.flatten())``, and counts
        as the module's one call. ``options`` are ``ignore_index``, ``reduction``,
        ``label_smoothing``, ``softcap``, ``z_loss`` and ``shift`` of
        ``gnsfast.functional.linear_cross_entropy``, which also says what it raises.

        Raises NotImplementedError for a subclass with a forward of its own, and for a weight that
        is sharded at this moment.

        >>> head, labels = gnsfast.Linear(5, 11), torch.randint(0, 11, (3, 7))
        >>> with gnsfast.per_sample_sqnorms(head, 3) as norms:
        ...     head.cross_entropy(torch.randn(3, 7, 5), labels).backward()
        >>> norms["weight"].shape
        torch.Size([3])
        """
        where = self._probe_name or type(self).__name__
        if type(self).forward is not Linear.forward or "forward" in vars(self):
            raise NotImplementedError(
                f"{where}: {type(self).__name__} has a forward of its own, which cross_entropy "
                "would leave out: compute the loss from its output"
            )
        if is_dtensor(self.weight):
            raise NotImplementedError(
                f"{where}: cross_entropy needs the whole weight, and it is sharded. Below "
                "fully_shard call it in the model's own forward, or, where the head is a unit of "
                "its own, torch.distributed.fsdp.register_fsdp_forward_method(head, "
                "'cross_entropy') after that"
            )
        layout: dict[str, Any] = dict(bias=self.bias, batch_dim=self._samples.batch_dim)
        if self._open():
            links = () if self._tie is None else self._tie.take(self._probe_name)
            if self._metric is not None or self._groups is not None:
                raise NotImplementedError(
                    f"{where}: cross_entropy has no norms under a metric, and none of groups: "
                    "compute the loss from its output"
                )
            if links and self._documents is not None:
                raise NotImplementedError(
                    f"{where}: a tied head's cross_entropy has no norms for documents of packed "
                    "rows (cu_seqlens): compute the loss from its output"
                )
            layout |= dict(
                probe=self._probe,
                batch_dim=self._batch_dim(input, features=1),
                starts=self._starts(input, features=1),
                links=links,
            )
        return functional.linear_cross_entropy(input, self.weight, labels, **layout, **options)


class TransposedLinear(Probed):
    """Over Hugging Face's ``Conv1D``: a linear layer, its weight [in_features, out_features]."""

    route = "linear"
    _takes_documents = True
    takes_metric = True
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self._open():
            y: Tensor = super().forward(x)
            return y
        assert self._probe is not None
        return functional.linear(
            x,
            self.weight,
            self.bias,
            self._probe,
            batch_dim=self._batch_dim(x, features=1),
            transposed=True,
            starts=self._starts(x, features=1),
            metric=self._metric,
            groups=self._groups,
        )


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


class _Conv(Probed):
    """The convolutions; ``torch.nn`` routes their forward through ``_conv_forward``."""

    route = "conv"
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    _reversed_padding_repeated_twice: list[int]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._open():
            y: Tensor = super()._conv_forward(input, weight, bias)  # type: ignore[misc]
            return y
        assert self._probe is not None
        if is_dtensor(weight):
            raise NotImplementedError(
                f"{self._probe_name}: a tensor-parallel convolution has no per-sample norms. "
                f"Leave it out: convert(model, exclude=[{self._probe_name!r}])."
            )
        if unbatched := input.ndim == weight.ndim - 1:
            input = input[None]
        self._batch_dim(input, features=input.ndim - 1)
        input, padding = self._pad(input)
        y = functional.conv(
            input,
            weight,
            bias,
            self._probe,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return y[0] if unbatched else y

    def _pad(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """What convolution itself cannot pad, padded here; the rest as numbers."""
        none = (0,) * len(self.kernel_size)
        mode: Any = self.padding_mode
        if mode != "zeros":
            return F.pad(input, self._reversed_padding_repeated_twice, mode), none
        if not isinstance(self.padding, str):
            return input, self.padding
        if self.padding == "valid":
            return input, none
        span = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
        if all(s % 2 == 0 for s in span):
            return input, tuple(s // 2 for s in span)
        return F.pad(input, [p for s in reversed(span) for p in (s // 2, s - s // 2)]), none


class Conv1d(_Conv, nn.Conv1d):
    """``torch.nn.Conv1d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Conv1d(2, 4, kernel_size=3, padding="same")
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8)).sum().backward()
    >>> norms["bias"]
    tensor([256., 256., 256.])
    """


class Conv2d(_Conv, nn.Conv2d):
    """``torch.nn.Conv2d`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Conv2d(2, 4, kernel_size=2, stride=2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8, 8)).sum().backward()
    >>> norms["bias"]
    tensor([1024., 1024., 1024.])
    """
