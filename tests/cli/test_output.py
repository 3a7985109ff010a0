# SPDX-License-Identifier: Apache-2.0
"""``--json``: one object on stdout from each command, units in its names, errors too."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gnsfast.cli.app import app

ROOT = Path(__file__).parents[2]
SCHEDULE = ("schedule", "0:4 1K:8", "--total-tokens", "6000", "--tokens-per-sample", "10")


def run(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert (done.exit_code, done.stderr) == (code, ""), done.output
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # the command puts the working directory on it
        measured = ("branch", "branch_runs:ScriptedRun", "--out", str(folder / "cbs"))
        run(*measured, "--tokens", "960", "--k", "1/2,1,2,4")
    log = {"step": 1, "tokens": 100, "loss": 2.0, "gns/covered": 1.0}
    (folder / "run.jsonl").write_text(json.dumps(log))
    found = [
        run("doctor"),
        run("plan", "--tokens", "20B", "--batch", "64", "--b-crit", "400:300:500"),
        run(*SCHEDULE),
        run("report", str(folder / "run.jsonl")),
        run("branch", "result", str(folder / "cbs")),
        run("plan", "--tokens", "x", code=2),
    ]
    return {each["kind"]: each for each in found}


def paths(value: Any, at: str = "") -> set[str]:
    """``laws[].samples`` and every other name, of objects in lists once."""
    if isinstance(value, list):
        return {path for each in value for path in paths(each, at + "[]")}
    if not isinstance(value, dict):
        return {at}
    return {at} | {p for n, each in value.items() for p in paths(each, f"{at}.{n}".lstrip("."))}


def table() -> dict[str, set[str]]:
    """The names of each kind that the page promises."""
    page = (ROOT / "docs" / "how-to" / "agents.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `{")]
    return {
        row[1].split('"')[3]: {n.strip(" `") for n in row[2].replace("\\", "").split(",")}
        for row in rows
    }


def test_the_page_promises_what_commands_answer(answers: dict[str, dict[str, Any]]) -> None:
    promised = table()
    assert promised.keys() == answers.keys()
    for kind, names in promised.items():
        assert names <= paths(answers[kind]), (kind, names - paths(answers[kind]))


def test_no_name_without_its_unit(answers: dict[str, dict[str, Any]]) -> None:
    bare = {"batch_size", "batch", "context", "b_crit", "threshold", "against", "whole_run"}
    for kind, found in answers.items():
        last = {path.rpartition(".")[2] for path in paths(found)}
        assert not bare & last, (kind, bare & last)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--tokens", "x"), "--tokens is 'x'"),
        (("plan",), "plan needs --tokens"),
        (("plan", "--token", "20B"), "No such option"),
        (("schedule", "0:4"), "Missing option"),
        ((*SCHEDULE, "--export", "torch"), "--export must be"),
        (("report", "/no/such/folder"), "no such file"),
        (("report", ".", "--out", "x.pdf"), "is not an .html file"),
        (("branch", "result", "/no/such/folder"), "holds no branch measurement"),
        (("branch", "x.py:run", "--tokens", "9", "--out", "/tmp/x"), "there is no file"),
    ],
)
def test_errors_are_objects(arguments: tuple[str, ...], said: str) -> None:
    found = run(*arguments, code=2)
    assert found.keys() == {"kind", "message", "exit_status"}
    assert found["kind"] == "error" and said in found["message"] and found["exit_status"] == 2
