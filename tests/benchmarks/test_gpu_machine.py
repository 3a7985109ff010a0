# SPDX-License-Identifier: Apache-2.0
"""``make gpu``: a rehearsal of it on this CPU, and its driver with a stub instead of the parts."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from processes import runs, soon

pytest.importorskip("triton", reason="triton is there on Linux alone")
pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import gpu_machine  # noqa: E402
from benchmarks.machine import job as gpu_job  # noqa: E402

ROOT = Path(__file__).parents[2]
MACHINE = [sys.executable, str(ROOT / "benchmarks" / "gpu_machine.py"), "--rehearse"]
PARTS = list(gpu_machine.SECONDS)

STUB = """\
import json, os, sys, time
from pathlib import Path

given = sys.argv[1:]
folder, behaviour = Path(given[given.index("--record") + 1]), json.loads(os.environ["STUB"])
if "--summary" in given:
    print("In short")
    sys.exit(behaviour.get("summary", 0))
print("a process")
if behaviour.get("dies"):
    sys.exit(4)
for part in given[given.index("--only") + 1 : given.index("--rehearse")]:
    path = folder / f"2026-01-02-gpu-{part}.json"
    growing = folder / f"2026-01-02-gpu-{part}-unfinished.json"
    for n in range(3):
        partial = folder / "partial"
        partial.write_text(json.dumps(list(range(n))))
        partial.replace(growing)
    print("began", part, os.getpid())
    if behaviour.get(part) == "hangs":
        time.sleep(20)
    if behaviour.get(part) == "crashes":
        os._exit(5)
    growing.replace(path)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of the driver: a program that writes records of two cases in no time."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("STUB", "{}")
    monkeypatch.setattr(gpu_job, "LOOK", 0.01)
    options = ["--rehearse", "--out", str(tmp_path / "out"), "--wheels", str(tmp_path / "none")]
    options += ["--resume", str(tmp_path / "results")]
    return [*options, "--python", sys.executable, str(tmp_path / "stub.py")]


def drive(options: list[str], *more: str) -> int:
    """The driver's exit status, in this process."""
    with pytest.raises(SystemExit) as left:
        gpu_machine.main([*options, *more])
    return int(left.value.code or 0)


def packed(out: Path) -> dict[str, str]:
    """The archive, which is read whole."""
    with tarfile.open(out / "gpu.tar.gz") as archive:
        files = [member for member in archive if member.isfile()]
        return {f.name: archive.extractfile(f).read().decode() for f in files}  # type: ignore[union-attr]


def began(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("began")]


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    """One run of everything, in one test: two could run it in two processes."""
    out = tmp_path / "out"
    run = [*MACHINE, "--out", str(out), "--wheels", str(out / "none")]
    done = subprocess.run(
        run, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    leaves_one_archive(out, done.stdout)
    measures_what_a_run_does(out)


def leaves_one_archive(out: Path, shown: str) -> None:
    """Every part's record, for programs and for people, and the log; a short table last."""
    assert sorted(path.name for path in out.iterdir()) == ["gpu.log", "gpu.tar.gz"]
    files = packed(out)
    stems = {Path(name).stem[11:] for name in files if name.startswith("records/")}
    assert stems == {f"gpu-{part}" for part in PARTS}
    assert sum(name.endswith(".md") for name in files) == len(PARTS)
    (log,) = (text for name, text in files.items() if name.startswith("logs/"))
    assert log == (out / "gpu.log").read_text() == shown
    last = shown.rpartition("In short")[2]
    for said in ("2 passed", "weight gradient / plain, T=70", "step / plain, gpt2, eager, gnsfast"):
        assert said in last
    assert "torch.func vmap / plain" in last and "step / plain, llama" in last and "| 0 |" in last
    assert "compute-sanitizer is not installed" in last and "every part is finished" in last


def measures_what_a_run_does(out: Path) -> None:
    files = packed(out)
    read = {name[19:-5]: json.loads(files[name]) for name in files if name.endswith(".json")}
    written = {part: read[f"gpu-{part}"]["tables"] for part in PARTS}
    for part in PARTS:
        command = f"python -m benchmarks gpu --only {part} --rehearse"
        assert read[f"gpu-{part}"]["command"] == command
        assert written[part] and "Failed" not in written[part]
    (row, *_) = written["ops"]["The weight gradient alone"]
    assert row["gnsfast / plain"]["ratio"] > 0
    steps = written["step"]["Whole training step"]
    assert [row["contestant"] for row in steps] == 2 * ["plain", "gnsfast, Triton"]
    coverage, cast, times = written["peers"].values()
    assert all(row["verdict"] == "right" and row["covered"] == 1 for row in coverage + cast)
    assert [row["contestant"] for row in times] == [
        *("plain", "gnsfast, Triton", "loop of single samples", "torch.func vmap")
    ]
    for title, (T, B) in {"Overhead against T": (8, 17), "Cost against B": (70, 2)}.items():
        rows = written["curves"][title]
        assert {(row["layer"], row["T"], row["B"]) for row in rows} == {("tiny 40x24", T, B)}
        assert {row["contestant"] for row in rows} >= {"plain", "gnsfast, Triton"}
        assert all(row["ratio"]["lower"] <= row["ratio"]["upper"] for row in rows)


def test_a_killed_run_is_resumed(
    stub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has all that was finished; no process is left; nothing finished runs again."""
    run = [sys.executable, str(ROOT / "benchmarks" / "gpu_machine.py"), *stub]
    out = tmp_path / "out"
    with subprocess.Popen(
        run, stdout=subprocess.DEVNULL, env={**os.environ, "STUB": '{"routes": "hangs"}'}
    ) as process:
        names: set[str] = set()
        while not any("routes-unfinished" in name for name in names):
            assert process.poll() is None
            time.sleep(0.05)
            names = set(packed(out)) if (out / "gpu.tar.gz").exists() else names
        with pytest.raises(SystemExit, match="another call works in .*results"):
            gpu_machine.main(stub)
        process.kill()
    (log,) = (tmp_path / "results" / "logs").iterdir()
    text = log.read_text()
    child = text.split()[-1]
    assert began(text) == ["correctness", "ops", "routes"]
    assert soon(lambda: not runs(child)), f"process {child} outlives the driver"
    files = packed(out)
    whole = [name for name in files if "records/" in name and "unfinished" not in name]
    assert whole == [f"records/2026-01-02-gpu-{part}.json" for part in ("correctness", "ops")]
    assert json.loads(files["records/2026-01-02-gpu-routes-unfinished.json"]) == [0, 1]

    again = [str(tmp_path / "fresh") if x == str(tmp_path / "results") else x for x in stub]
    assert drive(again) == 0
    text = (out / "gpu.log").read_text()
    stopped_last = [*PARTS[3:], "routes"]
    assert began(text) == stopped_last
    assert "finished by a former call: correctness, ops" in text
    assert "every part is finished" in text
    files = packed(out)
    assert json.loads(files["records/2026-01-02-gpu-routes-unfinished-former-1.json"]) == [0, 1]
    assert sum(name.startswith("logs/") for name in files) == 2
    assert len(list(out.iterdir())) <= 8

    assert drive(again, "--again", "step") == 0
    assert began((out / "gpu.log").read_text()) == ["step"]


def test_a_part_that_ends_its_process(
    stub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts after it run in another."""
    monkeypatch.setenv("STUB", '{"ops": "crashes"}')
    assert drive(stub) == 1
    text = (tmp_path / "out" / "gpu.log").read_text()
    assert began(text) == PARTS and "not finished: ops" in text
    monkeypatch.setenv("STUB", '{"dies": true}')
    assert drive(stub) == 1
    text = (tmp_path / "out" / "gpu.log").read_text()
    assert text.count("a process") == 1 and "ops: the process began none of them" in text


def test_a_part_that_takes_too_long(
    stub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", '{"step": "hangs"}')
    monkeypatch.setattr(gpu_machine, "STAGE_SECONDS", 1)
    assert drive(stub) == 1
    text = (tmp_path / "out" / "gpu.log").read_text()
    assert began(text) == PARTS and "stopped after 1 s" in text and "not finished: step" in text


@pytest.mark.parametrize(
    ("limit", "ran", "said"),
    [
        (25, [], "not started: correctness: 150 s estimated, 0 s left"),
        (60, ["correctness"], "not started: step: 240 s estimated, 30 s left"),
        (350, PARTS, "ops routes: 240 s estimated, 320 s left"),
        (480, PARTS, "every part"),
    ],
    ids=["nothing", "the first", "the second stage in two", "all, as they took less"],
)
def test_limit(limit: int, ran: list[str], said: str, stub: list[str], tmp_path: Path) -> None:
    """What no longer fits is not started, but the first part is."""
    assert drive(stub, "--limit", str(limit)) == 0
    text = (tmp_path / "out" / "gpu.log").read_text()
    assert began(text) == ran
    assert said in text.replace("29 s left", "30 s left").replace("319 s left", "320 s left")


def test_a_rehearsal_is_no_result(stub: list[str], tmp_path: Path) -> None:
    """Its records are in no folder that a later call takes for one of finished parts."""
    where = stub.index("--resume")
    usual = [*stub[:where], *stub[where + 2 :]]
    for _ in range(2):
        assert drive(usual) == 0
        assert began((tmp_path / "out" / "gpu.log").read_text()) == PARTS
        assert len(packed(tmp_path / "out")) == len(PARTS) + 1


def test_something_wrong_in_a_record(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary says it by its exit status."""
    monkeypatch.setenv("STUB", '{"summary": 1}')
    assert drive(stub) == 1


def test_an_archive_that_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records go before the extension, which the next call can build."""
    job = gpu_job.Job(tmp_path / "out", tmp_path / "results", 60, tmp_path)
    monkeypatch.setattr(gpu_job, "MOST", 2000)
    (job.records / "2026-01-02-gpu-ops.json").write_text("{}")
    (tmp_path / "results/extension/key").mkdir()
    (tmp_path / "results/extension/key/_C.so").write_bytes(os.urandom(3000))
    job.pack()
    job.pack()
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as archive:
        names = archive.getnames()
    assert "records/2026-01-02-gpu-ops.json" in names and not any("_C" in n for n in names)
    text = (tmp_path / "out" / "gpu.log").read_text()
    assert text.count("it is packed without the built extension") == 1
