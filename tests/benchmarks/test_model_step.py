# SPDX-License-Identifier: Apache-2.0
"""The counted model of a whole training step: against arithmetic by hand, and against what torch's
own step dispatches.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import networks as models  # noqa: E402
from benchmarks import readme
from benchmarks.model import plain as model_plain
from benchmarks.model import step as model_step
from benchmarks.model.gpu import ASSUMED, GPUS, Work  # noqa: E402
from benchmarks.model.plain import MODELS, between  # noqa: E402
from benchmarks.model.step import step  # noqa: E402
from gnsfast.functional import _links  # noqa: E402
from gnsfast.functional.plan import PLAIN  # noqa: E402

H200 = GPUS["H200"]
GPT2, LLAMA = MODELS["gpt-2"], MODELS["llama-3-8b"]
HEAD = GPT2.layers[-1]
N = 16 * 1024  # tokens
n = N * 768  # elements of the residual stream: 12.58M
MEMORY = 0.9 * 4.8e12


class Moved(TorchDispatchMode):
    """Kernels that operations run, and the bytes of their inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = any(ret.alias_info and not ret.alias_info.is_write for ret in func._schema.returns)
        name = func.overloadpacket.__name__
        if not view and "empty" not in name and name not in ("_unsafe_view", "device"):
            found = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, Tensor)]
            self.kernels[name] += 1
            self.nbytes[name] += sum(t.numel() * t.element_size() for t in found)
            self.numels += [t.numel() for t in found]
        return out


def test_models() -> None:
    """Llama-3-8B has 8,030,261,248 parameters; GPT-2, its vocabulary padded by 47, 124,475,904."""
    assert LLAMA.parameters == 8_030_261_248
    assert GPT2.parameters == 124_439_808 + 47 * 768
    with torch.device("meta"):
        parameters = dict(models.GPT2().named_parameters())
    assert GPT2.parameters == sum(p.numel() for p in parameters.values())
    assert GPT2.units == len(parameters)
    assert LLAMA.units == 32 * 7 + 1 + 1 + 65
    assert (GPT2.linears, LLAMA.linears) == (49, 225)


def test_plain_eager_step_is_torchs() -> None:
    """GPT-2's step under autocast, on tensors without memory: kernels and bytes of torch's own
    operations. The CPU's autocast casts the same tensors as CUDA's; the loss is apart, as there it
    would be float32 throughout.
    """
    with torch.device("meta"):
        gpt2 = models.GPT2()
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt2.to_empty(device="cpu")
        gpt2.head.weight = gpt2.tokens.weight
        ids = torch.empty(16, 1024, dtype=torch.int64)
        with Moved() as moved, torch.autocast("cpu", torch.bfloat16):
            logits = gpt2(ids)
            logits.backward(torch.empty_like(logits))
    parts = between(GPT2, 16, 1024, 4, compiled=False)
    aten, bytes_of = moved.kernels, moved.nbytes

    def same(work: Work, nbytes: float, kernels: int) -> None:
        assert work.nbytes == pytest.approx(nbytes, rel=5e-3)
        assert work.kernels == kernels

    again = 25 * 2 * 4 * n  # gain and bias: x and dy, which the dispatcher sees read once
    norms = bytes_of["native_layer_norm"] + bytes_of["native_layer_norm_backward"]
    same(parts["norms"], norms + again, aten["native_layer_norm"] * 3)
    gelus = bytes_of["gelu"] + bytes_of["gelu_backward"]
    same(parts["activation"], gelus, aten["gelu"] + aten["gelu_backward"])
    sums = parts["residual sums"] + Work(3 * 4 * (n + 50304 * 768), 2)  # embeddings', head's
    same(sums, bytes_of["add"], aten["add"])
    casts = parts["activations' casts"] + parts["weights' casts"]
    same(casts, bytes_of["_to_copy"] + bytes_of["sum"], aten["_to_copy"] + aten["sum"])
    same(parts["heads"], bytes_of["stack"], aten["stack"])
    assert model_plain.product_kernels(GPT2) == aten["mm"] + aten["addmm"] + 12 * 4  # attention


def test_plain_parts_by_hand() -> None:
    """The vocabulary: 16384 · 50304 = 824.2M logits. log_softmax reads and writes 2 bytes, its
    result is widened, 6, nll's gradient zeroed, 4, narrowed, 6, and log_softmax's gradient reads
    two and writes one, 6: 26 bytes, 21.4 GB, 4.96 ms. Compiled, forward reads 2, backward reads 2
    and writes 2: 4.9 GB. AdamW: 7 · 4 · 124.5M = 3.49 GB; 1900 chunks of 65536 are 6 kernels of
    320, and one counts. Eager, a block's elements move 2 · 28 bytes for norms, 2 · (10 + 12) for
    sums, 3 · 12 for casts, 10 · 4 for GELU and 12 for heads: 188; of 12 blocks 28.4 GB.
    """
    eager, compiled = (between(GPT2, 16, 1024, 4, compiled=c) for c in (False, True))
    assert eager["loss"].nbytes == 26 * 16384 * 50304
    assert eager["loss"].seconds(H200, ASSUMED) == pytest.approx(4.96e-3 + 8 * 2e-6, rel=1e-3)
    assert compiled["loss"].nbytes == 6 * 16384 * 50304
    assert eager["optimizer"] == compiled["optimizer"] == Work(28 * 124_475_904, 7)
    sharded = between(LLAMA, 8, 2048, 4, compiled=False, shards=64)["optimizer"]
    assert sharded.nbytes == 28 * 8_030_261_248 / 64
    blocks = 12 * (2 * 28 + 2 * (10 + 12) + 2 * 6 + 2 * 6 + 2 * 6 + 10 * 4 + 12) * n
    parts = ("norms", "residual sums", "activations' casts", "activation", "heads")
    ends = (28 + 6 + 6) * n  # the last norm, and the casts between it and the head
    assert sum(eager[part].nbytes for part in parts) == blocks + ends


def test_products() -> None:
    """Llama-3-8B, 8 samples of 2048: 6 · (8,030,261,248 - 525,336,576 of the table - 266,240 of
    gains) = 4.503e10 a token, 7.378e14 in all, at 791.5 TFLOP/s 932.1 ms; waves are 98 % full.
    Attention: 32 blocks · 3.5 · 2 · 8 · 2048² · 4096 = 3.079e13 at 494.7 TFLOP/s: 62.2 ms. 675
    products and 128 kernels of attention: 1.6 ms. A third of them make gradients of weights.
    """
    found = model_plain.products_seconds(H200, LLAMA, 8, 2048, ASSUMED)
    assert found - 62.2e-3 - 1.6e-3 == pytest.approx(932.1e-3 / 0.98, rel=0.01)
    counted = step(H200, LLAMA, 2048, 8)
    assert counted.device == pytest.approx(sum(counted.parts.values()))
    third = counted.gradients - 6 * LLAMA.linear_parameters / MEMORY  # without widening
    assert third == pytest.approx((found - 63.8e-3) / 3, rel=0.02)


def test_norm_layers_save_a_read() -> None:
    """GPT-2's 25: torch reads x and dy once for dx and once for gain and bias, float32: 2 · 50.3 MB
    saved each; ours writes and reads two kinds of sums of 528 programs, 2 · 2 · 1.6 MB, and its
    last program takes 1.2 µs: 25 · (-23.30 + 1.50 + 1.2) µs. Compiled, Inductor joins them.
    """
    eager, compiled = (
        model_step.other_parameters(H200, GPT2, 16, 1024, 4, mode, ASSUMED)["norm layers"]
        for mode in ("eager", "compiled")
    )
    assert eager == pytest.approx(25 * (-23.30 + 1.50 + 1.2) * 1e-6, rel=2e-3)
    assert compiled == pytest.approx(25 * (2 * 2e-6 + 2 * 2 * 4 * 16 * 768 / MEMORY))


def test_tied_head() -> None:
    """GPT-2's at T = 1024, beside a weight gradient like any other. Columns of dy: 1024 of 50304
    words touch 874 of a row's 3144 sectors, 28.0 kB, and 2 kB are written: 492 MB. [B, T, D]
    float32 is 50.33 MB: eleven passes, of which the product writes the first, 503 MB. The product:
    2 · 16 · 1024² · 768 = 25.8 GFLOP, 32.6 µs in full waves.
    """
    work = model_step.tie_work(HEAD, 16, 1024, "eager")
    touched = 3144 * (1 - (3143 / 3144) ** 1024)
    assert touched == pytest.approx(874, rel=1e-3)
    assert work.nbytes == pytest.approx(N * (32 * touched + 2048) + 10 * 50.33e6, rel=1e-3)
    seconds = model_step.tie(H200, HEAD, 16, 1024, "eager", ASSUMED)
    product = seconds - work.nbytes / MEMORY - work.kernels * 2e-6
    assert 25.8e9 / 791.5e12 <= product <= 1.2 * 25.8e9 / 791.5e12
    assert model_step.tie(H200, HEAD, 16, 1024, "compiled", ASSUMED) < seconds
    one = model_step.tie_work(HEAD, N, 1, "eager").nbytes  # a word a sample: one sector of its row
    assert one == pytest.approx(N * (32 + 2) + 10 * 50.33e6, rel=1e-3)
    costs = step(H200, GPT2, 1, N).costs
    assert costs[-1].route == "closed"


def test_tie_moves_what_is_counted() -> None:
    """The embedding's half of a tie, eager, as the layers run it: every pass over [B, T, D], and
    every operation. The head's gather and product are two kernels more, and one pass.
    """
    B, T, D, V = 3, 5, 7, 11
    ids, dy = torch.randint(0, V, (B, T)), torch.randn(B, T, D)
    rows, dw = torch.randn(B, T, D), torch.randn(V, D)
    torch.use_deterministic_algorithms(False)
    probe = torch.zeros(1, B + 2)
    with Moved() as moved:
        _, of_samples, of_sum = _links.link_grads([ids], rows, dw)
        assert of_samples is not None and of_sum is not None
        _links.add_cross_terms(probe, dy, PLAIN, of_samples, of_sum)
    # dW's rows are read as a gather: the dispatcher sees all of dW instead.
    passes = sum(numel == B * T * D for numel in moved.numels) + 1
    assert 1 + passes == model_step.TIED_PASSES["eager"]
    assert 2 + moved.kernels.total() == model_step.TIED_LAUNCHES["eager"]


def test_audit() -> None:
    """32 of GPT-2's 148 gradients, 108 of 498 MB float32: 24.9 µs, and a kernel each, 64 µs."""
    on, off = (step(H200, GPT2, 1024, 16, audit=audit) for audit in (True, False))
    assert sum(on.added.values()) - sum(off.added.values()) == pytest.approx(88.9e-6, rel=1e-3)
    assert on.device == off.device


def test_host() -> None:
    """GPT-2: 9.9M of a block, 49 linear layers of 289 thousand, 25 norms of 586, two embeddings of
    730: 40.2M, at 30.9M in 7 ms 9.1 ms. Compiled, 0.8 of linear layers and embeddings, and norms
    are plain. A plain eager step takes 7 ms at any batch.
    """
    eager, compiled = (model_step.added_instructions(GPT2, compiled=c) for c in (False, True))
    assert eager == 9_900_000 + 49 * 289_000 + 25 * 586_000 + 2 * 730_000
    assert compiled == pytest.approx(9_900_000 + 0.8 * (49 * 289_000 + 2 * 730_000))
    assert model_step.host_seconds(eager) == pytest.approx(9.1e-3, rel=2e-3)
    for B in (8, 32):
        assert step(H200, GPT2, 1024, B).host == pytest.approx(7e-3)
    kernels = sum(w.kernels for w in between(GPT2, 8, 1024, 4, compiled=True).values())
    kernels += model_plain.product_kernels(GPT2)
    found = step(H200, GPT2, 1024, 8, compiled=True).host
    assert found == pytest.approx(kernels * 73_000 / 4 * 7e-3 / 30.9e6)


def test_longer_of_the_two() -> None:
    """At B = 4 the host's 16 ms are longer than the device's 11; at 32 they hide."""
    short, long = (step(H200, GPT2, 1024, B) for B in (4, 32))
    assert short.bound == "host" and short.ours == short.host + short.host_added
    assert short.plain == short.device
    assert short.overhead == pytest.approx((short.host + short.host_added) / short.device - 1)
    assert long.bound == "device" and long.overhead == pytest.approx(long.on_device)
    assert replace(long, host=1.0).plain == 1.0


def test_compiled_biases() -> None:
    """48 biases cost two kernels more than plain, eager two less: 48 · 8 µs. All else is equal."""
    found = [
        step(H200, GPT2, 1024, 16, compiled=c).added["weight gradients"] for c in (False, True)
    ]
    assert found[1] - found[0] == pytest.approx(48 * 8e-6)


def test_processes() -> None:
    """64 processes: 2 · 6 hops of 5 µs; a shard of 8.03e9 · 4 / 64 = 501.9 MB at 4.32 TB/s: 116.2
    µs; a vector of 8 · (4 · 291 + 19) bytes over NVLink: 0.04 µs. Replicated 32.12 GB: 7.435 ms.
    """
    seconds = lambda world, sharded: model_step.communication_seconds(
        *(H200, LLAMA, world, 4, ASSUMED, sharded)
    )
    assert seconds(1, True) == 0
    assert seconds(64, True) == pytest.approx(60e-6 + 116.2e-6 + 0.04e-6, rel=1e-3)
    assert seconds(64, False) == pytest.approx(60e-6 + 7435e-6, rel=1e-3)


def test_readme_says_counted() -> None:
    """The README's line holds the model's own ratios of whole steps, and how they were found."""
    said = readme.counted()
    assert "Counted for an H200, not measured" in said
    for kernel, where in (("sm90", "CUDA"), ("triton", "Triton")):
        slower = replace(ASSUMED, loop=0.9 * ASSUMED.loop)
        ratio = 1 + step(H200, GPT2, 1024, 16, kernel=kernel, compiled=True, a=slower).overhead
        assert f"{ratio:.2f} ({where})" in said.partition("Llama 3 8B")[2]
    assert "wide" not in said
