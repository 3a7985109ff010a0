# SPDX-License-Identifier: Apache-2.0
"""Every operator's results have the shapes and dtypes that its fake promises to the compiler.

This holds for the formula and for the Triton kernels, for parameters of each dtype, and for inputs
without a sample, a token or a feature.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

pytest.importorskip("triton", reason="triton is there on Linux alone")

from signed import Signed

from gnsfast.ops import operators
from gnsfast.signatures import OPERATORS

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
BOTH = [(True, True), (True, False), (False, True)]


class Draw:
    """Tensors of a case with B samples, T tokens and N features."""

    def __init__(self, inputs: torch.dtype, parameter: torch.dtype, device: str) -> None:
        self.inputs, self.dtype, self.device = inputs, parameter, device

    def x(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.inputs)

    def p(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device).to(self.dtype)

    def ids(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def starts(self, segments: int, length: int) -> Tensor:
        return torch.arange(segments + 1, device=self.device) * length


Arguments = list[tuple[Any, ...]]
Case = Callable[[Draw, int, int, int], Arguments]
CASES: dict[str, tuple[str, Case]] = {}


def case(operator: str) -> Callable[[Case], None]:
    """Fields of an operator's signature, by the name of the function that draws them."""

    def keep(function: Case) -> None:
        CASES[function.__name__] = operator, function

    return keep


@case("linear_wgrad")
def linear_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, T, N), d.x(B, T, 8)
    return [(x, dy, *wanted, wanted[1], d.dtype) for wanted in [*BOTH, (False, False)]]


@case("linear_wgrad")
def linear_wgrad_tied(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy, ids = d.x(B, T, N), d.x(B, T, 8), d.ids(B, T)
    return [(x, dy, True, bias, False, d.dtype, None, 0, ids) for bias in (True, False)]


@case("linear_wgrad")
def linear_wgrad_segments(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy, starts = d.x(2 * B * T, N), d.x(2 * B * T, 8), d.starts(2 * B, T)
    return [
        (x, dy, *w, w[1], d.dtype, starts, experts)
        for w in [*BOTH, (False, False)]
        for experts in (2, 0)
    ]


@case("embedding_wgrad")
def embedding_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B, T, N), d.ids(B, T), V, -1, d.dtype) for V in (5, 300)]


@case("embedding_wgrad")
def embedding_wgrad_segments(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B * T, N), d.ids(B * T), 5, -1, d.dtype, d.starts(B, T))]


def with_statistics(d: Draw, B: int, T: int, N: int) -> list[Tensor]:
    """dy, x, mean, rstd, gain and bias; torch's layer norm takes no gain wider than float32 of
    narrower inputs.
    """
    dy, x, w, b = d.x(B, T, N), d.x(B, T, N), d.p(N), d.p(N)
    if d.dtype == F64:
        w, b = w.to(d.inputs), b.to(d.inputs)
    return [dy, x, *torch.native_layer_norm(x, [N], w, b, 1e-5)[1:], w, b]


@case("norm_backward")
def layer_norm(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(*with_statistics(d, B, T, N), *wanted) for wanted in BOTH]


@case("norm_backward")
def rms_norm(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B, T, N), d.x(B, T, N), None, None, d.p(N), None, True, False, 1e-5, 0.0)]


@case("norm_backward")
def norm_backward_of_documents(d: Draw, B: int, T: int, N: int) -> Arguments:
    *of_rows, w, b = with_statistics(d, B, T, N)
    rows = [t.flatten(0, 1) for t in of_rows]
    last = 1e-5, 0.0, d.starts(B, T)
    rms = *rows[:2], None, None, w, None, True, False, *last
    return [rms, *((*rows, w, b, *wanted, *last) for wanted in BOTH)]


def attention(d: Draw, B: int, T: int, N: int, backward: bool) -> Arguments:
    q, k = d.x(B, 2, T, 16), d.x(B, 1, T, 16)
    statistics = [d.x(B, 2, T).to(F64 if d.inputs == F64 else F32) for _ in range(2)]
    found: Arguments = []
    for learned in ([d.p(n) for n in (2, 2, 16, 16)], [None] * 4):
        rest = *learned, None, None, True, 0.25, 0, 0
        wanted = [p is not None for p in learned]
        forward = q, k, k, *rest
        found.append((q, q, k, k, q, *statistics, *rest, B, wanted) if backward else forward)
    return found


@case("attention_forward")
def attention_forward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return attention(d, B, T, N, backward=False)


@case("attention_backward")
def attention_backward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return attention(d, B, T, N, backward=True)


@case("conv_wgrad")
def conv_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, 4, max(T, 1) + 2), d.x(B, 6, max(T, 1))  # torch has none without an output
    last = [3], [1], [0], [1]
    grouped = (x, dy, B, *last, 2, True, True, d.dtype)
    return [grouped, *((x, dy, B, *last, 1, *wanted, d.dtype) for wanted in BOTH)]


def described(results: Any) -> list[tuple[list[int], torch.dtype]]:
    return [(list(t.shape), t.dtype) for t in pytree.tree_leaves(results)]


# Of what goes in, and of the parameter: under autocast it is the wider one.
DTYPES = [(F32, F32), (BF16, BF16), (F32, F64), (F64, F64)]
SIZES = {
    "full": (2, 3, 16),
    "no sample": (0, 3, 16),
    "no token": (2, 0, 16),
    "no feature": (2, 3, 0),
}


@pytest.mark.second
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("inputs", "parameter"), DTYPES, ids=str)
def test_results(
    name: str,
    inputs: torch.dtype,
    parameter: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels take no float64 inputs."""
    (of, make), draw = CASES[name], Draw(inputs, parameter, device)
    operator = getattr(Signed(operators), of)
    triton = inputs != F64
    for size, shape in SIZES.items():
        for arguments in make(draw, *shape):
            with FakeTensorMode() as mode:
                promised = described(
                    operator(*pytree.tree_map_only(Tensor, mode.from_tensor, arguments))
                )
            for backend in ("reference", "triton")[: 1 + triton]:
                monkeypatch.setenv("GNSFAST_BACKEND", backend)
                assert described(operator(*arguments)) == promised, (backend, size)


def test_every_operator_has_a_case() -> None:
    assert {operator for operator, _ in CASES.values()} == set(OPERATORS)
