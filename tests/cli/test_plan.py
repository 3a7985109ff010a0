# SPDX-License-Identifier: Apache-2.0
"""``gnsfast plan``: what it prints, its JSON, and one line for bad input."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gnsfast.cli.app import app
from gnsfast.cli.measurements import read_measurements

COSTS = ("--gpus", "8", "--tokens-per-second", "20K", "--gpu-hour-price", "2.5")


def invoke(*arguments: str, code: int = 0, columns: int = 80) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    assert code == 0 or (result.stdout == "" and result.stderr.count("\n") == 1)
    return result.output


def planned(*arguments: str) -> dict[str, Any]:
    return json.loads(invoke(*arguments, "--json"))


@pytest.fixture
def csv(tmp_path: Path) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(
        "tokens,value,tokens_per_sample\n"
        "1e9,100,4096\n4e9,210,4096\n16e9,390,4096\n64B,850,4096\n128B,,4096\n"
    )
    return str(path)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_a_user_sees(csv: str, columns: int) -> None:
    everything = ("--params", "1B", "--loss", "2.8", "--batch", "512", "--measured", csv)
    said = invoke(*everything, *COSTS, "--critical-at", "1B:100", columns=columns)
    for text in (
        "20 tokens per parameter",
        "critical batch size (20 % rule)",
        "critical batch size (b/a)",
        "optimal batch size",
        "extrapolated ×6",
        "range not published",
        "range over laws: 442K to 1.96M tokens",
        "4 points",
        "tokens (left out: 1 without a value)",
        "GPU-hours",
        "planned",
        "All rows reach the loss of 20B tokens at 512 samples",
        "410K (D_min / 1B)^0.462 tokens",
        "31.1-38.1K 8.14-9.98B",
    ):
        assert columns < 80 or text in " ".join(said.split()), text
    assert max(map(len, said.splitlines())) <= columns
    assert "…" not in said  # no number is cut


def test_range_and_laws() -> None:
    found = planned("--tokens", "500e9", "--params", "7B", "--context", "2048")
    by_name = {row["law"]: row for row in found["laws"]}
    assert by_name["Zhang, tokens"]["tokens"] == pytest.approx(5.6e6, rel=0.005)
    assert by_name["Zhang, tokens"]["samples"] == pytest.approx(5.6e6 / 2048, rel=0.005)
    assert by_name["Zhang, tokens"]["extrapolated"] == pytest.approx(500 / 24)
    assert all(row["source"] and row["formula"] for row in found["laws"])
    assert not found["chinchilla"] and found["trade_off"] is None and found["measured"] is None
    span = found["ranges"]["optimal batch size"]
    assert span["tokens"][0] < span["tokens"][1]
    assert span["samples"] == [t / 2048 for t in span["tokens"]]
    assert planned("--params", "1B")["tokens"] == 20e9


def test_experts() -> None:
    """Ling's law in place of DeepSeek's, in the parameters that a token uses."""
    found = planned("--tokens", "20B", "--params", "1B", "--experts")["laws"]
    names = {row["law"] for row in found}
    assert "Ling, experts" in names and "DeepSeek" not in names


def test_costs_carry_the_interval() -> None:
    run = ("--tokens", "20B", "--batch", "512", "--b-crit", "1024:512:2048", *COSTS)
    found = planned(*run)["trade_off"]
    costs = {row["batch_size_samples"]: row for row in found["costs"]}
    assert list(costs) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert costs[64]["gpus"] == 1 and costs[4096]["gpus"] == 64
    assert costs[512]["tokens"] == {"value": 20e9, "lower": 20e9, "upper": 20e9}
    assert costs[1024]["tokens"]["value"] == pytest.approx(20e9 * 2 / 1.5)
    assert costs[1024]["tokens"]["lower"] == pytest.approx(20e9 * 1.5 / 1.25)
    assert costs[1024]["tokens"]["upper"] == pytest.approx(20e9 * 3 / 2)
    hours = 20e9 * 2 / 1.5 / 20e3 / 3600
    assert costs[1024]["money"]["value"] == pytest.approx(2.5 * hours)
    alone = planned("--tokens", "20B", "--batch", "6", "--b-crit", "500")["trade_off"]["costs"]
    assert [row["batch_size_samples"] for row in alone] == [3, 6, 12, 24, 48]  # whole samples
    assert alone[0]["gpus"] is None
    few = ("--tokens", "20B", "--batch", "96", "--b-crit", "500", *COSTS, "--gpus", "6")
    sizes = [row["batch_size_samples"] for row in planned(*few)["trade_off"]["costs"]]
    assert sizes == [48, 96, 192, 384, 768]  # 24 would take 1.5 GPUs


def test_what_a_planned_batch_wastes() -> None:
    """E - E_min is B / (B + B_crit) of the tokens: a third of them at B_crit / 2."""
    run = ("--tokens", "20B", "--batch", "512", "--b-crit", "1024:512:1536", *COSTS)
    found = planned(*run, "--gpu-watts", "700")
    waste = found["trade_off"]["waste"]
    assert waste["share"] == pytest.approx({"value": 1 / 3, "lower": 1 / 4, "upper": 1 / 2})
    assert waste["tokens"]["value"] == pytest.approx(20e9 / 3)
    hours = 20e9 / 20e3 / 3600 / 3
    assert waste["gpu_hours"]["value"] == pytest.approx(hours)
    assert waste["money"]["value"] == pytest.approx(2.5 * hours)
    assert waste["kwh"]["value"] == pytest.approx(0.7 * hours)
    said = " ".join(invoke(*run).split())
    assert "33.3 (25 to 50) % of the planned tokens buy fewer steps" in said and "kWh" not in said
    for row in found["laws"]:
        assert row["planned_over_it"] == pytest.approx(512 / row["samples"])
    times = sorted(512 / row["samples"] for row in found["laws"])
    assert f"is {times[0]:.3g} to {times[-1]:.3g} times what the laws predict" in said
    alone = planned("--tokens", "20B", "--b-crit", "1024")
    assert alone["trade_off"]["waste"] is None and alone["laws"][0]["planned_over_it"] is None


def test_a_critical_batch_size_by_the_twenty_percent_rule() -> None:
    """B_crit = 5 (B* - 1.2 B_opt), B_opt being 256 samples of 512 tokens: 64 of 2048."""
    run = ("--tokens", "20B", "--context", "2048")
    found = planned(*run, "--b-twenty-percent", "281.6:179.2:384")["trade_off"]
    assert found["from"] == "--b-twenty-percent"
    assert found["critical_batch_samples"] == pytest.approx(
        {"value": 1024, "lower": 512, "upper": 1536}
    )


def test_tokens_for_each_parameter_and_what_serving_costs() -> None:
    said = " ".join(invoke("--tokens", "100B", "--params", "1B").split())
    assert "100 tokens per parameter. 20 give the lowest loss" in said
    assert "Serving 300B tokens takes as much compute as this training" in said


def test_measurements_of_a_run_folder(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"kind": "critical batch", "tokens": t, "value": v, "tokens_per_sample": 512}
        for t, v in ((1e9, 100.0), (4e9, 200.0), (16e9, 400.0), (32e9, None))
    ]
    records.insert(1, {"kind": "decision", "tokens": 5, "value": 3})
    records.insert(2, {"step": 1, "loss": 2.0, "tokens": 9.0})
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = read_measurements(str(tmp_path))
    assert [(p.tokens, p.critical.value) for p in found.points] == [
        (1e9, 100),
        (4e9, 200),
        (16e9, 400),
    ]
    assert (found.left_out, found.doubtful) == (1, 0)
    plan = planned("--tokens", "64B", "--measured", str(tmp_path), "--whole-runs")
    assert plan["tokens_per_sample"] == 512
    assert plan["measured"]["whole_run_samples"] == plan["measured"]["samples"]
    assert plan["measured"]["exponent"]["value"] == pytest.approx(0.5)
    assert plan["measured"]["samples"]["value"] == pytest.approx(800)
    assert plan["measured"]["extrapolated"] == 4.0
    assert plan["trade_off"]["from"] == "your measurements"


def test_one_measurement(tmp_path: Path) -> None:
    """It is taken as it is, with its own bounds; also out of folders in a folder."""
    record = {"kind": "critical batch", "tokens": 2e9, "value": 300, "lower": 200, "upper": 450}
    record["tokens_per_sample"] = 63
    doubt = record | {"tokens": 20e9, "doubts": ["noise"]}
    for name, each in (("a", record), ("b", doubt), ("c", record | {"tokens": 1e6, "value": 5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "critical_batch.jsonl").write_text(json.dumps(each))
    run = ("--tokens", "20B", "--batch", "512", "--measured", str(tmp_path))
    found = planned(*run)
    assert found["measured"]["samples"] == {"value": 300, "lower": 200, "upper": 450}
    assert (found["measured"]["points"], found["measured"]["doubtful"]) == (2, 1)
    assert found["trade_off"]["critical_batch_samples"] == found["measured"]["samples"]
    assert found["tokens_per_sample"] == 63  # a sample of the plan is a sample of the measurements
    costs = {row["batch_size_samples"]: row for row in found["trade_off"]["costs"]}
    assert costs[512]["steps"]["value"] == pytest.approx(20e9 / (512 * 63))
    said = " ".join(invoke(*run).split())
    assert "after 2B tokens (left out: 1 with doubts) 300 (200 to 450) samples" in said


def test_csv_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\ufefftokens, value\n1e9, 100\n2e9,\n", encoding="utf-8")
    assert read_measurements(str(path)) == ([(1e9, (100, 100, 100), None)], None, 1, 0)


def test_ends_that_are_not_there(tmp_path: Path) -> None:
    """null and inf are no bound; a column that is missing, or empty, is the value itself."""
    path = tmp_path / "mine.csv"
    path.write_text(
        "tokens,value,lower,upper,tokens_per_sample,doubts\n"
        "1e9,500,100,inf,63,False\n2e9,500,,,63,\n4e9,500,100,null,63,0\n"
    )
    spans = [p.critical[1:] for p in read_measurements(str(path)).points]
    assert spans == [(100, math.inf), (500, 500), (100, math.inf)]
    for row in ("nan,500", ",500", "1e9,0", "1e9,-5", "inf,500"):
        path.write_text(f"tokens,value\n{row}\n")
        said = invoke("--tokens", "20B", "--context", "63", "--measured", str(path), code=2)
        assert "mine.csv holds a measurement with tokens=" in said or "value is '-5'" in said


def test_mean_over_a_run(csv: str) -> None:
    """Points within a run become the mean over the whole run; numerically, and for the costs."""
    found = planned("--tokens", "128B", "--measured", csv)
    law = found["measured"]
    exponent, prefactor = law["exponent"]["value"], law["prefactor"]["value"]
    ends = [128e9 * k / 100_000 for k in range(100_001)]
    middle = [prefactor * ((a + b) / 2) ** exponent for a, b in zip(ends, ends[1:])]
    run = law["whole_run_samples"]
    assert run["value"] == pytest.approx(sum(middle) / len(middle), rel=1e-4)
    assert found["trade_off"]["critical_batch_samples"] == law["whole_run_samples"]
    assert (
        law["whole_run_samples"]["lower"]
        < law["whole_run_samples"]["value"]
        < law["whole_run_samples"]["upper"]
    )
    assert law["whole_run_samples"]["value"] < law["samples"]["value"]
    said = " ".join(invoke("--tokens", "128B", "--measured", csv).split())
    mean = run["value"]
    assert f"mean over a run of 128B tokens, which the costs use: {mean:.3g} (" in said


def test_a_measurement_at_the_start_of_a_run_prices_nothing(tmp_path: Path) -> None:
    path = tmp_path / "early.jsonl"
    early = {"tokens": 0, "value": 22.6, "lower": 16, "upper": 32, "tokens_per_sample": 63}
    path.write_text(json.dumps(early))
    run = ("--tokens", "20B", "--batch", "512", "--measured", str(path))
    found = planned(*run)
    assert found["measured"]["whole_run_samples"] is None and found["trade_off"] is None
    assert "does not hold for the whole run, so plan shows no costs" in " ".join(
        invoke(*run).split()
    )
    said = invoke(*run, *COSTS, code=2)
    assert "The one that you measured after 0 of the run's tokens does not hold" in said


def test_measured_units_that_differ_are_an_error(tmp_path: Path, csv: str) -> None:
    path = tmp_path / "mixed.csv"
    path.write_text("tokens,value,tokens_per_sample\n1e9,100,63\n2e9,110,512\n4e9,120,\n")
    bare = tmp_path / "bare.csv"
    bare.write_text("tokens,value\n1e9,100\n")
    tokens = ("--tokens", "20B", "--measured")
    for arguments, said in (
        ((*tokens, csv, "--context", "63"), "have 4096 tokens: drop --context"),
        ((*tokens, str(path)), "unknown number of tokens and of 63 tokens and of 512 tokens"),
        ((*tokens, str(bare)), "pass --context, or add a column tokens_per_sample"),
        (("--tokens", "20B", "--whole-runs"), "--whole-runs describes"),
    ):
        assert said in invoke(*arguments, code=2), arguments
    assert planned(*tokens, str(bare), "--context", "63")["tokens_per_sample"] == 63


def test_bad_input_is_one_line(tmp_path: Path, csv: str) -> None:
    doubt = tmp_path / "doubt.jsonl"
    doubt.write_text('{"tokens": 5, "value": 3, "doubts": ["noise"]}')
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    text = tmp_path / "text.csv"
    text.write_text("tokens,value\n1e9,many\n")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    tokens = ("--tokens", "20B")
    for arguments, said in (
        ((), "needs --tokens"),
        (("--tokens", "-20B"), "--tokens is '-20B'"),
        (("--tokens", "0"), "--tokens is 0"),
        (("--tokens", "lots"), "'lots'"),
        (("--params", "nan"), "--params is 'nan'"),
        ((*tokens, "--context", "0"), "--context"),
        ((*tokens, "--batch", "1.5"), "--batch"),
        ((*tokens, "--b-crit", "1:2"), "VALUE:LOWER:UPPER"),
        ((*tokens, "--b-crit", "0"), "--b-crit is 0"),
        (
            (*tokens, "--b-crit", "9", "--b-twenty-percent", "9"),
            "both state the critical batch size",
        ),
        ((*tokens, "--b-twenty-percent", "20"), "must be above 1.2 B_opt = 38.4"),
        ((*tokens, "--b-twenty-percent", "99:1"), "--b-twenty-percent is '99:1'"),
        ((*tokens, "--b-crit", "9", "--gpu-watts", "700"), "energy also need --gpus"),
        ((*tokens, "--b-crit", "5:6:7"), "outside of its interval"),
        ((*tokens, "--gpus", "8"), "pass --b-crit or --measured"),
        ((*tokens, "--b-crit", "500", "--gpus", "8"), "also need --tokens-per-second, --batch"),
        ((*tokens, "--b-crit", "500", "--gpu-hour-price", "2"), "also need --gpus, --tokens-per"),
        ((*tokens, "--critical-at", "3B"), "TOKENS:SAMPLES"),
        ((*tokens, "--loss", "0"), "--loss is 0"),
        ((*tokens, "--experts"), "--experts says what --params counts"),
        ((*tokens, "--measured", str(doubt)), "needs tokens and value (1 with doubts left out)"),
        ((*tokens, "--measured", str(other)), "no usable measurement"),
        ((*tokens, "--measured", str(text)), "'many'"),
        ((*tokens, "--measured", str(empty)), "no records"),
        ((*tokens, "--measured", str(tmp_path / "none.csv")), "none.csv"),
    ):
        assert said in invoke(*arguments, code=2), arguments
