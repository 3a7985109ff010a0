# SPDX-License-Identifier: Apache-2.0
"""What needs a CUDA device: whole models on it, its streams, graphs and memory. The kernels' own
tests run there too (``test_triton_*.py``).
"""

import copy
import threading
from typing import Any

import pytest
import torch
from layers import Tied, assert_layer
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

pytestmark = pytest.mark.gpu

LAYERS = {
    "linear": lambda: (gnsfast.Linear(40, 24), torch.randn(3, 70, 40)),
    "linear, short": lambda: (gnsfast.Linear(40, 24), torch.randn(3, 9, 40)),
    "linear, one token": lambda: (gnsfast.Linear(40, 24), torch.randn(3, 40)),
    "embedding": lambda: (gnsfast.Embedding(9, 24, padding_idx=2), torch.randint(0, 9, (3, 70))),
    "layer norm": lambda: (gnsfast.LayerNorm(24), torch.randn(3, 70, 24)),
    "rms norm": lambda: (gnsfast.RMSNorm(24), torch.randn(3, 70, 24)),
    "convolution": lambda: (gnsfast.Conv2d(6, 8, 3, padding=1), torch.randn(3, 6, 9, 9)),
    "grouped": lambda: (gnsfast.Conv1d(6, 6, 3, groups=6), torch.randn(3, 6, 20)),
    "3-d convolution": lambda: (gnsfast.Conv3d(6, 8, 3), torch.randn(3, 6, 5, 6, 7)),
    "transposed": lambda: (gnsfast.ConvTranspose2d(6, 8, 3, stride=2), torch.randn(3, 6, 9, 9)),
    "group norm": lambda: (gnsfast.GroupNorm(3, 6), torch.randn(3, 6, 9, 9)),
    "instance norm": lambda: (gnsfast.InstanceNorm2d(6, affine=True), torch.randn(3, 6, 9, 9)),
    "frozen batch norm": lambda: (gnsfast.BatchNorm2d(6).eval(), torch.randn(3, 6, 9, 9)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_layers(make: Any) -> None:
    layer, x = make()
    assert_layer(layer.cuda(), x.cuda(), 3)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A sum over samples of each sample's mean."""
    logits = model(batch[0]).float()
    losses = torch.nn.functional.cross_entropy(logits.mT, batch[1], reduction="none")
    return losses.mean(1).sum()


def draw(B: int = 3, T: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 23, (B, T), device="cuda"), torch.randint(0, 23, (B, T), device="cuda")


@pytest.mark.parametrize("T", [9, 80])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_model(compiled: bool, T: int) -> None:
    model, batch = Tied().cuda(), draw(T=T)
    loop = loop_sqnorms(model, loss_of, batch, 3)
    run = torch.compile(loss_of, fullgraph=True) if compiled else loss_of
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        run(model, batch).backward()
    assert_norms(norms, {n: norm for n, norm in loop.items() if n in norms})
    assert len(norms) == len(loop)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transformer_layer(compiled: bool) -> None:
    """Torch's own attention, long enough for the fused kernel."""
    model, batch = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True).cuda(), 3
    x = torch.randn(batch, 300, 64, device="cuda")

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    loop = loop_sqnorms(model, loss_of, x, batch)
    run = torch.compile(loss_of, fullgraph=True) if compiled else loss_of
    with gnsfast.per_sample_sqnorms(model, batch) as norms:
        run(model, x).backward()
    assert_norms(norms, loop)


def test_autocast() -> None:
    """No worse than twice torch's own error, one sample at a time."""
    model, batch = Tied().cuda(), draw(T=80)
    loop, twin = loop_sqnorms(model, loss_of, batch, 3), copy.deepcopy(model)

    def narrow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(model, batch)

    worst = dict.fromkeys(loop, 0.0)
    for b in range(3):
        one = tuple(t[b : b + 1] for t in batch)
        grads = torch.autograd.grad(narrow(twin, one), list(twin.parameters()))
        for name, g in zip(loop, grads):
            error = (g.double().square().sum().cpu() - loop[name][b]).abs() / loop[name][b]
            worst[name] = max(worst[name], error.item())
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        narrow(model, batch).backward()
    for name in loop:
        error = ((norms[name].double().cpu() - loop[name]).abs() / loop[name]).max().item()
        assert error <= 2 * max(worst.values()), name


EXTENSION = {
    "one block": (3, 64, 192, 256),
    "one token": (3, 1, 200, 264),
    "less than a step": (2, 7, 8, 8),
    "ragged": (4, 100, 200, 264),
    "many blocks": (5, 512, 512, 768),
    "split": (16, 260, 1000, 1000),
    "whole and split": (16, 256, 4096, 4096),
}


def extension_kernels() -> list[str]:
    """Those of the extension that this device runs; the test is skipped where it is not built."""
    from gnsfast.ops import extension

    if extension.missing():
        pytest.skip(extension.missing())
    return sorted({"sm80", extension.kernel_for(torch.cuda.get_device_capability())})


def assert_extension(
    x: Tensor, dy: Tensor, out: torch.dtype, add: bool, kernel: str, rtol: float = 1e-5
) -> None:
    """Every sample's norm and dW against float64; twice the same bits."""
    from gnsfast.ops import extension

    (B, _, I), O = x.shape, dy.shape[2]
    start = 1.0 if add else torch.nan
    filled = []
    for _ in range(2):
        dw = torch.full((O, I), start, device="cuda", dtype=out)
        db = torch.full((O,), start, device="cuda", dtype=out)
        rows = torch.full((2, B + 4), torch.nan, device="cuda")[:, : B + 2]  # of a wider matrix
        assert extension.takes(x, dy, dw, add)
        extension.linear_wgrad(x, dy, dw, db, rows, add, kernel)
        filled.append((dw, db, rows))
    for one, other in zip(*filled):
        assert torch.equal(one, other)
    total = torch.zeros(O, I, device="cuda", dtype=torch.float64)
    want = torch.ones(2, B + 2, device="cuda", dtype=torch.float64)
    for b in range(B):
        g = dy[b].double().T @ x[b].double()
        want[0, b] = g.square().sum()
        total += g
    want[0, B] = total.square().sum()
    db_BO = dy.double().sum(1)
    want[1, :B], want[1, B] = db_BO.square().sum(1), db_BO.sum(0).square().sum()
    torch.testing.assert_close(rows.double(), want, rtol=1e-5, atol=0)
    for got, sum_ in ((dw, total), (db, db_BO.sum(0))):
        scale = sum_.abs().max().item()
        torch.testing.assert_close(got.double() - add, sum_, rtol=rtol, atol=1e-5 * scale + 1e-6)
    alone = torch.full_like(rows[:1], torch.nan)
    again = torch.full_like(dw, start)
    extension.linear_wgrad(x, dy, again, None, alone, add, kernel)
    assert torch.equal(alone, rows[:1]) and torch.equal(again, dw)
    without = torch.full_like(rows, torch.nan)
    extension.linear_wgrad(x, dy, None, None, without, False, kernel)
    assert torch.equal(without, rows)


@pytest.mark.parametrize("add", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", EXTENSION.values(), ids=EXTENSION.keys())
def test_extension(shape: tuple[int, int, int, int], dtype: torch.dtype, add: bool) -> None:
    B, T, I, O = shape
    x, dy = (torch.randn(B, T, n, device="cuda").to(dtype) for n in (I, O))
    for kernel in extension_kernels():
        assert_extension(x, dy, torch.float32, add, kernel)
        if not add:
            assert_extension(x, dy, dtype, False, kernel, rtol=2**-7)


@pytest.mark.parametrize("T", [64, 197, 640])
def test_variants(T: int) -> None:
    """What the benchmarks hold against the Hopper kernel is right too."""
    if "sm90" not in extension_kernels():
        pytest.skip("no Hopper device")
    from gnsfast import _C

    variants = [name for name in _C.kernels() if name.startswith("sm90 ")]
    if not variants:
        pytest.skip("built without GNSFAST_CUDA_VARIANTS=1")
    for name in variants:
        B = 1 if name.endswith("one sample") else 5
        x, dy = (torch.randn(B, T, n, device="cuda").bfloat16() for n in (264, 520))
        assert_extension(x, dy, torch.bfloat16, False, name, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extension_token_sqnorms(dtype: torch.dtype) -> None:
    from gnsfast.ops import extension

    extension_kernels()
    x = torch.randn(1003, 3, 4104, device="cuda").to(dtype)[:, 1]
    dy = torch.randn(1003, 72, device="cuda").to(dtype)
    assert extension.takes_tokens(x, dy)
    product, dy_sqnorm = extension.token_sqnorms(x, dy)
    of_x, of_dy = (t.double().square().sum(1) for t in (x, dy))
    torch.testing.assert_close(product.double(), of_x * of_dy, rtol=1e-5, atol=0)
    torch.testing.assert_close(dy_sqnorm.double(), of_dy, rtol=1e-5, atol=0)


def test_extension_splits() -> None:
    """The named cases are what their names say, on 132 multiprocessors."""
    extension_kernels()
    from gnsfast import _C

    plans = {n: _C.plan_linear_wgrad("sm90", shape, 132) for n, shape in EXTENSION.items()}
    assert plans["split"]["whole_tiles"] == 0 and plans["split"]["helpers"] > 1
    assert plans["whole and split"]["whole_tiles"] > 0 and plans["whole and split"]["helpers"] > 1


EXTENSION_STRIDES = {
    "sequence first": lambda t: t.view(70, 3, 40).transpose(0, 1),
    "a slice of packed projections": lambda t: t.repeat(3).view(3, 70, 120)[..., 40:80],
    "one token": lambda t: t.view(210, 40)[:3, None],
    "one sample": lambda t: t.view(1, 210, 40),
}


@pytest.mark.parametrize("make", EXTENSION_STRIDES.values(), ids=EXTENSION_STRIDES.keys())
def test_extension_strides(make: Any) -> None:
    x = make(torch.randn(8400, device="cuda").bfloat16())
    dy = torch.randn(*x.shape[:2], 24, device="cuda").bfloat16()
    for kernel in extension_kernels():
        assert_extension(x, dy, torch.float32, False, kernel)
        assert_extension(dy, x, torch.float32, False, kernel)


def test_extension_in_a_fresh_thread() -> None:
    """A thread that has not used CUDA yet, as one of autograd's may be."""
    kernels = extension_kernels()
    x, dy = (torch.randn(3, 70, n, device="cuda").bfloat16() for n in (40, 24))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for kernel in kernels:
                assert_extension(x, dy, torch.float32, False, kernel)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed


def test_tf32() -> None:
    """Where PyTorch's switch allows it, no worse than twice torch's own tf32."""
    x, dy = (torch.randn(4, 256, n, device="cuda") for n in (512, 264))
    want = torch.stack([b.double().T @ a.double() for a, b in zip(x, dy)]).square().sum((1, 2))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        rows = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)[2]
        theirs = torch.stack([b.T @ a for a, b in zip(x, dy)]).double().square().sum((1, 2))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    error, bar = (((n.double() - want).abs() / want).max() for n in (rows[0, :4], theirs))
    assert error <= 2 * bar + 1e-5


def test_no_synchronisation() -> None:
    """A measured step never waits for the device."""
    model = Tied().cuda()
    gns = gnsfast.GradientNoiseScale(model)
    batches = [draw() for _ in range(3)]

    def step(batch: tuple[Tensor, Tensor]) -> None:
        with gns.update(3):
            (loss_of(model, batch) / 3).backward()
        model.zero_grad(set_to_none=True)

    step(batches[0])  # the first step looks for weights used as tensors, and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gns.compute().updates == 3


def test_cuda_graph() -> None:
    """Captured and replayed on new inputs."""
    x, dy = (torch.randn(3, 70, n, device="cuda") for n in (40, 24))
    run = lambda: torch.ops.gnsfast.linear_wgrad(x, dy, True, True, False, torch.float32)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.normal_()
    graph.replay()
    for ours, want in zip(captured, run()):
        torch.testing.assert_close(ours, want, rtol=0, atol=0)


def test_another_stream() -> None:
    stream = torch.cuda.Stream()
    x, dy = (torch.randn(3, 70, n, device="cuda") for n in (40, 24))
    want = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        got = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_tuned_configurations() -> None:
    """What tuning picks is as right as what is fixed."""
    torch.use_deterministic_algorithms(False)
    layer = gnsfast.Linear(264, 136).cuda()
    assert_layer(layer, torch.randn(3, 130, 264, device="cuda"), 3)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 << 30,
    reason="needs 40 GB",
)
@pytest.mark.parametrize("padding", [0, 1], ids=["descriptors", "pointers"])
def test_more_than_two_billion_elements(padding: int) -> None:
    """Offsets beyond 2³¹ in x, and in the table of an embedding.

    Tensor cores truncate as they accumulate. Simulated in steps of 16 tokens, a squared norm is
    low by 1.8e-4, and an element of dW, 300 in the mean, is off by up to 0.16.
    """
    B, T, I, O = 2, 70_000, 16_384, 24
    x = torch.randn(B, T, I + padding, device="cuda", dtype=torch.bfloat16)[..., :I]
    dy = torch.randn(B, T, O, device="cuda", dtype=torch.bfloat16)
    dw, _, rows = torch.ops.gnsfast.linear_wgrad(x, dy, True, False, False, torch.float32)
    total = torch.zeros(O, I, device="cuda", dtype=torch.float64)
    for b in range(B):
        g = torch.zeros_like(total)
        for tokens in torch.arange(T).split(10_000):
            part = slice(int(tokens[0]), int(tokens[-1]) + 1)
            g += dy[b, part].double().T @ x[b, part].double()
        torch.testing.assert_close(rows[0, b].double(), g.square().sum(), rtol=5e-4, atol=0)
        total += g
    torch.testing.assert_close(dw.double(), total, rtol=1e-3, atol=0.2)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 << 30,
    reason="needs 40 GB",
)
def test_embedding_beyond_two_billion_elements() -> None:
    V, D = 2_500_000, 1024
    ids = torch.randint(V - 1000, V, (3, 50), device="cuda")
    dy = torch.randn(3, 50, D, device="cuda")
    dw, rows = torch.ops.gnsfast.embedding_wgrad(dy, ids, V, -1, torch.bfloat16)
    for b in range(3):
        g = torch.zeros(1000, D, device="cuda", dtype=torch.float64)
        g.index_add_(0, ids[b] - (V - 1000), dy[b].double())
        torch.testing.assert_close(rows[0, b].double(), g.square().sum(), rtol=1e-5, atol=0)
    assert not dw[: V - 1000].any()
