# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels where nobody wants the gradients: the probe rows have the same bits as beside
them, nothing of the size of dW is allocated, and what reaches memory is counted byte by byte.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_cases import draw, loop
from largest import Largest
from torch import Tensor

pytest.importorskip("triton", reason="triton is there on Linux alone")

from gnsfast import ops  # noqa: E402
from gnsfast.signatures import ConvWgrad, EmbeddingWgrad, LinearWgrad  # noqa: E402
from gnsfast.triton_kernels import (  # noqa: E402
    configs,
    conv,
    linear_plan,
    linear_wgrad,
    operators,
    outer,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what programs store")

# B, T, I, O, route: the tiles of the default configurations are 128 x 128.
SHAPES = {
    "one tile": (3, 128, 64, 128, "fused"),
    "odd everything": (3, 77, 37, 21, "fused"),
    "several tiles": (3, 130, 264, 136, "fused"),
    "one sample": (1, 70, 40, 24, "fused"),
    "short": (3, 9, 140, 150, "gram"),
    "one short sample": (1, 9, 40, 24, "gram"),
    "one token": (5, 1, 140, 130, "closed"),
    "one sample of one token": (1, 1, 40, 24, "closed"),
    "no sample": (0, 9, 16, 8, "fused"),
    "no token": (3, 0, 16, 8, "fused"),
}


@pytest.fixture(params=SHAPES)
def shape(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, int, str]:
    found = SHAPES[request.param]
    monkeypatch.setattr(outer, "linear_route", lambda *arguments: found[4])
    return found


def assert_norms(row: Tensor, want_B1: Tensor) -> None:
    assert row[-1] == 1.0
    torch.testing.assert_close(row[:-1].double(), want_B1, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear(shape: Any, bias: bool, transposed: bool, dtype: torch.dtype, device: str) -> None:
    """Per sample against float64. A number that is not made by tiles beside dW is that of the sum:
    torch's own product has it then, and a tile of the kernel's here.
    """
    *sizes, route = shape
    x, dy = draw(*sizes, dtype, device)
    a = LinearWgrad(x, dy, True, bias, transposed, F32)
    rows, (_, _, beside, _) = operators.linear_norms(a), operators.linear_wgrad(a)
    assert_norms(rows[0], loop(x, dy)[1])
    if bias:
        assert_norms(rows[1], loop(torch.ones_like(x[..., :1]), dy)[1])
    alike = torch.ones_like(rows, dtype=torch.bool)
    alike[0, len(x)] = route == "fused"
    assert torch.equal(rows[alike], beside[alike]) and rows.shape == beside.shape


@pytest.mark.parametrize("programs", [1, 3, 11])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_shared_tiles(
    programs: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a tile are added before they are squared, by descriptors and by pointers."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    for I, O in ((208, 144), (201, 137)):
        x, dy = draw(7, 70, I, O, dtype, device)
        config = configs.candidates(dtype, I == 208)[0]
        found = []
        for dw in (None, torch.empty(O, I, device=device)):
            rows = torch.empty(1, 9, device=device)
            linear_wgrad.fused(x, dy, dw, rows, config, programs=programs)
            found.append(rows)
        assert_norms(found[0][0], loop(x, dy)[1])
        assert torch.equal(*found)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("experts", [0, 2])
def test_segments(experts: int, bias: bool, device: str) -> None:
    starts = torch.tensor([0, 3, 3, 50, 71] if experts else [0, 3, 50], device=device)
    x, dy = draw(1, 80, 140, 130, BF16, device)
    a = LinearWgrad(x[0], dy[0], True, bias, False, F32, starts, experts)
    rows = operators.linear_norms(a)
    assert torch.equal(rows, operators.linear_wgrad(a)[2])
    at = starts.tolist()
    g = torch.stack([dy[0, s:e].double().T @ x[0, s:e].double() for s, e in zip(at, at[1:])])
    g_BN = g.view(max(experts, 1), a.samples, -1).transpose(0, 1).flatten(1)
    assert_norms(rows[0], torch.cat([g_BN, g_BN.sum(0, keepdim=True)]).square().sum(1))


@pytest.mark.parametrize("small", [0, 256], ids=["sorted", "one-hot"])
@pytest.mark.parametrize("documents", [False, True])
def test_embedding(
    documents: bool, small: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "SMALL_VOCABULARY", small)
    ids, dy = torch.randint(0, 9, (3, 40), device=device), torch.randn(3, 40, 20, device=device)
    a = EmbeddingWgrad(dy, ids, 9, 4, F32)
    if documents:
        starts = torch.arange(4, device=device) * 40
        a = a._replace(dy_BTD=dy.flatten(0, 1)[None], ids_BT=ids.flatten()[None], starts=starts)
    rows = operators.embedding_norms(a)
    onehot_BTV = torch.nn.functional.one_hot(ids, 9) * (ids != 4)[..., None]
    assert_norms(rows[0], loop(dy, onehot_BTV)[1])
    beside = operators.embedding_wgrad(a)[1]
    torch.testing.assert_close(rows, beside, rtol=1e-6 if small and not documents else 0, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("patches", [1, conv.PATCHES], ids=["one by one", "together"])
def test_conv(groups: int, patches: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "PATCHES", patches)
    x, dy = torch.randn(3, 4, 9, device=device), torch.randn(3, 6, 7, device=device)
    a = ConvWgrad(x, dy, 3, [3], [1], [0], [1], groups, True, True, F32)
    rows = operators.conv_norms(a)
    assert torch.equal(rows, operators.conv_wgrad(a)[2])
    w, x, dy = (
        torch.zeros(6, 4 // groups, 3, dtype=torch.float64, device=device),
        x.double(),
        dy.double(),
    )
    grad = lambda b: torch.nn.grad.conv1d_weight(x[b], w.shape, dy[b], groups=groups).flatten()
    g = torch.stack([grad(slice(b, b + 1)) for b in range(3)])
    assert_norms(rows[0], torch.cat([g, g.sum(0, keepdim=True)]).square().sum(1))


ALONE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "linear": lambda: (ops.linear_wgrad, linear_of(2, 16, 300, 400)),
    "short": lambda: (ops.linear_wgrad, linear_of(2, 3, 300, 400)),
    "one token": lambda: (ops.linear_wgrad, linear_of(2, 1, 300, 400)),
    "experts": lambda: (
        ops.linear_wgrad,
        LinearWgrad(
            *(torch.randn(20, n) for n in (300, 400)),
            *(True, True, False, F32, torch.tensor([0, 3, 9, 11, 20]), 2),
        ),
    ),
    "embedding": lambda: (
        ops.embedding_wgrad,
        EmbeddingWgrad(torch.randn(2, 5, 40), torch.randint(0, 3000, (2, 5)), 3000, -1, F32),
    ),
    "convolution": lambda: (
        ops.conv_wgrad,
        ConvWgrad(
            *(torch.randn(2, n, 4) for n in (200, 300)),
            *(2, [1], [1], [0], [1], 1, True, True, F32),
        ),
    ),
}


def linear_of(B: int, T: int, I: int, O: int) -> LinearWgrad:
    return LinearWgrad(torch.randn(B, T, I), torch.randn(B, T, O), True, True, False, F32)


@interpreted
@pytest.mark.parametrize("layer", ALONE)
def test_no_weight_gradient_is_made(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dW of 60,000 to 240,000 numbers; the operator is that of a block with
    ``gradients="torch"``.
    """
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")
    operator, a = ALONE[layer]()
    with Largest() as beside:
        dw = operator(a)[0]
    with Largest() as alone:
        found = ops.norms_alone(operator, a)
    assert beside.numbers >= dw.numel() > 4 * alone.numbers
    assert all(t.numel() == 0 for t in found if t.ndim != 2) and found[0].numel() == 0


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes that the interpreter's programs have stored."""
    from triton.runtime import interpreter

    count, builder = [0], interpreter.interpreter_builder
    store = builder.create_masked_store

    def counted(ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
        count[0] += int(mask.data.sum()) * value.data.itemsize
        return store(ptrs, value, mask, *options)

    monkeypatch.setattr(builder, "create_masked_store", counted)
    yield count


@interpreted
@pytest.mark.parametrize("programs", [12, 5], ids=["whole tiles", "shared tiles"])
def test_bytes(programs: int, stored: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head of ``linear_wgrad.py`` says."""
    monkeypatch.setattr(configs, "MERGE", 0)
    linear_wgrad.launches.cache_clear()
    B, T, I, O, config = 9, 40, 60, 40, configs.Config(16, 16, 16, 4, 2)
    x, dy = draw(B, T, I, O, F32, "cpu")
    tiles, balance = 12, configs.balance(12, B, programs, 3)
    found = []
    for dw in (None, torch.empty(O, I), torch.empty(O, I, dtype=BF16)):
        stored[0] = 0
        linear_wgrad.fused(x, dy, dw, torch.empty(1, B + 2), config, programs=programs)
        found.append(stored[0])
    squares = linear_plan.Squares(O, I, config, balance)
    sums = linear_plan.plan((B, T), squares, None, processors=3).values["sums"]
    tickets, parts = 1, balance.unfinished * 16 * 16
    assert found[0] == 4 * (B * tiles + sums + tickets + parts + B + 2)
    assert (parts > 0) is (programs == 5)
    assert [more - found[0] for more in found[1:]] == [4 * I * O, 2 * I * O]
