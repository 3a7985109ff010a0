# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks gpu`` as far as a CPU can run it: its arguments, parts, tables, record."""

import json
import re
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import apart, contestants, gpu_machine, measure  # noqa: E402
from benchmarks.contestants import cases  # noqa: E402
from benchmarks.contestants.cases import LayerCase  # noqa: E402
from benchmarks.gpu import attention, rehearsal, small_shapes  # noqa: E402
from benchmarks.gpu import operators as gpu_ops
from benchmarks.gpu import parts as gpu
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import step as gpu_step
from gnsfast.ops import backends, extension

TINY = [LayerCase("tiny", 40, 24, T, 140) for T in (1, 8, 70)]


pytestmark = pytest.mark.usefixtures("global_flags")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")
    monkeypatch.setattr(gpu_ops, "ROUNDS", 3)
    monkeypatch.setattr(gpu_peers, "FEWER", 3)


@pytest.fixture
def tiny() -> Iterator[None]:
    with rehearsal.tiny():
        yield


@pytest.fixture
def few() -> Iterator[None]:
    with rehearsal.few():
        yield


def test_every_part_is_there() -> None:
    """Each has an estimate and a stage, and together they take less than half an hour."""
    staged = [part for stage in gpu_machine.STAGES for part in stage]
    assert list(gpu.PARTS) == list(gpu.SECONDS) and sorted(staged) == sorted(gpu.SECONDS)
    assert sum(gpu.SECONDS.values()) < 1800
    assert all(sum(gpu.SECONDS[p] for p in stage) < 600 for stage in gpu_machine.STAGES)
    with rehearsal.arranged():
        assert list(gpu.PARTS) == list(gpu.SECONDS)


def test_summary_has_targets() -> None:
    """The worst and the best size of a length; compiled steps and memory; what has no target."""
    timing = lambda ratio: measure.Timing(1.0, ratio, ratio, ratio)
    ops = [{"T": T, "gnsfast / plain": timing(r)} for T, r in ((128, 1.2), (512, 1.1), (512, 1.0))]
    step = {"training step": "llama", "contestant": "gnsfast, Triton", "ratio": timing(1.03)}
    short = gpu.summary(
        {
            "The weight gradient alone": ops,
            "Whole training step": [
                {**step, "mode": mode, "memory": 1.005} for mode in ("eager", "compiled")
            ],
            "Whole step, peers": [{"layer": "GPT", "B": 8, "contestant": "x", "failed": "no"}],
        }
    )
    assert [(row["result"], row.get("target")) for row in short] == [
        ("1.200 to 1.200 over 1 sizes", 1.10),
        ("1.000 to 1.100 over 2 sizes", 1.05),
        *((timing(1.03), None), (1.005, 1.01)),
        *((timing(1.03), 1.01), (1.005, 1.01)),
        ("no", None),
    ]


def test_out_of_memory(few: None) -> None:
    """Half of the batch, or a quarter, beside plain on as much; then the next contestant."""

    class Hungry(contestants.Session):
        def run(self) -> None:
            if self.B > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore")
            super().run()

    class Crowded(contestants.Session):
        """Alone there is room for it, and not beside plain."""

        runs = 0

        def run(self) -> None:
            self.runs += 1
            if self.B > most and self.runs > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().run()

    class Broken(contestants.Session):
        def run(self) -> None:
            raise ValueError("no such layer")

    most = 4
    hungry = replace(contestants.PLAIN, name="hungry", session=Hungry)
    crowded = replace(contestants.PLAIN, name="crowded", session=Crowded)
    broken = replace(contestants.PLAIN, name="broken", session=Broken)
    problem = cases.linear(LayerCase("tiny", 8, 8, 2, 32), bias=False, dtype=torch.bfloat16)
    run = partial(gpu_peers.timed, problem, [contestants.PLAIN, hungry, crowded, broken], 3, "cpu")
    run = partial(run, measure.wall_seconds)
    rows = run()
    said = {(row["contestant"], row["B"]): row.get("failed") for row in rows}
    assert said == {
        ("hungry", 16): "out of memory: CUDA out of memory. Tried to allocate 1 GiB",
        ("broken", 16): "raises ValueError: no such layer",
        ("plain", 16): None,
        ("hungry", 4): None,
        ("crowded", 16): "out of memory: CUDA out of memory",
        ("crowded", 4): None,
    }
    assert all("ratio" in row for row in rows if "failed" not in row)
    most = 0
    assert {(r["contestant"], r["B"]) for r in run() if "ratio" in r} == {("plain", 16)}


def test_wrong_norms_stop_the_run(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    """Nothing is timed while gnsfast is wrong by one of its back-ends."""

    def doubled(self: Any) -> dict[str, torch.Tensor]:
        return {name: 2 * sqnorm_B for name, sqnorm_B in self._sqnorms.items()}

    monkeypatch.setattr(gpu_peers.Gnsfast, "sqnorms", doubled)
    with pytest.raises(SystemExit, match="gnsfast, Triton is wrong"):
        gpu_peers.curve("cpu", TINY[0])


def test_a_wrong_model_does_not_cost_the_other(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    def checked(device: str, those: Any, problem_of: Any) -> None:
        if problem_of is wrong:
            raise SystemExit("gnsfast, Triton is wrong")

    wrong, right = (lambda *_: None for _ in range(2))
    monkeypatch.setattr(gpu_peers, "checked", checked)
    monkeypatch.setattr(gpu_peers, "partial", lambda problem_of, device: problem_of)
    monkeypatch.setattr(gpu_peers, "SMALL", {"gpt2": wrong, "llama": right})
    timed = lambda name, compiled, *_: [{"training step": name, "compiled": compiled}]
    monkeypatch.setattr(gpu_step, "beside_plain", timed)
    *_, tables = gpu_peers.step("cpu")
    assert [row["training step"] for row in tables["Whole training step"]] == 2 * ["llama"]
    assert len(tables["Failed"]) == 2
    assert all("gpt2" in row["check"] and row["exit status"] for row in tables["Failed"])


@pytest.mark.parametrize("name", gpu_step.PROBLEMS)
def test_small_models_that_are_checked(name: str, tiny: None, few: None) -> None:
    """Of the layers of those that are timed; gnsfast is right on them."""
    problem = partial(gpu_step.SMALL[name], "cpu")
    found, cast = gpu_peers.checked("cpu", gpu_peers.entered("cpu")[:2], problem)
    assert [v.complaint for v in (*found.values(), *cast.values())] == 4 * [""]


def test_back_ends_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contestant of ours runs on its own, and leaves the variable as it was."""
    seen = []
    with gpu_step.forced("reference"):
        seen.append(backends.chosen())
    seen.append(backends.chosen())
    monkeypatch.delenv("GNSFAST_BACKEND")
    with gpu_step.forced("cuda"):
        seen.append(backends.chosen())
    assert [*seen, backends.chosen()] == ["reference", "triton", "cuda", None]


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the CUDA extension, which go on to it."""
    launched = launch_nothing(monkeypatch)
    x = torch.ones(2, 3, 4)

    def run() -> None:
        for _ in range(3):
            extension.linear_wgrad(x, x, x, False, "sm90")

    assert gpu_step.launches(run) == 3 and launched == 3 * [(2, "sm90")]
    assert gpu_step.launches(lambda: None) == 0


def test_synchronisations() -> None:
    """Warnings of torch's debug mode are counted, and no others."""

    def run() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gpu_step.synchronisations(run, "cpu", steps=4) == 4


def test_start_up(monkeypatch: pytest.MonkeyPatch, tiny: None) -> None:
    """Four processes with empty caches; what each measures runs here."""
    seconds = gpu_step.first_steps("cpu", "eager", "triton")
    assert set(seconds) == {"model s", "first step s", "second step s", "third step s"}
    ran = []

    def process(run: list[str], env: dict[str, str], **_: Any) -> Any:
        ran.append(tuple(run[-3:]))
        assert not any(Path(env["TRITON_CACHE_DIR"]).iterdir())
        return subprocess.CompletedProcess(run, 0, json.dumps(seconds), "")

    monkeypatch.setattr(apart.subprocess, "run", process)
    monkeypatch.setattr(gpu_step, "synchronising", lambda *_: [{}])
    monkeypatch.setattr(gpu_step, "estimator", lambda device: {})
    *_, tables = gpu_step.host("cpu")
    assert ran == [("cpu", m, b) for m in ("eager", "compiled") for b in ("", "triton")]
    contestants_ = [row["contestant"] for row in tables["Start-up time"]]
    assert contestants_ == 2 * ["plain", "gnsfast, Triton"]


def test_other_operators_and_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed and what is watched runs; the kernels' own tests interpret them."""
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    monkeypatch.setattr(gpu_ops, "OPS", [])
    monkeypatch.setattr(gpu_ops, "BATCH", (2, 20))
    monkeypatch.setattr(gpu_ops, "WIDTHS", (40,))
    monkeypatch.setattr(gpu_ops, "VOCABULARIES", ((50, 24),))
    *_, tables = gpu_ops.ops("cpu")
    (rows,) = tables.values()
    assert len(rows) == 2 and all("gnsfast / plain" in row for row in rows)
    monkeypatch.setenv("GNSFAST_BACKEND", "reference")
    with Called() as called:
        small_shapes.main("cpu")
    defined = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gnsfast::")}
    # Those by group call the others, and the norms alone are those of the operator that makes dW.
    others = {name for name in defined if name.endswith(("_by_group", "_norms"))}
    assert called.names == defined - others


class Called(TorchDispatchMode):
    """The operators of gnsfast that ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gnsfast":
            self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["", "triton"], ids=["plain", "gnsfast"])
def test_training_steps(backend: str, tiny: None) -> None:
    """The steps that are timed run, on models that are small enough for it."""
    for name in gpu_step.PROBLEMS:
        run = gpu_step.training_step(name, backend, False, "cpu")
        run()
        run()


def test_attention_beside_torchs() -> None:
    """Ours and flex_attention's sinks agree, in a window too; a table of what runs on this CPU."""
    for window in (None, 4):
        case = attention.AttentionCase("tiny", 2, 4, 2, 130, 16, window=window)
        *inputs, _ = (t.detach() for t in attention.tensors(case, "cpu"))
        run = attention.forwards(case, "cpu")
        torch.testing.assert_close(
            run["gnsfast"](*inputs), run["flex"](*inputs), rtol=0.02, atol=0.02
        )
        assert run["sdpa"](*inputs).shape == inputs[0].shape
    narrow = attention.AttentionCase("tiny", 1, 2, 2, 9, 16, window=4)
    (row,) = attention.row("cpu", narrow)
    assert row["gnsfast / sdpa"].ratio > 0 and "window 4" in str(row)


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A device whose kernels are only written down: how many samples, and which."""
    launched: list[tuple[int, str]] = []
    monkeypatch.setattr(gpu_ops.measure, "cuda_seconds", measure.wall_seconds)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def launch(x: torch.Tensor, *arguments: Any) -> None:
        launched.append((len(x), arguments[-1]))

    monkeypatch.setattr(extension, "linear_wgrad", launch)
    return launched


def test_hopper_kernel_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant is timed, and no other name."""
    source = (Path(__file__).parents[2] / "csrc" / "variants_sm90.cu").read_text(encoding="utf-8")
    assert tuple(re.findall(r'{"(sm90 [^"]+)"', source)) == gpu_ops.VARIANTS
    launched = launch_nothing(monkeypatch)
    rows = [r for T in gpu_ops.LENGTHS_APART for r in gpu_ops.taken_apart("cpu", T, size=8)]
    assert {row["variant"] for row in rows} == {"sm90", "plain", *gpu_ops.VARIANTS}
    assert all(B == 1 for B, name in launched if name.endswith("one sample"))
    assert {name for _, name in launched} == {"sm90", *gpu_ops.VARIANTS}


def test_cuda_kernels_beside_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels of a Hopper, each beside plain."""
    launched = launch_nothing(monkeypatch)
    (row,) = gpu_ops.beside_triton("cpu", TINY[1])
    assert {name for _, name in launched} == {"sm80", "sm90"}
    assert row["sm90 / plain"].ratio > 0 and row["triton / plain"].ratio > 0


def test_without_a_device() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            command.main(["gpu"])
