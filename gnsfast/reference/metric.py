# SPDX-License-Identifier: Apache-2.0
"""Adam's metric P = 1 / (√v s + eps) with s = 1 / √(1 - beta2^t); v has the parameter's shape.

Every sample's gradient is multiplied by √P before it is squared, because its square alone might
underflow.
"""

import torch
from torch import Tensor


def root_metric(
    v: Tensor, constants_2: Tensor, acc: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """√P in the shape of ``v``. ``constants_2`` holds s and eps."""
    s, eps = constants_2.to(acc).unbind()
    return torch.sqrt(v.to(acc), out=out).mul_(s).add_(eps).rsqrt_()


def one_token_metric(x_BI: Tensor, dy_BO: Tensor, root_OI: Tensor) -> Tensor:
    """[B] float64: Σ_oi P_oi dy_o² x_i², by one product with P instead of B tiles."""
    weighed_BI = dy_BO.square() @ root_OI.square()
    return weighed_BI.mul_(x_BI.square()).sum(1, dtype=torch.float64)
