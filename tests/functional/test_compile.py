# SPDX-License-Identifier: Apache-2.0
"""torch.compile, the operators' registration, activation checkpointing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import assert_as_loop
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.signatures import OPERATORS

B, T, V = 3, 6, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = x + self.down(F.gelu(self.up(self.rms(x))))
        return out


class GPT(nn.Module):
    """``around`` names what is recomputed in backward."""

    reentrant = False

    def __init__(self, tied: bool = True, around: str = "", blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, 8), nn.Embedding(T, 8)
        self.conv, self.blocks = nn.Conv1d(8, 8, 1), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head, self.around = nn.LayerNorm(8), nn.Linear(8, V, bias=False), around
        if tied:
            self.head.weight = self.tokens.weight

    def run(self, part: str, *args: Any) -> Any:
        fn = getattr(self, part)
        if part not in self.around:
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=self.reentrant)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])[None])
        out: Tensor = self.conv(x.mT).mT
        return out

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def last(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out

    def everything(self, ids: Tensor) -> Tensor:
        out: Tensor = self.run("last", self.run("middle", self.run("embed", ids)))
        return out

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.run("everything", ids)
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def draw(samples: int = B) -> tuple[Tensor, Tensor]:
    return torch.randint(0, V, (samples, T)), torch.randint(0, V, (samples, T))


@pytest.mark.parametrize("tied, backend", [(True, "inductor"), (False, "aot_eager")])
def test_ten_steps_in_one_graph(tied: bool, backend: str) -> None:
    model = GPT(tied)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(10):
        batch = draw()
        assert_as_loop(model, batch, B, loss_of, run=compiled)
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 1


def test_another_batch_size_and_closed_probes() -> None:
    model = GPT(blocks=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for samples in (B, 5):
        batch = draw(samples)
        assert_as_loop(model, batch, samples, loss_of, run=compiled)
        if samples == B:
            model.zero_grad()
            loss_of(compiled, batch).backward()  # a plain step between
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch[0]), model(batch[0]))


def test_compiled_loss_under_autocast() -> None:
    model, batch = GPT(blocks=1), draw()

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    with gnsfast.per_sample_sqnorms(model, B) as eager:
        step(batch).backward()
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        torch.compile(step, backend="aot_eager", fullgraph=True)(batch).backward()
    for name in eager:  # the same bfloat16 rounding, up to the order of fused sums
        torch.testing.assert_close(norms[name], eager[name], rtol=2e-2, atol=1e-4)


class Odd(nn.Module):
    """``how`` uses the parameter as compiled code does not follow."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.odd, self.how = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner(x), self.odd)


def written(x: Tensor, w: Tensor) -> Tensor:
    w = w.clone()
    w.mul_(2.0)
    return F.linear(x, w)


ODD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, w: x @ (w * 2 + 1),
    "replayed": lambda x, w: torch.einsum("btd,de->bte", x, w),
    "written": written,
    "rows of a table": lambda x, w: F.linear(x, F.embedding(torch.tensor([1, 1, 0]), w)),
    "twice": lambda x, w: F.linear(F.linear(x, w).tanh(), w),
    "in two ways": lambda x, w: F.linear(x, w) * w[0],
}


@pytest.mark.parametrize("how", ODD)
def test_what_only_eager_code_follows(how: str) -> None:
    """It breaks the graph and stays exact; ``fullgraph`` has an error with the parameter's name."""
    model, x = Odd(ODD[how]), torch.randn(B, T, 8)
    loop = loop_sqnorms(model, squares, x, B)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
            squares(compiled, x).backward()
        assert_norms(norms, loop)
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()  # it keeps code that it has compiled for the same functions
    with pytest.raises(torch._dynamo.exc.Unsupported, match="odd: gnsfast follows this parameter"):
        with gnsfast.per_sample_sqnorms(model, B):
            squares(torch.compile(model, backend="aot_eager", fullgraph=True), x).backward()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().sum()


@pytest.mark.parametrize("backend, opened", [("aot_eager", "wrapper"), ("inductor", "model")])
def test_weights_that_are_cast_and_transposed(backend: str, opened: str) -> None:
    """Two graphs for the first batch size, measured and plain, and two for all others."""

    def weights(m: Any, x: Tensor) -> Tensor:
        x = F.gelu(m.up(x)) * m.gain
        return F.linear(x, m.w.to(x.dtype).t().contiguous(), m.b)

    parts = dict(gain=torch.randn(16), w=torch.randn(16, 3), b=torch.randn(3))
    model = Made(weights, up=nn.Linear(8, 16), **parts)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    frames = []
    for samples in (B, B, 5, 5, 7, 9):
        x = torch.randn(samples, T, 8)
        squares(compiled, x).backward()
        with gnsfast.per_sample_sqnorms(model if opened == "model" else compiled, samples) as norms:
            squares(compiled, x).backward()
        assert_norms(norms, loop_sqnorms(model, squares, x, samples))
        frames.append(counter.frame_count)
    assert frames[1:] == [2, 4, 4, 4, 4]


def test_a_model_that_runs_twice() -> None:
    class Twice(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            return self.everything(ids) + self.everything(ids.flip(1))

    model, batch = Twice(blocks=1), draw()
    for run in (model, torch.compile(model, backend="eager")):
        assert_as_loop(model, batch, B, loss_of, run=run)


def ops_and_arguments() -> list[tuple[str, tuple[Any, ...]]]:
    x, dy, ids = torch.randn(3, 4, 5), torch.randn(3, 4, 6), torch.randint(0, 6, (3, 4))
    mean, rstd, w, b = torch.randn(3, 4, 1), torch.rand(3, 4, 1), torch.randn(5), torch.randn(5)
    f32, image, square = torch.float32, torch.randn(4, 2, 5, 5), [1, 1]
    starts, narrow = torch.tensor([0, 1, 3, 3, 4]), (x.bfloat16(), x.bfloat16())
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("linear_wgrad", (x, dy, True, True, False, f32)),
        ("linear_wgrad", (x, dy, True, False, True, f32)),
        ("linear_wgrad", (x.bfloat16(), dy.bfloat16(), False, True, False, torch.bfloat16)),
        ("linear_wgrad", (x[:, :1], dy[:, :1], True, True, False, f32)),
        ("linear_wgrad", (x[:0], dy[:0], True, True, False, f32)),
        ("linear_wgrad", (x, dy, True, True, False, f32, None, 0, ids)),
        ("linear_wgrad", (x[0], dy[0], True, True, False, f32, starts, 2)),
        ("embedding_wgrad", (dy, ids, 6, -1, f32)),
        ("embedding_wgrad", (dy, ids, 6, 2, f32)),
        ("norm_backward", (x, x, mean, rstd, w, b, True, True)),
        ("norm_backward", (x, x, mean, rstd, w, None, True, False)),
        ("norm_backward", (x, x, mean, rstd, w, b, False, True)),
        ("norm_backward", (x, x, None, None, w, None, True, False, 1e-6, 0.0)),
        ("norm_backward", (*narrow, None, None, w.bfloat16(), None, True, False, 1e-6, 1.0)),
    ]
    for samples, groups in ((4, 1), (2, 2)):
        dy_image = torch.randn(4, 4, 3, 3)
        geometry = ([3, 3], square, [0, 0], square, groups)
        calls.append(("conv_wgrad", (image, dy_image, samples, *geometry, True, True, f32)))
    return calls


@pytest.mark.parametrize(
    ("name", "arguments"), ops_and_arguments(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_operators_are_registered_right(name: str, arguments: tuple[Any, ...]) -> None:
    fields = tuple(OPERATORS[name](*arguments))
    torch.library.opcheck(getattr(torch.ops.gnsfast, name).default, fields)


@pytest.mark.parametrize(
    ("around", "reentrant"),
    [
        ("middle", True),
        *((parts, False) for parts in ("middle", "embed", "last", "everything")),
        *((parts, False) for parts in ("embed middle", "everything middle")),
    ],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_checkpointing(around: str, reentrant: bool, tied: bool) -> None:
    model, batch = GPT(tied, around), draw()
    model.reentrant = reentrant
    twin = copy.deepcopy(model)
    twin.around = ""
    assert_as_loop(model, batch, B, loss_of, twin=twin)


def test_checkpointing_compiled() -> None:
    model, batch = GPT(True, "middle", blocks=1), draw()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    twin = copy.deepcopy(model)
    twin.around = ""
    assert_as_loop(model, batch, B, loss_of, twin=twin, run=compiled)


def test_blocks_that_are_alike_share_a_graph() -> None:
    """Compiled one by one they would exceed torch's limit of 8 graphs, were a name in each."""
    counter = CompileCounterWithBackend("eager")
    blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4)) for _ in range(10)]
    model = nn.Sequential(*blocks)
    for block in model:
        block.compile(backend=counter)
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(model, B):
            model(torch.randn(B, 5, 4)).sum().backward()
    assert counter.frame_count <= 4  # the first block has an input without a gradient
