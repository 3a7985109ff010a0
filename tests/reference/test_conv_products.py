# SPDX-License-Identifier: Apache-2.0
"""Both ways to a convolution's weight gradient against float64 gradients of single samples."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.ops import cpu
from gnsfast.reference import conv
from gnsfast.signatures import ConvWgrad

GEOMETRIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((3, 3), {}),
    "pointwise": ((1, 1), {}),
    "padded": ((3, 3), dict(padding=(1, 1))),
    "uneven": ((2, 3), dict(padding=(1, 2), stride=(1, 2), dilation=(2, 1))),
    "strided": ((3, 3), dict(padding=(1, 1), stride=(2, 2))),
    "strided far": ((5, 3), dict(padding=(2, 1), stride=(3, 3), dilation=(2, 2))),
    "patches": ((2, 3), dict(stride=(2, 3))),
    "patches with gaps": ((2, 2), dict(stride=(3, 3), padding=(1, 0))),
    "dilated more than strided": ((3, 1), dict(dilation=(3, 1), stride=(2, 1))),
    "sequence": ((3,), dict(padding=(1,), stride=(2,))),
    "volume": ((3, 2, 2), dict(padding=(1, 0, 1), stride=(2, 1, 1), dilation=(1, 2, 1))),
    "patches of a volume": ((2, 2, 2), dict(stride=(2, 2, 2))),
}
WAYS = {
    "by sample": conv.by_sample,
    "by patches": lambda a: conv.by_patches(a, conv.linear_wgrad, conv.copy_channels_last),
    "by the kernel": lambda a: conv.by_patches(a, cpu.linear_wgrad, cpu.channels_last),
}
SIZE = {1: (23,), 2: (13, 11), 3: (7, 6, 8)}


def problem(
    kernel: tuple[int, ...],
    geometry: dict[str, Any],
    dtype: torch.dtype,
    *,
    C: int = 5,
    O: int = 7,
    rows: int = 3,
    samples: int = 3,
) -> ConvWgrad:
    D = len(kernel)
    torch.manual_seed(0)
    x = torch.randn(rows, C, *SIZE[D])
    full = {"stride": (1,) * D, "padding": (0,) * D, "dilation": (1,) * D} | geometry
    dy = torch.randn_like(convolved(x, x.new_zeros(O, C, *kernel), full))
    stride, padding, dilation = (list(full[k]) for k in ("stride", "padding", "dilation"))
    of = list(kernel), stride, padding, dilation, 1
    return ConvWgrad(x.to(dtype), dy.to(dtype), samples, *of, True, False, dtype)


def convolved(x: Tensor, w: Tensor, geometry: dict[str, Any]) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, None, **geometry)


def of_single_samples(a: ConvWgrad) -> Tensor:
    """[B, O, C / groups, *kernel] in float64, by autograd."""
    geometry = {k: getattr(a, k) for k in ("stride", "padding", "dilation", "groups")}
    rows = len(a.x) // a.samples
    w = a.x.new_zeros(a.dy.shape[1], a.x.shape[1] // a.groups, *a.kernel, dtype=torch.float64)
    w.requires_grad_()
    grads = []
    for x, dy in zip(a.x.double().split(rows), a.dy.double().split(rows)):
        grads += torch.autograd.grad((convolved(x, w, geometry) * dy).sum(), w)
    return torch.stack(grads)


def assert_right(way: Any, a: ConvWgrad, rtol: float) -> None:
    dw, row = way(a)
    g = of_single_samples(a).flatten(1)
    total = g.sum(0)
    assert dw.shape == a.results()[0].shape and dw.dtype == a.dtype and dw.is_contiguous()
    torch.testing.assert_close(
        dw.flatten().double(), total, rtol=rtol, atol=rtol * total.abs().max()
    )
    want = torch.cat([g.square().sum(1), total.square().sum()[None], total.new_ones(1)])
    torch.testing.assert_close(row[0].double(), want, rtol=max(rtol, 1e-6), atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("few", [True, False])
def test_geometries(name: str, way: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few patches have one product, others one for each row of the kernel."""
    if not few:
        monkeypatch.setattr(conv, "CACHED", 1)
    assert_right(WAYS[way], problem(*GEOMETRIES[name], torch.float32), 2e-6)
    assert_right(WAYS[way], problem(*GEOMETRIES[name], torch.float64), 1e-12)
    assert_right(WAYS[way], problem(*GEOMETRIES[name], torch.bfloat16), 1e-2)


@pytest.mark.parametrize("way", WAYS)
def test_several_rows_of_a_sample(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cached in product(("padded", "strided", "sequence"), (1, 1 << 20)):
        monkeypatch.setattr(conv, "CACHED", cached)
        a = problem(*GEOMETRIES[name], torch.float32, rows=6, samples=2)
        assert_right(WAYS[way], a, 2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_some_samples_at_a_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = problem(*GEOMETRIES["padded"], torch.float32, rows=5, samples=5)
    for samples in (1, 2, 3):
        monkeypatch.setattr(conv, "CACHED", samples * 13 * 11 * 5 * 3)
        assert_right(WAYS[way], a, 2e-6)
        monkeypatch.setattr(conv, "CACHED", samples * 7 * 5 * 9)
        assert_right(WAYS[way], a, 2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_layouts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "CACHED", 3 * 13 * 11 * 5 * 3)
    a = problem(*GEOMETRIES["padded"], torch.float32)
    last = torch.channels_last
    x = a.x.to(memory_format=last)
    assert_right(WAYS[way], a._replace(x=x, dy=a.dy.to(memory_format=last)), 2e-6)
    assert_right(
        WAYS[way], a._replace(x=x.mT.contiguous().mT, dy=a.dy[:1, :1].expand_as(a.dy)), 2e-6
    )
    every_other = torch.full((3, 5, 13, 22), math.nan)[..., ::2].copy_(a.x)
    assert_right(WAYS[way], a._replace(x=every_other), 2e-6)
    lazy = torch.complex(torch.zeros_like(a.dy), -a.dy).conj().imag
    assert lazy.is_neg()
    assert_right(WAYS[way], a._replace(dy=lazy), 2e-6)


def test_groups_are_torchs() -> None:
    for groups in (2, 4):
        a = problem((3, 3), dict(padding=(1, 1)), torch.float32, C=4, O=8)._replace(groups=groups)
        assert not conv.takes_patches(a)
        assert_right(lambda a: (lambda dw, _, row: (dw, row))(*cpu.conv_wgrad(a)), a, 2e-6)


def test_infinite_samples_stay_apart() -> None:
    a = problem(*GEOMETRIES["padded"], torch.float32)
    a.x[1] = math.inf
    for way in WAYS.values():
        row = way(a)[1][0]
        assert row[[0, 2]].isfinite().all() and not row[[1, 3]].isfinite().any()


def test_the_way_with_fewer_numbers() -> None:
    """Beside their products: 3 x and dy of a sample, or a call and its gradient."""

    def takes_patches(C: int, size: int) -> bool:
        x = torch.empty(8, C, size, size, device="meta")
        one, three = [1, 1], [3, 3]
        geometry = x, x, 8, three, one, one, one, 1
        return conv.takes_patches(ConvWgrad(*geometry, True, False, torch.float32))

    patches = {(C, size): takes_patches(C, size) for C in (32, 128) for size in (16, 32, 64)}
    assert [key for key, taken in patches.items() if not taken] == [(32, 64), (128, 32), (128, 64)]


@pytest.mark.skipif(bool(cpu.missing()), reason="no CPU kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_channels_last(dtype: torch.dtype) -> None:
    """The copy fills what it has to and nothing beside it, for sizes that are no whole tiles."""
    for C, *size in ((1, 1), (16, 16), (5, 3, 300), (33, 17, 18), (48, 2, 31), (3, 4, 5, 16)):
        t = torch.randn(2, C, *size).to(dtype)
        to = torch.full((2, *(s + 2 for s in size), C + 1), math.nan, dtype=dtype)
        inner = to[..., :C]
        for d, s in enumerate(size):
            inner = inner.narrow(1 + d, 1, s)
        cpu.channels_last(inner, t)
        assert torch.equal(inner, t.movedim(1, -1))
        assert to.isnan().sum() == to.numel() - t.numel()
