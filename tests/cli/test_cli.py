# SPDX-License-Identifier: Apache-2.0
"""The ``gnsfast`` command: its help, and what ``doctor`` says."""

import json
import subprocess
import sys

import pytest
import typer.main
from rich.text import Text
from typer.testing import CliRunner

import gnsfast
from gnsfast.cli.app import app


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GNSFAST_CPU_PRODUCT", "GNSFAST_BACKEND"):
        monkeypatch.delenv(name, raising=False)
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


def test_help_shows_all_of_its_text() -> None:
    """Rich takes [words] in a help text for markup and drops them."""
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            text = getattr(option, "help", None) or ""
            assert Text.from_markup(text).plain == text, (command.name, option.name)
