# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of linear layers, per sample against a float64 loop over single samples: on a
GPU where there is one, else in Triton's interpreter.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import assert_wgrad, draw, loop
from layouts import LAYOUTS
from signed import Signed
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import reference
from gnsfast.triton_kernels import (  # noqa: E402
    configs,
    crossovers,
    gram,
    linear_wgrad,
    operands,
    operators,
    outer,
)
from gnsfast.triton_kernels.configs import Config, candidates  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = Signed(operators)
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)

# B, T, I, O: the tiles of the default configurations are 128 x 128, the blocks 64 tokens.
SHAPES = {
    "one tile, whole blocks": (3, 128, 64, 128),
    "odd everything": (3, 77, 37, 21),
    "one sample": (1, 70, 40, 24),
    "below a block": (4, 5, 16, 8),
    "several tiles": (3, 130, 264, 136),
    "one feature": (4, 66, 1, 1),
    "short, by Gram products": (3, 9, 512, 512),
    "one token": (5, 1, 40, 24),
    "no sample": (0, 9, 16, 8),
    "no token": (3, 0, 16, 8),
}


def is_aligned(t: Tensor) -> bool:
    return operands.aligned(operands.operand(t))


def fused(x: Tensor, dy: Tensor, dw: Tensor, config: Config, **more: object) -> Tensor:
    """Fills ``dw`` by tiles. Returns the squared norms [B + 1]."""
    rows = torch.empty(1, len(x) + 2, device=x.device)
    linear_wgrad.fused(x, dy, dw, rows, config, **more)
    assert rows[0, -1] == 1.0
    return rows[0, :-1]


@DTYPES
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_linear_wgrad(
    shape: tuple[int, int, int, int], transposed: bool, dtype: torch.dtype, device: str
) -> None:
    x, dy = draw(*shape, dtype, device)
    dw, db, rows, _ = KERNELS.linear_wgrad(x, dy, True, True, transposed, F32)
    weight, bias = loop(x, dy), loop(torch.ones_like(x[..., :1]), dy)
    if shape[2] == 1:  # a sum over one feature must not be taken for the bias
        x = torch.randn_like(x)
        dw, db, rows, _ = KERNELS.linear_wgrad(x, dy, True, True, transposed, F32)
        weight = loop(x, dy)
    assert_wgrad(dw.T if transposed else dw, rows[0, :-1], weight)
    assert_wgrad(db[:, None], rows[1, :-1], bias)
    assert (rows[:, -1] == 1).all() and rows.dtype == F32


# I and O by whether blocks are loaded in wide pieces. Multiples of 16 are so on every device: 200
# is only where there are descriptors, which sm_80 has not and float32 never takes.
WIDTHS = {True: (208, 144), False: (201, 137)}


@pytest.fixture
def shared_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a test are too short for parts of tiles to pay."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()


@DTYPES
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("programs", [1, 3, 11])
def test_fused_tiles(
    programs: int, aligned: bool, dtype: torch.dtype, device: str, shared_at_any_size: None
) -> None:
    """Every named configuration, by descriptors and by pointers, on a device of so many programs:
    one has all tiles, eleven share them. A tile of another size is shared by the same plan, and no
    kernel asks which half precision it has: three programs take every tile, the others and float16
    the first.
    """
    I, O = WIDTHS[aligned]
    x, dy = draw(7, 70, I, O, dtype, device)
    want = loop(x, dy)
    tiles = candidates(dtype, aligned)[: None if programs == 3 and dtype != F16 else 1]
    for config in tiles if programs == 3 else (*tiles, Config(32, 64, 32, 8, 2)):
        assert is_aligned(x) is is_aligned(dy) is aligned
        dw = torch.empty(O, I, device=device)
        assert_wgrad(dw, fused(x, dy, dw, config, programs=programs), want)


@pytest.mark.parametrize("out", [F32, F16, BF16], ids=str)
def test_dw_in_the_dtype_of_the_weight(out: torch.dtype, device: str) -> None:
    """Rounded once, from the float32 sum (by the interpreter: to bfloat16 towards zero)."""
    x, dy = draw(3, 70, 40, 24, BF16, device)
    dw, _, rows, _ = KERNELS.linear_wgrad(x, dy, True, False, False, out)
    want = loop(x, dy)
    assert dw.dtype == out
    error = (dw.double() - want[0]).abs().max() / want[0].abs().max()
    assert error <= {F32: 1e-6, F16: 2**-11, BF16: 2**-8 if x.is_cuda else 2**-7}[out]
    torch.testing.assert_close(rows[0, :-1].double(), want[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("programs", [1, 3])
def test_adds_into_a_buffer(programs: int, device: str, shared_at_any_size: None) -> None:
    """The norms are those of what is added, not of the buffer."""
    x, dy = draw(4, 70, 144, 40, BF16, device)
    buffer = torch.randn(40, 144, device=device)
    before = buffer.clone().double()
    norms = fused(x, dy, buffer, candidates(BF16, True)[0], add=True, programs=programs)
    assert_wgrad(buffer.double() - before, norms, loop(x, dy))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tied_rows(dtype: torch.dtype, device: str) -> None:
    """Rows of every sample's gradient at its own ids, repeated and absent ones included."""
    x, dy = draw(3, 70, 40, 152, dtype, device)
    ids = torch.randint(0, 152, (3, 9), device=device)
    ids[0] = 7
    dw, db, rows, tied = KERNELS.linear_wgrad(x, dy, True, True, False, F32, ids_BS=ids)
    assert_wgrad(dw, rows[0, :-1], loop(x, dy))
    for b in range(3):
        want = dy[b].double().T[ids[b]] @ x[b].double()
        torch.testing.assert_close(tied[b].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, dtype: torch.dtype, device: str) -> None:
    x = LAYOUTS[layout](3, 70, 40, device=device, dtype=dtype)
    dy = torch.randn(3, 70, 24, device=device).to(dtype)
    for left, right in ((x, dy), (dy, x)):
        dw, _, rows, _ = KERNELS.linear_wgrad(left, right, True, False, False, F32)
        assert_wgrad(dw, rows[0, :-1], loop(left, right))


ROUTES = ((70, 40, "fused"), (9, 512, "gram"), (1, 40, "closed"))


@pytest.fixture
def three_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 132 a Gram product for each of three samples would leave 129 idle: they would be fused."""
    monkeypatch.setattr(crossovers, "multiprocessors", lambda device: 3)


def test_samples_do_not_mix(device: str, three_processors: None) -> None:
    """What is not finite in one sample stays there, on every route."""
    for T, width, route in ROUTES:
        x, dy = draw(3, T, width, width, BF16, device)
        assert crossovers.linear_route(3, T, width, width, x) == route
        x[1, -1, 0] = torch.inf
        _, _, rows, _ = KERNELS.linear_wgrad(x, dy, True, False, False, F32)
        assert rows[0, :3].isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_cases_of_every_device(
    capability: tuple[int, int], three_processors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any GPU the tests above have the alignment and the routes that they name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (operands, configs):
        monkeypatch.setattr(module, "INTERPRETED", False)
    for aligned, widths in WIDTHS.items():
        for N, dtype in itertools.product(widths, (F32, F16, BF16)):
            assert is_aligned(torch.empty(7, 70, N, dtype=dtype)) is aligned
    for T, width, route in ROUTES:
        assert crossovers.linear_route(3, T, width, width, torch.empty(0, dtype=BF16)) == route


@pytest.mark.parametrize("T", [2, 3, 16, 17, 33, 64, 100, 128])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gram(T: int, dtype: torch.dtype, device: str) -> None:
    x, dy = draw(3, T, 150, 70, dtype, device)
    torch.testing.assert_close(gram.gram(x, dy).double(), loop(x, dy)[1][:-1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("T", [3, 64, 128])
def test_gram_that_cancels(T: int, device: str) -> None:
    """Tokens alike and dy that sums to almost zero: the sum of the terms would have no digit left;
    samples beside it are not touched.
    """
    x, dy = draw(3, T, 150, 70, BF16, device)
    x[1] = x[1, :1] + 0.01 * x[1]
    dy[1] -= dy[1].float().mean(0).to(BF16)
    torch.testing.assert_close(gram.gram(x, dy).double(), loop(x, dy)[1][:-1], rtol=1e-5, atol=0)
    x[1], dy[1] = x[1, :1], 1.0
    dy[1, : T // 2 * 2 : 2], dy[1, T // 2 * 2 :] = -1.0, 0.0
    assert gram.gram(x, dy)[1] == 0.0


def test_rows(device: str) -> None:
    x, dy = draw(5, 1, 3000, 70, BF16, device)
    product, dy_sqnorm = torch.empty(2, 5, device=device)
    gram.token_sqnorms(x[:, 0], dy[:, 0], product, dy_sqnorm)
    torch.testing.assert_close(product.double(), loop(x, dy)[1][:-1], rtol=1e-5, atol=0)
    bias = loop(torch.ones_like(x[..., :1]), dy)
    torch.testing.assert_close(dy_sqnorm.double(), bias[1][:-1], rtol=1e-5, atol=0)


def test_same_bits_twice(device: str) -> None:
    x, dy = draw(5, 130, 264, 136, BF16, device)
    first, second = (KERNELS.linear_wgrad(x, dy, True, True, False, F32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_route_is_chosen_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossovers, "multiprocessors", lambda device: 132)
    x = torch.empty(0, dtype=BF16)
    assert crossovers.linear_route(1024, 1, 4096, 4096, x) == "closed"
    assert crossovers.linear_route(1024, 16, 4096, 4096, x) == "gram"
    assert crossovers.linear_route(4, 128, 4096, 4096, x) == "fused"  # four programs would be slow
    assert crossovers.linear_route(32, 512, 4096, 4096, x) == "fused"
    assert crossovers.linear_route(1024, 16, 4096, 4096, x.float()) == "fused"


@pytest.mark.parametrize(
    ("x_dtype", "dy_dtype"),
    [(torch.float64, torch.float64), (torch.int8, torch.int8), (F32, BF16)],
    ids=["float64", "int8", "mixed"],
)
def test_dtype_without_a_kernel(x_dtype: torch.dtype, dy_dtype: torch.dtype, device: str) -> None:
    x, dy = (torch.ones(2, 3, 4, device=device).to(dtype) for dtype in (x_dtype, dy_dtype))
    with pytest.raises(NotImplementedError, match=r"shapes \[2, 3, 4\].*GNSFAST_BACKEND=reference"):
        KERNELS.linear_wgrad(x, dy, True, False, False, F32)


@pytest.mark.parametrize("T", [1, 9, 70])
def test_float64_parameter(T: int, device: str) -> None:
    """Under autocast the weight may be wider than what it multiplies."""
    x, dy = draw(3, T, 512, 512, BF16, device)
    dw, db, rows, _ = KERNELS.linear_wgrad(x, dy, True, True, False, torch.float64)
    assert dw.dtype == db.dtype == torch.float64
    assert_wgrad(dw, rows[0, :-1], loop(x, dy))


def test_agrees_with_the_reference(device: str) -> None:
    """Same shapes, dtypes and meaning of every result."""
    x, dy = draw(3, 70, 40, 24, F32, device)
    ours = KERNELS.linear_wgrad(x, dy, True, True, True, F32)
    theirs = Signed(reference).linear_wgrad(x, dy, True, True, True, F32)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("I", "T", "copied"), [(512, 9, True), (40, 9, False)], ids=["wide input", "narrow input"]
)
def test_unaligned_rows_are_copied_where_that_is_cheaper(
    I: int, T: int, copied: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 137 words: its rows of dy begin anywhere."""
    x, dy = draw(3, T, I, 137, BF16, device)
    read, fused = [], linear_wgrad.fused
    run = lambda x, dy, *args, **kwargs: read.append(dy) or fused(x, dy, *args, **kwargs)
    monkeypatch.setattr(linear_wgrad, "fused", run)
    dw, rows = torch.empty(137, I, device=device), torch.empty(1, 5, device=device)
    outer.fused_wgrad(x, dy, dw, rows)
    assert_wgrad(dw, rows[0, :-1], loop(x, dy))
    assert [is_aligned(t) for t in read] == [copied]
    assert (read[0] is dy) is not copied


def test_torch_can_write_a_product_in_float32() -> None:
    """``outer.dense_wgrad`` and ``wide_bmm`` ask for it on a GPU alone."""
    x, dy = (torch.empty(6, n, dtype=torch.bfloat16, device="meta") for n in (4, 5))
    dw = torch.empty(5, 4, device="meta")
    assert torch.mm(dy.T, x, out_dtype=torch.float32, out=dw) is dw
    assert torch.bmm(dy.T[None], x[None], out_dtype=torch.float32).dtype == torch.float32
