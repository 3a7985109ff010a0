# SPDX-License-Identifier: Apache-2.0
"""The end of an operator: how many launches it takes, the same bits whichever program arrives last,
and sizes for which every loop of the finishing kernels turns more than once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_launches import launched, shuffled_programs
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast.triton_kernels import operators, sums  # noqa: E402
from gnsfast.triton_kernels.tiles import INTERPRETED  # noqa: E402

F32, F16 = torch.float32, torch.float16
KERNELS = Signed(operators)


def metric(device: str, *v: Tensor) -> dict[str, Any]:
    constants = torch.tensor([[1.5, 1e-3]] * len(v), dtype=torch.float64, device=device)
    return dict(moments=list(v), constants_P2=constants)


def layer_norm(device: str, shape: tuple[int, int, int], **more: Any) -> Callable[[], Any]:
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    w, b = (torch.randn(shape[2], device=device) for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, [shape[2]], w, b, 1e-5)
    return lambda: KERNELS.norm_backward(dy, x, mean, rstd, w, b, True, True, **more)


def rms_norm(device: str, shape: tuple[int, int, int], **more: Any) -> Callable[[], Any]:
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    w = torch.randn(shape[2], device=device)
    return lambda: KERNELS.norm_backward(dy, x, None, None, w, None, True, False, 1e-5, **more)


CALLS: dict[str, tuple[Callable[[str], Callable[[], Any]], list[str]]] = {
    "layer norm": (
        lambda device: layer_norm(device, (3, 40, 100)),
        ["norm_backward_kernel", "finish_sums_kernel"],
    ),
    "rms norm under a metric": (
        lambda device: rms_norm(device, (3, 40, 100), **metric(device, torch.rand(100).to(device))),
        ["norm_backward_kernel", "finish_sums_kernel"],
    ),
    "wide rms norm": (
        lambda device: rms_norm(device, (2, 2, 4101)),
        ["norm_means_kernel", "norm_backward_kernel", "finish_sums_kernel"],
    ),
}
"""An operator's call -> what it launches."""


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_launches(case: tuple[Any, list[str]], device: str) -> None:
    make, names = case
    assert launched(make(device)) == names


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_order_of_programs(case: tuple[Any, list[str]]) -> None:
    """Whoever arrives last, the bits are the same."""
    call = case[0]("cpu")
    want = call()
    for seed in range(3):
        with shuffled_programs(seed):
            got = call()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert not any(t.isnan().any() for t in got)


# Samples, pieces and widths of the parameters; blocks are of 256 pieces and 32 columns.
SIZES = {
    "one": (1, (1,), (1,)),
    "samples in parts": (530, (1,), (40,)),
    "samples of a few pieces in parts": (70, (3,), (65,)),
    "pieces of several blocks": (2, (600,), (33,)),
    "columns of several blocks": (3, (2,), (32 * 130,)),
    "unlike parameters": (5, (70, 9, 1, 300), (3, 100, 64, 1)),
}


@pytest.mark.parametrize("under_metric", [False, True], ids=["", "metric"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_sums(
    size: tuple[int, tuple[int, ...], tuple[int, ...]], under_metric: bool, device: str
) -> None:
    B, pieces, widths = size
    partials = [torch.randn(B, c, n, device=device) + 1 for c, n in zip(pieces, widths)]
    dtypes = [F32, F16, F32, F16]  # the interpreter cuts off what bfloat16 lacks
    grads = [torch.empty(n, dtype=d, device=device) for n, d in zip(widths, dtypes)]
    more = metric(device, *(torch.rand(n, device=device) for n in widths)) if under_metric else {}
    measures = 1 + under_metric
    rows = torch.empty(measures * len(widths), B + 2, device=device)
    plan = sums.plan(B, pieces, widths, measures)
    plan.run(partials, grads, rows, plan.tickets(rows).zero_(), **more)
    for i, (partial, grad) in enumerate(zip(partials, grads)):
        g_BN = partial.double().sum(1)
        total_N = g_BN.sum(0)
        rtol = 2**-11 if grad.dtype == F16 else 1e-5
        torch.testing.assert_close(grad.double(), total_N, rtol=rtol, atol=1e-4)
        for m in range(measures):
            p_N = 1 / (more["moments"][i].double().sqrt() * 1.5 + 1e-3) if m else 1.0
            row = rows[m * len(widths) + i].double()
            torch.testing.assert_close(row[:B], (p_N * g_BN**2).sum(1), rtol=1e-5, atol=0)
            torch.testing.assert_close(row[B], (p_N * total_N**2).sum(), rtol=1e-5, atol=0)
            assert row[B + 1] == 1.0
