# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for ``torch.nn.Linear`` and for linear layers with a transposed weight."""

from typing import Any

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.errors import ObservationError
from gnsfast.functional import Plan
from gnsfast.layers.drop_in import Converted, DropIn, Opened
from gnsfast.layers.own_forward import OwnForward
from gnsfast.tensors import is_dtensor


class Linear(DropIn, nn.Linear):
    """``torch.nn.Linear`` whose backward can also yield per-sample squared gradient norms.

    Equals ``torch.nn.Linear(in_features, out_features, bias)`` in everything else.

    >>> layer = gnsfast.Linear(5, 2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["weight"].shape
    torch.Size([3])
    """

    gnsfast = Converted("linear")

    def forward(self, input: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input)
        plan = self._plan_for(input, features=1)
        return functional.linear(
            input, self.weight, self.bias, opened.probe, plan, self._links(opened)
        )

    def _links(self, opened: Opened) -> tuple[functional.Link, ...]:
        tie = self.gnsfast.tie
        if tie is None:
            return ()
        if tie.ended(opened.probe):  # else torch would say only that the graph is gone
            raise ObservationError(
                f"{opened.name}: it is called again after a backward pass in one block, and one "
                f"block takes one forward and one backward pass. {in_parts(opened.name, self)}You "
                f"can also leave it out: convert(model, exclude=[{opened.name!r}])."
            )
        return tie.take(opened.name, self.gnsfast.repeated)

    def cross_entropy(self, input: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """The cross entropy of this head's outputs, which are never stored as a whole.

        It equals ``F.cross_entropy(self(input).flatten(0, -2).float(), labels.flatten())``, and
        counts as a call of the module. ``options`` are ``ignore_index``, ``reduction``,
        ``label_smoothing``, ``softcap``, ``z_loss`` and ``shift``, as in
        ``gnsfast.functional.linear_cross_entropy``, which raises the same errors.

        Raises NotImplementedError for a subclass with its own forward, and for a weight that is
        sharded during the call.

        >>> head, labels = gnsfast.Linear(5, 11), torch.randint(0, 11, (3, 7))
        >>> with gnsfast.per_sample_sqnorms(head, 3) as norms:
        ...     head.cross_entropy(torch.randn(3, 7, 5), labels).backward()
        >>> norms["weight"].shape
        torch.Size([3])
        """
        opened = self._measuring()
        where = type(self).__name__ if opened is None else opened.name
        if type(self).forward is not Linear.forward or "forward" in vars(self):
            raise NotImplementedError(
                f"{where}: {type(self).__name__} has a forward of its own, which cross_entropy "
                "would bypass. Compute the loss from the module's output."
            )
        if is_dtensor(self.weight):
            raise NotImplementedError(
                f"{where}: cross_entropy needs the whole weight, but it is sharded. With "
                "fully_shard call cross_entropy inside the model's forward. If the head is "
                "sharded by itself, call "
                "torch.distributed.fsdp.register_fsdp_forward_method(head, 'cross_entropy') after "
                "fully_shard."
            )
        plan = Plan(batch_dim=self.gnsfast.layout.batch_dim)
        options |= dict(bias=self.bias, plan=plan)
        if opened is not None:
            plan = self._plan_for(input, features=1)
            options |= dict(plan=plan, probe=opened.probe, links=self._links(opened))
        return functional.linear_cross_entropy(input, self.weight, labels, **options)


def in_parts(path: str, module: nn.Module) -> str:
    """What a head says of a loss with several backward passes."""
    if type(module).forward is not Linear.forward:
        return ""
    return (
        "If the loss runs a backward pass for each part of the sequence, as torchtitan's "
        f"ChunkedLossWrapper does, compute it by {path}.cross_entropy(hidden, labels), which keeps "
        "no logits in memory either. "
    )


class CastLinear(OwnForward, Linear):
    """Drop-in for linear layers that cast their parameters to the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input)
        w, b = (t if t is None else t.to(input.dtype) for t in (self.weight, self.bias))
        assert w is not None
        if w.dtype.itemsize < self.weight.dtype.itemsize and not self.gnsfast.half:
            self.know(half=True)
        plan = self._plan_for(input, features=1)
        return functional.linear(input, w, b, opened.probe, plan, self._links(opened))


class OutProjection(Linear):
    """The output projection of an attention layer. The attention uses its parameters directly."""

    gnsfast = Converted("out_projection")


class TransposedLinear(DropIn):
    """Drop-in for Hugging Face's ``Conv1D``, a linear layer with weight [in_features,
    out_features].
    """

    gnsfast = Converted("linear")
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            y: Tensor = super().forward(x)
            return y
        plan = self._plan_for(x, features=1, transposed=True)
        return functional.linear(x, self.weight, self.bias, opened.probe, plan)
