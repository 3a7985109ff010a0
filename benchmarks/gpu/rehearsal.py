# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks gpu --rehearse``: all parts on a CPU, on tiny cases, by the kernels in
Triton's interpreter. It shows that they run; its measurements mean nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from benchmarks import contestants, networks
from benchmarks.contestants.cases import LayerCase
from benchmarks.gpu import attention, operators, peers, step
from benchmarks.gpu import parts as gpu
from gnsfast.ops import backends, extension

CASES = [LayerCase("tiny", 40, 24, T, 140) for T in (1, 8, 70)]
ATTENTION = [attention.AttentionCase("tiny", 1, 2, 2, 9, 16, window=4)]
CHECKED = ("triton_kernels/test_triton_linear.py::test_tied_rows",)
CONTESTANTS = ("plain", "gnsfast", "loop of single samples", "torch.func vmap")
"""Those that need torch alone."""


class TinyGPT(networks.GPT):
    B, T, vocabulary = 2, 5, 20
    sizes = 16, 2, 0


@contextmanager
def tiny() -> Iterator[None]:
    """GPT-2 and Llama as small as can be, and what is checked for them smaller still. Only Llama
    has a block: Triton's interpreter takes most of a second for one.
    """
    with ExitStack() as stack:
        put = lambda *change: stack.enter_context(mock.patch.object(*change))
        for name, value in {"B": 2, "T": 9, "vocabulary": 50, "sizes": (16, 2, 0)}.items():
            put(networks.GPT2, name, value)
        llama = partial(step.llama_problem, 2, 9, (16, 2, 24), 1)
        stack.enter_context(mock.patch.dict(step.PROBLEMS, llama=llama))
        checked = {"gpt2": partial(step.gpt_problem, TinyGPT), "llama": llama}
        stack.enter_context(mock.patch.dict(step.SMALL, checked))
        yield


@contextmanager
def few() -> Iterator[None]:
    """Contestants that need torch alone, and one back-end."""
    with ExitStack() as stack:
        put = lambda *change: stack.enter_context(mock.patch.object(*change))
        put(contestants, "ALL", tuple(map(contestants.named, CONTESTANTS)))
        put(peers, "present", lambda device, *names: ["triton"])
        put(step, "present", lambda device, *names: ["triton"])
        yield


@contextmanager
def arranged() -> Iterator[None]:
    """Make ``gpu.PARTS`` tiny. Triton reads its variable at its import, which comes later."""
    interpreted = {"TRITON_INTERPRET": "1", backends.VARIABLE: "triton"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", interpreted))
        stack.enter_context(tiny())
        stack.enter_context(few())
        for module, name, value in REPLACED:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def no_process(device: str, how: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"model": "GPT-2", "mode": how[0], "contestant": how[1] or "plain"}]


REPLACED = (
    *((gpu, "SUITES", CHECKED), (gpu, "PROCESSES", 1)),
    *((operators, "OPS", CASES), (operators, "WIDTHS", ()), (operators, "VOCABULARIES", ())),
    *((operators, "ROUTES", CASES[1:2]), (operators, "ROUNDS", 2)),
    *((peers, "OVER_T", CASES[1:2]), (peers, "OVER_B", CASES[2:]), (peers, "MODES", (False,))),
    *((peers, "ROUNDS", 2), (peers, "FEWER", 2), (peers, "UntiedGPT2", TinyGPT)),
    *((attention, "CASES", ATTENTION), (extension, "missing", lambda: "a rehearsal")),
    (step, "start_up", no_process),
)
"""A case or three of each part. Nothing is compiled and no process timed."""
