# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor


def linear_squares(x: Tensor, dy: Tensor, transposed: bool) -> Tensor:
    found = (
        torch.bmm(
            dy.mT.float() if dy.dtype != torch.float64 else dy.mT,
            x.to(dy.dtype).float() if dy.dtype != torch.float64 else x,
        )
        .square()
        .sum(0)
    )
    return found.mT if transposed else found


def linear_grams(x: Tensor, dy: Tensor, side: int) -> Tensor:
    g = torch.bmm(dy.mT, x)
    g = g.float() if g.dtype != torch.float64 else g
    return (g.mT @ g if side else g @ g.mT).sum(0)
