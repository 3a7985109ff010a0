# SPDX-License-Identifier: Apache-2.0
"""Every example runs, in this process, and leaves a noise scale where it says."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def go(name: str, *options: Any) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return go


def test_plain_loop(run: Callable[..., str], tmp_path: Path) -> None:
    assert "12 updates (384 samples)" in run("plain_loop.py", "--steps", 12)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 12]
    assert lines[1]["gns/b_simple"] > 0 and lines[1]["tokens"] == 12 * 2 * 16 * 63


@pytest.mark.second
def test_batch_size(run: Callable[..., str], tmp_path: Path) -> None:
    options = "batch_size.py", "--tokens", 40_000, "--out"
    said = run(*options, "whole")
    assert "allows 16" in said and "allows 32" in said
    stopped = run(*options, "parts", "--stop-at", 25_000)
    resumed = run(*options, "parts", "--resume")
    assert "resumed at 25," in resumed and "with a batch of 16" in resumed
    before = stopped.partition("44 steps, the last of 16 samples")[0]
    assert said.splitlines() == before.splitlines() + resumed.splitlines()[1:]
    whole, parts = (
        [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert whole[-1] == parts[-1] and whole[-1]["batch/size"] > 8
    decisions = [line for line in whole if line.get("kind") == "decision"]
    assert [d["new"] for d in decisions][:3] == [8, 16, 32]
    assert decisions == [line for line in parts if line.get("kind") == "decision"]


@pytest.mark.second
def test_branches(run: Callable[..., str], tmp_path: Path) -> None:
    said = run("branches.py", "--steps", 5, "--tokens", 3 * 128 * 63)
    assert "critical batch size" in said and "under Adam's metric: noise scale" in said
    [line] = (tmp_path / "branches" / "critical_batch.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert [b["batch_size"] for b in found["branches"]] == [8, 16, 32, 64, 128]
    assert (tmp_path / "branches" / "factor.json").exists() == found["resolved"]


@pytest.mark.second
def test_trainer(run: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = run("trainer.py", "--steps", 10, "--out", tmp_path, "--report-to", "tensorboard")
    assert "10 updates (320 samples)" in said
    [file] = tmp_path.glob("**/events.out.*")
    events = EventAccumulator(str(file)).Reload()
    [names] = [n for n in events.Tags()["scalars"] if n.endswith("gns/b_simple")]
    [tokens] = [n for n in events.Tags()["scalars"] if n.endswith("/tokens")]
    assert [e.step for e in events.Scalars(names)] == [10]
    assert [e.value for e in events.Scalars(tokens)] == [10 * 2 * 16 * 64]


def test_lightning_module(run: Callable[..., str], tmp_path: Path) -> None:
    said = run("lightning_module.py", "--steps", 10, "--out", tmp_path)
    assert "10 updates (1,280 samples)" in said
    [table] = tmp_path.glob("**/metrics.csv")
    assert "gns/b_simple" in table.read_text()
