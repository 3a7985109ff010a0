# SPDX-License-Identifier: Apache-2.0
"""The ``gnsfast`` command: what it writes, says and leaves behind."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.cli
import typer.main
from rich.text import Text
from typer.testing import CliRunner

import gnsfast
from gnsfast.cli import panel, run
from gnsfast.cli.app import app


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten batches and 64 single samples are a check; 200 characters are a line."""
    monkeypatch.setattr(run, "CHECK_BATCHES", 10)
    monkeypatch.setattr(run, "CHECK_SAMPLES", 64)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_page_of_options() -> None:
    arguments = ["gnsfast.cli.app", "utils", "docs", "--name", "gnsfast", "--title", "All options"]
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    found = CliRunner().invoke(typer.cli.app, arguments).output.strip()
    how = f"python -m typer {' '.join(arguments[:5])} --title 'All options' --output {page}"
    assert found == page.read_text(encoding="utf-8").strip(), how


def demo(tmp_path: Path, *options: str, code: int = 0) -> str:
    arguments = ["demo", "--steps", "20", "--samples", "4", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments + list(options))
    assert result.exit_code == code, result.output
    return result.output


def records(tmp_path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def kinds(tmp_path: Path) -> list[str | None]:
    """Of each line; metrics have none."""
    return [r.get("kind") for r in records(tmp_path)]


@pytest.mark.second
def test_demo(tmp_path: Path) -> None:
    """Also as JSON, with the same numbers for the same seed."""
    said = demo(tmp_path)
    assert "estimate / brute force" in said
    assert kinds(tmp_path) == ["run", None, None, "check", "end"]
    last = records(tmp_path)[2]
    assert last["step"] == 20 and last["gns/updates"] == 18  # 8 and 16 are plain
    assert last["tokens"] == 20 * 4 * 128 and last["batch/size"] == 4 and last["loss"] > 0
    assert last["gns/covered"] == 1.0
    assert last["gns/layer_lo/blocks.0.qkv"] >= 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Plotly.newPlot" in report and report.count("<section>") == 4
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?(https?:)?//", report)
    result = json.loads(demo(tmp_path / "again", "--json"))
    assert result["kind"] == "result" and not result["interrupted"]
    assert result["check"]["single_samples"] == 64
    assert Path(result["report"]).exists()
    first, again = (
        [record.get("gns/b_simple") for record in records(folder)]
        for folder in (tmp_path, tmp_path / "again")
    )
    assert first == again and first[2] > 0


@pytest.mark.parametrize("after", [0, 1])
def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C leaves a report of what there is."""
    train = run.Demo.train

    def stopped(self: run.Demo) -> Iterator[run.Progress]:
        for k, progress in enumerate(train(self)):
            if k == after:
                raise KeyboardInterrupt
            yield progress

    monkeypatch.setattr(run.Demo, "train", stopped)
    assert "Interrupted" in demo(tmp_path, code=130)
    assert kinds(tmp_path) == ["run"] + [None] * after + ["interrupted", "end"]
    report = (tmp_path / "run" / "report.html").read_text()
    assert ("Plotly.newPlot" in report) == bool(after)
    assert (">interrupted<" if after else "before its first measurement") in report


def test_doctor() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert found["versions"]["gnsfast"] == gnsfast.__version__
    kernel = next(row for row in found["backends"] if row["backend"] == "cpu")
    used = "reference" if kernel["why"] else "cpu"
    assert found["devices"][0]["backend"] == used
    assert kernel["why"] or "avx" in found["devices"][0]["name"]
    assert all(row["why"] or row["state"] == "ready" for row in found["backends"])
    taken = [row["taken"] for row in found["choices"]]
    assert taken == ([] if kernel["why"] else ["gnsfast"])  # tests use deterministic algorithms
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "reference" in said and "cuda" in said and ("short samples" in said) == bool(taken)


def test_doctor_says_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpu() -> dict[str, str]:
        return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)["devices"][0]

    monkeypatch.setenv("GNSFAST_BACKEND", "triton")
    assert cpu()["backend"] == "triton"
    monkeypatch.setenv("GNSFAST_BACKEND", "fast")
    assert cpu()["backend"] == "none" and "GNSFAST_BACKEND=fast" in cpu()["why"]
    monkeypatch.setenv("GNSFAST_BACKEND", "a | b\nc")
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "GNSFAST_BACKEND=a │ b c" in said  # a bar in a cell begins no other cell
    monkeypatch.delenv("GNSFAST_BACKEND")
    monkeypatch.setenv("GNSFAST_CPU_PRODUCT", "mkl")
    choices = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)["choices"]
    assert all(row["taken"] == "none" and "=mkl" in row["why"] for row in choices)


@pytest.mark.second
def test_without_the_extra() -> None:
    """One line says what to install."""
    code = "import sys; sys.modules['typer'] = None; from gnsfast.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "gnsfast: typer is not installed: pip install 'gnsfast[cli]'"


def test_sparkline() -> None:
    assert panel.sparkline([1.0, float("inf"), 2.0, 8.0]) == "▁▂█"
    assert panel.sparkline([]) == ""


def test_help_shows_all_of_its_text() -> None:
    """Rich takes [words] in a help text for markup and drops them."""
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            text = getattr(option, "help", None) or ""
            assert Text.from_markup(text).plain == text, (command.name, option.name)
