# SPDX-License-Identifier: Apache-2.0
"""Adam's metric P = 1 / (√v s + eps), s = 1 / √(1 - beta2^t): v lies as the parameter does.

Every sample's gradient is weighed by √P and then squared, so a product of weights and squares never
underflows first.
"""

import torch
from torch import Tensor


def root_metric(
    v: Tensor, constants_2: Tensor, acc: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """√P, shaped as ``v``; ``constants_2`` holds s and eps."""
    s, eps = constants_2.to(acc).unbind()
    return torch.sqrt(v.to(acc), out=out).mul_(s).add_(eps).rsqrt_()


def one_token_metric(x_BI: Tensor, dy_BO: Tensor, root_OI: Tensor) -> Tensor:
    """Σ_oi P_oi dy_o² x_i² of each sample, float64: a product with P instead of B tiles."""
    weighed_BI = dy_BO.square() @ root_OI.square()
    return weighed_BI.mul_(x_BI.square()).sum(1, dtype=torch.float64)
