# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks gpu`` as far as a CPU can run it: its arguments, parts, tables, record."""

import importlib.util
import json
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    attention,
    contestants,
    cuda_kernels,
    gpu,
    gpu_ops,
    gpu_peers,
    gpu_step,
    measure,
    model,
    models,
    record,
    small_shapes,
)
from benchmarks.cases import LayerCase  # noqa: E402
from gnsfast import backends, extension  # noqa: E402

TINY = [LayerCase("tiny", 40, 24, T, 140) for T in (1, 8, 70)]


pytestmark = pytest.mark.usefixtures("global_flags")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 as small as can be."""
    monkeypatch.setattr(models.GPT2, "__init__", lambda self: models.GPT.__init__(self, 16, 2, 1))
    for name, value in (("B", 2), ("T", 9), ("vocabulary", 50)):
        monkeypatch.setattr(models.GPT2, name, value)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, frozen: None) -> None:
    """Contestants that need torch alone, and one back-end."""
    names = ("plain", "gnsfast", "loop of single samples", "torch.func vmap")
    monkeypatch.setattr(contestants, "ALL", tuple(map(contestants.named, names)))
    monkeypatch.setattr(gpu_peers, "present", lambda device, *names: ["triton"])


def test_parts_write_their_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, tiny: None, few: None
) -> None:
    """All parts on tiny cases; files for programs and for people; a short table last."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "_gpu", lambda: {"gpu": "a device"})
    monkeypatch.setattr(extension, "missing", lambda: "no device")
    monkeypatch.setattr(gpu_ops, "other_ops", lambda device, rounds: {})
    monkeypatch.setattr(gpu_step, "start_up", lambda device: [{"model": "GPT-2"}])
    outcome = {"check": "pytest", "exit status": 0, "result": "3 passed"}
    parts: dict[str, Callable[[str], Any]] = {
        "correctness": lambda device: {"Tests against float64": [outcome]},
        "ops": lambda device, run=gpu.ops: run("cpu", TINY, 2),
        "routes": lambda device, run=gpu.routes: run("cpu", TINY[1:2], 2),
        "cuda": lambda device, run=gpu.cuda: run("cpu", 3),
        "step": lambda device, run=gpu.step: run("cpu", rounds=2, names=("gpt2",), modes=(False,)),
        "host": lambda device, run=gpu.host: run("cpu", 1),
        "peers": lambda device, run=gpu.peers: run("cpu", 2, TinyGPT, TinyGPT),
        "curves": lambda device, run=gpu.curves: run("cpu", TINY[1:2], TINY[2:], 2),
    }
    for name, part in parts.items():
        monkeypatch.setattr(gpu, name, part)
    command.main(["gpu", "--only", *parts, "--record", str(tmp_path)])
    out = capsys.readouterr().out
    assert f"| all | {sum(gpu.SECONDS[name] for name in parts)} |" in out
    last = out.rpartition("In short")[2]
    for said in ("3 passed", "weight gradient / plain, T=70", "step / plain, gpt2, eager, gnsfast"):
        assert said in last
    assert "torch.func vmap / plain" in last and "| 0 |" in last
    written = {}
    for name in parts:
        (path,) = tmp_path.glob(f"*-gpu-{name}.json")
        data = written[name] = json.loads(path.read_text())
        assert data["command"] == f"python -m benchmarks gpu --only {name}"
        assert data["machine"]["gpu"] == "a device" and data["tables"]
        assert path.with_suffix(".md").exists()
    (row, *_) = written["ops"]["tables"]["The weight gradient alone"]
    assert row["gnsfast / plain"]["ratio"] > 0 and row["predicted"] == "-"
    steps = written["step"]["tables"]["Whole training step"]
    assert [row["contestant"] for row in steps] == ["plain", "gnsfast, Triton"]
    coverage, cast, times = written["peers"]["tables"].values()
    assert all(row["verdict"] == "right" and row["covered"] == 1 for row in coverage + cast)
    assert [row["contestant"] for row in times] == [
        *("plain", "gnsfast, Triton", "loop of single samples", "torch.func vmap")
    ]
    for title, (T, B) in {"Overhead against T": (8, 17), "Cost against B": (70, 2)}.items():
        rows = written["curves"]["tables"][title]
        assert {(row["layer"], row["T"], row["B"]) for row in rows} == {("tiny 40x24", T, B)}
        assert {row["contestant"] for row in rows} >= {"plain", "gnsfast, Triton"}
        assert all(row["ratio"]["lower"] <= row["ratio"]["upper"] for row in rows)


class TinyGPT(models.GPT):
    B, T, vocabulary = 2, 5, 20

    def __init__(self) -> None:
        super().__init__(16, 2, 1)


def test_every_part_is_there() -> None:
    """Each has an estimate, and together they take less than half an hour."""
    assert all(callable(getattr(gpu, part)) for part in gpu.SECONDS)
    assert sum(gpu.SECONDS.values()) < 1800 and max(gpu.SECONDS.values()) < 600


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
    problem = gpu_peers.linear(LayerCase("tiny", 8, 8, 2, 32), "cpu", torch.bfloat16)
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
        gpu_peers.curve("cpu", TINY[0], 3)


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

    monkeypatch.setattr(gpu_step.subprocess, "run", process)
    rows = gpu_step.start_up("cpu")
    assert ran == [("cpu", m, b) for m in ("eager", "compiled") for b in ("", "triton")]
    assert [row["contestant"] for row in rows] == 2 * ["plain", "gnsfast, Triton"]


def test_other_operators_and_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed and what is watched runs; the kernels' own tests interpret them."""
    monkeypatch.setattr(gpu_ops, "_compiled", lambda fn, args: lambda: fn(*args))
    tables = gpu_ops.other_ops("cpu", 3, tokens=40, widths=(40,), tables=((50, 24),))
    (rows,) = tables.values()
    assert len(rows) == 2 and all("gnsfast / plain" in row for row in rows)
    monkeypatch.setenv("GNSFAST_BACKEND", "reference")
    small_shapes.main("cpu")


@pytest.mark.parametrize("backend", ["", "triton"], ids=["plain", "gnsfast"])
def test_training_steps(monkeypatch: pytest.MonkeyPatch, backend: str, tiny: None) -> None:
    """The steps that are timed run, on models that are small enough for it."""
    monkeypatch.setattr(models.LlamaBlock.__init__, "__defaults__", (16, 2, 24))
    monkeypatch.setattr(gpu_step._llama, "__defaults__", (2, 9, 16, 1))
    for name in gpu_step.MODELS:
        run = gpu_step.training_step(name, backend, False, "cpu")
        run()
        run()


def test_predicted_step() -> None:
    """A number for GPT-2 on a GPU that the model knows, and nothing else."""
    triton = gpu_step.predicted("gpt2", "NVIDIA H200", "gnsfast, Triton")
    cuda = gpu_step.predicted("gpt2", "NVIDIA H200", "gnsfast, CUDA")
    assert isinstance(triton, float) and isinstance(cuda, float) and 1 < cuda < triton
    assert gpu_step.predicted("llama", "NVIDIA H200", "gnsfast, Triton") == "-"
    assert gpu_step.predicted("gpt2", "another", "gnsfast, Triton") == "-"


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
    (row,) = attention.table("cpu", [narrow], 3, measure.wall_seconds)
    assert row["gnsfast / sdpa"].ratio > 0 and "window 4" in str(row)


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A device whose kernels are only written down: how many samples, and which."""
    launched: list[tuple[int, str]] = []
    monkeypatch.setattr(cuda_kernels.measure, "cuda_seconds", measure.wall_seconds)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")

    def launch(x: torch.Tensor, dy: torch.Tensor, dw: Any, add: bool, name: str) -> torch.Tensor:
        launched.append((len(x), name))
        return x.new_zeros(3, len(x) + 1)

    monkeypatch.setattr(extension, "linear_wgrad", launch)
    return launched


def test_hopper_kernel_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that was counted is timed, and no other name."""
    names = ["sm90 unordered", "sm90 cluster of 1", "sm90 unsplit", "sm90 128 x 256, one sample"]
    if importlib.util.find_spec("gnsfast._C"):
        assert extension.variants() == names
    monkeypatch.setattr(extension, "variants", lambda: names)
    launched = launch_nothing(monkeypatch)
    rows = cuda_kernels.taken_apart("cpu", 3, size=8)
    timed = {(row["T"], row["variant"]) for row in rows}
    assert {(T, name) for T, counted in cuda_kernels.COUNTED.items() for name in counted} <= timed
    assert all(B == 1 for B, name in launched if name.endswith("one sample"))
    assert {name for _, name in launched} == {"sm90", *names}


def test_cuda_kernels_beside_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels of a Hopper, each beside plain and what was counted for it."""
    launched = launch_nothing(monkeypatch)
    (row,) = cuda_kernels.beside_triton("cpu", TINY[1:2], 3)
    assert {name for _, name in launched} == {"sm80", "sm90"}
    assert row["sm90 / plain"].ratio > 0 and row["triton / plain"].ratio > 0
    assert row["sm90 predicted"] > 1 and row["triton predicted"] > 1
    short = LayerCase("short", 4096, 4096, 64, 16384)  # the fused kernels are timed there too
    assert model.predicted(short, "NVIDIA H200") < 1.2  # by the Gram route
    assert model.predicted(short, "NVIDIA H200", route="fused") > 1.5


def test_parts_after_one_that_raises_or_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """A part that raises leaves its record and the others run; what is wrong is not timed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "_gpu", lambda: {"gpu": "a device"})
    ran = []

    def raises(device: str) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "ops", raises)
    monkeypatch.setattr(gpu, "cuda", lambda device: ran.append(device) or {})
    with pytest.raises(SystemExit) as stopped:
        command.main(["gpu", "--only", "ops", "cuda", "--record", str(tmp_path)])
    assert stopped.value.code == 1 and ran == ["cuda"]
    assert "raises RuntimeError: no such kernel" in next(tmp_path.glob("*ops.md")).read_text()
    failed = {"check": "pytest", "exit status": 1, "result": "1 failed"}
    monkeypatch.setattr(gpu, "correctness", lambda device: {"Tests against float64": [failed]})
    with pytest.raises(SystemExit):
        command.main(["gpu", "--only", "correctness", "cuda", "--record", str(tmp_path)])
    assert ran == ["cuda"] and "1 failed" in capsys.readouterr().out


def test_without_a_device() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            command.main(["gpu"])
