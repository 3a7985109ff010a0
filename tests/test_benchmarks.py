# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks gpu`` as far as a CPU can run it: its arguments, parts, tables, record."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import attention, cuda_kernels, gpu, measure, record, small_shapes  # noqa: E402
from benchmarks.cases import LayerCase  # noqa: E402
from gnsfast import extension  # noqa: E402

TINY = [LayerCase("tiny", 40, 24, T, 140) for T in (1, 8, 70)]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNSFAST_BACKEND", "triton")


def test_parts_write_their_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """All parts on tiny cases; files for programs and for people; a short table last."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "_gpu", lambda: {"gpu": "a device"})
    monkeypatch.setattr(extension, "missing", lambda: "no device")
    outcome = {"check": "pytest", "exit status": 0, "result": "3 passed"}
    parts = {
        "correctness": lambda device: {"Tests against float64": [outcome]},
        "ops": lambda device, run=gpu.ops: run("cpu", TINY, 3),
        "routes": lambda device, run=gpu.routes: run("cpu", TINY[1:2], 3),
        "cuda": lambda device, run=gpu.cuda: run("cpu", 3),
    }
    monkeypatch.setattr(gpu, "other_ops", lambda device, rounds: {})
    for name, part in parts.items():
        monkeypatch.setattr(gpu, name, part)
    command.main(["gpu", "--only", *parts, "--record", str(tmp_path)])
    out = capsys.readouterr().out
    last = out.rpartition("In short")[2]
    assert "3 passed" in last and "weight gradient / plain, T=70" in last
    for name in parts:
        (written,) = tmp_path.glob(f"*-gpu-{name}.json")
        data = json.loads(written.read_text())
        assert data["command"] == f"python -m benchmarks gpu --only {name}"
        assert data["machine"]["gpu"] == "a device" and data["tables"]
        assert written.with_suffix(".md").exists()


def test_other_operators_and_small_shapes() -> None:
    tables = gpu.other_ops("cpu", 3, tokens=40, widths=(40,), tables=((50, 24),))
    (rows,) = tables.values()
    assert len(rows) == 2 and all("gnsfast / plain" in row for row in rows)
    small_shapes.main("cpu")


@pytest.mark.parametrize("per_sample", [False, True], ids=["plain", "gnsfast"])
def test_training_steps(monkeypatch: pytest.MonkeyPatch, per_sample: bool) -> None:
    """The steps that are timed run, on models that are small enough for it."""
    from benchmarks import cases

    monkeypatch.setattr(cases.GPT2, "__init__", lambda self: cases.GPT.__init__(self, 16, 2, 1))
    for name, value in (("B", 2), ("T", 9), ("vocabulary", 50)):
        monkeypatch.setattr(cases.GPT2, name, value)
    run = gpu.training_step("gpt2", per_sample, False, "cpu")
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
    (row,) = attention.table("cpu", [narrow], 3, measure.wall_seconds)
    assert row["gnsfast / sdpa"] and "window 4" in str(row)


def test_hopper_kernel_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that was counted is timed, and no other name."""
    launched: list[tuple[int, str]] = []
    names = ["sm90 unordered", "sm90 cluster of 1", "sm90 unsplit", "sm90 128 x 256, one sample"]
    if importlib.util.find_spec("gnsfast._C"):
        assert extension.variants() == names
    monkeypatch.setattr(extension, "variants", lambda: names)
    monkeypatch.setattr(cuda_kernels.measure, "cuda_seconds", measure.wall_seconds)

    def launch(x: torch.Tensor, dy: torch.Tensor, dw: Any, add: bool, name: str) -> torch.Tensor:
        launched.append((len(x), name))
        return x.new_zeros(3, len(x) + 1)

    monkeypatch.setattr(extension, "linear_wgrad", launch)
    rows = cuda_kernels.taken_apart("cpu", 3, size=8)
    timed = {(row["T"], row["variant"]) for row in rows}
    assert {(T, name) for T, counted in cuda_kernels.COUNTED.items() for name in counted} <= timed
    assert all(B == 1 for B, name in launched if name.endswith("one sample"))
    assert {name for _, name in launched} == {"sm90", *names}


def test_without_a_device() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            command.main(["gpu"])
