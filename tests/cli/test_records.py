# SPDX-License-Identifier: Apache-2.0
"""Reading run logs: what is shown is what was logged, and what cannot be read is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gnsfast
from gnsfast.cli.records import LAYER_LINES, LogFile, NothingYet, Reader, RecordsError, read_runs
from gnsfast.cli.words import name_of, share
from gnsfast.integrations.trackers import JSONLTracker, largest_samples


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 100.0 * step, "loss": 3.0 - 0.01 * step, **values}


def decision(tokens: int, old: int, new: int, **values: Any) -> dict[str, Any]:
    return {"kind": "decision", "tokens": tokens, "old": old, "new": new, **values}


def sample(name: Any, update: int, **values: Any) -> dict[str, Any]:
    numbers = {"sqnorm": 2.0 + update, "share": 0.5, "times_median": 9.0}
    return {"id": name, "update": update, **numbers, "parameters": ["0.weight"], **values}


def largest(step: float, *samples: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "largest samples", "step": step, "samples": [*samples]}


def write(path: Path, *records: Any) -> Path:
    texts = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_a_tracker_is_read_back(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "a.jsonl", run={"name": "small", "steps": 2})
    tracker.log({"loss": 2.0, "gns/b_simple": 8.0, "gns/layer/0_lo": 3.0, "lr": 0.1}, 1)
    tracker.record(decision(100, 8, 16, upper=math.inf))
    tracker.log({"loss": math.nan, "gns/layer/0_lo": 4.0, "gns/layer_lo/0_lo": 2.0}, 2)
    [run] = read_runs([tmp_path])
    assert (run.name, run.header, run.state) == ("small", {"name": "small", "steps": 2}, "open")
    assert [p.values for p in run.points] == [{"loss": 2.0, "gns/b_simple": 8.0}, {"loss": None}]
    assert run.last_layers == {"0_lo": (4.0, 2.0, math.inf)}
    assert [each.values for each in run.layers] == [{"0_lo": 3.0}, {"0_lo": 4.0}]
    assert run.decisions == [decision(100, 8, 16, upper=None)]
    assert list(run.notes) == ["1 of 2 losses are NaN or infinite and missing from the curve"]
    tracker.close()
    assert read_runs([tmp_path])[0].state == "ended"


def test_python_writes_nan_as_nan(tmp_path: Path) -> None:
    [run] = read_runs([write(tmp_path / "a.jsonl", '{"step": 1, "loss": NaN, "tokens": Infinity}')])
    assert run.points[0].values == {"loss": None, "tokens": None}


@pytest.mark.parametrize(
    "records, said",
    [
        ([line(1), '{"step": 2, "lo', line(3)], ":2: this line is not JSON"),
        ([line(1), "[1]"], ":2: this line is not a JSON object"),
        ([line(1), "", '{"loss": 2.0}'], ":3: this line has neither a step nor a kind"),
        ([line(1), '{"step": null}'], ":2: step must be a number of at least 0, not None"),
        ([line(1), '{"step": 2.5}'], ":2: step must be a whole number, not 2.5"),
        ([line(-1)], ":1: step must be a number of at least 0, not -1"),
        ([line(1), line(2, tokens=-5)], ":2: tokens must be a number of at least 0, not -5"),
        ([line(1), line(2, loss="low")], ":2: loss must be a number, not 'low'"),
        ([line(1, **{"gns/layer/0": True})], ":1: gns/layer/0 must be a number, not True"),
        (
            [{"kind": "run", "format": 2}],
            ":1: this line has format 2, but this version of gnsfast reads format 1",
        ),
        ([line(1), {"kind": "decision", "old": 1, "new": 2}], ":2: this line has no 'tokens'"),
        ([decision(5, 0, 2)], ":1: old must be a number of at least 1, not 0"),
        ([{"kind": "critical batch", "tokens": 5}], ":1: this line has no 'batch_size'"),
        ([largest(1.5)], ":1: step must be a whole number, not 1.5"),
        ([line(1), largest(1, {"id": 3})], ":2: a sample of this line has no 'update'"),
        ([largest(1, sample(3, 0, share="all"))], ":1: share must be a number, not 'all'"),
        (
            [largest(1) | {"samples": "all"}],
            ":1: samples must be a list of objects, not 'all'",
        ),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, records: list[Any], said: str) -> None:
    path = write(tmp_path / "a.jsonl", *records)
    with pytest.raises(RecordsError) as error:
        read_runs([tmp_path])
    assert str(error.value) == f"{path}{said}"


def test_missing_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="none: no such file or folder"):
        read_runs([tmp_path / "none"])
    with pytest.raises(NothingYet, match="this folder holds no .jsonl file"):
        read_runs([tmp_path])
    with pytest.raises(NothingYet, match="no line was logged yet"):
        read_runs([write(tmp_path / "a.jsonl")])
    with pytest.raises(RecordsError, match="not a .jsonl file"):
        read_runs([write(tmp_path / "a.txt", line(1))])


def test_half_a_line_is_waited_for(tmp_path: Path) -> None:
    """Cut at every byte, inside of a letter too, no line is lost and none is read twice."""
    whole = b"".join(
        json.dumps(each, ensure_ascii=False).encode() + b"\n"
        for each in (line(1), {"kind": "later é"}, line(2))
    )
    for cut in range(len(whole)):
        path = tmp_path / "a.jsonl"
        path.write_bytes(whole[:cut])
        file = LogFile(path)
        file.poll()
        path.write_bytes(whole)
        assert file.poll()
        assert [p.step for p in file.points] == [1, 2]
        assert list(file.notes) == ["a.jsonl: the report does not show lines of kind 'later é'"]
        assert not file.poll()
    with open(path, "a") as more:
        more.write("\nbroken\n")
    with pytest.raises(RecordsError, match=r"a.jsonl:5: this line is not JSON"):
        file.poll()


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    write(tmp_path / "a.jsonl", line(1), line(2))
    assert reader.poll() and len(reader.run().points) == 2
    write(tmp_path / "a.jsonl", line(5))
    assert reader.poll() and [p.step for p in reader.run().points] == [5]


def test_after_a_restart_the_later_lines_count(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"kind": "run", "format": 1, "name": "old"},
        line(10), line(20, **{"gns/layer/0": 1.0}), decision(2500, 8, 16), line(25),
        decision(3500, 16, 32), line(35), {"kind": "end"},
        {"kind": "run", "format": 1, "name": "new"},
        decision(2500, 8, 16, reason="again"), decision(3000, 16, 16), line(30, loss=7.0), line(40),
    )  # fmt: skip
    [run] = read_runs([path])
    assert [p.step for p in run.points] == [10, 20, 25, 30, 40]
    assert run.points[3].values["loss"] == 7.0
    assert run.decisions == [decision(2500, 8, 16, reason="again"), decision(3000, 16, 16)]
    assert run.name == "new" and run.state == "open"
    assert list(run.notes) == [
        "a.jsonl: steps 35 to 35 were logged twice because of a restart; the report shows the "
        "later lines"
    ]


def test_decisions_alone_are_made_again(tmp_path: Path) -> None:
    made = [decision(2500, 8, 16), decision(3500, 16, 32)]
    [run] = read_runs([write(tmp_path / "a.jsonl", *made, decision(2500, 8, 32))])
    assert run.decisions == [made[0], decision(2500, 8, 32)]
    [run] = read_runs([write(tmp_path / "a.jsonl", *made, made[0])])
    assert run.decisions == [made[0]]


def test_decisions_that_lag_behind_their_line_delete_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line(10), decision(900, 8, 16), line(20))
    [run] = read_runs([path])
    assert [p.step for p in run.points] == [10, 20] and not run.notes


def test_a_restart_without_decisions(tmp_path: Path) -> None:
    first, again = ({"gns/layer/0": v} for v in (1.0, 2.0))
    late = decision(2500, 8, 16)
    lines = line(10), line(20, **first), late, line(30, **first), line(20, loss=9.0, **again)
    [run] = read_runs([write(tmp_path / "a.jsonl", *lines)])
    assert [p.step for p in run.points] == [10, 20]
    assert run.points[1].values["loss"] == 9.0
    assert [(each.step, each.values) for each in run.layers] == [(20, {"0": 2.0})]
    assert not run.decisions


def test_numbers_of_one_step_are_put_together(tmp_path: Path) -> None:
    """From two lines of a file and from two files."""
    write(tmp_path / "a.jsonl", line(1), {"step": 1, "gns/b_simple": 4.0}, line(3))
    write(tmp_path / "b.jsonl", {"step": 2, "cbs/ratio": 0.5}, {"step": 3, "cbs/ratio": 1.5})
    [run] = read_runs([tmp_path])
    assert [(p.step, sorted(p.values)) for p in run.points] == [
        (1, ["gns/b_simple", "loss", "tokens"]),
        (2, ["cbs/ratio"]),
        (3, ["cbs/ratio", "loss", "tokens"]),
    ]
    assert list(run.notes) == ["1 of 3 lines have no tokens, so the x-axis shows steps"]


def test_two_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", line(1), line(2))
    write(tmp_path / "b.jsonl", line(2, loss=1.0))
    said = "holds two runs: a.jsonl and b.jsonl both log loss at step 2. Pass the files"
    with pytest.raises(RecordsError, match=said):
        read_runs([tmp_path])
    assert [run.name for run in read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])] == [*"ab"]


def test_runs_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    paths = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name / "metrics.jsonl", line(1)))
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]


def test_of_many_lines_with_layers_some_are_kept(tmp_path: Path) -> None:
    count = 5 * LAYER_LINES
    lines = ({"step": k, "gns/layer/0": float(k)} for k in range(count))
    [run] = read_runs([write(tmp_path / "a.jsonl", *lines)])
    kept = [each.step for each in run.layers]
    assert LAYER_LINES / 2 <= len(kept) <= LAYER_LINES
    assert {b - a for a, b in zip(kept, kept[1:])} == {8} and kept[0] == 0
    assert run.last_layers["0"].record() == {"value": count - 1.0, "lower": None, "upper": None}
    assert len(run.points) == count


def test_largest_samples(tmp_path: Path) -> None:
    """A sample that a window holds at two steps belongs to the first of them."""
    model = torch.nn.Linear(3, 1)
    gns = gnsfast.GradientNoiseScale(model, keep_largest=2)
    tracker = JSONLTracker(tmp_path / "a.jsonl", run={"name": "small"})
    for step in (1, 2):
        x = torch.randn(4, 3)
        x[step] *= math.inf if step == 2 else 50.0
        with gns.update(4, ids=[Path(f"{step}/{b}") for b in range(4)]):
            model(x).square().mean().backward()
        model.zero_grad()
        tracker.log({"loss": 1.0}, step)
        tracker.record(largest_samples(gns.largest(), step))
    [run] = read_runs([tmp_path])
    kept = gns.largest()
    assert len(kept) == len(run.spikes) == 4 and not run.notes
    for read, one in zip(run.spikes, kept):
        assert (read["id"], read["update"]) == (str(one.id), one.update)
        assert read["step"] == one.update + 1
        assert read["share"] == (one.share if math.isfinite(one.share) else None)
        assert tuple(read["parameters"]) == one.parameters
    assert name_of(run.spikes[0]) == "2/2" and share(run.spikes[0]) == "no number"


def test_samples_of_steps_that_were_trained_again(tmp_path: Path) -> None:
    """Their names may be the same: the estimator counts updates from 0 after a restart."""
    first = [line(1), largest(1, sample([0, 0, 0, 3], 0)), line(2), line(3)]
    first += [largest(3, sample("a", 2))]
    again = [line(2), largest(2, sample([0, 0, 0, 3], 0, sqnorm=1.0))]
    [run] = read_runs([write(tmp_path / "a.jsonl", *first, *again)])
    found = [(name_of(s), s["step"]) for s in run.spikes]
    assert found == [("(0, 0, 0, 3)", 1), ("(0, 0, 0, 3)", 2)]
    assert [(name_of(s), n) for s, n in run.listed] == [("(0, 0, 0, 3)", 2)]
    [run] = read_runs([write(tmp_path / "a.jsonl", *first, *again[::-1])])
    assert [s["step"] for s in run.spikes] == [1, 2] and run.points[-1].step == 2


def test_samples_without_any_other_line(tmp_path: Path) -> None:
    [run] = read_runs([write(tmp_path / "a.jsonl", largest(3, sample("a", 2)))])
    assert run.summary()["largest_samples"] == [{**sample("a", 2), "step": 3, "times_listed": 1}]
