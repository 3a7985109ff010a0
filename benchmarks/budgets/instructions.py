# SPDX-License-Identifier: Apache-2.0
"""Instructions that a step with gnsfast executes on a CPU, counted by valgrind's callgrind: a busy
machine counts what an idle one does.

``count()`` runs this file under valgrind, which shows a program the same processor (AVX2) wherever
it runs. Nothing is counted until the file asks for it, after start, imports and first calls.
What torch's libraries of products execute is left out: they choose their way by themselves.
"""

import ctypes
import gc
import importlib.util
import mmap
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gnsfast
from benchmarks import apart
from benchmarks.budget import Budget, Rows
from benchmarks.networks import GPT, gpt_case, perceptron_case
from gnsfast.ops import cpu

WARM_UP = 8  # after which CPython has specialised a function's bytecode
CALLS = 3  # counted one by one; the first pays for what valgrind has not translated

AUDITED = 5  # updates, so that those which are counted, 13 to 15, are not audited

Runs = tuple[Callable[[], None], Callable[[], None]]
Loss = Callable[[Any, tuple[Any, ...]], Tensor]


def layer(make: Callable[[], nn.Module], x: Tensor, dy: Tensor) -> Runs:
    """Forward and backward of a layer: plain, and with every sample's norms."""
    plain, ours = make(), nn.Sequential(make())

    def run_plain() -> None:
        plain(x).backward(dy)
        plain.zero_grad()
        x.grad = None

    def run_ours() -> None:
        with gnsfast.per_sample_sqnorms(ours, len(x)):
            ours(x).backward(dy)
        ours.zero_grad()
        x.grad = None

    return run_plain, run_ours


def linear(B: int, T: int, I: int = 4, gram: bool = False) -> Runs:
    """A wide output: an extra pass over dy is 3 % of what torch executes. A narrow input and few
    tokens: valgrind takes long for the arithmetic of a product. ``gram``: whose norms are Gram's.
    """
    assert cpu.takes_gram("avx2", B, T, I, 256) == gram
    x, dy = torch.randn(B, T, I, requires_grad=True), torch.randn(B, T, 256)
    return layer(lambda: nn.Linear(I, 256), x, dy)


def embedding() -> Runs:
    ids, dy = torch.randint(0, 64, (16, 64)), torch.randn(16, 64, 256)
    return layer(lambda: nn.Embedding(64, 256), ids, dy)


def layer_norm(B: int, T: int) -> Runs:
    x, dy = torch.randn(B, T, 256, requires_grad=True), torch.randn(B, T, 256)
    return layer(lambda: nn.LayerNorm(256), x, dy)


class TinyGPT(GPT):
    """Tensors so small that the host's work is what is counted."""

    B, T, vocabulary = 4, 8, 64
    sizes = 16, 2, 1


class TinyGPT2(TinyGPT):
    """Three blocks, as GPT-2's, the head tied to the embedding."""

    sizes, tied = (16, 2, 3), True


def norms(make: Callable[[], nn.Module], loss_of: Loss, batch: tuple[Tensor, ...]) -> Runs:
    """Forward and backward; ours with every sample's norms."""
    plain, ours = make(), make()

    def run_plain() -> None:
        loss_of(plain, batch).backward()
        plain.zero_grad()

    def run_ours() -> None:
        with gnsfast.per_sample_sqnorms(ours, len(batch[0])):
            loss_of(ours, batch).backward()
        ours.zero_grad()

    return run_plain, run_ours


def estimator(
    make: Callable[[], nn.Module], loss_of: Loss, batch: tuple[Tensor, ...], asked: bool = False
) -> Runs:
    """The same; ours with a noise scale, which is asked for after each update, or not at all."""
    run_plain, _ = norms(make, loss_of, batch)
    ours = make()
    gns = gnsfast.GradientNoiseScale(ours)

    def run_ours() -> None:
        with gns.update(len(batch[0])):
            loss_of(ours, batch).backward()
        ours.zero_grad()
        if asked:
            gns.compute()

    for _ in range(AUDITED):
        run_ours()
    gns.compute()
    return run_plain, run_ours


def asked() -> Runs:
    """A noise scale that is asked for after each update; beside it one that is not."""
    case = gpt_case(TinyGPT)
    return estimator(*case)[1], estimator(*case, asked=True)[1]


CASES: dict[str, Callable[[], Runs]] = {
    "Linear, closed form": lambda: linear(256, 1),
    "Linear, Gram": lambda: linear(64, 2, 32, gram=True),
    "Linear, fused": lambda: linear(4, 64),
    "Embedding": embedding,
    "LayerNorm, short samples": lambda: layer_norm(8, 64),
    "LayerNorm, long samples": lambda: layer_norm(2, 256),
    "GPT step": lambda: estimator(*gpt_case(TinyGPT)),
    "GPT step, asked": asked,
    "GPT-2 step, 3 blocks": lambda: estimator(*gpt_case(TinyGPT2)),
    "Perceptron, norms": lambda: norms(*perceptron_case()),
    "Perceptron, estimator": lambda: estimator(*perceptron_case()),
}

MKL = ("mkl_", "mm_", "SGEMM", "cblas_", "0x")
"""Beginnings of its functions inside of torch; some have no name, as none of torch's."""

# How a program speaks to valgrind, as machine code, so that no compiler is needed: mov rax, rdi;
# xor edx, edx; rol rdi by 3, 13, 61 and 51, which is valgrind's mark; xchg rbx, rbx; mov rax, rdx;
# ret. Outside of valgrind it does nothing.
REQUEST = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
REQUESTS = (0x43540004, 0x43540002, 0x43540000)  # callgrind.h: start, toggle collecting, dump


def under_valgrind() -> None:
    """Run every case, plain and then ours; callgrind writes a file after each call."""
    torch.set_num_threads(1)
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(REQUEST)
    code = ctypes.c_char.from_buffer(page)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(code))
    start, toggle, dump = (partial(call, (ctypes.c_uint64 * 6)(number)) for number in REQUESTS)
    runs = []
    for make in CASES.values():
        torch.manual_seed(0)
        for run in make():
            for _ in range(WARM_UP):
                run()
            runs.append(run)
    gc.collect()
    gc.disable()
    start()
    for run in runs:
        for _ in range(CALLS):
            toggle()
            run()
            toggle()
            dump()


def missing() -> str:
    """Why nothing can be counted here; empty where it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "instructions are counted on x86-64 Linux alone"
    return "" if shutil.which("valgrind") else "there is no valgrind: apt-get install valgrind"


def here(rows: Rows) -> Budget:
    versions = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True).stdout
    build = f"Python {sys.version}, {' '.join(platform.libc_ver())}, {valgrind.strip()}"
    return Budget(versions | {"compiler": compiler()}, rows, build)


def compiler() -> str:
    """What the CPU kernels here were compiled by."""
    kernels = importlib.util.find_spec("gnsfast._cpu")
    assert kernels is not None and kernels.origin is not None, "gnsfast has no CPU kernels here"
    marks = re.findall(rb"(GCC: [^\0]*|clang version [^\0 ]*)", Path(kernels.origin).read_bytes())
    return ", ".join(sorted({mark.decode() for mark in marks})) or "unknown"


def count() -> Budget:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        command += ["--dump-line=no", "--compress-strings=no", f"--callgrind-out-file={out}"]
        environment = apart.without_settings(
            PYTHONHASHSEED="0", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
        )
        environment.pop("ATEN_CPU_CAPABILITY", None)
        apart.printed("budgets.instructions", environment=environment, under=command)
        calls = iter([by_part(Path(f"{out}.{i + 1}")) for i in range(2 * CALLS * len(CASES))])
        for name in CASES:
            plain, ours = (least(list(islice(calls, CALLS))) for _ in range(2))
            rows[name] = {
                "plain": plain["host"],
                "host": ours["host"] - plain["host"],
                "torch": ours["torch"],
                "kernels": ours["kernels"],
            }
    return here(rows)


def least(calls: list[Counter[str]]) -> Counter[str]:
    return Counter({part: min(call[part] for call in calls) for part in calls[0]})


def part_of(library: str, function: str) -> str:
    """Who executes a function: our ``kernels``; ``torch``'s operators; MKL and oneDNN, which choose
    their ``products`` by the processor; or the ``host``: interpreter, bindings, memory.
    """
    name = library.rpartition("/")[2]
    if name.startswith("_cpu."):
        return "kernels"
    if name == "???" or "dnnl" in function:  # no library has the code that oneDNN writes
        return "products"
    if name.startswith("libtorch_cpu"):
        return "products" if function.startswith(MKL) else "torch"
    return "host"


def by_part(path: Path) -> Counter[str]:
    """Instructions of each part, out of a file that callgrind wrote."""
    counts: Counter[str] = Counter()
    library, part, called = "", "", False
    for line in path.read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "ob":
            library = value
        elif key == "fn":
            part = part_of(library, value)
        elif called or key == "calls":  # the line after it has the cost of what was called
            called = key == "calls"
        elif re.match(r"[+*\-\d]", line):
            counts[part] += int(line.split()[1])
    total = re.search(r"^summary: (\d+)", path.read_text(), re.MULTILINE)
    assert total is not None and counts.total() == int(total[1]), f"{path} is not read in full"
    return counts


if __name__ == "__main__":
    under_valgrind()
