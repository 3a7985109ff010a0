# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over ``torch.nn``: same constructor, same state_dict, same outputs.

While a probe is open (see ``gnsfast.per_sample_sqnorms``) the backward pass of each also yields
every sample's squared gradient norm; otherwise they run the very code of their torch class.
"""

from typing import Any

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Probed, ProbeRow
from gnsfast.tensors import is_dtensor


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
