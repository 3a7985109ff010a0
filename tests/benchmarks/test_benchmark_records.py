# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks: what was written is what is read, compared, drawn and told."""

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import compare, figures, readme, record  # noqa: E402
from benchmarks.measure import Timing  # noqa: E402

Tables = dict[str, list[dict[str, Any]]]
MARKS = "<!-- benchmarks: cpu -->\n{}<!-- end -->\n"


def timing(ratio: float, spread: float = 0.01) -> Timing:
    return Timing(800 * ratio, ratio, ratio - spread, ratio + 2 * spread)


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="figures alone need it, and no GPU machine draws any")


def tables() -> Tables:
    """Of the suite's schema; the numbers are made up."""
    costs = {"plain torch": 1.0, "gnsfast": 1.03, "Gram": 1.4, "sums": 1.1, "parts": 1.2}
    step: list[dict[str, Any]] = []
    over_T: list[dict[str, Any]] = []
    over_B: list[dict[str, Any]] = []
    for name, cost in costs.items():
        for threads in (1, 2):
            row = {"threads": threads, "contestant": name, "ms": 900.0 / threads}
            row |= {"ratio": timing(cost + 0.02 * (threads - 1))}
            row |= {"memory": 0.9 + cost / 10} if threads == 1 else {}
            row |= {"per sample": "sum only" if name == "sums" else "yes"}
            step.append(row | {"covered": 0.74 if name == "parts" else 1.0})
        for layer, T in (("up", 1), ("up", 64), ("up", 2048), ("head", 1)):
            row = {"layer": layer, "T": T, "B": max(1, 4096 // T), "threads": 1}
            ratio = timing(cost + 50 / T if name == "sums" else cost + T / 1e4)
            over_T.append({**row, "contestant": name, "ms": 20.0, "ratio": ratio})
        for B in (1, 8):
            row = {"layer": "up", "T": 256, "B": B, "threads": 1}
            over_B.append({**row, "contestant": name, "ms": 2.0, "ratio": timing(cost + 0.1 / B)})
    return {"Whole training step": step, "Overhead against T": over_T, "Cost against B": over_B}


def written(
    folder: Path, content: Tables | None = None, name: str = "2026-12-01-cpu", **machine: Any
) -> record.Record:
    about = {"processor": "a CPU", "cores": 2, "torch": "2.13", "opacus": "1.6", "commit": "abc"}
    data = {"command": "python -m benchmarks cpu", "machine": about | machine}
    data["tables"] = tables() if content is None else content
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data, default=vars))
    return record.read(path)


def step_row(content: Tables, contestant: str, threads: int = 1) -> dict[str, Any]:
    rows = content["Whole training step"]
    [row] = [r for r in rows if (r["contestant"], r["threads"]) == (contestant, threads)]
    return row


def test_a_record_is_read_back(tmp_path: Path) -> None:
    content = {"Steps": [{"name": "a", "n": 3, "ms": 1234.5678, "time": timing(1.05), "x": None}]}
    for_people = record.write("cpu-x", "python -m benchmarks cpu", content, tmp_path)
    read = record.read(for_people.with_suffix(".json"))
    assert read.tables == content and read.command == "python -m benchmarks cpu"
    assert read.name == for_people.stem and read.machine["torch"] == torch.__version__
    assert {"load at start", "OMP_NUM_THREADS", "commit"} <= read.machine.keys()
    assert {"instruction sets", "torch's products"} <= read.machine.keys()
    raw = json.loads(read.path.read_text())["tables"]["Steps"][0]["time"]
    assert raw == {"milliseconds": 840.0, "ratio": 1.05, "lower": 1.04, "upper": 1.07}
    assert "| a | 3 | 1235 | 1.050 (1.040 to 1.070) | - |" in for_people.read_text()


def test_libraries_of_torchs_products() -> None:
    config = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64
  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd69a3df32adcccb623b12cd7baa22)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release"""
    assert record.products(config) == "MKL 2024.2, oneDNN 3.12.0, BLAS is mkl"
    assert record.products("PyTorch built with:") == "unknown"


def test_the_commit_of_a_checkout_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNSFAST_COMMIT", "0123abc")
    assert record.machine()["commit"] == "0123abc"


def test_installed_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            self.name, self.version = name, "1.2"

    found = [Distribution("opacus"), Distribution("something")]
    monkeypatch.setattr(record.importlib.metadata, "distributions", lambda: found)
    about = record.machine()
    assert about["opacus"] == "1.2" and "something" not in about


def test_what_a_record_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a record cannot hold tensor"):
        record.write("x", "", {"a": [{"b": torch.ones(2)}]}, tmp_path)


def test_every_committed_record_is_read() -> None:
    paths = sorted(record.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        assert record.read(path).tables
    old = record.read(record.RESULTS / "2026-11-21-cpu-step-memory.json")
    cell = old.tables["Whole training step of a small GPT"][0]["gnsfast / plain"]
    assert (cell.ratio, cell.lower, cell.upper) == (1.047, 1.023, 1.069)
    assert math.isnan(cell.milliseconds)


def test_the_newest_record_of_a_name(tmp_path: Path) -> None:
    for name in ("2026-11-30-cpu", "2026-12-01-cpu", "2026-12-05-cpu-operator", "note-cpu"):
        written(tmp_path, name=name)
    newest = record.newest("cpu", tmp_path)
    assert newest is not None and newest.name == "2026-12-01-cpu"
    assert record.newest("gpu", tmp_path) is None


def test_a_change_is_more_than_the_noise(tmp_path: Path) -> None:
    """Quartiles that overlap, that touch, and that do not, either way."""
    after = tables()
    moved = {"Gram": 1.44, "sums": 1.05, "gnsfast": 1.04, "parts": 1.23, "plain torch": 0.975}
    for name, ratio in moved.items():
        step_row(after, name)["ratio"] = timing(ratio)
    step_row(after, "gnsfast")["memory"] = 1.5
    found = compare.compare(written(tmp_path), written(tmp_path, after, "2026-12-02-cpu"))
    rows = {
        (row["contestant"], row["threads"], row["of"]): row
        for row in found["tables"]["Whole training step"]["rows"]
    }
    verdicts = {key[0]: row["verdict"] for key, row in rows.items() if key[1:] == (1, "ratio")}
    assert verdicts == {
        "plain torch": "within noise", "gnsfast": "within noise", "Gram": "HIGHER",
        "sums": "LOWER", "parts": "within noise",
    }  # fmt: skip
    assert {rows[name, 2, "ratio"]["change"] for name in verdicts} == {0.0}
    assert rows["Gram", 1, "ratio"]["change"] == pytest.approx(1.44 / 1.4 - 1)
    memory = rows["gnsfast", 1, "memory"]
    assert memory["verdict"] == "no spread was recorded"
    assert memory["change"] == pytest.approx(1.5 / 1.003 - 1)


def test_rows_and_tables_that_one_record_has(tmp_path: Path) -> None:
    """A version is no name; what shares its name with another row is not compared."""
    before, after = tables(), tables()
    rows = before["Whole training step"]
    rows[:] = [{"contestant": r.pop("contestant"), "version": "1", **r} for r in rows]
    after["Whole training step"] = [r | {"version": "2"} for r in after["Whole training step"]]
    del before["Cost against B"]
    after["Whole training step"].remove(step_row(after, "Gram", 2))
    after["Overhead against T"].append(dict(after["Overhead against T"][0]))
    after["Coverage"] = []
    old = written(tmp_path, before, "2026-12-01-cpu")
    found = compare.compare(old, written(tmp_path, after, "2026-12-02-cpu", torch="3.0"))
    whole = found["tables"]["Whole training step"]
    assert whole["only_before"] == [["Gram", 2]] and not whole["only_after"]
    assert len(whole["rows"]) == 9 + 5  # ratios, memories
    over_T = found["tables"]["Overhead against T"]
    assert over_T["alike"] == [["up", 1, 4096, 1, "plain torch"]] and len(over_T["rows"]) == 19
    assert found["only_after"] == ["Cost against B", "Coverage"] and not found["only_before"]
    assert found["differs"] == {"torch": ["2.13", "3.0"]}


def test_compare_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    before = written(tmp_path, name="2026-12-01-cpu")
    after = tables()
    step_row(after, "gnsfast")["ratio"] = timing(1.2)
    changed = written(tmp_path, after, "2026-12-02-cpu", processor="another", commit="def")
    paths = [str(before.path), str(changed.path)]
    command.main(["compare", *paths])
    text = capsys.readouterr().out
    assert text.index("processor: a CPU before, another after") < text.index("Whole training")
    assert "commit: abc before, def after" in text and "only ratios are compared" in text
    line = "| 1 | gnsfast | ratio | 1.030 (1.020 to 1.050) | 1.200 (1.190 to 1.220) | +16.5% |"
    assert line + " HIGHER |" in text
    old = str(record.RESULTS / "2026-11-21-cpu-step-memory.json")
    command.main(["compare", old, old])
    text = capsys.readouterr().out
    assert text.count("within noise") == 2 and "| 1 | gnsfast / plain | 1.001 | 1.001 |" in text
    assert "before, " not in text


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "is not a record"),
        ('{"command": "", "machine": {}}', "is not a record"),
        ('{"command": "", "machine": {}, "tables": {"a": [1]}}', "is not a record"),
        ('{"command": "", "machine": {}, "tables": {"a": []}}', "no table of the same title"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: Any, content: str | None, said: str
) -> None:
    other = tmp_path / "other.json"
    if content is not None:
        other.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        command.main(["compare", str(written(tmp_path).path), str(other)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and not out
    assert said in err and "other.json" in err and err.count("\n") == 1


@pytest.mark.usefixtures("matplotlib")
def test_the_figure_shows_the_records_numbers(tmp_path: Path) -> None:
    """Read from the drawn axes, contestant by contestant."""
    source = written(tmp_path)
    axes = {ax.get_label(): ax for ax in figures.draw(source).axes}
    for panel, column in (("time", "ratio"), ("memory", "memory")):
        drawn = {c.get_label(): c.patches[0] for c in axes[panel].containers}
        want = {
            f"{row['contestant']}, {row['threads']}": row
            for row in source.tables["Whole training step"]
            if row["contestant"] != "plain torch" and column in row
        }
        assert drawn.keys() == want.keys()
        for name, patch in drawn.items():
            value = want[name][column]
            value = value.ratio if column == "ratio" else value
            assert patch.get_x() == 1 and patch.get_x() + patch.get_width() == pytest.approx(value)
            assert bool(patch.get_hatch()) == name.startswith(("sums", "parts"))
            assert f"{value:.2f}" in [text.get_text() for text in axes[panel].texts]
    spans = {tuple(line.get_xdata()) for line in axes["time"].lines}
    assert (1.02, 1.05) in spans  # gnsfast's quartiles


@pytest.mark.usefixtures("matplotlib")
def test_a_figure_is_one_text(tmp_path: Path) -> None:
    """Drawn twice it is the same; it carries the record's name and a hash of what it shows."""
    content = tables()
    source = written(tmp_path, content)
    text = figures.svg(source)
    assert text == figures.svg(source)
    ElementTree.fromstring(text)
    shown = {*re.findall(r">([^<>]+)</text>", text)}
    assert {"gnsfast", "sums, sum only", "parts, 74% of parameters"} <= shown
    assert "A training step with gnsfast: 1.03 to 1.05 x plain's time, 1.00 x its memory" in shown
    path = figures.write(source)
    assert figures.signature_of(path) == figures.signature(source)
    assert figures.signature(source).startswith("2026-12-01-cpu sha256:")
    step_row(content, "Gram")["ratio"] = timing(1.9)
    assert figures.signature(written(tmp_path, content)) != figures.signature_of(path)
    del content["Whole training step"]
    with pytest.raises(ValueError, match="has no table 'Whole training step'"):
        figures.draw(written(tmp_path, content))


@pytest.mark.usefixtures("matplotlib")
def test_the_readmes_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "compiled", lambda: "")
    (tmp_path / "results").mkdir()
    written(tmp_path / "results")
    page = tmp_path / "README.md"
    page.write_text("# Title\n" + MARKS.format("old\n") + "after\n")
    assert len(readme.update(page, tmp_path / "results")) == 2
    assert readme.update(page, tmp_path / "results", check=True) == []
    lines = page.read_text().splitlines()
    assert lines[0] == "# Title" and lines[-1] == "after" and "old" not in lines
    assert (tmp_path / "results/2026-12-01-cpu.svg").exists()
    assert len(lines) - 2 <= 18 and max(map(len, lines)) <= 122
    text = " ".join(lines)
    assert (
        "| **gnsfast** | **1.030** (1.020 to 1.050) | **1.050** (1.040 to 1.070) | 1.00 |" in text
    )
    assert "| sums | 1.100 (1.090 to 1.120) | 1.120 (1.110 to 1.140) | 1.01 | sum only |" in text
    assert "(a CPU, 2 cores, torch 2.13, commit abc; `python -m benchm" in text
    assert "(results/2026-12-01-cpu.md)" in text and "(results/2026-12-01-cpu.svg)" in text
    assert "No GPU has run the kernels yet." in text


def test_the_table_has_ours_and_the_cheapest(tmp_path: Path) -> None:
    content = tables()
    for name, cost in (("x", 1.01), ("y", 1.02), ("z", 2.0)):
        row = step_row(content, "Gram") | {"contestant": name, "ratio": timing(cost)}
        content["Whole training step"].append(row)
    rows, rest = readme.table(figures.steps(written(tmp_path, content)))
    named = [row.split("|")[1].strip(" *") for row in rows[2:]]
    assert named == ["x", "y", "gnsfast"]
    said = "sums (sum only) 1.10; parts (74% of parameters) 1.20; Gram 1.40; z 2.00. "
    assert rest == f"With 1 thread other ways to these norms take more: {said}"


def test_a_gpu_record_ends_the_sentence_about_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path)
    monkeypatch.setattr(readme, "compiled", lambda: "Compiled: 7.")
    assert readme.gpu(source, tmp_path) == "**No GPU has run the kernels yet.** Compiled: 7."
    for name in ("2026-12-01-gpu-ops", "2026-12-02-gpu-ops", "2026-12-02-gpu-step"):
        written(tmp_path, {}, name, gpu="a GPU")
    links = "[gpu-ops](2026-12-02-gpu-ops.md), [gpu-step](2026-12-02-gpu-step.md)"
    assert readme.gpu(source, tmp_path) == f"On a GPU (a GPU) we measured {links}."


def test_compiled_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all budgets of kernels; one of CPU instructions is none."""
    monkeypatch.setattr(readme, "BUDGETS", tmp_path)
    assert readme.compiled() == ""
    budgets = {"cpu": {"a": {"added": 3}}, "triton-90": {"a": {"registers": 128, "spilled": 0}}}
    spilled = {"a": 0, "keys 256 all": 8, "keys 256 sinks": 16}
    budgets["triton-80"] = {n: {"registers": 200, "spilled": s} for n, s in spilled.items()}
    for name, rows in budgets.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    said = "4 variants of them, and 2 of them spill registers (keys 256)."
    assert readme.compiled() == f"Compilers have built {said}"


@pytest.mark.usefixtures("matplotlib")
def test_the_check_finds_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A number changed in the README, or in the record since the figure; a lost figure."""
    page, figure = tmp_path / "README.md", tmp_path / "2026-12-01-cpu.svg"
    monkeypatch.setattr(readme, "README", page)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    content = tables()
    written(tmp_path, content)
    page.write_text(MARKS.format(""))

    def check(says: list[Path]) -> None:
        with pytest.raises(SystemExit) as stopped:
            command.main(["readme", "--check"])
        told = capsys.readouterr().out.splitlines()
        assert stopped.value.code == 1
        assert told == [f"{path}: not what the records give" for path in says]

    check([page, figure])
    command.main(["readme"])
    assert capsys.readouterr().out == f"{page}: written\n{figure}: written\n"
    command.main(["readme", "--check"])
    good = page.read_text()
    page.write_text(good.replace("1.030", "1.020", 1))
    check([page])
    page.write_text(good)
    slower = copy.deepcopy(content)
    step_row(slower, "Gram")["memory"] = 1.31
    written(tmp_path, slower)
    check([figure])
    written(tmp_path, content)
    figure.unlink()
    check([figure])


@pytest.mark.parametrize("text", ["no marks\n", MARKS.format("").replace("cpu", "gpu")])
def test_a_readme_without_marks_or_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str
) -> None:
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        command.main(["readme"])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "README.md").read_text() == text


def test_the_projects_readme_is_what_its_records_give() -> None:
    assert readme.update(readme.README, record.RESULTS, check=True) == []
