# SPDX-License-Identifier: Apache-2.0
"""Norms alone: the probe rows of the operator that makes dW, while no dW is written."""

from typing import Any

import pytest
import torch
from largest import Largest
from torch import Tensor

from gnsfast import ops, reference
from gnsfast.ops import cpu
from gnsfast.signatures import LinearWgrad

SHAPES = {  # B, T, I, O: routes of the reference and of the CPU kernel, whole and in blocks
    "small": (4, 6, 8, 5),
    "one token": (3, 1, 600, 900),
    "blocks": (2, 300, 600, 1100),
    "short": (5, 16, 900, 800),
    "thin": (2, 1, 3, 4),
    "one sample": (1, 7, 5, 2000),
    "empty": (3, 0, 4, 5),
}


def operands(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> LinearWgrad:
    B, T, I, O = shape
    x, dy = torch.randn(B, T, I).to(dtype), torch.randn(B, T, O).to(dtype)
    flags = {"weight": True, "bias": True, "transposed": False, **options}
    return LinearWgrad(x, dy, **flags, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: str, bias: bool, transposed: bool, dtype: torch.dtype) -> None:
    a = operands(SHAPES[shape], dtype, bias=bias, transposed=transposed)
    g_BOI, g_BO = a.dy_BTO.double().mT @ a.x_BTI.double(), a.dy_BTO.double().sum(1)
    want = [_norms(g_BOI), _norms(g_BO)][: 1 + bias]
    for run in (cpu.linear_norms, reference.linear_norms):
        rows = run(a)
        assert rows.dtype == torch.float32 and (rows[:, -1] == 1.0).all()
        torch.testing.assert_close(rows[:, :-1].double(), torch.stack(want), rtol=1e-5, atol=1e-12)


def _norms(g: Tensor) -> Tensor:
    return torch.cat([g.flatten(1).square().sum(1), g.sum(0).square().sum()[None]])


@pytest.mark.parametrize("run", [cpu.linear_norms, reference.linear_norms])
@pytest.mark.parametrize("T", [2, 160])
def test_no_weight_gradient_is_made(run: Any, T: int) -> None:
    """Of a head of 5M numbers at most a tile of 1M is in memory."""
    a = operands((2, T, 256, 20_000), torch.float32, bias=False)
    given = a.dy_BTO.numel()
    with Largest() as made:
        run(a)
    assert given < 1.5 * 256 * 20_000 and made.numbers <= max(given, reference.TILE)


def test_operator() -> None:
    a = operands(SHAPES["small"], torch.float32)
    torch.library.opcheck(torch.ops.gnsfast.linear_norms.default, tuple(a))


def test_links_have_the_gradient() -> None:
    """A head that is tied makes dW, whose rows its links take."""
    a = operands(SHAPES["small"], torch.float32)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    for own, is_made in ((a, False), (a._replace(ids_BS=ids), True)):
        dw, _, rows, _ = ops.norms_alone(ops.linear_wgrad, own)
        assert (dw.numel() > 0) is is_made
        torch.testing.assert_close(rows, ops.linear_wgrad(own)[2])
