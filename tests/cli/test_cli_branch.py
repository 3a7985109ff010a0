# SPDX-License-Identifier: Apache-2.0
"""``gnsfast branch``: a result, a folder that it continues, and one line for bad input."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import branch_runs
import pytest
from typer.testing import CliRunner, Result

from gnsfast.cli.app import app
from gnsfast.cli.branch import Target, grid
from gnsfast.cli.output import plain
from gnsfast.critical_batch import CriticalBatchFactor
from gnsfast.critical_batch.branches import CriticalBatch


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the folder of its target on the path, which later tests must not see."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def branch(tmp_path: Path, target: str, *options: Any, **changed: Any) -> Result:
    how = {"out": tmp_path / "cbs", "tokens": 960, "k": "1/2,1,2,4", **changed}
    arguments = [word for name, value in how.items() for word in (f"--{name}", str(value))]
    return CliRunner().invoke(app, ["branch", target, *arguments, *map(str, options)])


def test_branch(tmp_path: Path) -> None:
    done = branch(tmp_path, "branch_runs:ScriptedRun")
    assert done.exit_code == 0 and done.stderr == ""
    assert "k = 0.5    batch        4  loss 2.00" in done.stdout
    assert "critical batch size 16 to 32 samples" in done.stdout
    assert str(CriticalBatch.load(tmp_path / "cbs")) in done.stdout


def test_as_json_and_again(tmp_path: Path) -> None:
    target = "branch_runs:out_of_memory"
    record = json.loads(branch(tmp_path, target, "--json").stdout)
    assert (record["kind"], record["critical_batch_samples"]["upper"]) == ("critical batch", 32)
    assert record["missing"] == [{"k": 2.0, "reason": "RuntimeError: no memory"}]
    assert "failed: RuntimeError: no memory" in branch(tmp_path, target).stdout
    again = json.loads(branch(tmp_path, "branch_runs:ScriptedRun", "--json").stdout)
    assert (again["critical_batch_samples"]["lower"], again["missing"]) == (16, [])
    other = branch(tmp_path, "branch_runs:ScriptedRun", "--tolerance", 0.5)
    assert one_line(other) and "tolerance=0.01, not 0.5" in other.stderr


def test_factor(tmp_path: Path) -> None:
    """Written where it is known; where it cannot be, no branch is trained."""
    done = branch(tmp_path, "branch_runs:MeasuredRun", "--factor", "adam")
    assert done.exit_code == 0, done.output
    found = CriticalBatchFactor.load(tmp_path / "cbs" / "factor.json")
    assert found == CriticalBatch.load(tmp_path / "cbs").factor("adam")
    unknown = branch(tmp_path, "branch_runs:MeasuredRun", "--factor", "l1", out=tmp_path / "other")
    assert one_line(unknown) and "factor must be 'euclidean', 'adam'" in unknown.stderr
    bare = branch(tmp_path, "branch_runs:ScriptedRun", "--factor", "adam", out=tmp_path / "bare")
    assert one_line(bare) and "has no method noise_scale()), so there will be" in bare.stderr
    muon = branch(tmp_path, "branch_runs:MeasuredRun", "--factor", "spectral", out=tmp_path / "m")
    assert one_line(muon) and "Measured: euclidean, adam, sign. Ask" in muon.stderr
    for name in ("bare", "m"):
        assert (tmp_path / name / "checkpoint").is_dir()
        assert not list((tmp_path / name).glob("branch-*/*")), "a branch was trained"
    goes_on = branch(tmp_path, "branch_runs:MeasuredRun", "--factor", "sign", out=tmp_path / "m")
    assert goes_on.exit_code == 0, goes_on.output


def of_file(folder: Path) -> dict[str, Any]:
    """What --json says of a result: its record, with units in the names."""
    record = CriticalBatch.load(folder).record()
    ends = {end: record.pop(end) for end in ("value", "lower", "upper")}
    found: dict[str, Any] = json.loads(json.dumps(plain(record | {"critical_batch_samples": ends})))
    return found


def test_repeats(tmp_path: Path) -> None:
    options = ("--repeats", 2, "--loss", "train", "--tolerance", 9, "--json")
    done = branch(tmp_path, "branch_runs:small_run", *options, tokens=960, k="1,2")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == of_file(tmp_path / "cbs")
    assert (tmp_path / "cbs" / "repeat-1" / "checkpoint").is_dir()
    once = branch(tmp_path, "branch_runs:small_run", *options[2:-1], tokens=960, k="1,2")
    assert one_line(once) and "pass repeats again" in once.stderr
    assert json.loads(done.stdout) == of_file(tmp_path / "cbs")
    cannot = branch(tmp_path, "branch_runs:ScriptedRun", "--repeats", 2, out=tmp_path / "other")
    assert one_line(cannot) and "ScriptedRun has no skip(tokens)" in cannot.stderr


def test_checkpoint_and_options(tmp_path: Path) -> None:
    """A file beside which others are imported, and a run restored to where it is measured."""
    (tmp_path / "beside.py").write_text("from branch_runs import MeasuredRun as Run")
    (tmp_path / "json.py").write_text("from beside import Run\ndef make():\n    return Run()")
    run = branch_runs.ScriptedRun()
    run.tokens = 4000
    (tmp_path / "at").mkdir()
    run.save(tmp_path / "at")
    options = ["--checkpoint", tmp_path / "at", "--loss", "evaluate", "--lr", "none", "--json"]
    target = f"{tmp_path / 'json.py'}:make"
    record = json.loads(branch(tmp_path, target, *options, "--no-noise-scale").stdout)
    assert (record["tokens"], record["loss"], record["lr"]) == (4000, "evaluate", "none")
    assert record["branches"][0]["loss"] == 1.00496 and record["noise_scale"] is None
    assert Target(target, tmp_path / "at")().tokens == 4000


def one_line(done: Result) -> bool:
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert done.stderr.startswith("gnsfast: ")
    return done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "file.py:function or module:function"),
        ("no/such/file.py:make", "gnsfast: there is no file "),
        ("no_such_module:make", "ModuleNotFoundError"),
        ("branch_runs:nothing", "has no function 'nothing'"),
        ("branch_runs:LEVELS", "has no function 'LEVELS'"),
        ("branch_runs:Stream", "returned a Stream, which lacks batch_size"),
        ("branch_runs:halving", r"halving(): TypeError: halving() missing 1 required"),
    ],
)
def test_targets_that_make_no_run(target: str, said: str, tmp_path: Path) -> None:
    done = branch(tmp_path, target)
    assert one_line(done) and said in done.stderr
    assert not (tmp_path / "cbs").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": "2,4"}, "k must include 1"),
        ({"k": "1,two"}, "--k '1,two'"),
        ({"k": "1,1/0"}, "--k"),
        ({"k": "1,nan"}, "--k"),
        ({"tokens": -5}, "--tokens is '-5', but must be"),
        ({"tokens": 0}, "delta_tokens"),
        ({"tolerance": -1}, "tolerance"),
        ({"tolerance": "nan"}, "tolerance"),
        ({"lr": "cubic"}, "lr must be 'sqrt', 'linear', 'keep' or 'none'"),
        ({"only": "3x"}, "--only must be one of --k, which are 0.5x, 1x, 2x, 4x"),
        ({"only": "fast"}, "--only 'fast'"),
        ({"checkpoint": "no/such/folder"}, "no/such/folder is not a folder"),
        ({"out": __file__}, "is a file"),
    ],
)
def test_options_that_cannot_be(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    done = branch(tmp_path, "branch_runs:ScriptedRun", **changed)
    assert one_line(done) and said in done.stderr


def test_nan_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(branch_runs.LEVELS, 8, float("nan"))
    done = branch(tmp_path, "branch_runs:ScriptedRun")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "the branch with k = 1 diverged" in done.stderr


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(branch_runs.LEVELS, 16, KeyboardInterrupt())
    done = branch(tmp_path, "branch_runs:ScriptedRun")
    assert done.exit_code == 130 and "the same command again to continue in" in done.stderr


def test_grid() -> None:
    assert grid("1/16, 0.5,1") == (0.0625, 0.5, 1.0)


def test_one_branch_is_one_command(tmp_path: Path) -> None:
    """As listed, in any order; then the result of the folder is that of one process."""
    done = branch(tmp_path, "branch_runs:MeasuredRun", "--no-noise-scale", "--list", k="1/2,1,2")
    how = f"gnsfast branch branch_runs:MeasuredRun --out {tmp_path}/cbs --tokens 960"
    how += " --k 0.5,1.0,2.0 --no-noise-scale --only"
    assert done.stdout.splitlines() == [f"{how} {k}" for k in ("0.5x", "1x", "2x")]
    assert not (tmp_path / "cbs").exists()
    odd = branch(tmp_path, "a b.py:make", "--list", "--lr", "keep", out="a;b").stdout
    assert odd.startswith("gnsfast branch 'a b.py:make' --out 'a;b' --tokens 960 --k 0.5,")
    with_factor = ("--factor", "adam")
    lines = branch(tmp_path, "branch_runs:MeasuredRun", *with_factor, "--list").stdout.splitlines()
    for line in reversed(lines):
        early = CliRunner().invoke(app, ["branch", "result", str(tmp_path / "cbs")])
        assert early.exit_code == 2 or line == lines[0]  # without k = 1
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0 and done.stdout.startswith(f"k = {line.split()[-1][:-1]}")
    arguments = ["branch", "result", str(tmp_path / "cbs"), *with_factor]
    done = CliRunner().invoke(app, arguments)
    here = branch(tmp_path, "branch_runs:MeasuredRun", out=tmp_path / "here")
    assert done.stdout.partition("factor.json")[0].strip() in here.stdout
    assert CriticalBatch.load(tmp_path / "cbs") == CriticalBatch.load(tmp_path / "here")
    assert (tmp_path / "cbs" / "factor.json").is_file()
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert record == of_file(tmp_path / "here")
    one = json.loads(branch(tmp_path, "branch_runs:MeasuredRun", "--only", "2x", "--json").stdout)
    assert one == {"kind": "branch"} | record["branches"][2]
    nothing = CliRunner().invoke(app, ["branch", "result", str(tmp_path)])
    assert one_line(nothing) and "holds no branch measurement" in nothing.stderr


def test_an_error_of_one_branch(tmp_path: Path) -> None:
    """It reaches the scheduler, as the process's own."""
    done = branch(tmp_path, "branch_runs:out_of_memory", "--only", "2x")
    assert done.exit_code == 1 and str(done.exception) == "no memory"
    bare = branch(tmp_path, "branch_runs:ScriptedRun", "--only", "1x", "--factor", "adam")
    assert one_line(bare) and "no branch was begun" in bare.stderr
    other = branch(tmp_path, "branch_runs:ScriptedRun", "--only", "2x", "--factor", "adam")
    assert other.exit_code == 0, "the branch of k = 1 asks for the noise scale"
