# SPDX-License-Identifier: Apache-2.0
"""Linear layers too large for one product of all samples, at sizes of a test: every route of the
formula, in blocks of rows and columns, against a loop over single samples in float64.
"""

import pytest
import torch
from signed import Signed
from torch import Tensor

from gnsfast import reference
from gnsfast.reference import outer

B, I, O = 7, 40, 30


@pytest.fixture(params=[1, 1700], ids=["sample by sample", "four samples at a time"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 columns and 25 rows; nothing is small enough to be computed at once."""
    sizes = {"TILE": 400, "COLUMNS": 16, "GROUP": request.param, "FEW": 0}
    for name, value in sizes.items():
        monkeypatch.setattr(outer, name, value)


def assert_right(x: Tensor, dy: Tensor) -> None:
    dw, _, rows, _ = Signed(reference).linear_wgrad(x, dy, True, False, False, x.dtype)
    g = dy.double().mT @ x.double()
    g = torch.cat([g, g.sum(0, keepdim=True)])
    torch.testing.assert_close(dw.double(), g[-1], rtol=1e-5, atol=1e-5 * g[-1].abs().max().item())
    [row] = rows
    torch.testing.assert_close(row[:-1].double(), g.square().sum((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("T", [1, 3, 70], ids=["closed", "gram", "fused"])
def test_routes(T: int, small_blocks: None) -> None:
    assert outer.linear_route(T, I, O) == {1: "closed", 3: "gram", 70: "fused"}[T]
    scale = torch.logspace(-2, 0, B)[:, None, None]
    x, dy = torch.randn(B, T, I) * scale, torch.randn(B, T, O)
    assert_right(x, dy)


def test_tokens_whose_gram_terms_cancel(small_blocks: None) -> None:
    """Inputs almost alike and gradients that sum to zero; the samples beside it are not touched."""
    x, dy = torch.randn(B, 3, I), torch.randn(B, 3, O)
    x[1] = x[1, :1] + 1e-3 * x[1]
    dy[1] -= dy[1].mean(0)
    assert_right(x, dy)
