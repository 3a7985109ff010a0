# SPDX-License-Identifier: Apache-2.0
"""The query, key and value projections of an attention layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.functional._linear import linear
from gnsfast.functional.plan import PLAIN, Plan


def in_projection(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value projections of an attention layer, whose backward fills ``probe``.

    It equals ``F.linear(t, w, b)`` for the three (t, w, b) of (query, key, value), ``weight`` and
    ``bias.chunk(3)``. Backward reads the three output gradients where they are, without copying
    them into one tensor.

    Args:
        query, key, value: [B, ..., features], or [T, B, features] with ``plan.batch_dim`` 1.
        weight: [3 E, features], or three weights [E, features of its input].
        bias: [3 E] or None.
        probe: float32 zeros [P, B + 2]: rows for the weight of the query, the key and the value,
            then for the three biases. A frozen parameter has none.
        plan: says which dimension holds the samples, or where documents begin.

    The squared norms scale with the loss, as in ``linear``. That of a packed weight is the sum of
    its three rows. Raises ValueError for a probe of another shape.
    Source: Goodfellow 2015 (arXiv 1510.01799), for each of the three.

    >>> x, w = torch.randn(3, 7, 4), torch.randn(12, 4, requires_grad=True)
    >>> probe = torch.zeros(3, 3 + 2, requires_grad=True)
    >>> q, k, v = gnsfast.functional.in_projection(x, x, x, w, None, probe)
    >>> (q * k + v).sum().backward()
    >>> torch.allclose(probe.grad[:, 3].sum(), w.grad.square().sum())
    True
    """
    if isinstance(weight, Tensor):
        weights, trained = weight.chunk(3), [weight.requires_grad] * 3
    else:
        weights, trained = weight, [w.requires_grad for w in weight]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    parts = zip((query, key, value), weights, biases)
    of_bias = bias is not None and bias.requires_grad
    plan.check("in_projection", probe, sum(trained) + 3 * of_bias)
    if not torch.is_grad_enabled():
        q, k, v = (F.linear(*part) for part in parts)
        return q, k, v
    rows = iter(probe.unbind())
    of_weights = [[next(rows)] if own else [] for own in trained]
    of_biases = [[row] for row in rows] or [[], [], []]
    own_rows = (w + b for w, b in zip(of_weights, of_biases))
    own_probes = (torch.stack(own) if own else probe[:0] for own in own_rows)
    q, k, v = (linear(*part, own, plan) for part, own in zip(parts, own_probes))
    return q, k, v
