# SPDX-License-Identifier: Apache-2.0
"""A run of ``python -m benchmarks gpu`` in which parts fail, end or are not there; its records."""

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import record  # noqa: E402
from benchmarks.gpu import parts as gpu  # noqa: E402

TESTS = Path(__file__).parents[1]


def test_every_test_of_a_kernel_is_run() -> None:
    """Those that the mark or the fixture sends to a device; this file's benchmarks are parts."""
    suites = {name for name in gpu.SUITES}
    for path in sorted(TESTS.rglob("test_*.py")):
        file, source = path.relative_to(TESTS).as_posix(), path.read_text()
        marked = re.findall(r"@pytest.mark.gpu\n(?:@.*\n)*def (\w+)", source)
        given = re.findall(r"^def (test_\w+)\([^)]*\bdevice: str", source, re.MULTILINE)
        named = re.findall(r'parametrize\("device".*\n(?:@.*\n)*def (\w+)', source)
        for name in {*marked, *given} - {*named}:
            assert {file, f"{file}::{name}"} & suites, f"{file}::{name}"
        if re.search(r"^pytestmark = pytest.mark.gpu$", source, re.MULTILINE):
            assert file in suites, file
    for name in gpu.SUITES:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text() or not test, name


def parts(monkeypatch: pytest.MonkeyPatch, **those: Any) -> None:
    for name, part in those.items():
        monkeypatch.setitem(gpu.PARTS, name, part)


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(record, "_gpu", lambda: {"gpu": "a device"})


def test_parts_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, a_device: None
) -> None:
    """A gate that exits, an exception and a failed test are rows; what came before stays."""

    def exits(device: str) -> Any:
        yield {"Cases": [{"n": 1}]}
        raise SystemExit("gnsfast, Triton is wrong on GPT")

    def raises(device: str) -> Any:
        raise RuntimeError("no such kernel")

    failed = {"check": "pytest", "exit status": 1, "result": "1 failed"}
    tests = lambda device: [{"Tests against float64": [failed]}]
    right = lambda device: [{"Cases": [{"n": 2}]}]
    parts(monkeypatch, correctness=tests, ops=exits, routes=raises, cuda=right)
    with pytest.raises(SystemExit) as stopped:
        command.main(
            ["gpu", "--only", "correctness", "ops", "routes", "cuda", "--record", str(tmp_path)]
        )
    assert stopped.value.code == 1
    of = lambda part: record.newest(f"gpu-{part}", tmp_path).tables
    assert of("ops")["Cases"] == [{"n": 1}] and of("cuda") == {"Cases": [{"n": 2}]}
    assert "gnsfast, Triton is wrong on GPT" in of("ops")["Failed"][0]["result"]
    assert of("routes")["Failed"][0]["result"] == "raises RuntimeError: no such kernel"
    last = capsys.readouterr().out.rpartition("In short")[2]
    assert "1 failed" in last and "no such kernel" in last and "is wrong on GPT" in last


def test_a_case_that_raises_does_not_cost_the_others() -> None:
    def rows_of(n: int) -> list[dict[str, Any]]:
        if n == 4:
            raise SystemExit("gnsfast, Triton is wrong")
        return [{"n": 6 // n}]

    *_, tables = record.Growing().over("Cases", (1, 0, 4, 3), rows_of)
    assert tables["Cases"] == [{"n": 6}, {"n": 2}]
    raised, wrong = tables["Failed"]
    assert raised["check"] == "Cases: 0" and "ZeroDivisionError" in raised["result"]
    assert wrong["check"] == "Cases: 4" and "Triton is wrong" in wrong["result"]


def test_a_record_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, a_device: None) -> None:
    """It has each finished case, and no name of a whole one before it is whole."""
    seen = []

    def part(device: str) -> Any:
        found = record.Growing()
        for tables in found.over("Cases", range(3), lambda n: [{"n": n}]):
            yield tables
            begun = record.newest("gpu-ops-unfinished", tmp_path)
            seen.append([row["n"] for row in begun.tables["Cases"]])
            assert record.newest("gpu-ops", tmp_path) is None

    parts(monkeypatch, ops=part)
    command.main(["gpu", "--only", "ops", "--record", str(tmp_path)])
    assert seen == [[0], [0, 1], [0, 1, 2]]
    assert len(record.newest("gpu-ops", tmp_path).tables["Cases"]) == 3
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def test_a_record_is_replaced_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kill before the new one takes the name leaves the former one."""

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    path = record.write("x", "", {"a": [{"n": 1}]}, tmp_path).with_suffix(".json")
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write("x", "", {"a": [{"n": 2}]}, tmp_path)
    assert record.read(path).tables == {"a": [{"n": 1}]}


def test_a_growing_record_asks_the_machine_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And again when it is whole, as a GPU's clocks are those at the end."""
    asked = []
    done = subprocess.CompletedProcess([], 0, "abc", "")
    monkeypatch.setattr(record.subprocess, "run", lambda *a, **_: asked.append(a) or done)
    record._line.cache_clear()
    for _ in range(3):
        record.write_unfinished("x", "", {}, tmp_path)
    once = len(asked)
    record.write_whole("x", "", {}, tmp_path)
    record._line.cache_clear()
    assert 0 < once < 3 and len(asked) == 2 * once
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_lost_device_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, a_device: None
) -> None:
    """After its record is whole: CUDA answers the process no more, so no other part begins."""

    def raises() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    ran = []
    parts(monkeypatch, ops=lambda device: [{}], cuda=lambda device: ran.append(device) or [{}])
    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    with pytest.raises(SystemExit, match="after ops the device answers only new processes"):
        command.main(["gpu", "--only", "ops", "cuda", "--record", str(tmp_path)])
    assert not ran and record.newest("gpu-ops", tmp_path)


def test_a_lost_device_ends_a_process_of_tests(
    monkeypatch: pytest.MonkeyPatch, a_device: None
) -> None:
    """After a failed test, where there are others: this one would fail at once all that it took."""

    def raises() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    ended: list[int] = []
    monkeypatch.setattr(conftest.os, "_exit", ended.append)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    report = partial(pytest.TestReport, "test_a", ("test_a.py", 1, "test_a"), {})
    failed = report("failed", "AssertionError", "call")
    conftest.pytest_runtest_logreport(failed)
    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    conftest.pytest_runtest_logreport(failed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    conftest.pytest_runtest_logreport(report("passed", None, "call"))
    assert not ended
    conftest.pytest_runtest_logreport(failed)
    assert ended == [1]
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    conftest.pytest_runtest_logreport(failed)
    assert ended == [1]


def test_summary_of_a_folder(tmp_path: Path, capsys: Any) -> None:
    """What is unfinished, or failed, is said and turns the exit status; sanitizers do not."""
    said = {"compute-sanitizer": [{"check": "memcheck", "its status": 9, "result": "3 errors"}]}
    record.write("gpu-sanitizers", "", said, tmp_path)
    summary = ["gpu", "--summary", "--record", str(tmp_path)]
    command.main(summary)
    assert "3 errors" in capsys.readouterr().out
    record.write_unfinished("gpu-curves", "", {"Cost against B": [{"layer": "a"}]}, tmp_path)
    with pytest.raises(SystemExit):
        command.main(summary)
    assert "| curves | unfinished: 1 rows |" in capsys.readouterr().out


def test_tests_and_sanitizers_show_what_they_print(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At once: this one ends when its line was shown, which is its result."""
    waits = f"for i in $(seq 100); do [ -e {tmp_path}/shown ] && exit 3; sleep 0.1; done; exit 4"
    shown = lambda line, **_: (tmp_path / "shown").touch()
    monkeypatch.setattr(gpu, "print", shown, raising=False)
    row = gpu.outcome("tests", ["sh", "-c", f"echo '= 2 passed ='; echo; {waits}"], "rc")
    assert row == {"check": "tests", "rc": 3, "result": "2 passed"}
    ran = []
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu, "outcome", lambda check, run, *_, **__: ran.append(run) or {})
    assert len(list(gpu.sanitizers("cuda"))) == 2
    assert all(run[5:7] == ["--report-api-errors", "no"] for run in ran)


def test_a_test_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It fails, and is named; the tests after it run in a process that takes its one's place."""
    path = tmp_path / "test_kernels.py"
    path.write_text("import time\ndef test_a(): time.sleep(30)\ndef test_b(): pass\n")
    monkeypatch.setattr(gpu, "TEST_SECONDS", 0.5)
    suite = os.path.relpath(path, Path(gpu.ROOT) / "tests")
    monkeypatch.setattr(gpu, "SUITES", [suite])
    monkeypatch.setattr(gpu, "PROCESSES", 1)
    *_, tables = gpu.correctness("cuda")
    (row,) = tables["Tests against float64"]
    assert row["exit status"] == 1 and "1 failed, 1 passed" in row["result"]
    (failed,) = tables["Tests that failed"]
    assert failed["test"].endswith("test_kernels.py::test_a") and "crashed" in failed["why"]
