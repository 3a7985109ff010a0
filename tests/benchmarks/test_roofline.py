# SPDX-License-Identifier: Apache-2.0
"""The counted model of a weight gradient: against arithmetic by hand, and against what the
operators launch.
"""

import argparse
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from signed import Signed
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from kernel_launches import count_launches  # noqa: E402

import gnsfast  # noqa: E402
from benchmarks.budgets.launches import Launches  # noqa: E402
from benchmarks.contestants import cases  # noqa: E402
from benchmarks.model import gpu as model_gpu
from benchmarks.model import linear as model_linear
from benchmarks.model import plain as model_plain
from benchmarks.model import step as model_step
from benchmarks.model import tables as model  # noqa: E402
from benchmarks.model.gpu import ASSUMED, GPUS  # noqa: E402
from benchmarks.model.linear import KERNELS, Layer, balance, weight_gradient  # noqa: E402

H200 = GPUS["H200"]
SQUARE = Layer("square", 4096, 4096)
TOKENS = 16384


def test_clocks() -> None:
    """The peaks belong to clocks that the vendor states: 1410 MHz on the A100 (312e12 / 108 / 2048
    = 1.4106e9), 1830 MHz on the H100 (989.4e12 / 132 / 4096 = 1.8300e9). The A100's L2 is measured
    at 5.4e12 / 1.41e9 = 3830 bytes a clock, of 5120 stated.
    """
    assert GPUS["A100"].clock == pytest.approx(1.410e9, rel=1e-3)
    assert GPUS["H100"].clock == pytest.approx(1.830e9, rel=1e-3)
    reads = GPUS["A100"].l2_reads
    assert reads is not None and reads / GPUS["A100"].clock == pytest.approx(3830, rel=1e-3)


@pytest.mark.parametrize(
    ("O", "product", "again"), [(4096, 43.71, 3.793), (14336, 153.02, 8.533)], ids=["9 %", "6 %"]
)
def test_short_samples(O: int, product: float, again: float) -> None:
    """Up to 128 tokens norms cost one more read of x and dy: 9 % of a 4096 x 4096 layer, 6 % of
    4096 x 14336.

    Nanoseconds a token on an H200. 2 · 4096² = 33.55 MFLOP at 0.8 · 989.4 = 791.5 TFLOP/s: 42.39.
    512 tiles of 128 x 256 are 3.9 of 132 blocks' waves and take 4: 42.39 · 528 / 512 = 43.71.
    2 · (4096 + 4096) = 16384 bytes at 0.9 · 4.8 = 4.32 TB/s: 3.793; the ratio is 0.087. With
    O = 14336: 117.44 MFLOP, 148.38, 1792 tiles in 14 waves 153.02; 36864 bytes, 8.533; 0.056.

    Gram at T = 128: a token's row of both products is 2 · 128 · 8192 = 2.097 MFLOP, at 0.6 · 989.4
    = 593.6 TFLOP/s 3.53 ns; 128 samples are a wave of 132 not quite full: 3.53 / (128 / 132) =
    3.64, still less than the read.
    """
    layer = Layer("hand", 4096, O)
    for T, route in ((1, "closed"), (16, "gram"), (128, "gram")):
        cost = weight_gradient(H200, layer, T, TOKENS // T)
        assert cost.route == route
        assert cost.plain - ASSUMED.kernel == pytest.approx(TOKENS * product * 1e-9, rel=1e-3)
        if O == 4096 or T < 128:
            assert cost.reads == pytest.approx(TOKENS * again * 1e-9, rel=1e-3)
        assert cost.ends == cost.parts == cost.tiles == 0
        assert cost.launches == pytest.approx(2 * 2e-6 + 1.2e-6)  # its norms, the finishing kernel
    alone = model_linear.gram_seconds(H200, 1, 128, 4096, 4096, ASSUMED)
    assert alone == pytest.approx(132 * 128 * 3.533e-9, rel=1e-3)  # one of 132 multiprocessors


def test_waves_of_a_plain_product() -> None:
    """GPT-2's up, 3072 x 768 from 16384 tokens. Full, it would take 77.3 GFLOP / 791.5 TFLOP/s =
    97.7 µs. 72 tiles of 128 x 256 are one wave 55 % full: 16384 tokens of 65536 / 4096 / 0.8 = 20
    clocks, 179.1 µs; 96 of 128 x 192 one 73 % full: 15 clocks, 134.3. In three parts the 72 are 216
    in two waves of 5462 tokens: 119.4, and 28.3 MB of parts, more than half of L2, are read at 4.32
    TB/s by one kernel more: 6.55 + 2. So 127.9. Four parts are 37.7 MB, more than cuBLAS may take.
    The head's 2358 tiles of 128 x 128, or 1179 of 128 x 256, fill 18 or 9 waves to 99 %.
    """
    bytes_up = 2 * TOKENS * (768 + 3072) + 2 * 768 * 3072
    up = model_gpu.product_seconds(H200, 3072, 768, TOKENS, bytes_up, ASSUMED)
    assert up == pytest.approx((119.4 + 6.55 + 2.0) * 1e-6, rel=1e-3)
    ideal = 2 * 50304 * 768 * TOKENS / 791.5e12
    head = model_gpu.product_seconds(H200, 50304, 768, TOKENS, 0.0, ASSUMED)
    assert ideal <= head <= 1.02 * ideal
    for K in (16, 1000, 4096):  # never faster than its operations or its bytes
        found = model_gpu.product_seconds(H200, 768, 768, K, 1e6, ASSUMED)
        assert found >= max(2 * 768 * 768 * K / 791.6e12, 1e6 / 4.32e12)


def test_balanced_work() -> None:
    """GPT-2's up: 144 tiles of 16 samples are 2304 pairs on 132 programs, 17.45 each, so 18: a wave
    and two samples of the other twelve tiles for their owners, and for 84 helpers; two waves of
    whole tiles would be 32. Three programs of two tiles of three samples: a helper has the third.
    """
    assert balance(144, 16, 132, 16) == (132, 18, 12 + 84 + 12 - 1)
    assert balance(2, 3, 3, 64) == (3, 2, 4)
    assert balance(132, 5, 132, 64) == (132, 5, 0)  # a whole tile each
    assert balance(133, 1, 132, 64) == (132, 2, 0)  # whole samples alone
    assert balance(2, 3, 132, 64)[:2] == (6, 1)  # not more programs than pairs
    assert balance(63, 32, 66, 16) == (63, 32, 0)  # a helper's 31 parts cost more than they save
    for tiles in (1, 36, 143, 144, 1024):
        for B in (1, 8, 17):
            found = balance(tiles, B, 132, 64)
            assert found.most == math.ceil(tiles * B / 132)
            assert found.unfinished <= 2 * found.programs


def test_summed_norm_reads_dw() -> None:
    """The closed form's and Gram's one read of dW is 2 % of its product at 16k tokens.

    float32: 4096² · 4 = 67.1 MB, more than half of 50 MB, so from memory at 4.32 TB/s: 15.53 µs of
    716.2. Under autocast plain stores bfloat16 and widens it: 33.55 MB read and 67.1 written, 100.7
    MB or 23.30 µs; we copy a float32 product into dW: 134.2 MB, 31.07 µs. Each takes a kernel.
    As bfloat16 33.55 MB are too much as well: 7.77 µs; of a 1024 x 4096 layer 8.39 MB come from L2
    at 9.7 TB/s: 0.865 µs.
    """
    autocast = weight_gradient(H200, SQUARE, 1, TOKENS, weights=4)
    assert autocast.stores == pytest.approx((15.53 + 31.07 - 23.30) * 1e-6, rel=3e-3)
    assert autocast.launches == pytest.approx(2 * 2e-6 + 1.2e-6)
    assert 15.53e-6 / 716.2e-6 == pytest.approx(0.022, abs=0.001)
    assert weight_gradient(H200, SQUARE, 1, TOKENS).stores == pytest.approx(7.77e-6, rel=1e-3)
    narrow = weight_gradient(H200, Layer("k", 4096, 1024), 1, TOKENS)
    assert narrow.stores == pytest.approx(0.865e-6, rel=2e-3)


def test_ends_of_samples() -> None:
    """Fused, 0 to 8 %: a 128 x 192 tile's end is 2 · 24576 / 128 + 150 = 534 clocks where nothing
    hides it, a token 2 · 24576 / 4096 / 0.8 = 15 clocks: 534 / (512 · 15) = 7.0 % at T = 512. In
    turn a warpgroup has half of the additions, 192 + 150 = 342, under the other's 64 · 7.5 = 480
    clocks of one block: nothing is left. The 128 x 128 tile: 256 + 150 = 406 clocks.
    """
    assert model_linear.end_clocks(H200, KERNELS["triton wide"], 512, 0.8, ASSUMED) == 534
    assert model_linear.end_clocks(H200, KERNELS["sm90"], 64, 0.8, ASSUMED) == 0
    faster = replace(ASSUMED, drain=388)  # 580 clocks, 100 more than the block covers
    assert model_linear.end_clocks(H200, KERNELS["sm90"], 1, 0.8, faster) == pytest.approx(100)
    assert model_linear.end_clocks(H200, KERNELS["triton"], 512, 0.8, ASSUMED) == 406


def test_what_a_tile_can_reach() -> None:
    """A token of a 128 x 128 tile is 32768 FLOP and (128 + 128) · 2 = 512 bytes out of L2: 64 a
    byte. 9.7 TB/s feed 620.8 TFLOP/s, 0.627 of the peak. 128 x 192 without a cluster: 49152 FLOP
    from 640 bytes, 745.0 TFLOP/s, 0.753.

    128 x 192 in clusters of two: (128 + 96) · 2 = 448 bytes, 1.08 of the peak. Shared memory, where
    wgmma reads: two warpgroups · (64 + 192) · 2 = 1024 bytes, copies write 640, in 12 clocks: 138.7
    a clock, of 128 that there are: 0.923. So neither binds below 0.8. Where L2 is unknown it does
    not bind.
    """
    share = model_gpu.loop_share
    assert share(H200, KERNELS["triton"], 0.8) == pytest.approx(0.627, abs=1e-3)
    assert share(H200, KERNELS["triton wide"], 0.8) == pytest.approx(0.753, abs=1e-3)
    assert share(H200, KERNELS["sm90"], 0.8) == 0.8
    assert share(H200, KERNELS["sm90"], 1.0) == pytest.approx(0.923, abs=1e-3)
    assert share(GPUS["A100"], KERNELS["triton"], 1.0) == 1.0  # 64 a byte of 5.4 TB/s: 346 TFLOP/s
    assert share(GPUS["B200"], KERNELS["triton"], 1.0) == 1.0


def test_fused() -> None:
    """4096 x 4096, T = 2048, B = 8. Triton: 32 · 32 = 1024 tiles, 8192 pairs on 132 programs, 62.06
    each, so 63: 63 · 2048 tokens of 8 / 0.627 = 12.75 clocks: 898.9 µs at 1.83 GHz, 182.7 more
    than cuBLAS's 716.2; 63 ends of 406 clocks are 14.0 µs. Two kernels, plain one.

    sm90: 16 · 22 = 352 tiles, 2816 pairs on 66 clusters, 42.67 each, so 43 of 2048 · 15 clocks:
    721.8 µs. Five waves, 22 owners and 37 helpers of three samples: 80 parts of 2 · 98304 bytes,
    15.7 MB, and partials 352 · 16 · 9 · 4 = 0.2 MB: out of L2 1.64 µs.
    """
    cost = weight_gradient(H200, SQUARE, 2048, 8)
    assert cost.tiles == pytest.approx(182.7e-6, rel=3e-3)
    assert cost.ends == pytest.approx(14.0e-6, rel=3e-3)
    assert cost.launches == pytest.approx(2e-6 + 1.2e-6)
    tiles, plan = model_linear.work(H200, KERNELS["sm90"], 8, 2048, 4096, 4096)
    assert (tiles, plan.programs, plan.most, plan.unfinished) == (352, 66, 43, 80)
    cost = weight_gradient(H200, SQUARE, 2048, 8, kernel="sm90")
    assert cost.tiles == pytest.approx((721.8 - 716.2) * 1e-6, rel=2e-2)
    assert cost.parts == pytest.approx(1.64e-6, rel=5e-3)


def test_bias() -> None:
    """GPT-2's qkv under autocast. Plain takes four kernels, product, widened dW, the sum over rows
    of 2 · 16384 · 2304 = 75.5 MB and its cast; ours two, and reads dy as often. Compiled, plain's
    sum takes two; ours four beside the two of the product.
    """
    with_bias, without = (Layer("qkv", 768, 2304, bias=b) for b in (True, False))
    one, none = (weight_gradient(H200, each, 1024, 16, weights=4) for each in (with_bias, without))
    assert one.plain - none.plain == pytest.approx(75.5e6 / 4.32e12 + 2 * 2e-6, rel=1e-3)
    assert one.launches == pytest.approx(-2 * 2e-6 + 1.2e-6)
    assert none.launches == pytest.approx(1.2e-6)
    assert one.more - none.more == pytest.approx(-2 * 2e-6)
    assert one.more_bytes == none.more_bytes
    compiled = weight_gradient(H200, with_bias, 1024, 16, weights=4, compiled=True)
    assert compiled.launches == pytest.approx((2 + 4 - 2 - 2) * 2e-6 + 1.2e-6)


def test_bytes() -> None:
    """One sample of 64 tokens, 128 x 256, bfloat16. Plain: 2 · 64 · (128 + 256) + 2 · 32768 =
    114688 bytes. T = 1, B = 64 has the same; norms read the rows, 49152, and dW, 65536, once more,
    and write and read 64 float32: 512.
    """
    layer = Layer("hand", 128, 256)
    cost = weight_gradient(H200, layer, 1, 64)
    assert (cost.route, cost.plain_bytes) == ("closed", 114688)
    assert cost.more_bytes == 49152 + 65536 + 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of Triton's interpreter")
def test_kernels_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators launch is what the model counts."""
    from gnsfast.triton_kernels import operators, outer

    def count(operator: str, *args: Any, **more: Any) -> int:
        return count_launches(lambda: getattr(Signed(operators), operator)(*args, **more))

    f32 = torch.float32
    x, dy = torch.randn(6, 300, 40), torch.randn(6, 300, 24)
    for route, launches in model_linear.LAUNCHES.items():
        monkeypatch.setattr(outer, "linear_route", lambda *args, route=route: route)
        T = {"closed": 1, "gram": 40, "fused": 300}[route]
        shape = x[:, :T].contiguous(), dy[:, :T].contiguous()
        for bias in (False, True):
            assert count("linear_wgrad", *shape, True, bias, False, f32) == launches, route
    w = torch.randn(40)
    _, mean, rstd = torch.native_layer_norm(x, [40], w, w, 1e-5)
    norm = model_plain.NORM_LAUNCHES + model_step.NORM_LAUNCHES["eager"]
    assert count("norm_backward", x, x, None, None, w, None, True, False, 1e-5, 0.0) == norm
    assert count("norm_backward", x, x, mean, rstd, w, w, True, True) == norm
    ids = torch.randint(0, 500, (6, 300))
    found = count("embedding_wgrad", x, ids, 500, -1, f32)
    assert found - 3 == model_step.EMBEDDING_LAUNCHES["eager"]  # plain: zeros, sort, sums
    found = count("linear_wgrad", x, dy, True, False, False, f32, ids_BS=ids % 24)
    plain = count("linear_wgrad", x, dy, True, False, False, f32)
    assert found - plain == 2  # the gather, the batched product


def test_estimator_launches() -> None:
    """Of a step, whatever the model: counted in its second, after the layers were audited."""
    for layers in (1, 5):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
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
        witness = 3  # at the end of the backward pass: norms by two kernels, and their stack
        found = opened.counts.total() + closed.counts.total() + witness
        assert found == model_step.ESTIMATOR_LAUNCHES


def test_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector that processes add up has two numbers for each parameter, two for each row of a
    probe, and ``SCALARS``.
    """
    sent: list[int] = []

    def of_two_that_are_alike(vector: Tensor, **_: Any) -> None:
        sent.append(vector.mul_(2).numel())

    monkeypatch.setattr(dist, "all_reduce", of_two_that_are_alike)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        gns = gnsfast.GradientNoiseScale(net)
        with gns.microbatch(4):
            net(torch.randn(4, 3, 8)).sum().backward()
        gns.update()
        gns.compute()
    finally:
        dist.destroy_process_group()
    assert sent == [4 * 4 + model_step.SCALARS]


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
    ms = {row["part"]: row["ms"] for row in step}
    plain = sum(each for part, each in ms.items() if part.startswith("plain: "))
    assert plain == pytest.approx(ms["plain, device"], abs=0.01)
    added = ("weight gradients", "norm layers", "embeddings", "tied head", "estimator")
    assert sum(ms[part] for part in added) == pytest.approx(ms["norms, device"], abs=0.01)
    ratios = next(rows for title, rows in data.items() if title.startswith("Steps of gpt-2"))
    cases_of = [(row["B"], row["mode"], row["kernel"]) for row in ratios]
    assert cases_of == list(itertools.product((8, 16, 32), ("eager", "compiled"), KERNELS))
    model.run(parser.parse_args(["--gpu", "A100", "--json"]))
    assert "sm90" not in capsys.readouterr().out
    wrongs = ["--length", "20000"], ["--gemm", "1.2"], ["--loop", "0"]
    for wrong in (*wrongs, ["--gpu", "A100", "--kernel", "sm90"]):
        with pytest.raises(SystemExit, match=wrong[-2]):
            model.run(parser.parse_args(wrong))


def test_predicted() -> None:
    """Beside a measurement: time over plain, and nothing for a device that is not in the table."""
    case = cases.LayerCase("square", 4096, 4096, 1, TOKENS)
    assert model.predicted(case, "NVIDIA H200") == pytest.approx(1.106, abs=0.002)
    assert model.predicted(case, "NVIDIA H100 PCIe") == "-"
