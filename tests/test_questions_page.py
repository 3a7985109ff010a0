# SPDX-License-Identifier: Apache-2.0
"""The page of questions: every line that it shows is one of the output of the command above it."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "questions.md"
PAIR = re.compile(r"(?m)^```(python|bash)\n((?:.*\n)*?)```\n\n```text\n((?:.*\n)*?)```$")
PAIRS = [match.groups() for match in PAIR.finditer(PAGE.read_text(encoding="utf-8"))]


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def same(shown: str, line: str) -> bool:
    """The same words, and numbers that another processor's last digits may move by 1 %."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", line):
        return False
    a, b = ([float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (shown, line))
    return a == pytest.approx(b, rel=0.01)


def test_python_prints_what_the_page_shows() -> None:
    scope: dict[str, object] = {"__name__": "page"}
    blocks = [(code, shown) for language, code, shown in PAIRS if language == "python"]
    assert len(blocks) == 3
    for code, shown in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(PAGE), "exec"), scope)
        printed = out.getvalue().splitlines()
        assert not [s for s in shown.splitlines() if not any(same(s, line) for line in printed)]


def test_commands_print_what_the_page_shows() -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from gnsfast.cli.app import app

    commands = [(code, shown) for language, code, shown in PAIRS if language == "bash"]
    assert len(commands) == 1
    for code, shown in commands:
        words = shlex.split(code.replace("\\\n", " "))[1:]
        found = typer_testing.CliRunner().invoke(app, words)
        assert found.exit_code == 0, found.output
        lines = {line.strip() for line in found.output.splitlines()}
        assert {line.strip() for line in shown.splitlines()} <= lines


def test_each_question_of_the_table_has_its_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = {line[3:] for line in text.splitlines() if line.startswith("## ")}
    questions = re.findall(r"(?m)^\| ([^|]+\?) \|", text)
    assert len(questions) == 12 and sections < {*questions}  # the others have pages of their own
