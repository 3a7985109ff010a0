# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Triton kernels share: inputs, and single samples in float64."""

import torch
from torch import Tensor


def draw(B: int, T: int, I: int, O: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Samples of very different size: an error in a small one must not hide behind a large one."""
    scale = torch.logspace(-2, 0, B)[:, None, None]
    x, dy = torch.randn(B, T, I) * scale, torch.randn(B, T, O)
    return x.to(device, dtype), dy.to(device, dtype)


def loop(x_BTI: Tensor, dy_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """dW and the squared norms [B + 1], sample by sample in float64."""
    g = [dy.T @ x for x, dy in zip(x_BTI.double().unbind(), dy_BTO.double().unbind())]
    dw = sum(g, torch.zeros(dy_BTO.shape[2], x_BTI.shape[2], device=x_BTI.device).double())
    return dw, torch.stack([*(one.square().sum() for one in g), dw.square().sum()])


def assert_wgrad(dw: Tensor, sqnorm_B1: Tensor, want: tuple[Tensor, Tensor]) -> None:
    """float32 gradients and every norm within 1e-5."""
    scale = want[0].abs().max().item() if want[0].numel() else 0.0
    torch.testing.assert_close(dw.double(), want[0], rtol=1e-5, atol=1e-5 * scale)
    torch.testing.assert_close(sqnorm_B1.double(), want[1], rtol=1e-5, atol=0)


def assert_gradient(grad: Tensor, g: Tensor) -> None:
    """A float32 gradient against the sum of its samples' float64 ones."""
    want = g.sum(0)
    scale = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-5 * scale)


def assert_rows(rows: Tensor, g_PB: list[Tensor]) -> None:
    """Each parameter's probe row against its samples' float64 gradients [B, ...]."""
    assert rows.dtype == torch.float32 and len(rows) == len(g_PB)
    for row, g in zip(rows, g_PB):
        want = torch.cat([g, g.sum(0, keepdim=True)]).square().flatten(1).sum(1)
        torch.testing.assert_close(row[:-1].double(), want, rtol=1e-5, atol=1e-12)
        assert row[-1] == 1.0
