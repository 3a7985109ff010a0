# SPDX-License-Identifier: Apache-2.0
"""The counted model: against arithmetic by hand, against what the operators launch, and against the
plans of the compiled kernels.
"""

import argparse
import importlib.util
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from signed import Signed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

import gnsfast  # noqa: E402
from benchmarks import cases, model, model_linear, model_step, models  # noqa: E402
from benchmarks.model_linear import ASSUMED, GPUS, KERNELS, Layer, weight_gradient  # noqa: E402
from gnsfast.ops import extension

H200 = GPUS["H200"]
SQUARE = Layer("square", 4096, 4096)
TOKENS = 16384


def test_clocks() -> None:
    """The peaks belong to clocks that the vendor states: 1410 MHz on the A100 (312e12 / 108 / 2048
    = 1.4106e9), 1830 MHz on the H100 (989.4e12 / 132 / 4096 = 1.8300e9).
    """
    assert GPUS["A100"].clock == pytest.approx(1.410e9, rel=1e-3)
    assert GPUS["H100"].clock == pytest.approx(1.830e9, rel=1e-3)


@pytest.mark.parametrize(
    ("O", "product", "again"), [(4096, 42.39, 3.793), (14336, 148.38, 8.533)], ids=["9 %", "6 %"]
)
def test_short_samples(O: int, product: float, again: float) -> None:
    """Up to 128 tokens norms cost one more read of x and dy: 9 % of a 4096 x 4096 layer, 6 % of
    4096 x 14336.

    Nanoseconds a token on an H200. 2 · 4096² = 33.55 MFLOP at 0.8 · 989.4 = 791.5 TFLOP/s: 42.39.
    2 · (4096 + 4096) = 16384 bytes at 0.9 · 4.8 = 4.32 TB/s: 3.793; the ratio is 0.0895. With
    O = 14336: 117.44 MFLOP, 148.38; 36864 bytes, 8.533; 0.0575.

    Gram at T = 128: a token's row of both products is 2 · 128 · 8192 = 2.097 MFLOP, at 0.6 · 989.4
    = 593.6 TFLOP/s 3.53 ns; 128 samples are a wave of 132 not quite full: 3.53 / (128 / 132) =
    3.64, still less than the read.
    """
    layer = Layer("hand", 4096, O)
    for T, route in ((1, "closed"), (16, "gram"), (128, "gram")):
        cost = weight_gradient(H200, layer, T, TOKENS // T)
        assert cost.route == route
        assert cost.plain == pytest.approx(TOKENS * product * 1e-9, rel=1e-3)
        if O == 4096 or T < 128:
            assert cost.reads == pytest.approx(TOKENS * again * 1e-9, rel=1e-3)
        assert cost.ends == cost.parts == cost.tiles == 0
    alone = model_linear.gram_seconds(H200, 1, 128, 4096, 4096, ASSUMED)
    assert alone == pytest.approx(132 * 128 * 3.533e-9, rel=1e-3)  # one of 132 multiprocessors


def test_summed_norm_reads_dw() -> None:
    """The closed form's and Gram's one read of dW is 2 % of its product at 16k tokens.

    float32: 4096² · 4 = 67.1 MB, more than half of 50 MB, so from memory at 4.32 TB/s: 15.53 µs of
    694.6. Under autocast plain stores bfloat16 and widens it: 33.55 MB read and 67.1 written, 100.7
    MB or 23.30 µs; we copy a float32 product into dW: 134.2 MB, 31.07 µs.
    As bfloat16 33.55 MB are too much as well: 7.77 µs; of a 1024 x 4096 layer 8.39 MB come from L2,
    5120 bytes at 1.83 GHz: 0.895 µs.
    """
    autocast = weight_gradient(H200, SQUARE, 1, TOKENS, weights=4)
    assert autocast.stores == pytest.approx((15.53 + 31.07 - 23.30 - 2.0) * 1e-6, rel=3e-3)
    assert 15.53e-6 / 694.6e-6 == pytest.approx(0.022, abs=0.001)
    assert weight_gradient(H200, SQUARE, 1, TOKENS).stores == pytest.approx(7.77e-6, rel=1e-3)
    narrow = weight_gradient(H200, Layer("k", 4096, 1024), 1, TOKENS)
    assert narrow.stores == pytest.approx(0.895e-6, rel=2e-3)


def test_ends_of_samples() -> None:
    """Fused, 0 to 8 %: a 128 x 192 tile's end is 2 · 24576 / 128 + 150 = 534 clocks where nothing
    hides it, a token 2 · 24576 / 4096 / 0.8 = 15 clocks: 534 / (512 · 15) = 7.0 % at T = 512. In
    turn a warpgroup has half of the additions, 192 + 150 = 342, under the other's 64 · 7.5 = 480
    clocks of one block: nothing is left. The 128 x 128 tile: 256 + 150 = 406 clocks.
    """
    alone = replace(KERNELS["sm90"], in_turn=False)
    assert model_linear.end_clocks(H200, alone, 512, 0.8, ASSUMED) == 534
    assert model_linear.end_clocks(H200, KERNELS["sm90"], 64, 0.8, ASSUMED) == 0
    faster = replace(ASSUMED, drain=388)  # 580 clocks, 100 more than the block covers
    assert model_linear.end_clocks(H200, KERNELS["sm90"], 1, 0.8, faster) == pytest.approx(100)
    assert model_linear.end_clocks(H200, KERNELS["triton"], 512, 0.8, ASSUMED) == 406


def test_what_a_tile_can_reach() -> None:
    """A token of a 128 x 128 tile is 32768 FLOP and (128 + 128) · 2 = 512 bytes out of L2: 64 a
    byte. 5120 bytes · 1.83 GHz = 9.37 TB/s feed 599.6 TFLOP/s, 0.606 of the peak.

    128 x 192 in clusters of two: 49152 FLOP, (128 + 96) · 2 = 448 bytes, 1.04 of the peak. Shared
    memory, where wgmma reads: two warpgroups · (64 + 192) · 2 = 1024 bytes, copies write 640, in 12
    clocks: 138.7 a clock, of 128 that there are: 0.923. So neither binds below 0.8.
    """
    share = model_linear.loop_share
    assert share(H200, KERNELS["triton"], ASSUMED) == pytest.approx(0.606, abs=1e-3)
    assert share(H200, KERNELS["sm90"], ASSUMED) == 0.8
    ideal = replace(ASSUMED, gemm=1.0)
    assert share(H200, KERNELS["sm90"], ideal) == pytest.approx(0.923, abs=1e-3)
    assert share(GPUS["A100"], KERNELS["triton"], ideal) == 1.0  # 64 a byte of 7.2 TB/s: 462


def test_fused_waves() -> None:
    """4096 x 4096, T = 2048, B = 8. Triton: 32 · 32 = 1024 tiles on 132 blocks are 8 waves of 8
    samples, 64 · 2048 tokens of 8 / 0.606 = 13.2 clocks: 945.6 µs at 1.83 GHz, 251.0 more than
    cuBLAS's 694.6; 64 ends of 406 clocks are 14.2 µs. Unsplit, so 3 kernels more. 768 x 768 is 36
    tiles; 16 samples of 16 steps are 256 steps in one part; 108 blocks of 6, 5, 5 samples take 96
    and 16 + 11 for the merge; 144 of 4 are two waves, 128 and more.

    sm90: 16 · 22 = 352 tiles on 66 clusters: 5 waves, and 22 tiles left. In 3 parts of 3, 3, 2
    samples they are one more wave: 5 · 8 + 3 = 43 samples of 2048 · 15 clocks: 721.9 µs. The parts
    are 22 · 3 · 2 tiles of 98304 bytes, 13.0 MB, and partials 352 · 16 · 9 · 4 = 0.2 MB: out of L2
    1.41 µs.
    """
    cost = weight_gradient(H200, SQUARE, 2048, 8)
    assert cost.tiles == pytest.approx(251.0e-6, rel=2e-3)
    assert cost.ends == pytest.approx(14.2e-6, rel=2e-3)
    assert cost.launches == 3 * ASSUMED.kernel
    split = model_linear.triton_plan(H200, KERNELS["triton"], 16, 1024, 768, 768)
    assert (split.tiles, split.parts, split.samples) == (36, 3, 6)
    plan = model_linear.sm90_plan(H200, KERNELS["sm90"], 8, 2048, 4096, 4096)
    assert (plan.tiles, plan.split_tiles, plan.parts, plan.samples) == (352, 22, 3, 43)
    cost = weight_gradient(H200, SQUARE, 2048, 8, kernel="sm90")
    assert cost.tiles == pytest.approx((721.9 - 694.6) * 1e-6, rel=5e-3)
    assert cost.parts == pytest.approx(1.41e-6, rel=5e-3)


def test_bytes() -> None:
    """One sample of 64 tokens, 128 x 256, bfloat16. Plain: 2 · 64 · (128 + 256) + 2 · 32768 =
    114688 bytes. T = 1, B = 64 has the same; norms read the rows, 49152, and dW, 65536, once more,
    and write and read 64 float32: 512.
    """
    layer = Layer("hand", 128, 256)
    cost = weight_gradient(H200, layer, 1, 64)
    assert (cost.route, cost.plain_bytes) == ("closed", 114688)
    assert cost.more_bytes == 49152 + 65536 + 512


@pytest.mark.skipif(importlib.util.find_spec("gnsfast._C") is None, reason="no CUDA extension")
@pytest.mark.parametrize(
    "shape",
    [(8, 2048, 4096, 4096), (16, 1024, 768, 2304), (64, 256, 4096, 14336), (1, 8192, 768, 768)],
    ids=str,
)
def test_plan_is_the_kernels(shape: tuple[int, int, int, int]) -> None:
    """Partial norms and scratch as the compiled planner has them."""
    found = extension._module().plan_linear_wgrad("sm90", shape, 132)
    plan = model_linear.sm90_plan(H200, KERNELS["sm90"], *shape)
    assert found["partial_rows"] == plan.tiles * 2 * 8
    assert found["scratch_elements"] == plan.split_tiles * plan.parts * 2 * 128 * 192


class Launches(TorchDispatchMode):
    """Counts operations that run a kernel: neither views nor ``empty``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        view = any(ret.alias_info and not ret.alias_info.is_write for ret in func._schema.returns)
        if not view and "empty" not in name and name != "_unsafe_view":
            self.names[name] += 1
        if name == "cat":
            self.longest = max(self.longest, out.numel())
        return out


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton kernels that are launched, by name."""
    from triton.runtime.interpreter import GridExecutor

    launched: list[str] = []
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *args, **kw: launched.append(self.fn.__name__)
    )
    torch.use_deterministic_algorithms(False)  # which fills what is empty
    return launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of Triton's interpreter")
def test_kernels_launched(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators launch beside plain PyTorch's kernels is what the model counts."""
    from gnsfast.triton_kernels import operators, outer

    def count(operator: str, *args: Any, **more: Any) -> int:
        kernels.clear()
        with Launches() as aten:
            getattr(Signed(operators), operator)(*args, **more)
        return len(kernels) + sum(aten.names.values())

    f32 = torch.float32
    x, dy = torch.randn(6, 300, 40), torch.randn(6, 300, 24)
    for route, launches in model_linear.LAUNCHES.items():
        monkeypatch.setattr(outer, "linear_route", lambda *args, route=route: route)
        T = {"closed": 1, "gram": 40, "fused": 300}[route]
        shape = x[:, :T].contiguous(), dy[:, :T].contiguous()
        found = count("linear_wgrad", *shape, True, False, False, f32)
        merged = "merge_splits_kernel" in kernels
        assert found - 1 == launches + merged, route  # plain: one product
        assert merged == (route == "fused")  # one tile, and three blocks
    with_bias = count("linear_wgrad", x, dy, True, True, False, f32)
    assert with_bias - found - 1 == model_step.BIAS_LAUNCHES
    w = torch.randn(40)
    _, mean, rstd = torch.native_layer_norm(x, [40], w, w, 1e-5)
    rms = count("norm_backward", x, x, None, None, w, None, True, False, 1e-5, 0.0)
    layer = count("norm_backward", x, x, mean, rstd, w, w, True, True)
    assert rms - 2 == model_step.NORM_LAUNCHES[False]  # plain: the input's, the gains'
    assert layer - 2 == model_step.NORM_LAUNCHES[True]
    ids = torch.randint(0, 500, (6, 300))
    found = count("embedding_wgrad", x, ids, 500, -1, f32)
    assert found - 3 == model_step.EMBEDDING_LAUNCHES  # plain: zeros, sort, sums
    found = count("linear_wgrad", x, dy, True, False, False, f32, ids_BS=ids % 24)
    plain = count("linear_wgrad", x, dy, True, False, False, f32)
    assert found - plain == model_step.TIED_LAUNCHES


def test_estimator_launches() -> None:
    """Of a step, whatever the model: measured in its second, after the layers were audited."""
    for layers in (1, 5):
        net = gnsfast.convert(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))))
        gns = gnsfast.GradientNoiseScale(net)
        for _ in range(2):
            torch.use_deterministic_algorithms(False)
            with Launches() as opened:
                block = gns.microbatch(4)
                block.__enter__()
            net(torch.randn(4, 3, 8)).sum().backward()
            with Launches() as closed:
                block.__exit__(None, None, None)
                gns.update()
            net.zero_grad()
        found = sum(opened.names.values()) + sum(closed.names.values())
        assert found == pytest.approx(model_step.ESTIMATOR_LAUNCHES, rel=0.1)
        assert closed.longest == 4 * 2 * layers + model_step.SCALARS


def test_models() -> None:
    """Llama-3-8B has 8,030,261,248 parameters; GPT-2, its vocabulary padded by 47, 124,475,904."""
    assert model_step.MODELS["llama-3-8b"].parameters == 8_030_261_248
    gpt2 = model_step.MODELS["gpt-2"]
    assert gpt2.parameters == 124_439_808 + 47 * 768
    with torch.device("meta"):
        parameters = dict(models.GPT2().named_parameters())
    assert gpt2.parameters == sum(p.numel() for p in parameters.values())
    assert gpt2.units == len(parameters)


def test_step() -> None:
    """Plain Llama-3-8B, 8 samples of 2048: 6 · (8,030,261,248 - 525,336,576 of the table - 266,240
    of gains) = 4.503e10 a token, 7.378e14 in all, at 791.5 TFLOP/s 932.1 ms. Attention: 32 blocks ·
    3.5 · 2 · 8 · 2048² · 4096 = 3.079e13 at 494.7 TFLOP/s: 62.2 ms.
    """
    llama = model_step.MODELS["llama-3-8b"]
    counted = model_step.step(H200, llama, 2048, 8)
    assert counted.plain == pytest.approx(0.9321 + 0.0622, rel=1e-3)
    assert counted.gradients == pytest.approx(0.9321 / 3, rel=0.06)  # and autocast's widening
    assert counted.added["biases"] == counted.added["processes"] == 0
    assert counted.overhead == pytest.approx(sum(counted.added.values()) / counted.plain)


def test_processes() -> None:
    """64 processes: 2 · 6 hops of 5 µs; a shard of 8.03e9 · 4 / 64 = 501.9 MB at 4.32 TB/s: 116.2
    µs; a vector of 8 · (4 · 291 + 19) bytes over NVLink: 0.04 µs. Replicated 32.12 GB: 7.435 ms.
    """
    llama = model_step.MODELS["llama-3-8b"]
    assert llama.units == 32 * 7 + 1 + 1 + 65
    seconds = lambda world, sharded: model_step.communication_seconds(
        *(H200, llama, world, 4, ASSUMED, sharded)
    )
    assert seconds(1, True) == 0
    assert seconds(64, True) == pytest.approx(60e-6 + 116.2e-6 + 0.04e-6, rel=1e-3)
    assert seconds(64, False) == pytest.approx(60e-6 + 7435e-6, rel=1e-3)


def test_command(capsys: Any) -> None:
    """Tables for people and for programs; what cannot be counted is refused."""
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    model.run(parser.parse_args(["--world", "64"]))
    out = capsys.readouterr().out
    assert "TFLOP/s dense" in out and "64 processes" in out and "| 8192 | 2 | fused |" in out
    model.run(parser.parse_args(["--model", "gpt-2", "--kernel", "sm90", "--json"]))
    data = json.loads(capsys.readouterr().out)
    assert data["Assumptions"]
    (step,) = (rows for title, rows in data.items() if title.startswith("A step"))
    assert step[-1]["part"] == "all"
    assert step[-1]["ms"] == pytest.approx(sum(row["ms"] for row in step[1:-1]), abs=0.01)
    for wrong in (["--length", "20000"], ["--gemm", "1.2"], ["--gpu", "A100", "--kernel", "sm90"]):
        with pytest.raises(SystemExit, match=wrong[-2]):
            model.run(parser.parse_args(wrong))


def test_predicted() -> None:
    """Beside a measurement: time over plain, and nothing for a device that is not in the table."""
    case = cases.LayerCase("square", 4096, 4096, 1, TOKENS)
    assert model.predicted(case, "NVIDIA H200") == pytest.approx(1.127, abs=0.002)
    assert model.predicted(case, "NVIDIA H100 PCIe") == "-"
