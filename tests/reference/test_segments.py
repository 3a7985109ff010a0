# SPDX-License-Identifier: Apache-2.0
"""Layers whose samples are segments of one list of rows (experts, documents): the formula and the
Triton kernels, per sample against a float64 loop over segments.
"""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from signed import Signed
from torch import Tensor

from gnsfast import functional, reference
from gnsfast.ops import operators
from gnsfast.reference import segments
from gnsfast.signatures import OPERATORS

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64

# E, I, O and the rows of every segment: those of expert 0 first, sample by sample.
CASES: dict[str, tuple[int, int, int, list[int]]] = {
    "documents": (1, 140, 24, [3, 70, 1, 129]),
    "documents, some empty": (1, 24, 130, [0, 5, 0, 0, 66, 0]),
    "experts": (3, 37, 21, [2, 0, 5, 0, 0, 0, 7, 1, 66]),
    "several tiles of experts": (2, 136, 140, [4, 3, 2, 9]),
    "one sample": (3, 16, 8, [4, 0, 9]),
    "one row each": (2, 16, 8, [1, 1, 1, 1]),
    "one feature": (2, 1, 1, [2, 3, 0, 1]),
    "no row": (2, 16, 8, [0, 0, 0, 0]),
    "no sample": (2, 16, 8, []),
}


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, device: str) -> tuple[Signed, Any, str]:
    """The operators, the module of the sums over segments, and where they run."""
    if request.param == "reference":
        return Signed(reference), segments, "cpu"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is there on Linux alone")
    from gnsfast.triton_kernels import operators as kernels
    from gnsfast.triton_kernels import segments as kernels_of_segments

    return Signed(kernels), kernels_of_segments, device


@pytest.fixture
def operator(backend: tuple[Signed, Any, str]) -> tuple[Callable[..., Any], str]:
    """Called with rows, ``starts``, experts, what is wanted, layout and dtype."""

    def run(x: Tensor, dy: Tensor, starts: Tensor, experts: int, *last: Any) -> tuple[Any, ...]:
        *found, linked = backend[0].linear_wgrad(x, dy, *last, starts, experts)
        assert not linked.numel()
        return tuple(found)

    return run, backend[2]


def draw(case: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, and where segments start; what is outside of all segments is NaN."""
    _, I, O, lengths = CASES[case]
    starts = torch.tensor([2, *itertools.accumulate(lengths, initial=2)][1:], dtype=torch.int32)
    N = int(starts[-1])
    x, dy = torch.full((N + 3, I), torch.nan), torch.full((N + 3, O), torch.nan)
    x[2:N], dy[2:N] = torch.randn(N - 2, I), torch.randn(N - 2, O)
    return x.to(device, dtype), dy.to(device, dtype), starts.to(device)


def loop(case: str, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients [E, B, O, I] of the weight and [E, B, O] of the bias, segment by segment."""
    E, I, O, lengths = CASES[case]
    pairs = list(zip(x[2:-3].double().split(lengths), dy[2:-3].double().split(lengths)))
    shape = (E, len(lengths) // E)
    weights = [dy_TO.T @ x_TI for x_TI, dy_TO in pairs] or [x.new_empty(0, dtype=F64)]
    biases = [dy_TO.sum(0) for _, dy_TO in pairs] or [x.new_empty(0, dtype=F64)]
    return torch.stack(weights).view(*shape, O, I), torch.stack(biases).view(*shape, O)


def assert_wgrad(grad: Tensor, row: Tensor, want: Tensor) -> None:
    """Of [E, B, ...]: the sum over samples, and every sample's norm over all experts, in 1e-5."""
    total = want.sum(1)
    norms_B = want.flatten(2).square().sum((0, 2))
    torch.testing.assert_close(grad.double(), total, rtol=1e-5, atol=1e-5)
    norms = torch.cat(
        [norms_B, total.square().sum()[None], torch.ones_like(total[:1]).flatten()[:1]]
    )
    torch.testing.assert_close(row.double(), norms, rtol=1e-5, atol=0)


TRANSPOSED = ("experts", "several tiles of experts")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("case", "transposed"), [*((c, False) for c in CASES), *((c, True) for c in TRANSPOSED)]
)
def test_wgrad(
    case: str, dtype: torch.dtype, transposed: bool, operator: tuple[Callable[..., Any], str]
) -> None:
    run, device = operator
    x, dy, starts = draw(case, dtype, device)
    dw, db, rows = run(x, dy, starts, CASES[case][0], True, True, transposed, F32)
    weight, bias = loop(case, x, dy)
    assert rows.dtype == dw.dtype == db.dtype == F32
    assert_wgrad(dw.mT if transposed else dw, rows[0], weight)
    assert_wgrad(db, rows[1], bias)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] == 1])
def test_one_weight(case: str, operator: tuple[Callable[..., Any], str]) -> None:
    """Without experts: what one expert has, without its dimension."""
    run, device = operator
    x, dy, starts = draw(case, F32, device)
    dw, db, rows = run(x, dy, starts, 0, True, True, False, F32)
    weight, bias = loop(case, x, dy)
    assert_wgrad(dw[None], rows[0], weight)
    assert_wgrad(db[None], rows[1], bias)


def test_wanted(operator: tuple[Callable[..., Any], str]) -> None:
    """What is not wanted comes back empty and has no row; the rest keeps its bits."""
    run, device = operator
    x, dy, starts = draw("experts", F32, device)
    dw, db, rows = run(x, dy, starts, 3, True, True, True, F32)
    for want_weight, want_bias in ((True, False), (False, True), (False, False)):
        some = run(x, dy, starts, 3, want_weight, want_bias, True, F32)
        assert torch.equal(some[0], dw if want_weight else dw.new_empty(0))
        assert torch.equal(some[1], db if want_bias else db.new_empty(0))
        kept = [row for row, want in zip(rows, (want_weight, want_bias)) if want]
        assert torch.equal(some[2], torch.stack(kept) if kept else rows[:0])


def test_samples_do_not_mix(operator: tuple[Callable[..., Any], str]) -> None:
    """What is not finite in one segment stays with its sample."""
    run, device = operator
    x, dy, starts = draw("experts", F32, device)
    x[starts[2]] = dy[starts[2]] = torch.nan  # the first row of sample 2 of expert 0
    _, _, rows = run(x, dy, starts, 3, True, True, False, F32)
    assert rows[:, :3].isfinite().tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_strides(dtype: torch.dtype, operator: tuple[Callable[..., Any], str]) -> None:
    """Columns of a wider tensor, every second row, columns that lie one below the other, one row
    for all.
    """
    run, device = operator
    x, dy, starts = draw("experts", dtype, device)
    weight, _ = loop("experts", x, dy)
    wide = torch.cat([x, x, x], 1)[:, 37:74]
    apart = torch.stack([dy, dy], 1).flatten(0, 1)[::2]
    dw, _, rows = run(wide, apart, starts, 3, True, False, False, F32)
    assert_wgrad(dw, rows[0], weight)
    dw, _, rows = run(x.T.contiguous().T, dy, starts, 3, True, False, True, F32)
    assert_wgrad(dw.mT, rows[0], weight)
    same = dy[3:4].expand_as(dy)
    dw, _, rows = run(x, same, starts, 3, True, False, False, F32)
    assert_wgrad(dw, rows[0], loop("experts", x, same)[0])


def test_short_and_long_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula's two ways side by side, in float64, with several groups of short segments, one
    of which cancels.
    """
    monkeypatch.setattr(segments, "PADDED", 600)
    lengths = [3, 0, 5, 90, 2, 1, 4, 4, 4]
    CASES["both"] = (3, 64, 48, lengths)
    x, dy, starts = draw("both", F64, "cpu")
    del CASES["both"]
    own = slice(int(starts[6]), int(starts[7]))
    x[own], dy[own] = x[own][:1], torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    dw, db, rows, _ = Signed(operators).linear_wgrad(x, dy, True, True, False, F64, starts, 3)
    g = torch.stack([dy[a:b].T @ x[a:b] for a, b in itertools.pairwise(starts.tolist())]).unflatten(
        0, (3, 3)
    )
    torch.testing.assert_close(dw, g.sum(1))
    torch.testing.assert_close(rows[0, :-2].double(), g.square().sum((0, 2, 3)), rtol=1e-6, atol=0)
    assert db.dtype == F64


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lengths", [[3, 70, 1, 0, 9], [0, 5, 0], [83]])
def test_embedding(
    lengths: list[int], dtype: torch.dtype, backend: tuple[Signed, Any, str]
) -> None:
    """Rows of one id are added within a document, not beyond it."""
    run, kernels, device = backend
    V, D, N = 7, 20, sum(lengths)
    dy, ids = torch.randn(N, D).to(device, dtype), torch.randint(0, V, (N,)).to(device)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    dw, [row] = run.embedding_wgrad(dy, ids, V, 2, F32, starts)
    onehot = torch.nn.functional.one_hot(ids, V).double()
    onehot[:, 2] = 0.0
    pairs = zip(onehot.split(lengths), dy.double().split(lengths))
    assert_wgrad(dw[None], row, torch.stack([a.T @ b for a, b in pairs])[None])
    sums = torch.stack([t.sum(0) for t in dy.double().split(lengths)])
    found = kernels.segment_sums(dy, starts)
    torch.testing.assert_close(found.double(), sums, rtol=1e-5, atol=1e-5)


def test_float64_sums(backend: tuple[Signed, Any, str]) -> None:
    """What cancels would be lost in float32."""
    _, kernels, device = backend
    rows, starts = torch.tensor([[1e9], [1.0], [-1e9]], dtype=F64), torch.tensor([0, 3])
    assert kernels.segment_sums(rows.to(device), starts.to(device)).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize(("S", "T", "F"), [(2, 3, 16), (0, 3, 16), (2, 0, 16), (2, 3, 0)])
def test_sums_of_any_size(
    S: int, T: int, F: int, dtype: torch.dtype, backend: tuple[Signed, Any, str]
) -> None:
    """Also without a segment, a row or a feature."""
    _, kernels, device = backend
    rows = torch.randn(S * T, F).to(device, dtype)
    sums = kernels.segment_sums(rows, torch.arange(S + 1, device=device) * T)
    assert sums.shape == (S, F) and sums.dtype == (F64 if dtype == F64 else F32)
    want = rows.double().view(S, T, F).sum(1)
    torch.testing.assert_close(sums.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.second
def test_opcheck() -> None:
    """Schema and fake say what the operator does."""
    x, dy, starts = draw("several tiles of experts", F32, "cpu")
    for weight, bias, transposed in (
        (True, True, True),
        (False, True, False),
        (True, False, False),
    ):
        for experts in (2, 0):
            arguments = (x, dy, weight, bias, transposed, BF16, starts, experts)
            check("linear_wgrad", *arguments)
    ids = torch.arange(len(dy)) % 5
    whole = torch.tensor([0, 4, len(dy)])
    check("embedding_wgrad", dy.nan_to_num(), ids, 5, -1, BF16, whole)


def check(name: str, *fields: Any) -> None:
    """An operator by torch's own checks, with the fields of its signature."""
    overload = getattr(torch.ops.gnsfast, name).default
    torch.library.opcheck(overload, tuple(OPERATORS[name](*fields)))


def test_probe_and_starts_of_other_shapes() -> None:
    x, w = torch.randn(3, 5), torch.randn(2, 4, 5, requires_grad=True)
    starts = torch.tensor([0, 1, 1, 2, 3])
    with pytest.raises(ValueError, match=r"starts must have shape \[7\], for 2 experts, the 3"):
        functional.grouped_linear(x, w, None, starts, torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"probe must be float32 \[1, B \+ 2\]"):
        functional.grouped_linear(x, w, None, starts, torch.zeros(2, 4))


def test_what_goes_with_no_segments(backend: tuple[Signed, Any, str]) -> None:
    """A kernel that left a field aside would give nothing without a word."""
    operators_of, _, device = backend
    if operators_of.module is reference:
        return
    x, dy = torch.randn(4, 5, device=device), torch.randn(4, 6, device=device)
    starts, ids = torch.tensor([0, 1, 4], device=device), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="linear_wgrad takes no ids_BS"):
        operators_of.linear_wgrad(x, dy, True, False, False, F32, starts, ids_BS=ids.to(device))
