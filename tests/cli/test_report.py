# SPDX-License-Identifier: Apache-2.0
"""The report: what its figures and words say of a run; pixels are not looked at."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from test_records import decision, largest, line, sample, write
from typer.testing import CliRunner

from gnsfast.cli import figures, live
from gnsfast.cli.app import app
from gnsfast.cli.records import NothingYet, RecordsError, read_runs
from gnsfast.cli.report import write_report
from gnsfast.cli.runs import Point, Run
from gnsfast.cli.words import count, matches


def scale(name: str, value: float | None, lower: float, upper: float | None) -> dict[str, Any]:
    return {name: value, f"{name}_lo": lower, f"{name}_hi": upper}


def page(tmp_path: Path, *records: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text without plotly.js, and the figures, each of which plotly must take."""
    run = read_runs([write(tmp_path / "a.jsonl", *records)])
    return read(write_report(run, tmp_path / "a.html"))


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    text = path.read_text()
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    specs = json.loads(found[1])["figures"] if found else []
    for spec in specs:
        go.Figure(spec["data"], spec["layout"])
    return text.partition('<script type="application/json"')[0], specs


def trace(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in spec["data"] if t.get("name") == name and t["mode"] != "none")


def view(tmp_path: Path, *records: dict[str, Any]) -> figures.View:
    return figures.View(read_runs([write(tmp_path / "a.jsonl", *records)]))


def test_steps_that_were_planned(tmp_path: Path) -> None:
    header = {"kind": "run", "format": 1, "steps": 9}
    text, _ = page(tmp_path, header, line(1), line(2))
    assert "<dt>trained</dt><dd>200 tokens <small>2 steps of 9</small></dd>" in text
    text, _ = page(tmp_path, header | {"steps": 2}, {"step": 2, "loss": 1.0})
    assert "<dt>trained</dt><dd>2 steps</dd>" in text


def test_only_what_there_is(tmp_path: Path) -> None:
    text, specs = page(tmp_path, line(1), line(2))
    assert re.findall("<h2>(.*?)</h2>", text) == ["Summary", "Loss"] and len(specs) == 1
    assert specs[0]["data"][0]["x"] == [100, 200]
    assert specs[0]["layout"]["xaxis"]["title"]["text"] == "tokens"
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert not [p for p in tmp_path.iterdir() if p.name not in ("a.jsonl", "a.html")]


def test_noise_scale_with_gaps_and_bounds(tmp_path: Path) -> None:
    name = "gns/b_simple"
    records = [
        line(1, **scale(name, 10.0, 8.0, 13.0)), line(2, **scale(name, 11.0, 9.0, 14.0)),
        line(3, **scale(name, 40.0, 20.0, None)), line(4, **scale(name, None, 0.0, None)),
        line(5), line(6, **scale(name, 30.0, 25.0, 35.0)), line(7, **{name: 31.0}),
    ]  # fmt: skip
    figure = figures.all_figures(view(tmp_path, *records))["euclidean"]
    band, curve, arrows = figure.traces
    gap = None
    assert band["x"] == [100, 200, 200, 100, gap, 600, 600]
    assert band["y"] == [13, 14, 9, 8, gap, 35, 25]
    assert curve["x"] == [100, 200, 300, 400, 600, 700]
    assert curve["y"] == [10, 11, gap, gap, 30, 31]
    assert curve["text"][0] == "10 (95 %: 8 to 13)" and curve["text"][5] == "31"
    assert (arrows["x"], arrows["y"], arrows["text"]) == ([300], [20], ["at least 20 (95 %)"])
    low, high = figure.layout["yaxis"]["range"]
    assert low < math.log10(8) and math.log10(35) < high < math.log10(50)


def test_an_end_that_is_far_does_not_stretch_the_axis(tmp_path: Path) -> None:
    name = "gns/b_simple"
    records = line(1, **scale(name, 10.0, 8.0, 1e6)), line(2, **scale(name, None, 5.0, None))
    figure = figures.all_figures(view(tmp_path, *records))["euclidean"]
    low, high = figure.layout["yaxis"]["range"]
    assert math.log10(4) < low < math.log10(5) and math.log10(120) < high < math.log10(150)


def test_batch_sizes_from_decisions(tmp_path: Path) -> None:
    records = [
        line(1, **{"batch/size": 8.0}), decision(250, 8, 16, warning=False),
        line(4, **{"batch/size": 13.0}), decision(400, 16, 16, warning=True, reason="<too large>"),
    ]  # fmt: skip
    text, [_, spec] = page(tmp_path, *records)
    sizes = trace(spec, "batch size")
    assert (sizes["x"], sizes["y"]) == ([0, 250, 400], [8, 16, 16])
    assert sizes["line"]["shape"] == "hv"
    assert [s["x0"] for s in spec["layout"]["shapes"]] == [250]
    assert "8 → 16" in text and "Warning: &lt;too large&gt;" in text
    assert text.count('<td class="warning"') == 6
    assert "<dt>batch size</dt><dd>16 samples</dd>" in text


def test_batch_sizes_from_lines(tmp_path: Path) -> None:
    sizes = [8, 8, 8, 16, 16, 16]
    figure = figures.batch_size(
        view(tmp_path, *(line(k, **{"batch/size": b}) for k, b in enumerate(sizes)))
    )
    assert figure is not None
    assert figure.traces[0]["x"] == [0, 200, 300, 500] and figure.traces[0]["y"] == [8, 8, 16, 16]
    assert figure.traces[0]["line"]["shape"] == "vh"  # what a line says holds before it
    constant = view(tmp_path, *(line(k, **{"batch/size": 8}) for k in range(3)))
    assert "batch_size" not in figures.all_figures(constant)


def test_batch_over_the_estimate(tmp_path: Path) -> None:
    def at(step: int, size: float, estimate: float | None) -> dict[str, Any]:
        return line(step, **{"batch/size": size}, **scale("cbs/estimate", estimate, 5.0, 90.0))

    records = [at(1, 12, 10), at(2, 12.1, 10), at(3, 30, 10), at(4, 8, 10), at(5, 8, None)]
    text, [_, spec] = page(tmp_path, *records, {**at(6, 8, 10), "cbs/ratio": 2.0})
    shaded = [(s["x0"], s["x1"]) for s in spec["layout"]["shapes"] if s["type"] == "rect"]
    assert shaded == [(200, 400), (600, 600)]
    assert "<li>tokens 200 to 400: up to 3 times the estimate</li>" in text
    assert "The batch is 2 times the estimated critical batch size" in text
    over = read_runs([tmp_path / "a.jsonl"])[0].summary()["over_critical_batch"]
    assert over[0] == {"steps": [2, 4], "tokens": [200.0, 400.0], "ratio": 3.0}
    assert "The batch is" not in page(tmp_path, at(1, 11, 10))[0]


def measurement(**values: Any) -> dict[str, Any]:
    losses = {0.5: 2.0, 1: 2.004, 2: 2.009, 4: 2.018, 8: None}
    branches = [
        {"k": k, "batch_size": 16 * k, "lr_factor": k, "loss": loss, "state": "diverged"}
        for k, loss in losses.items()
    ]
    return {
        **{"kind": "critical batch", "format": 1, "tokens": 150, "batch_size": 16},
        **{"branches": branches, "lower": 32, "upper": 64, "value": 45.25},
        **{"noise_scale": scale("value", 1.0, 0.5, 2.0), **values},
    }


def test_branches(tmp_path: Path) -> None:
    text, [_, spec] = page(tmp_path, line(1), line(2), measurement(tolerance=0.01))
    [point] = spec["data"]
    assert (point["x"], point["y"]) == ([150], [45.25])
    assert point["error_y"]["array"] == [18.75] and point["error_y"]["arrayminus"] == [13.25]
    assert "branches at 150 tokens: 32 to 64 samples" in text
    assert re.findall(r"<td>([^<]*)</td></tr>", text) == ["-", "yes", "yes", "no", "diverged"]
    more = {"missing": [{"k": 8, "reason": "<killed>"}], "doubts": ["k = 4 <?>"]}
    text, [spec] = page(tmp_path, {"kind": "branch step"}, measurement(tolerance=0.01, **more))
    assert "k = 8 failed: &lt;killed&gt;; doubtful: k = 4 &lt;?&gt;" in text
    assert "no measurement yet" not in text and "does not show" not in text
    sign = {"noise_scale": 7.0, "lower": 5.0, "upper": 9.0}
    text, _ = page(tmp_path, measurement(sign=sign, spectral=None))
    said = "noise scale there: 1 samples; in sign descent's norm there: 7 (95 %: 5 to 9) samples<"
    assert said in html.unescape(text)
    without = [matched for _, matched in matches(measurement())]  # a record without tolerance
    assert without == ["-", "yes", "yes", "no", "diverged"]


@pytest.mark.parametrize(
    "ends, symbol, said",
    [
        ({"lower": 32, "upper": None}, "arrow-up", "at least 32 samples"),
        ({"lower": 0, "upper": 8}, "arrow-down", "at most 8 samples"),
        ({"lower": None, "upper": 8}, "arrow-down", "at most 8 samples"),
    ],
)
def test_branches_with_one_end(tmp_path: Path, ends: Any, symbol: str, said: str) -> None:
    text, [_, spec] = page(tmp_path, line(2), measurement(value=None, **ends))
    assert spec["data"][0]["marker"]["symbol"] == [symbol] and said in text


def test_groups_other_scales_and_layers(tmp_path: Path) -> None:
    records = [
        line(
            k,
            **scale("gns/adam", 5.0 * k, 4.0, 50.0),
            **scale("gns/sign", 6.0 * k, 4.0, 50.0),
            **scale("gns/spectral", None, 4.0 + k, None),
            **scale("gns/group/a", 2.0, 1.0, 3.0),
            **{"gns/group/b_lo": 7.0},
            **{"gns/layer/x": 1.0 * k, "gns/layer_lo/x": 0.5, "gns/layer_hi/x": 9.0},
            **{"gns/layer_lo/y.<i>": 3.0},
        )
        for k in (1, 2)
    ]
    text, specs = page(tmp_path, *records)
    titles = re.findall("<h2>(.*?)</h2>", text)[1:]
    assert titles[1:4] == [
        "Noise scale under Adam's metric, samples",
        "Noise scale in sign descent's norm, samples",
        "Noise scale in spectral descent's (Muon's) norm, samples",
    ]
    assert "<dt>noise scale in sign descent's norm</dt><dd>12 samples" in html.unescape(text)
    assert "spectral descent's (Muon's) norm</dt><dd>at least 6 samples" in html.unescape(text)
    by_title = dict(zip(titles, specs))
    assert trace(by_title[titles[1]], "noise scale")["y"] == [5, 10]
    assert trace(by_title[titles[2]], "noise scale")["y"] == [6, 12]
    [arrows] = [t for t in by_title[titles[3]]["data"] if t.get("marker")]
    assert arrows["y"] == [5, 6] and "over matrices. Band" in text
    said = read_runs([tmp_path / "a.jsonl"])[0].summary()
    assert said["noise_scale_sign"] == {"value": 12.0, "lower": 4.0, "upper": 50.0}
    assert said["noise_scale_spectral"] == {"value": None, "lower": 6.0, "upper": None}
    assert said["noise_scale_adam"]["value"] == 10 and said["noise_scale"] is None
    groups = by_title["Noise scale of groups of samples"]
    assert trace(groups, "a")["y"] == [2, 2]
    assert [t["y"] for t in groups["data"] if t.get("marker")] == [[7, 7]]
    dots, arrows = by_title["Noise scale by layer, samples, last window"]["data"]
    assert (dots["x"], dots["y"], dots["error_x"]["array"]) == ([2], ["x"], [7])
    assert (arrows["x"], arrows["y"]) == ([3], ["y.&lt;i&gt;"])
    [heat] = by_title["Noise scale by layer, samples, over tokens"]["data"]
    assert heat["y"] == ["x", "y.&lt;i&gt;"] and heat["customdata"] == [[1, 2], [None, None]]
    assert heat["z"][0] == [0, 0.301] and "Layers with a value: 1 of 2" in text


def test_runs_over_each_other(tmp_path: Path) -> None:
    """One without tokens: all stand over steps, decisions in between."""
    a = write(tmp_path / "a.jsonl", line(10), decision(1500, 8, 16), line(20))
    b = write(tmp_path / "b.jsonl", {"step": 5, "loss": 1.0}, {"step": 15, "loss": 2.0})
    runs = read_runs([a, b])
    text, specs = read(write_report(runs, tmp_path / "two.html"))
    assert [t["x"] for t in specs[0]["data"]] == [[10, 20], [5, 15]]
    assert len({t["line"]["color"] for t in specs[0]["data"]}) == 2
    assert specs[0]["layout"]["xaxis"]["title"]["text"] == "step"
    assert trace(specs[1], "a: batch size")["x"] == [0, 15, 20]
    assert text.count('class="run"') == 2
    assert [spec["layout"]["showlegend"] for spec in specs] == [True, False]
    assert runs[0].at(2500, over_tokens=False) is None


def test_largest_samples(tmp_path: Path) -> None:
    """Each at the tokens of its line, as wide as the loss; a name that comes again is listed
    once.
    """
    records = [
        line(10),
        largest(10, sample("a <b>", 4, share=0.25), sample([5, 0, 1, 2], 5, share=0.125)),
        line(20),
        largest(20, sample("a <b>", 14, share=0.75), sample("c", 15, share=None)),
        largest(99, sample("d", 98, share=0.0625)),  # after the last line of numbers
    ]
    text, specs = page(tmp_path, *records)
    assert re.findall("<h2>(.*?)</h2>", text) == [
        *("Summary", "Loss", "Largest samples, share of their update", "Which samples these are"),
    ]
    [marks] = specs[1]["data"]
    assert marks["x"] == [2000, 2000, 1000, 1000, 2000]
    assert marks["y"] == [1.0, 0.75, 0.25, 0.125, 0.0625]
    assert marks["marker"]["symbol"] == ["x", *["circle"] * 4]
    assert marks["text"][1] == "a &lt;b&gt;: 75.0% of update 14<br>0.weight"
    assert specs[1]["layout"]["xaxis"]["range"] == [0, specs[0]["data"][0]["x"][-1]]
    rows = re.findall("<tr><td(.*?)</tr>", text)
    cells = [re.findall("(?:^|<td)[^>]*>(.*?)</td>", row) for row in rows]
    below = "<small>0.weight</small>"
    assert cells == [
        [f"c{below}", "no number", "9", "15"],
        [f"a &lt;b&gt; (2 times){below}", "75.0%", "9", "14"],
        [f"(5, 0, 1, 2){below}", "12.5%", "9", "5"],
        [f"d{below}", "6.2%", "9", "98"],
    ]
    assert "more</summary>" not in text
    many = [largest(20, *(sample(k, k) for k in range(40)))]
    text, _ = page(tmp_path, line(20), *many)
    assert text.count("<small>0.weight</small>") == 32 and "<summary>24 more</summary>" in text


def test_largest_samples_of_two_runs(tmp_path: Path) -> None:
    """Only one of them keeps any."""
    a = write(tmp_path / "a.jsonl", line(10), largest(10, sample("x", 4)))
    b = write(tmp_path / "b.jsonl", line(10), line(20))
    text, specs = read(write_report(read_runs([a, b]), tmp_path / "two.html"))
    assert text.count("<h3>a</h3>") == 1 and "<h3>b</h3>" not in text
    assert len(specs[1]["data"]) == 1
    assert specs[1]["layout"]["xaxis"]["range"] == [0, 2000]


def test_no_text_ends_the_script(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    records = [
        {"kind": "run", "format": 1, "name": hostile, "about": hostile, "loss_unit": hostile}
    ]
    records += [line(1, **{f"gns/layer/{hostile}": 2.0, f"gns/group/{hostile}_lo": 2.0})]
    records += [decision(50, 1, 2, reason=hostile, phase=hostile)]
    records += [largest(1, sample(hostile, 0, parameters=[hostile]))]
    text, specs = page(tmp_path, *records)
    assert len(specs) == 5 and "alert(1)</script>" not in (tmp_path / "a.html").read_text()
    data = (tmp_path / "a.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert "\\u003cbr\\u003e" in data and "<" not in data


def test_long_curves_keep_their_extremes() -> None:
    points = [Point(k, {"loss": 2.0 + k % 7 / 10}) for k in range(20_000)]
    points[12_345].values["loss"] = 99.0
    points[17_000].values["loss"] = None
    kept = figures.thinned(points, lambda p: p.values["loss"])
    assert figures.MOST_POINTS / 3 < len(kept) <= figures.MOST_POINTS + 1
    assert {12_345, 17_000, 19_999} <= {p.step for p in kept}
    assert [p.step for p in kept] == sorted({p.step for p in kept})


def test_counts() -> None:
    said = [count(x) for x in (0, 9999, 10_000, 999_499, 999_999, 26_214_400, 3e12, 4e15)]
    assert said == ["0", "9,999", "10k", "999k", "1M", "26.2M", "3T", "4,000T"]


def test_command(tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl", line(1), line(2, loss=None, **scale("gns/b_simple", 9.0, 8.0, None))
    )
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    said = json.loads(result.stdout)
    assert result.exit_code == 0 and said["report"] == str(tmp_path / "report.html")
    [run] = said["runs"]
    assert (run["step"], run["tokens"], run["loss"]) == (2, 200.0, None)
    assert (run["losses"], run["losses_not_finite"]) == (2, 1)
    assert run["noise_scale"] == {"value": 9.0, "lower": 8.0, "upper": None}
    assert "at least 8 samples" in read(tmp_path / "report.html")[0]


@pytest.mark.parametrize("options", [[], ["--live"], ["--json"]])
def test_command_refuses_in_one_line(tmp_path: Path, options: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", line(1), "broken")
    result = CliRunner().invoke(app, ["report", str(tmp_path), *options])
    assert result.exit_code == 2
    message = f"{path}:2: this line is not JSON"
    if options == ["--json"]:
        said = {"kind": "error", "message": message, "exit_status": 2}
        assert json.loads(result.stdout) == said and not result.stderr
    else:
        assert result.stderr == f"gnsfast: {message}\n"
    assert CliRunner().invoke(app, ["report", str(path), "--out", str(path)]).exit_code == 2


class Training:
    """Writes a line of the log whenever the watcher sleeps; time passes as it says."""

    def __init__(self, path: Path, out: Path, lines: list[Any]) -> None:
        self.path, self.out, self.lines = path, out, lines
        self.now, self.pages = 5.0, list[tuple[int, Any]]()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.out.exists():
            data = re.search(r'id="data">(.*?)</script>', self.out.read_text(), re.S)
            assert data
            found = json.loads(data[1])
            self.pages.append((len(found["figures"][0]["data"][0]["x"]), found["live"]))
        new = self.lines.pop(0)
        if isinstance(new, BaseException):
            raise new
        with open(self.path, "a") as file:
            file.write(new if isinstance(new, str) else json.dumps(new) + "\n")

    def watch(self, every: float = 5.0) -> tuple[list[Run], list[str]]:
        said: list[str] = []
        where = [self.path.parent]
        return live.watch(where, self.out, every, said.append, self.sleep, lambda: self.now), said


def test_live_until_the_end(tmp_path: Path) -> None:
    half = json.dumps(line(2))
    lines = ["", line(1), half[:9], half[9:] + "\n", {"kind": "end"}]
    training = Training(tmp_path / "a.jsonl", tmp_path / "a.html", lines)
    runs, said = training.watch()
    assert said == [f"{tmp_path}: this folder holds no .jsonl file. Waiting for the first line."]
    assert [n for n, _ in training.pages] == [1, 1, 2]
    assert all(found["stale"] > found["refresh"] >= 5 for _, found in training.pages)
    assert runs[0].state == "ended"
    text = (tmp_path / "a.html").read_text()
    assert '"live":null' in text and 'id="live"' not in text.partition("<script")[0]


@pytest.mark.parametrize("stop, error", [(KeyboardInterrupt(), None), ("broken\n", RecordsError)])
def test_live_leaves_a_page_that_stands(tmp_path: Path, stop: Any, error: Any) -> None:
    write(tmp_path / "a.jsonl", line(1))
    training = Training(tmp_path / "a.jsonl", tmp_path / "a.html", [line(2), stop])
    if error:
        with pytest.raises(error, match="a.jsonl:3: this line is not JSON"):
            training.watch()
    else:
        assert [run.state for run in training.watch()[0]] == ["open"]
    assert training.pages[-1][1] and '"live":null' in (tmp_path / "a.html").read_text()


def test_live_stopped_before_a_line(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.jsonl", tmp_path / "a.html", [KeyboardInterrupt()])
    with pytest.raises(NothingYet):
        training.watch()


def test_live_without_news_shows_that_it_lives(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", line(1))
    training = Training(tmp_path / "a.jsonl", tmp_path / "a.html", ["", "", {"kind": "end"}])
    training.watch(every=40.0)
    written = [found["written"] for _, found in training.pages]
    assert written[0] == written[1] < written[2]


def test_noise_scale_at_the_newest_weights(tmp_path: Path) -> None:
    """A dotted line of its own, a card, and a legend that says which is which; "at most" as an
    arrow down.
    """
    records = [
        line(1, **scale("gns/b_simple", 10.0, 8.0, 13.0)),
        line(2, **scale("gns/b_simple", 11.0, 9.0, 14.0), **scale("gns/present", 20.0, 6.0, 50.0)),
        line(3, **scale("gns/b_simple", None, 0.0, 90.0), **scale("gns/present", None, 5.0, None)),
    ]
    text, specs = page(tmp_path, *records)
    newest, mean = (trace(specs[1], name) for name in ("newest weights", "mean of the window"))
    assert newest["line"]["dash"] == "dot" and newest["y"] == [20.0, None]
    assert mean["y"] == [10.0, 11.0, None]
    legend = [t["name"] for t in specs[1]["data"] if t["showlegend"]]
    assert legend == ["newest weights", "mean of the window"] and specs[1]["layout"]["showlegend"]
    arrows = {tuple(t["marker"]["symbol"]): t for t in specs[1]["data"] if "marker" in t}
    assert arrows["arrow-up",]["y"] == [5.0] and arrows["arrow-down",]["y"] == [90.0]
    assert arrows["arrow-down",]["text"] == ["at most 90 (95 %)"]
    assert "<dt>noise scale at the newest weights</dt><dd>at least 5 samples" in text
    assert "<dt>noise scale</dt><dd>at most 90 samples" in text
    [run] = read_runs([tmp_path / "a.jsonl"])
    found = run.summary()
    assert found["noise_scale_present"] == {"value": None, "lower": 5.0, "upper": None}
