# SPDX-License-Identifier: Apache-2.0
"""The parts of ``python -m benchmarks cpu`` that need processes of their own, and ``budgets``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import budget, measure, record  # noqa: E402
from benchmarks.budget import Budget  # noqa: E402
from benchmarks.budgets import parts as regressions  # noqa: E402
from benchmarks.contestants import cases  # noqa: E402
from benchmarks.contestants.cases import Problem  # noqa: E402
from benchmarks.contestants.sessions import Gnsfast  # noqa: E402
from benchmarks.cpu import fresh
from benchmarks.cpu import parts as cpu  # noqa: E402
from benchmarks.networks import GPT, gpt_batch, gpt_loss  # noqa: E402

pytestmark = pytest.mark.usefixtures("global_flags")


class TinyGPT(GPT):
    B, T, vocabulary = 2, 5, 20

    def __init__(self, *sizes: int) -> None:
        super().__init__(16, 2, 1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as can be, in this process, with its threads."""
    monkeypatch.setattr(cases, "GPT", TinyGPT)
    monkeypatch.setattr(cases, "gpt_batch", lambda model=None: gpt_batch(TinyGPT))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    problem = Problem("GPT of one layer", TinyGPT.T, TinyGPT(), gpt_loss, cases.gpt_batch())
    monkeypatch.setattr(cases, "small_gpt", lambda: problem)


def test_memory_of_a_process(tiny: None) -> None:
    assert fresh.memory("gnsfast", "1") >= 0


def test_autocast(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain, ours) = cpu.autocast([1], 2)["Whole training step under autocast(bfloat16)"]
    assert [plain["contestant"], ours["contestant"]] == ["plain", "gnsfast"]
    assert plain["ratio"].ratio == 1 and ours["ratio"].ratio > 0 and ours["rounds"] == 8
    run = Gnsfast.run

    def off(self: Gnsfast) -> None:
        run(self)
        self._sqnorms = {name: 1.02 * sqnorm_B for name, sqnorm_B in self._sqnorms.items()}

    monkeypatch.setattr(Gnsfast, "run", off)
    with pytest.raises(SystemExit, match="gnsfast under autocast: .* is off by 2.*e-02"):
        cpu.autocast([1], 2)


def test_an_interrupted_run_replaces_no_whole_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(threads: list[int], rounds: int) -> Any:
        raise KeyboardInterrupt

    for part in cpu.PARTS:
        monkeypatch.setitem(cpu.PARTS, part, lambda threads, rounds: {"Start-up time": [{"ms": 1}]})
    run = ["cpu", "--threads", "1", "1", "--record", str(tmp_path / "new")]
    command.main(run)
    (whole,) = (tmp_path / "new").glob("*.json")
    before = whole.read_text()
    monkeypatch.setitem(cpu.PARTS, "layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(run)
    assert whole.read_text() == before
    assert list((tmp_path / "new").glob("*-cpu-unfinished.json"))
    with pytest.raises(SystemExit):
        command.main(["cpu", "--threads", "0"])


def test_a_process_answers_or_says_why_not() -> None:
    """What it prints last is its answer; a failed one's words are in the error."""
    seconds = fresh.ask("start")
    assert list(seconds) == ["import torch", "import gnsfast", "table of the small GPT"]
    assert all(s > 0 for s in seconds.values())
    assert fresh.medians([seconds, seconds, {name: 1e3 for name in seconds}]) == seconds
    with pytest.raises(RuntimeError, match=r"fresh nothing: KeyError: 'nothing'"):
        fresh.ask("nothing")


def test_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"import torch": s} for s in (1.0, 5.0, 2.0)])
    monkeypatch.setattr(fresh, "ask", lambda what: next(answers))
    assert cpu.start([1], 5) == {"Start-up time": [{"what": "import torch", "runs": 3, "ms": 2e3}]}


def test_parts_after_one_that_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def raises(threads: list[int], rounds: int) -> Any:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(cpu.PARTS, "coverage", raises)
    monkeypatch.setitem(cpu.PARTS, "start", lambda threads, rounds: {"Start-up time": [{"ms": 1}]})
    with pytest.raises(SystemExit, match="failed: coverage; see above"):
        command.main(["cpu", "--only", "coverage", "start", "--record", str(tmp_path)])
    (path,) = tmp_path.glob("*-cpu-coverage-start.json")
    tables = record.read(path).tables
    assert tables["coverage"] == [
        {"part": "coverage", "result": "raises RuntimeError: out of luck"}
    ]
    assert tables["Start-up time"] == [{"ms": 1}]


class Device:
    """Events of a device that runs a millisecond's work once it has slept; nothing is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch: float) -> None:
        self.now, self.launch, self.slept = 0.0, launch, 0.0
        self.sleeps: list[float] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / measure.CYCLES)

    def run(self) -> None:
        self.now += self.launch

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * max(1e-3, self.launch - self.sleeps[-1])


@pytest.mark.parametrize(("launch", "sleeps"), [(5e-4, [1e-3]), (4e-3, [1e-3, 6e-3])])
def test_a_device_does_not_wait_for_launches(
    monkeypatch: pytest.MonkeyPatch, launch: float, sleeps: list[float]
) -> None:
    device = Device(monkeypatch, launch)
    assert measure.cuda_seconds(device.run) == 1e-3
    assert device.sleeps == pytest.approx(sleeps)
    measure.cuda_seconds(device.run, tries=1)
    assert device.sleeps[len(sleeps) :] == [1e-3]


def test_budgets_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Written, held, exceeded; what cannot be counted here is said."""
    monkeypatch.setattr(budget, "FOLDER", tmp_path)
    monkeypatch.setattr(regressions, "missing", lambda part: part == "cuda" and "there is no nvcc")
    now = Budget({"torch": "1"}, {"a step": {"launches": 100}})
    monkeypatch.setattr(regressions, "counted", lambda part: [("instructions", now)])
    run = ["budgets", "--only", "instructions", "cuda"]
    command.main([*run, "--write"])
    command.main(run)
    out = capsys.readouterr().out
    assert "within its margins" in out and "cuda: not counted: there is no nvcc" in out
    now = replace(now, rows={"a step": {"launches": 103}})
    with pytest.raises(SystemExit):
        command.main(run)
    assert "103" in capsys.readouterr().out
    now = replace(now, versions={"torch": "2"})
    command.main(run)
    assert "not compared" in capsys.readouterr().out
