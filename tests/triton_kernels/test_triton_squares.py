# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of ``linear_squares``, every coordinate against a float64 loop over single
samples: on a GPU where there is one, else in Triton's interpreter.
"""

from collections.abc import Iterator

import pytest
import torch
from layouts import LAYOUTS
from second_moments import assert_squares, draw
from signed import Signed

pytest.importorskip("triton", reason="triton is there on Linux alone")

from kernel_launches import launched, reads_within, shuffled_programs

from gnsfast import ops
from gnsfast.triton_kernels import configs, linear_squares, operators
from gnsfast.triton_kernels.configs import Config

F32, BF16 = torch.float32, torch.bfloat16
SQUARES = Signed(operators)

# B, T, I, O: the fixed tiles are 128 x 128 and 128 x 64, the blocks 64 and 32 tokens.
SHAPES = {
    "one tile, whole blocks": (2, 64, 64, 128),
    "odd everything": (3, 37, 37, 21),
    "one sample": (1, 70, 40, 24),
    "below a block": (4, 5, 16, 8),
    "several tiles": (2, 9, 136, 136),
    "one feature": (2, 66, 1, 1),
    "one token": (5, 1, 40, 24),
    "no sample": (0, 9, 16, 8),
    "no token": (3, 0, 16, 8),
    "no feature": (3, 9, 0, 8),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_squares(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    x, dy = draw(*shape, dtype, device)
    found = SQUARES.linear_squares(x, dy, False)
    assert found.dtype == F32
    assert_squares(found, x, dy)


def test_float16_of_a_transposed_weight(device: str) -> None:
    x, dy = draw(3, 9, 40, 24, torch.float16, device)
    found = SQUARES.linear_squares(x, dy, True)
    assert found.shape == (40, 24) and found.dtype == F32
    assert_squares(found.T, x, dy)


SMALL = Config(32, 16, 16, 8, 2)


@pytest.fixture
def shared_at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Samples of a test are too short for runs of them to pay."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_squares.run_length.cache_clear()
    yield
    linear_squares.run_length.cache_clear()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("widths", [(48, 64), (41, 37)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("programs", [1, 18])
def test_runs_of_samples(
    programs: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    shared_at_any_size: None,
) -> None:
    """Tiles whole and shared by runs of samples, the last of which has fewer."""
    x, dy = draw(5, 20, *widths, dtype, device)
    assert linear_squares.run_length(6, 5, 2, programs) == (2 if programs > 1 else 5)
    assert_squares(linear_squares.linear_squares(x, dy, SMALL, programs), x, dy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
@pytest.mark.parametrize("widths", [(48, 64), (41, 37)], ids=["aligned", "unaligned"])
def test_no_read_outside(widths: tuple[int, int], device: str, shared_at_any_size: None) -> None:
    x, dy = draw(3, 20, *widths, BF16, device)
    with reads_within(x, dy):
        linear_squares.linear_squares(x, dy, SMALL, 12)


def test_run_length() -> None:
    """Few tiles are shared, but not where the sums of runs cost more than they save."""
    assert linear_squares.run_length(1, 7, 40, 3) == 3
    assert linear_squares.run_length(4, 7, 40, 1) == 7
    assert linear_squares.run_length(6, 8, 16, 132) == 1
    assert linear_squares.run_length(36, 16, 16, 132) == 6
    assert (
        linear_squares.run_length(144, 16, 16, 132) == 4
    )  # five waves of 78 steps, not two of 256
    assert linear_squares.run_length(36, 1, 16, 132) == 1
    assert linear_squares.run_length(12, 8, 1, 132) == 8
    for B in range(1, 20):
        for tiles in (1, 5, 30):
            assert 1 <= linear_squares.run_length(tiles, B, 9, 11) <= B


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, dtype: torch.dtype, device: str) -> None:
    x, dy = (LAYOUTS[layout](3, 9, 40, device=device, dtype=dtype) for _ in range(2))
    assert_squares(SQUARES.linear_squares(x, dy[..., :24], False), x, dy[..., :24])


def test_unaligned_rows_are_copied_where_that_is_cheaper(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 137 words: its rows of dy begin anywhere."""
    copied = []
    pad = linear_squares.padded
    monkeypatch.setattr(linear_squares, "padded", lambda t: copied.append(t) or pad(t))
    x, dy = draw(1, 2, 1024, 137, BF16, device)
    assert_squares(SQUARES.linear_squares(x, dy, False), x, dy)
    assert len(copied) == 1 and copied[0] is dy


def test_one_launch_and_a_sum(device: str, shared_at_any_size: None) -> None:
    """Neither atomics nor a fill: the memory that runs write is not touched before."""
    x, dy = draw(3, 9, 20, 40, BF16, device)
    whole = launched(lambda: linear_squares.linear_squares(x, dy, SMALL, 1))
    assert whole == ["linear_squares_kernel"]
    shared = launched(lambda: linear_squares.linear_squares(x, dy, SMALL, 99))
    assert shared == ["linear_squares_kernel", "aten.sum"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses its own order")
def test_any_order_of_programs(device: str, shared_at_any_size: None) -> None:
    """The same bits twice, and with programs in another order."""
    x, dy = draw(4, 20, 40, 40, BF16, device)
    first, second = (linear_squares.linear_squares(x, dy, SMALL, 99) for _ in range(2))
    with shuffled_programs(3):
        third = linear_squares.linear_squares(x, dy, SMALL, 99)
    assert torch.equal(first, second) and torch.equal(first, third)


def test_samples_do_not_leave_their_row_and_column(device: str) -> None:
    x, dy = draw(3, 9, 40, 24, BF16, device)
    x[1, -1, 7] = torch.inf
    found = SQUARES.linear_squares(x, dy, False)
    assert found.isfinite().all(0).nonzero().flatten().tolist() == [*range(7), *range(8, 40)]


@pytest.mark.parametrize(
    ("x_dtype", "dy_dtype"), [(torch.float64, torch.float64), (F32, BF16)], ids=["float64", "mixed"]
)
def test_dtype_without_a_kernel(x_dtype: torch.dtype, dy_dtype: torch.dtype, device: str) -> None:
    x, dy = (torch.ones(2, 3, 4, device=device).to(dtype) for dtype in (x_dtype, dy_dtype))
    with pytest.raises(NotImplementedError, match=r"linear_squares.*shapes \[2, 3, 4\]"):
        SQUARES.linear_squares(x, dy, False)


def test_backend_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator runs the kernel where it is asked for, and the formula on a CPU tensor."""
    x, dy = draw(3, 9, 40, 24, F32, device)
    for backend, kernels in (("triton", ["linear_squares_kernel"]), ("reference", [])):
        monkeypatch.setenv("GNSFAST_BACKEND", backend)
        names = launched(lambda: Signed(ops).linear_squares(x, dy, False))
        assert [name for name in names if "kernel" in name] == kernels
