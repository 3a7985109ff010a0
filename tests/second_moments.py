# SPDX-License-Identifier: Apache-2.0
"""Second moments of a linear layer's per-sample gradients, by a float64 loop over single samples,
and what they are found from.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def draw(B: int, T: int, I: int, O: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Samples of very different size: none may be left out or counted twice unseen."""
    scale = torch.logspace(-1, 0, B)[:, None, None]
    x, dy = torch.randn(B, T, I) * scale, torch.randn(B, T, O)
    return x.to(device, dtype), dy.to(device, dtype)


def sample_grads(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    """[B, O, I] float64, sample by sample."""
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    g_BOI = torch.zeros(B, O, I, dtype=torch.float64, device=x_BTI.device)
    for g_OI, x_TI, dy_TO in zip(g_BOI, x_BTI.double(), dy_BTO.double()):
        g_OI += dy_TO.T @ x_TI
    return g_BOI


def assert_squares(squares: Tensor, x_BTI: Tensor, dy_BTO: Tensor) -> None:
    """Every coordinate within 1e-5. One in which all samples' products cancel, by chance to less
    than a tenth of the mean, may be off by as much as such a one.
    """
    want = sample_grads(x_BTI, dy_BTO).square().sum(0)
    atol = 1e-6 * want.mean().item() if want.numel() else 0.0
    torch.testing.assert_close(squares.double(), want, rtol=1e-5, atol=atol)


def assert_grams(gram: Tensor, x_BTI: Tensor, dy_BTO: Tensor, side: int) -> None:
    """Symmetric to the bit; every number within 1e-5 of the root of its two diagonal ones."""
    g_BOI = sample_grads(x_BTI, dy_BTO)
    want = sum((g.T @ g if side else g @ g.T for g in g_BOI), gram.double() * 0)
    assert gram.shape == want.shape and torch.equal(gram, gram.T)
    root = want.diagonal().sqrt()
    assert ((gram.double() - want).abs() <= 1e-5 * root[:, None] * root).all()


@contextmanager
def coarse_products() -> Iterator[None]:
    """torch may multiply float32 as tf32 on a GPU, and as bfloat16 on a CPU that can."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
