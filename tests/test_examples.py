# SPDX-License-Identifier: Apache-2.0
"""Every example runs, in this process, and leaves a noise scale where it says."""

import io
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gnsfast.noise_scale import ModuleNoiseScale

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def go(name: str, *options: Any) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        monkeypatch.syspath_prepend(FOLDER)
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return go


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


DEMO = "demo.py", "--steps", 20, "--samples", 4, "--single-samples", 64, "--out"


@pytest.mark.second
def test_demo(run: Callable[..., str], tmp_path: Path) -> None:
    """What it logs, also a second time; the check at its end; its page."""
    said = run(*DEMO, "run")
    first, *points, check, last = logged(tmp_path / "run")
    assert [first["kind"], last["kind"]] == ["run", "end"]
    assert [point["step"] for point in points] == [10, 20]
    assert points[1]["gns/updates"] == 18  # 8 and 16 are plain
    assert points[1]["tokens"] == 20 * 4 * 128 and points[1]["batch/size"] == 4
    assert points[1]["gns/covered"] == 1.0 and points[1]["gns/layer_lo/blocks.0.qkv"] >= 0
    assert check["single_samples"] == 64 and check["batches"] == 40
    assert check["ratio"] == check["estimate"]["value"] / check["brute_force"]["value"]
    assert f"estimate / brute force               {check['ratio']:.2f}" in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "frozen last checkpoint, single samples" in page and page.count("<section>") == 4
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?(https?:)?//", page)
    run(*DEMO, "again")
    again = [point["gns/b_simple"] for point in logged(tmp_path / "again")[1:3]]
    assert again == [point["gns/b_simple"] for point in points]
    with pytest.raises(FileExistsError):
        run(*DEMO, "run")


def test_interrupted_demo(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a report of what there is."""
    adamw_step, steps = torch.optim.AdamW.step, iter(range(20))

    def step(self: torch.optim.AdamW) -> None:
        if next(steps) == 11:
            raise KeyboardInterrupt
        adamw_step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    run(*DEMO, "run")
    kinds = [line.get("kind") for line in logged(tmp_path / "run")]
    assert kinds == ["run", None, "interrupted", "end"]
    assert ">interrupted<" in (tmp_path / "run" / "report.html").read_text()


def test_demos_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a panel, elsewhere lines."""
    monkeypatch.syspath_prepend(FOLDER)
    demo = runpy.run_path(str(FOLDER / "demo.py"))
    assert demo["sparkline"]([1.0, math.inf, 2.0, 8.0]) == "▁▂█" and demo["sparkline"]([]) == ""
    estimate = ModuleNoiseScale(7.0, 5.0, math.inf, 1.0, 1.0)
    scale = SimpleNamespace(**vars(estimate), interval=estimate.interval, present=estimate)
    scale.drift, scale.updates = True, 64
    for terminal, shown in ((True, "at least 5 samples, mean of 64 updates, moving"), (False, "")):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        screen = demo["Screen"]("A title", 100, console)
        with screen.live or nullcontext():
            screen.show(50, 2.5, scale, 0.03, 9.0)
        text = console.file.getvalue()
        assert "A title" in text and "3.0%" in text and "at least 5" in text and shown in text


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
    assert "4 updates (128 samples)" in said
    [file] = tmp_path.glob("**/events.out.*")
    events = EventAccumulator(str(file)).Reload()
    [names] = [n for n in events.Tags()["scalars"] if n.endswith("gns/b_simple_lo")]
    [tokens] = [n for n in events.Tags()["scalars"] if n.endswith("/tokens")]
    assert [e.step for e in events.Scalars(names)] == [10]
    assert [e.value for e in events.Scalars(tokens)] == [10 * 2 * 16 * 64]


def test_lightning_module(run: Callable[..., str], tmp_path: Path) -> None:
    said = run("lightning_module.py", "--steps", 10, "--out", tmp_path)
    assert "4 updates (512 samples)" in said
    [table] = tmp_path.glob("**/metrics.csv")
    assert "gns/b_simple" in table.read_text()
