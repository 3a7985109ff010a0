# SPDX-License-Identifier: Apache-2.0
"""The drop-in for ``torch.nn.Bilinear``."""

from torch import Tensor, nn

from gnsfast import functional
from gnsfast.layers.drop_in import Converted, DropIn


class Bilinear(DropIn, nn.Bilinear):
    """``torch.nn.Bilinear`` whose backward can also yield per-sample squared gradient norms.

    >>> layer = gnsfast.Bilinear(5, 4, 2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5), torch.randn(3, 7, 4)).sum().backward()
    >>> norms["bias"]
    tensor([98., 98., 98.])
    """

    gnsfast = Converted("bilinear")

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        if (opened := self._measuring()) is None:
            return super().forward(input1, input2)
        plan = self._plan_for(input1, features=1)
        return functional.bilinear(input1, input2, self.weight, self.bias, opened.probe, plan)
