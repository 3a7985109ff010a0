# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of norms and embeddings against loops over single samples in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_cases import assert_row
from layouts import LAYOUTS
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from gnsfast import reference
from gnsfast.ops import cpu
from gnsfast.signatures import EmbeddingWgrad, NormBackward

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason=cpu.missing() or "the kernel is there")

SHAPES = [(1, 1, 3), (3, 7, 1), (3, 7, 17), (40, 2, 63), (2, 300, 129), (1, 1025, 48), (5, 33, 96)]
"""[B, T, F] around whole vectors, rows taken together, tokens added together, and parts."""


def norm(dy: Tensor, x: Tensor, kind: str, gain: bool = True) -> NormBackward:
    """With torch's own statistics for a layer norm, and an RMS norm with an offset else."""
    w, b = (torch.randn(x.shape[2], dtype=x.dtype) if gain else None for _ in range(2))
    if kind == "rms":
        return NormBackward(dy, x, None, None, w, None, gain, False, eps=1e-3, offset=1.0)
    _, mean, rstd = torch.native_layer_norm(x, x.shape[2:], w, b, 1e-3)
    return NormBackward(dy, x, mean, rstd, w, b, gain, gain, eps=1e-3)


def of_single_samples(a: NormBackward) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and dW and db of each sample, in float64 with the statistics that ``a`` gives."""
    x, dy, mean = a.x_BTF.double(), a.dy_BTF.double(), 0.0
    rstd = (x.square().mean(2, True) + a.eps).rsqrt()
    if a.mean_BT1 is not None and a.rstd_BT1 is not None:
        mean, rstd = a.mean_BT1.double(), a.rstd_BT1.double()
    normed = (x - mean) * rstd
    gain = 1.0 if a.w_F is None else a.w_F.double() + a.offset
    weighed = dy * gain
    constant = 0.0 if a.mean_BT1 is None else weighed.mean(2, True)
    dx = (weighed - constant - normed * (weighed * normed).mean(2, True)) * rstd
    samples = [(dy_TF * normed_TF, dy_TF) for dy_TF, normed_TF in zip(dy, normed)]
    dw_BF, db_BF = (torch.stack([pair[k].sum(0) for pair in samples]) for k in range(2))
    return dx, dw_BF, db_BF


def assert_right(a: NormBackward) -> None:
    dx, dw, db, rows = cpu.norm_backward(a)
    want_dx, dw_BF, db_BF = of_single_samples(a)
    rtol = {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dx.dtype]
    rstd = 1.0 if a.rstd_BT1 is None else a.rstd_BT1.double()  # one number has dx = 0
    typical = max(t.square().mean().sqrt() for t in (want_dx, a.dy_BTF.double() * rstd)).item()
    torch.testing.assert_close(dx.double(), want_dx, rtol=rtol, atol=4 * rtol * typical)
    wanted = [(dw, dw_BF)] * a.weight + [(db, db_BF)] * a.bias
    assert len(rows) == len(wanted)
    for row, (total, g_BF) in zip(rows, wanted):
        if dx.dtype == torch.bfloat16:  # dW is rounded to the dtype of the weight
            sqnorm_B = g_BF.square().sum(1)
            torch.testing.assert_close(row[:-2].double(), sqnorm_B, rtol=1e-5, atol=0)
            torch.testing.assert_close(total, g_BF.sum(0).to(total.dtype), rtol=1e-2, atol=1e-2)
        elif g_BF.shape[1] > 1:
            assert_row(row, total, g_BF)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int, int], kind: str, instructions: str) -> None:
    dy, x = torch.randn(2, *shape)
    assert_right(norm(dy, 3 * x + 2, kind))
    assert_right(norm(dy.bfloat16(), (3 * x + 2).bfloat16(), kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, instructions: str) -> None:
    dy, x = (LAYOUTS[layout](3, 40, 33) for _ in range(2))
    assert_right(norm(dy, x, "layer"))
    assert_right(norm(dy, x, "rms"))
    ids_BT = torch.randint(0, 50, (40, 3)).T
    dw, rows = cpu.embedding_wgrad(EmbeddingWgrad(dy, ids_BT, 50, -1, torch.float32))
    assert_row(rows[0], dw, tables(dy, ids_BT, 50))


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_frozen_parameters(weight: bool, bias: bool, instructions: str) -> None:
    a = norm(*torch.randn(2, 3, 40, 33), "layer")._replace(weight=weight, bias=bias)
    assert_right(a)
    halves = a._replace(w_F=torch.ones(33).bfloat16(), b_F=torch.ones(33).bfloat16())
    for found, want in zip(cpu.norm_backward(halves), halves.results()):
        assert found.shape == want.shape and found.dtype == want.dtype


def test_no_gain(instructions: str) -> None:
    assert_right(norm(*torch.randn(2, 3, 40, 33), "layer", gain=False))


def test_constant_rows_have_no_gradient_of_the_gain(instructions: str) -> None:
    """Their normalised values are exactly zero, although 1 / std is 32."""
    x = torch.randn(4, 9, 1).expand(4, 9, 64) * 1000
    a = norm(torch.randn(4, 9, 64), x, "layer")._replace(mean_BT1=x[..., :1].contiguous())
    dw, rows = cpu.norm_backward(a)[1::2]
    assert not dw.any() and not rows[0, :5].any()


def test_long_samples_of_one_sign(instructions: str) -> None:
    """One float32 sum over 2^16 tokens would be 2e-4 off."""
    x, dy = torch.randn(1, 1 << 16, 8), torch.full((1, 1 << 16, 8), 0.3)
    db, rows = cpu.norm_backward(norm(dy, x, "layer"))[2:]
    torch.testing.assert_close(db, torch.full((8,), 0.3 * (1 << 16)), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows[1, 0], db.square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_wide_rows_of_one_sign(kind: str, instructions: str) -> None:
    """One float32 sum over 2^16 equal numbers is 2e-4 off."""
    x, dy = torch.full((1, 3, 1 << 16), 0.7), torch.full((1, 3, 1 << 16), 0.3)
    x[..., ::2] *= 1 if kind == "rms" else -1
    a = norm(dy, x, kind)._replace(w_F=torch.full((1 << 16,), 0.9))
    dx, dw, _, rows = cpu.norm_backward(a)
    want_dx, dw_BF, _ = of_single_samples(a)
    assert_row(rows[0], dw, dw_BF)
    torch.testing.assert_close(dx.double(), want_dx, rtol=0, atol=2e-6 * (0.3 * 1.9 / 0.7))


def test_norms_that_the_reference_takes() -> None:
    x, dy = torch.randn(2, 4, 6, 8)
    whole = norm(dy[:1], x[:1], "layer")
    rows = (t[0] for t in whole[:4] if t is not None)
    documents = NormBackward(*rows, *whole[4:10], starts=torch.tensor([0, 2, 6]))
    lazy = norm(torch.randn(4, 6, 8, dtype=torch.cfloat).conj().imag, x, "rms")
    assert lazy.dy_BTF.is_neg()
    for a in (documents, norm(dy.double(), x.double(), "rms"), norm(dy[:0], x[:0], "layer"), lazy):
        for found, want in zip(cpu.norm_backward(a), reference.norm_backward(a)):
            assert torch.equal(found, want)


def like_the_reference(a: NormBackward) -> None:
    for found, want in zip(cpu.norm_backward(a), reference.norm_backward(a)):
        assert found.dtype == want.dtype
        torch.testing.assert_close(found, want, equal_nan=True)


@pytest.mark.parametrize("F", [1, 5])
def test_numbers_that_are_not_in_memory(F: int, instructions: str) -> None:
    """A gain with a lazy minus sign, one of lazy zeros, and one that consists of other tensors."""
    a = norm(*torch.randn(2, 3, 4, F), "layer")
    imaginary = torch.complex(torch.zeros(F), torch.ones(F)).conj().imag
    assert imaginary.is_neg()
    for gain in (imaginary, torch._neg_view(torch.ones(F)), torch._efficientzerotensor(F)):
        like_the_reference(a._replace(w_F=gain))
    twice = TwoTensor(torch.full((F,), 3.0), torch.full((F,), 3.0))
    assert twice.data_ptr() == 0  # the address of no gain at all
    found: Any = cpu.norm_backward(a._replace(w_F=twice))[0]
    torch.testing.assert_close(found.a, reference.norm_backward(a._replace(w_F=twice.a))[0])


def test_shapes_that_do_not_fit(instructions: str) -> None:
    """The kernels would read beyond the end of these."""
    a = norm(*torch.randn(2, 3, 4, 5), "layer")
    for odd in (a._replace(dy_BTF=torch.randn(1, 4, 5)), a._replace(w_F=torch.ones(1))):
        with pytest.raises(RuntimeError, match="shape"):
            cpu.norm_backward(odd)
    few = EmbeddingWgrad(torch.randn(3, 4, 5), torch.zeros(1, 4).long(), 6, -1, torch.float32)
    with pytest.raises(RuntimeError, match="size"):
        cpu.embedding_wgrad(few)


def tables(dy: Tensor, ids_BT: Tensor, V: int, padding_idx: int = -1) -> Tensor:
    """[B, V, D]: the gradient of each sample, in float64."""
    found = torch.zeros(len(dy), V, dy.shape[2], dtype=torch.float64)
    for table, rows, ids in zip(found, dy.double(), ids_BT):
        for row, k in zip(rows, ids.tolist()):
            if k != padding_idx:
                table[k] += row
    return found


@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize(
    ("shape", "V"), [((1, 1, 3), 2), ((9, 5, 64), 7), ((3, 300, 65), 2), ((17, 33, 200), 1000)]
)
def test_embeddings(
    shape: tuple[int, int, int], V: int, padding_idx: int, instructions: str
) -> None:
    dy, ids_BT = torch.randn(shape), torch.randint(0, V, shape[:2])
    for cast in (dy, dy.bfloat16()):
        a = EmbeddingWgrad(cast, ids_BT, V, padding_idx, torch.float32)
        dw, rows = cpu.embedding_wgrad(a)
        assert_row(rows[0], dw, tables(cast, ids_BT, V, padding_idx))
    dw, _ = cpu.embedding_wgrad(a._replace(ids_BT=ids_BT.int(), dtype=torch.bfloat16))
    assert dw.dtype == torch.bfloat16


def test_padding_alone_has_no_gradient(instructions: str) -> None:
    dy, ids_BT = torch.randn(3, 4, 5), torch.full((3, 4), 2)
    dw, rows = cpu.embedding_wgrad(EmbeddingWgrad(dy, ids_BT, 6, 2, torch.float32))
    assert not dw.any() and rows.tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]


def test_an_id_outside_of_the_table(instructions: str) -> None:
    for wrong in (-1, 6):
        ids_BT = torch.tensor([[0, wrong]])
        with pytest.raises(IndexError, match="not in the table"):
            cpu.embedding_wgrad(EmbeddingWgrad(torch.randn(1, 2, 5), ids_BT, 6, -1, torch.float32))


@pytest.mark.parametrize("shape", [(2, 300, 129), (33, 40, 200)])
def test_threads_do_not_change_the_bits(
    shape: tuple[int, int, int], threads: Callable[[int], None], instructions: str
) -> None:
    dy, x = torch.randn(2, *shape)
    ids_BT = torch.randint(0, 30, shape[:2])
    found = []
    for count in (1, 2, 5):
        threads(count)
        of_norm = cpu.norm_backward(norm_of := norm(dy, x, "rms")._replace(w_F=x[0, 0]))
        of_table = cpu.embedding_wgrad(EmbeddingWgrad(dy, ids_BT, 30, -1, torch.float32))
        found.append((*of_norm, *of_table))
    assert norm_of.weight
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0]))
