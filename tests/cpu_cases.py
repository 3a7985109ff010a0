# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CPU kernels share."""

import torch
from torch import Tensor

from gnsfast.ops import cpu
from gnsfast.signatures import LinearWgrad

SETS = [] if cpu.missing() else cpu._module().kernels()

EDGES = [(5, 9), (14, 32), (15, 33), (100, 70), (6, 600), (530, 40), (31, 1100)]
"""[O, I] around whole tiles, and beyond a block of them."""


def linear(x: Tensor, dy: Tensor, bias: bool = True, transposed: bool = False) -> LinearWgrad:
    return LinearWgrad(x, dy, True, bias, transposed, torch.float32)


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def single_samples(a: LinearWgrad) -> tuple[Tensor, Tensor]:
    """dW and db of each sample, in float64."""
    pairs = list(zip(a.x_BTI.double(), a.dy_BTO.double()))
    grads = [x_TI.T @ dy_TO if a.transposed else dy_TO.T @ x_TI for x_TI, dy_TO in pairs]
    return torch.stack(grads), torch.stack([dy_TO.sum(0) for _, dy_TO in pairs])


def assert_row(row: Tensor, total: Tensor, g_BN: Tensor) -> None:
    """A gradient and its probe row, norm by norm. Roundings of few numbers do not average out."""
    B, rtol = len(g_BN), 1e-6 if g_BN[0].numel() > 100 else 1e-5
    sqnorm_B = g_BN.flatten(1).square().sum(1)
    torch.testing.assert_close(row[:B].double(), sqnorm_B, rtol=rtol, atol=0)
    typical = g_BN.square().mean().sqrt().item()
    torch.testing.assert_close(total.double(), g_BN.sum(0), rtol=1e-5, atol=1e-5 * typical)
    torch.testing.assert_close(row[B].double(), total.double().square().sum(), rtol=1e-6, atol=0)
    assert row[B + 1] == 1 and len(row) == B + 2


def assert_agrees(a: LinearWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, which is what single samples give: dW, db and the probe rows."""
    dw, db, rows, _ = cpu.linear_wgrad(a)
    for total, row, g_BN in zip((dw, db), rows, single_samples(a)):
        assert_row(row, total, g_BN)
    return dw, db, rows


def assert_segments(
    experts: int, dtype: torch.dtype, index: torch.dtype = torch.int64
) -> tuple[LinearWgrad, Tensor]:
    """Of no rows, of one, of more than a chunk; rows before the first and after the last. What was
    asked for, and dW.
    """
    starts = [4, 4, 5, 30, 1500] + [1500, 1510, 1540, 1540] * (experts > 0)
    starts += [1600] * (4 * experts + 1 - len(starts))
    a = linear(torch.randn(1700, 40).to(dtype), torch.randn(1700, 20).to(dtype))
    a = a._replace(starts=torch.tensor(starts, dtype=index), experts=experts)
    assert cpu.takes(a.x_BTI, a.dy_BTO, a.samples, segments=len(starts) - 1)
    dw, db, rows, _ = cpu.linear_wgrad(a)
    E, B = max(experts, 1), a.samples
    spans = [slice(*span) for span in zip(starts, starts[1:])]
    x, dy = a.x_BTI.double(), a.dy_BTO.double()
    grads = torch.stack([dy[span].T @ x[span] for span in spans]).unflatten(0, (E, B))
    sums = torch.stack([dy[span].sum(0) for span in spans]).unflatten(0, (E, B))
    for total, row, g_EBN in zip((dw, db), rows, (grads, sums)):
        assert_row(row, total.view(E, *total.shape[-g_EBN.ndim + 2 :]), g_EBN.transpose(0, 1))
    return a, dw
