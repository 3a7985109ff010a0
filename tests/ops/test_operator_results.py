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

from gnsfast import ops

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

    def constants(self, parameters: int) -> Tensor:
        return torch.ones(parameters, 2, dtype=F64, device=self.device)


Arguments = list[tuple[Any, ...]]
CASES: dict[str, Callable[[Draw, int, int, int], Arguments]] = {}


def case(function: Callable[[Draw, int, int, int], Arguments]) -> None:
    CASES[function.__name__] = function


@case
def linear_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, T, N), d.x(B, T, 8)
    return [(x, dy, *wanted, wanted[1], d.dtype) for wanted in [*BOTH, (False, False)]]


@case
def in_projection_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, T, N), d.x(B, T, 8)
    return [([x, x], [dy, dy], *wanted, d.dtype) for wanted in [*BOTH, (False, False)]]


@case
def linear_wgrad_tied(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, T, N), d.x(B, T, 8)
    return [(x, dy, d.ids(B, T), bias, d.dtype) for bias in (True, False)]


@case
def linear_wgrad_segments(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy, starts = d.x(2 * B * T, N), d.x(2 * B * T, 8), d.starts(2 * B, T)
    return [(x, dy, starts, 2, *w, w[1], d.dtype) for w in [*BOTH, (False, False)]]


@case
def embedding_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B, T, N), d.ids(B, T), V, -1, d.dtype) for V in (5, 300)]


@case
def embedding_wgrad_segments(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B * T, N), d.ids(B * T), d.starts(B, T), 5, -1, d.dtype)]


@case
def segment_sums(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B * T, N), d.starts(B, T))]


def with_statistics(d: Draw, B: int, T: int, N: int) -> list[Tensor]:
    """dy, x, mean, rstd, gain and bias; torch's layer norm takes no gain wider than float32 of
    narrower inputs.
    """
    dy, x, w, b = d.x(B, T, N), d.x(B, T, N), d.p(N), d.p(N)
    if d.dtype == F64:
        w, b = w.to(d.inputs), b.to(d.inputs)
    return [dy, x, *torch.native_layer_norm(x, [N], w, b, 1e-5)[1:], w, b]


@case
def layer_norm_backward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(*with_statistics(d, B, T, N), *wanted) for wanted in BOTH]


@case
def rms_norm_backward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return [(d.x(B, T, N), d.x(B, T, N), d.p(N), 1e-5, 0.0)]


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


@case
def attention_forward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return attention(d, B, T, N, backward=False)


@case
def attention_backward(d: Draw, B: int, T: int, N: int) -> Arguments:
    return attention(d, B, T, N, backward=True)


@case
def conv_wgrad(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, 4, max(T, 1) + 2), d.x(B, 6, max(T, 1))  # torch has none without an output
    last = [3], [1], [0], [1]
    grouped = (x, dy, B, *last, 2, True, True, d.dtype)
    return [grouped, *((x, dy, B, *last, 1, *wanted, d.dtype) for wanted in BOTH)]


@case
def linear_wgrad_metric(d: Draw, B: int, T: int, N: int) -> Arguments:
    x, dy = d.x(B, T, N), d.x(B, T, 8)
    return [
        (x, dy, d.p(8, N), d.p(8), d.constants(2), d.ids(B, T), False, d.dtype),
        (x, dy, d.p(N, 8), None, d.constants(1), None, True, d.dtype),
        (x, dy, None, d.p(8), d.constants(1), None, False, d.dtype),
    ]


@case
def embedding_wgrad_metric(d: Draw, B: int, T: int, N: int) -> Arguments:
    one = d.constants(1)
    return [(d.x(B, T, N), d.ids(B, T), d.p(V, N), one, -1, d.dtype) for V in (5, 300)]


@case
def norm_backward_metric(d: Draw, B: int, T: int, N: int) -> Arguments:
    *first, w, b = with_statistics(d, B, T, N)
    found: Arguments = [(*first[:2], None, None, w, None, w, None, d.constants(1), 1e-5, 0.0)]
    for weight, bias in BOTH:
        v = w if weight else None, b if bias else None
        found.append((*first, w, b, *v, d.constants(weight + bias), 1e-5, 0.0))
    return found


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("inputs", "parameter"), DTYPES, ids=str)
def test_results(
    name: str,
    inputs: torch.dtype,
    parameter: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels take no float64 inputs, but sum what is float64 already."""
    operator, draw = getattr(ops, name), Draw(inputs, parameter, device)
    triton = inputs != F64 or name == "segment_sums"
    for size, shape in SIZES.items():
        for arguments in CASES[name](draw, *shape):
            with FakeTensorMode() as mode:
                promised = described(
                    operator(*pytree.tree_map_only(Tensor, mode.from_tensor, arguments))
                )
            for backend in ("reference", "triton")[: 1 + triton]:
                monkeypatch.setenv("GNSFAST_BACKEND", backend)
                assert described(operator(*arguments)) == promised, (backend, size)


def test_every_operator_has_a_case() -> None:
    assert {name for name, of in vars(ops).items() if hasattr(of, "_schema")} == set(CASES)
