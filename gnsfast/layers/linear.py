# SPDX-License-Identifier: Apache-2.0
"""``torch.nn.Linear``, with the cross entropy of a head that never stores its logits."""

from typing import Any

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.tensors import is_dtensor


class Linear(nn.Linear):
    """``torch.nn.Linear``, with a ``cross_entropy`` for the head of a language model.

    >>> layer = gnsfast.Linear(5, 2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms["weight"].shape
    torch.Size([3])
    """

    def cross_entropy(self, input: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """The cross entropy of this head's outputs, which are never stored as a whole.

        It equals ``F.cross_entropy(self(input).flatten(0, -2).float(), labels.flatten())``.
        ``options`` are ``ignore_index``, ``reduction``, ``label_smoothing``, ``softcap``,
        ``z_loss`` and ``shift``, as in ``gnsfast.functional.linear_cross_entropy``, which raises
        the same errors.

        Raises NotImplementedError for a subclass with its own forward, and for a weight that is
        sharded during the call.

        >>> head, labels = gnsfast.Linear(5, 11), torch.randint(0, 11, (3, 7))
        >>> with gnsfast.per_sample_sqnorms(head, 3) as norms:
        ...     head.cross_entropy(torch.randn(3, 7, 5), labels).backward()
        >>> norms["weight"].shape
        torch.Size([3])
        """
        where = type(self).__name__
        if type(self).forward is not nn.Linear.forward or "forward" in vars(self):
            raise NotImplementedError(
                f"{where} has a forward of its own, which cross_entropy would bypass. Compute the "
                "loss from the module's output."
            )
        if is_dtensor(self.weight):
            raise NotImplementedError(
                f"{where}: cross_entropy needs the whole weight, but it is sharded. With "
                "fully_shard call cross_entropy inside the model's forward. If the head is "
                "sharded by itself, call "
                "torch.distributed.fsdp.register_fsdp_forward_method(head, 'cross_entropy') after "
                "fully_shard."
            )
        return functional.linear_cross_entropy(
            input, self.weight, labels, bias=self.bias, **options
        )
